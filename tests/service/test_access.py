"""Tokens and their scopes, over real gRPC and real HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from harness_sdk.cli.settings import validate_config
from harness_sdk.errors import AuthError, ConfigError, EpisodeNotFound
from harness_sdk.rpc.v1 import rollout_pb2 as pb
from rollout_service.access import ANYBODY, Access, Caller, Scope, read_tokens
from rollout_service.config import RolloutConfig
from tests.service.openai_service import Endpoint, endpoint
from tests.service.served import OpenedEpisode, Served, failure, served
from tests.session_cases import LOOK, ScriptedEngine

TOKENS = {name: f"{name}-0123456789abcdef" for name in ("alice", "bob", "trainer", "root")}
SCOPES = {"trainer": Scope.TRAINER, "root": Scope.ADMIN}
ACCESS = Access(
    named=[
        (token, Caller(name=name, scope=SCOPES.get(name, Scope.AGENT)))
        for name, token in TOKENS.items()
    ]
)


def bearer(name: str) -> Any:
    return (("authorization", f"Bearer {TOKENS[name]}"),)


def calls(stub: Any, call: pb.CallContext) -> dict[str, Any]:
    """Every call on an episode, by name."""
    go = pb.Message(role="user", content="go")
    return {
        "Generate": lambda **k: stub.Generate(
            pb.GenerateRequest(call=call, messages=[go], demonstration=LOOK), **k
        ),
        "Fork": lambda **k: stub.Fork(
            pb.ForkRequest(call=call, branches=[pb.Branch(thread_id="a", prompt="x")]), **k
        ),
        "Rewind": lambda **k: stub.Rewind(pb.RewindRequest(call=call, step=0), **k),
        "ReadThread": lambda **k: stub.ReadThread(
            pb.ReadThreadRequest(call=call, branch="a", first_step=1), **k
        ),
        "Wait": lambda **k: stub.Wait(pb.WaitRequest(call=call), **k),
        "Done": lambda **k: stub.Done(pb.DoneRequest(call=call, answer="x"), **k),
        "Cancel": lambda **k: stub.Cancel(pb.CancelRequest(call=call), **k),
        "CloseEpisode": lambda **k: stub.CloseEpisode(
            pb.CloseEpisodeRequest(episode_id=call.episode_id), **k
        ),
    }


async def opened(served: Served, name: str, **fields: Any) -> OpenedEpisode:
    stream = served.stub.OpenEpisode(pb.OpenEpisodeRequest(**fields), metadata=bearer(name))
    event = await stream.read()
    return OpenedEpisode(served=served, stream=stream, opened=event.opened)


async def test_an_agent_does_not_find_anothers_episode() -> None:
    async with served(ScriptedEngine(), access=ACCESS) as running:
        episode = await opened(running, "alice", episode_id="e")
        nowhere = pb.CallContext(episode_id="none", thread_id="root")
        unknown = calls(running.stub, nowhere)
        for name, rpc in calls(running.stub, episode.call()).items():
            status, error = await failure(rpc(metadata=bearer("bob")))
            assert isinstance(error, EpisodeNotFound) and status is grpc.StatusCode.NOT_FOUND
            _, missing = await failure(unknown[name](metadata=bearer("bob")))
            assert str(error).replace("got e;", "got none;") == str(missing), name
        assert running.sessions.status().open_episodes == 1 and not running.sink.records
        await opened(running, "bob", episode_id="e2", idempotency_key="k")
        stream = running.stub.OpenEpisode(
            pb.OpenEpisodeRequest(episode_id="e2", idempotency_key="k"), metadata=bearer("alice")
        )
        _, error = await failure(stream)
        assert "used before" in str(error)


async def test_an_agent_does_not_learn_how_anothers_episode_ended() -> None:
    async with served(ScriptedEngine(), access=ACCESS) as running:
        await opened(running, "alice", episode_id="e")
        close = pb.CloseEpisodeRequest(episode_id="e", idempotency_key="k")
        mine = await running.stub.CloseEpisode(close, metadata=bearer("alice"))
        for _ in range(2):
            _, error = await failure(running.stub.CloseEpisode(close, metadata=bearer("bob")))
            assert isinstance(error, EpisodeNotFound) and "closed" not in str(error)
        for name in ("alice", "root"):
            assert await running.stub.CloseEpisode(close, metadata=bearer(name)) == mine


async def test_an_agent_reaches_its_own_episode_and_an_administrator_every_one() -> None:
    async with served(ScriptedEngine(), access=ACCESS) as running:
        for name in ("alice", "root"):
            episode = await opened(running, "alice")
            rpcs = calls(running.stub, episode.call())
            events = [event async for event in rpcs["Generate"](metadata=bearer(name))]
            assert events[-1].turn.step == 1
            reply = await rpcs["CloseEpisode"](metadata=bearer(name))
            assert reply.num_nodes > 0


async def test_a_trainers_token_looks_on() -> None:
    async with served(ScriptedEngine(), access=ACCESS) as running:
        stub, look = running.stub, {"metadata": bearer("trainer")}
        assert (await stub.Connect(pb.ConnectRequest(protocol_version=1), **look)).run == "r"
        assert (await stub.Status(pb.StatusRequest(), **look)).open_episodes == 0
        episode = await opened(running, "alice")
        rpcs = calls(running.stub, episode.call())
        rpcs["OpenEpisode"] = lambda **k: stub.OpenEpisode(pb.OpenEpisodeRequest(), **k)
        for name, rpc in rpcs.items():
            status, error = await failure(rpc(**look))
            assert isinstance(error, AuthError) and status is grpc.StatusCode.UNAUTHENTICATED
            assert name in error.value and "Status" in error.limit
        assert running.sessions.status().open_episodes == 1


def test_no_scope_pushes_adapters_over_grpc() -> None:
    methods = pb.DESCRIPTOR.services_by_name["Rollout"].methods_by_name
    fields = {
        field.name.lower() for method in methods.values() for field in method.input_type.fields
    }
    assert not any("adapter" in name or "lora" in name for name in {*methods, *fields})


@pytest.mark.parametrize(
    "header",
    ["", "Bearer ", "Bearer wrong", TOKENS["alice"], f"Basic {TOKENS['alice']}", "Bearer \udcff",
     f"Bearer {TOKENS['alice'][:-1]}", f"Bearer {TOKENS['alice']}x", f"bearer {TOKENS['alice']}"],
)  # fmt: skip
def test_what_is_no_token_is_nobodys(header: str) -> None:
    with pytest.raises(AuthError) as caught:
        ACCESS.caller(header)
    assert not any(token in str(caught.value) for token in TOKENS.values())


def test_every_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr("hmac.compare_digest", compare)
    for name in ("alice", "root"):
        assert ACCESS.caller(f"Bearer {TOKENS[name]}").name == name
    with pytest.raises(AuthError):
        ACCESS.caller("Bearer short")
    assert len(compared) == 3 * len(TOKENS)
    assert {len(each) for pair in compared for each in pair} == {32}


def test_a_shared_token_is_an_administrators_and_none_asks_for_none() -> None:
    assert Access("secret").caller("Bearer secret") == ANYBODY
    assert Access().is_open and Access().caller("") == ANYBODY
    with pytest.raises(AuthError):
        Access("secret").caller("")


def test_a_file_of_tokens(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"# comment\n\nalice agent {TOKENS['alice']}\nroot\tadmin {TOKENS['root']}\n")
    assert read_tokens(path) == [
        (TOKENS["alice"], Caller(name="alice", scope=Scope.AGENT)),
        (TOKENS["root"], Caller(name="root", scope=Scope.ADMIN)),
    ]
    secret = "s" * 20
    for text, told in (
        ("", "names no token"),
        (f"alice agent {secret}\nbob agent {secret}", "twice"),
        (f"alice {secret}", "line 1: 2 words"),
        (f"# x\nalice boss {secret}", "line 2: another scope"),
        (f"a/b agent {secret}", "another characters"),
        ("alice agent short", "5 characters"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            read_tokens(path)
        told = told.replace("another characters", "a name of other characters")
        assert told in str(caught.value) and secret not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot read"):
        read_tokens(tmp_path / "gone")


def said(text: str) -> Any:
    return [{"role": "user", "content": text}]


def keyed(service: Endpoint, name: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=service.url, api_key=TOKENS[name], max_retries=0)


async def test_openai_sessions_are_their_owners_alone() -> None:
    ask: Any = {"model": "m", "messages": said("q")}
    named: Any = {"extra_headers": {"X-Octopus-Session": "s"}}
    async with endpoint(lambda text: "fine", access=ACCESS) as service:
        alice, bob, trainer = (keyed(service, name) for name in ("alice", "bob", "trainer"))
        async with alice, bob, trainer:
            for client in (alice, bob):
                await client.chat.completions.create(**ask, **named)
                await client.chat.completions.create(**ask)
            # The same name, and the same words: four episodes all the same.
            assert service.sessions.status().open_episodes == 4
            await alice.chat.completions.create(model="m", messages=said("mine"))
            told = [*said("mine"), {"role": "assistant", "content": "fine"}, *said("more")]
            for client, num_open in ((bob, 6), (alice, 6)):
                await client.chat.completions.create(model="m", messages=told)
                assert service.sessions.status().open_episodes == num_open
            reply = await alice.responses.create(model="m", input="q")
            with pytest.raises(openai.BadRequestError, match="no such response"):
                await bob.responses.create(model="m", input="x", previous_response_id=reply.id)
            assert (
                reply.id
                == (
                    await alice.responses.create(
                        model="m", input="x", previous_response_id=reply.id
                    )
                ).previous_response_id
            )
            with pytest.raises(openai.AuthenticationError, match="scope"):
                await trainer.chat.completions.create(**ask)
            assert (await trainer.models.list()).data
            close: Any = {"cast_to": dict[str, Any], "body": {"reward": 1.0}}
            closed = await bob.post("/octopus/sessions/s/close", **close)
            assert closed["session"] == "s"
            await bob.post("/octopus/sessions/s/close", **close)
            assert len(service.records.written) == 1


async def test_an_administrator_too_has_openai_sessions_of_its_own_alone() -> None:
    ask: Any = {"model": "m", "extra_headers": {"X-Octopus-Session": "s"}}
    close: Any = {"cast_to": dict[str, Any], "body": {"reward": 1.0}}
    async with endpoint(lambda text: "fine", access=ACCESS) as service:
        alice, root = keyed(service, "alice"), keyed(service, "root")
        async with alice, root:
            await alice.chat.completions.create(messages=said("q"), **ask)
            with pytest.raises(openai.NotFoundError, match="no such session"):
                await root.post("/octopus/sessions/s/close", **close)
            await root.chat.completions.create(messages=said("q"), **ask)
            assert service.sessions.status().open_episodes == 2
            await root.post("/octopus/sessions/s/close", **close)
            await alice.post("/octopus/sessions/s/close", **close)
            assert len(service.records.written) == 2


def test_the_configured_file_of_tokens_lets_others_in(tmp_path: Path) -> None:
    settings = {"model": {"path": str(tmp_path)}, "server": {"host": "0.0.0.0"}}
    with pytest.raises(ConfigError, match="open to others"):
        validate_config(RolloutConfig, settings)
    settings["server"]["tokens"] = str(tmp_path / "tokens")
    assert validate_config(RolloutConfig, settings).server.tokens is not None
