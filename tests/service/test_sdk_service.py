"""The SDK against the real rollout service: both styles, every error, every way to leave."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import pytest

from harness_sdk import (
    Limits,
    OctopusClient,
    RetryPolicy,
    StopReason,
    Thread,
    ThreadStatus,
    TlsOptions,
    ToolLoop,
)
from harness_sdk.errors import (
    AuthError,
    BudgetExhausted,
    Cancelled,
    ConfigError,
    EpisodeNotFound,
    HarnessError,
    InvalidRequest,
    ResourceExhausted,
    StaleHead,
    StepNotFound,
    ThreadEnded,
    ThreadNotFound,
    Unavailable,
)
from rollout_service.access import Access
from rollout_service.sessions import SessionOptions
from tests.service.sdk_service import ScriptedEngine, calls, scripted
from tests.service.test_server import certificate
from tests.unit.scripted_server import until


def plain(text: str) -> str | None:
    """A model that only talks; asked to hang, it does."""
    return None if "hang" in text else "fine"


async def test_agent_driven_episode_leaves_its_whole_dag_in_the_record() -> None:
    async with (
        scripted(plain) as service,
        OctopusClient.connect(service.address) as client,
        client.episode(task_id="t", group_id="g", primitives=()) as episode,
    ):
        root = episode.root
        first = await root.generate("question")
        assert (first.step, first.text, first.finish_reason) == (1, "fine", "stop")
        assert len(first.token_ids) == len(first.sampled_logprobs) > 0

        async def work(child: Thread) -> None:
            turn = await child.generate()
            await child.done(f"{child.name}: {turn.text}")

        await root.fork({"left": "do left", "right": "do right"}, run=work)
        results = {result.thread_id: result for result in await root.wait()}
        assert results["left"].answer == "left: fine"
        assert results["right"].steps[0].step == 1
        read = await root.read_thread("left", (0, 9))
        assert (read.first_step, read.last_step) == (1, 1)
        assert read.tokens_mounted > 0
        again = await root.read_thread("left", (0, 1))
        assert again.tokens_mounted == 0
        second = await root.generate("go on")
        back = await root.rewind(1, note="try again")
        assert (back.step, root.step) == (1, 1)
        assert back.tokens_returned > len(second.token_ids)
        turn = await root.generate("once more", demonstration="the end")
        assert turn.raw_text == "the end"
        await root.done(turn.text, "left and right")
        result = await episode.close(reward=0.5)
    assert result.stop_reason is StopReason.DONE
    (record,) = service.records.written
    assert (record.reward, record.answer, record.group_id) == (0.5, "the end", "g")
    assert {thread.thread_id for thread in record.threads} == {"root", "left", "right"}
    assert any(node.rewound for node in record.nodes)
    assert any(node.mounts for node in record.nodes)
    assert result.num_tokens == record.num_tokens


def team(text: str) -> str:
    """A model that forks, searches in each branch, reads its peer, and joins the answers."""
    if "[branch" in text:
        own = text.rsplit("[branch ", 1)[1][0]
        if "<tool_response>\nfound" not in text:
            return calls(("lookup", {"key": own}))
        return calls(("done", {"answer": f"{own}=1"}))
    if "[fork]" not in text:
        return "Split." + calls(
            ("fork", {"branches": {"a": "find a", "b": "find b"}}), ("wait", {})
        )
    if "[read]" not in text:
        return calls(("read_thread", {"branch": "a", "steps": [0, 9]}))
    assert "a=1" in text
    assert "b=1" in text
    return calls(("done", {"answer": "a=1 b=1"}))


async def test_model_driven_loop_forks_waits_reads_and_ends() -> None:
    async def lookup(key: str) -> str:
        """Look a key up."""
        return f"found {key}"

    async with (
        scripted(team) as service,
        OctopusClient.connect(service.address) as client,
        client.episode() as episode,
    ):
        result = await ToolLoop([lookup]).run(episode.root, "find both")
        assert (result.status, result.answer) == (ThreadStatus.DONE, "a=1 b=1")
        assert {each.answer for each in result.children.values()} == {"a=1", "b=1"}
        assert result.num_failed_calls == 0
        assert isinstance(service.engine, ScriptedEngine)
        assert "found a" in service.engine.seen[-1]
        assert (await client.status()).open_episodes == 1
    assert episode.result is not None
    assert episode.result.stop_reason is StopReason.DONE


async def test_model_that_errs_is_told_and_goes_on() -> None:
    errors = [
        '<tool_call>\n{"name": "lookup", "arguments": \n</tool_call>',
        calls(("loookup", {"key": "a"})),
        calls(("rewind", {"step": 40, "note": "x"})),
        calls(("read_thread", {"branch": "nobody", "steps": [1, 2]})),
        calls(("read_thread", {"branch": "root", "steps": [1, 2]})),
        calls(("wait", {})),
        calls(("fork", {"branches": {"root": "x"}})),
        calls(("fork", {"branches": {"b1": "x", "b2": "x", "b3": "x"}})),
        calls(("done", {"answer": "enough"})),
    ]
    replies = iter(errors)
    told: list[str | None] = []

    async with (
        scripted(lambda text: next(replies)) as service,
        OctopusClient.connect(service.address) as client,
        client.episode(limits=Limits(max_threads=2)) as episode,
    ):
        loop = ToolLoop(
            on_event=lambda event: told.append(event.observation) if event.call else None
        )
        result = await loop.run(episode.root, "go")
        assert result.answer == "enough"
        assert result.num_failed_calls == len(errors) - 1
    *observed, last = told
    assert last is None
    assert all(text is not None and text.startswith("error: ") for text in observed)
    for text, part in zip(
        observed,
        ("", "unknown tool `loookup`", "40", "nobody", "itself", "nobody to wait", "root", "2"),
        strict=True,
    ):
        assert text is not None
        assert part in text


async def test_turns_without_a_call_end_as_no_done() -> None:
    async with (
        scripted(plain) as service,
        OctopusClient.connect(service.address) as client,
        client.episode() as episode,
    ):
        result = await ToolLoop().run(episode.root, "go")
        assert (result.status, result.num_turns) == (ThreadStatus.NO_DONE, 2)
        with pytest.raises(ThreadEnded, match="no_done"):
            await episode.root.generate("more")
    assert episode.result is not None
    assert episode.result.stop_reason is StopReason.NO_DONE


async def test_observation_beyond_the_budget_leaves_room_for_an_answer() -> None:
    async def flood() -> str:
        """Too much."""
        return "x" * 5000

    def script(text: str) -> str:
        return calls(("done", {"answer": "short"}) if "error:" in text else ("flood", {}))

    async with (
        scripted(script) as service,
        OctopusClient.connect(service.address) as client,
        client.episode(limits=Limits(thread_budget=2000, answer_reserve=500)) as episode,
    ):
        result = await ToolLoop([flood]).run(episode.root, "go")
        assert (result.status, result.answer) == (ThreadStatus.DONE, "short")


async def test_thread_without_room_for_a_turn_ends_as_budget() -> None:
    async with (
        scripted(plain) as service,
        OctopusClient.connect(service.address) as client,
        client.episode(limits=Limits(thread_budget=200, answer_reserve=20)) as episode,
    ):
        result = await ToolLoop().run(episode.root, "x" * 500)
        assert (result.status, result.num_turns) == (ThreadStatus.BUDGET, 0)
    assert episode.result is not None
    assert episode.result.stop_reason is StopReason.BUDGET


Act = Callable[[Thread], Awaitable[object]]


@pytest.mark.parametrize(
    ("act", "error", "value"),
    [
        (lambda root: root.read_thread("nobody", (1, 1)), ThreadNotFound, "nobody"),
        (lambda root: root.rewind(7), StepNotFound, "7"),
        (lambda root: root.read_thread("a", (3, 2)), InvalidRequest, "3"),
        (lambda root: root.read_thread("root", (0, 1)), InvalidRequest, "root"),
        (lambda root: root.wait(["root"]), InvalidRequest, "root"),
        (lambda root: root.fork({}), InvalidRequest, "0"),
        (lambda root: root.fork({"a": "again"}), InvalidRequest, "a"),
        (lambda root: root.fork(dict.fromkeys("bcdef", "x")), BudgetExhausted, "5"),
        (lambda root: root.generate("x" * 3000), BudgetExhausted, "tokens"),
        (lambda root: root.generate(tools=[{"type": "nonsense"}]), InvalidRequest, "nonsense"),
    ],
)
async def test_bad_input_is_a_typed_error_and_the_episode_goes_on(
    act: Act, error: type[HarnessError], value: str
) -> None:
    async with (
        scripted(plain) as service,
        OctopusClient.connect(service.address) as client,
        client.episode(primitives=(), limits=Limits(max_threads=3, thread_budget=2000)) as episode,
    ):
        await episode.root.generate("hello")
        child = (await episode.root.fork({"a": "x"}))["a"]
        await child.generate()
        with pytest.raises(error) as caught:
            await act(episode.root)
        assert value in caught.value.value
        assert caught.value.limit
        assert (await episode.root.generate("still here")).text == "fine"


async def test_second_writer_with_a_stale_head_is_refused() -> None:
    async with (
        scripted(plain) as service,
        OctopusClient.connect(service.address) as client,
        client.episode(primitives=()) as episode,
    ):
        root = episode.root
        await root.generate("hello")
        threads: dict[str, Thread] = {}
        other = Thread(root._session, threads, "root", root._calls.head)
        await root.generate("moves the head")
        with pytest.raises(StaleHead) as caught:
            await other.generate("too late")
        assert caught.value.limit
        assert caught.value.remedy


async def test_five_megabyte_observation_passes() -> None:
    room = 1 << 23
    options = SessionOptions(thread_budget=room)
    async with (
        scripted(plain, options=options, max_positions=room) as service,
        OctopusClient.connect(service.address) as client,
        client.episode(primitives=()) as episode,
    ):
        turn = await episode.root.generate(" the" * (5 * 1024 * 1024 // 4))
        assert turn.text == "fine"
        assert turn.budget.tokens_used > 5 * 1024 * 1024 // 4


async def test_message_over_the_limit_is_refused_by_either_end() -> None:
    async with scripted(plain, max_message_bytes=1 << 20) as service:
        async with (
            OctopusClient.connect(service.address) as client,
            client.episode(primitives=()) as episode,
        ):
            assert client.info.max_message_bytes == 1 << 20
            with pytest.raises(ResourceExhausted, match="server accepts") as caught:
                await episode.root.generate("x" * (3 << 20))
            assert caught.value.limit == f"{1 << 20} bytes"
            await episode.root.generate("short")
        async with (
            OctopusClient.connect(service.address, max_message_bytes=10_000) as client,
            client.episode(primitives=()) as episode,
        ):
            with pytest.raises(ResourceExhausted, match="client accepts"):
                await episode.root.generate("x" * 20_000)


async def test_token_opens_the_service_and_its_lack_does_not() -> None:
    async with scripted(plain, access=Access("secret")) as service:
        async with OctopusClient.connect(service.address, token="secret") as client:
            await client.status()
        for token in (None, "guess"):
            with pytest.raises(AuthError, match="token"):
                async with OctopusClient.connect(service.address, token=token):
                    pass


async def test_mutual_tls_lets_known_clients_in_alone(tmp_path: Path) -> None:
    ca, _ = certificate(tmp_path, "ca")
    cert, key = certificate(tmp_path, "localhost", issuer="ca")
    certificate(tmp_path, "client", issuer="ca")
    tls = grpc.ssl_server_credentials([(key, cert)], root_certificates=ca, require_client_auth=True)
    known = TlsOptions(
        ca_file=str(tmp_path / "ca.pem"),
        cert_file=str(tmp_path / "client.pem"),
        key_file=str(tmp_path / "client.key"),
        server_name="localhost",
    )
    unknown = TlsOptions(ca_file=str(tmp_path / "ca.pem"), server_name="localhost")
    once = RetryPolicy(max_attempts=1)
    async with scripted(plain, tls=tls) as service:
        async with (
            OctopusClient.connect(service.address, tls=known) as client,
            client.episode(primitives=()) as episode,
        ):
            assert (await episode.root.generate("hello")).text == "fine"
        for options in (unknown, None):
            with pytest.raises(Unavailable):
                async with OctopusClient.connect(service.address, tls=options, retry=once):
                    pass
    with pytest.raises(ConfigError, match=r"missing\.pem"):
        async with OctopusClient.connect("localhost:1", tls=TlsOptions(ca_file="missing.pem")):
            pass


async def test_service_that_stops_mid_turn_is_an_error_at_once_not_a_hang() -> None:
    async with contextlib.AsyncExitStack() as serving:
        service = await serving.enter_async_context(scripted(plain))
        started_s = time.monotonic()
        with pytest.raises((Unavailable, Cancelled, EpisodeNotFound, ThreadEnded)):
            async with (
                OctopusClient.connect(service.address) as client,
                client.episode(primitives=()) as episode,
            ):
                await episode.root.generate("hello")
                child = (await episode.root.fork({"a": "hang"}))["a"]
                child.spawn(child.generate())
                stopping = asyncio.create_task(serving.aclose())
                try:
                    await episode.root.wait()
                finally:
                    await stopping
        assert time.monotonic() - started_s < 5
    assert service.records.written[0].stop_reason == StopReason.CANCELLED


async def test_cancelling_the_caller_cancels_the_turn_and_leaves_the_thread_usable() -> None:
    async with (
        scripted(plain) as service,
        OctopusClient.connect(service.address) as client,
        client.episode(primitives=()) as episode,
    ):
        engine = service.engine
        assert isinstance(engine, ScriptedEngine)
        await episode.root.generate("hello")
        before = engine.stats().resident_cursors
        task = asyncio.create_task(episode.root.generate("hang"))
        await until(lambda: engine.running_turns == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: engine.running_turns == 0)
        await until(lambda: engine.stats().resident_cursors == before)
        assert (await episode.root.generate("again")).step == 2


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (KeyError("agent"), StopReason.TOOL_ERROR),
        (asyncio.CancelledError(), StopReason.CANCELLED),
    ],
)
async def test_leaving_by_an_exception_stores_why(
    failure: BaseException, reason: StopReason
) -> None:
    async with scripted(plain) as service, OctopusClient.connect(service.address) as client:
        with pytest.raises(type(failure)):
            async with client.episode(primitives=()) as episode:
                await episode.root.generate("hello")
                child = (await episode.root.fork({"a": "hang"}))["a"]
                child.spawn(child.generate())
                await asyncio.sleep(0.05)
                raise failure
        assert (await client.status()).open_episodes == 0
        assert service.engine.stats().resident_cursors == 0
    (record,) = service.records.written
    assert record.stop_reason == reason
    assert record.error_kind


async def test_cancelled_branch_ends_its_task_and_is_told_to_who_waits() -> None:
    async with (
        scripted(plain) as service,
        OctopusClient.connect(service.address) as client,
        client.episode(primitives=()) as episode,
    ):
        await episode.root.generate("hello")
        child = (await episode.root.fork({"a": "hang"}))["a"]
        task = child.spawn(child.generate())
        waiting = asyncio.create_task(episode.root.wait())
        await asyncio.sleep(0.05)
        assert await child.cancel("not needed") == ("a",)
        (result,) = await waiting
        assert result.status is ThreadStatus.CANCELLED
        assert task.done()
        (still,) = await episode.root.wait(timeout_s=0.05)
        assert still.status is ThreadStatus.CANCELLED


async def test_wait_gives_up_at_its_timeout() -> None:
    async with (
        scripted(plain) as service,
        OctopusClient.connect(service.address) as client,
        client.episode(primitives=()) as episode,
    ):
        await episode.root.generate("hello")
        await episode.root.fork({"a": "x"})
        (result,) = await episode.root.wait(timeout_s=0.05)
        assert result.status is ThreadStatus.RUNNING
        assert not episode.threads["a"].ended
