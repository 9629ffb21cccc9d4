"""A killed engine process: who waits is served by the next or told soon, and nothing remains."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from harness_sdk.cli.__main__ import main
from harness_sdk.cli.processes import free_port, spawn, stop
from harness_sdk.client import OctopusClient
from harness_sdk.errors import Unavailable
from harness_sdk.types import Message, SamplingOptions
from rollout_service.engine.base import Engine
from rollout_service.engine.vllm import VllmEngine
from rollout_service.engine.vllm.shared_memory import family, shared_files
from rollout_service.engine.vllm.supervisor import RestartPolicy
from tests.chat_tokenizers import save_chat_tokenizer
from tests.e2e.rollout_process import ROLLOUT, until_gone, until_listening
from tests.engine_cases import save_adapter
from tests.session_cases import Bench
from tests.vllm.audit import check_nothing_left
from tests.vllm.conftest import Served, new_play, serve
from tests.vllm.models import save_servable_model
from tests.vllm.session_play import World
from tests.vllm.test_sessions import check_random_use

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.slow,
    # PEFT 0.21 reads a property that transformers has renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]

SOON_S = 15.0
"""Of a busy machine; vLLM looks at its process at once."""
START_S = 300.0


def engine_processes(engine: VllmEngine) -> list[int]:
    """The engine's process and all below it."""
    (process,) = engine._supervisor.newest.process._processes
    return family(process.pid)


async def until_sampled(engine: VllmEngine, num_more: int) -> None:
    before = engine.stats().tokens_sampled
    while engine.stats().tokens_sampled < before + num_more:
        await asyncio.sleep(0.005)


async def test_calls_end_with_a_retryable_error_and_no_process_remains(
    servable_folder: Path,
) -> None:
    told: list[Unavailable] = []
    restarts = RestartPolicy(max_restarts=0)
    serving = asynccontextmanager(serve)(
        servable_folder, "llama", restarts=restarts, on_end=told.append
    )
    async with serving as served:
        engine, play = served.engine, new_play(served, seed=1)
        bench = Bench(engine=engine)
        await bench.open()
        await bench.say()
        root = await play.extend(None, 40)
        victims = engine_processes(engine)
        assert victims
        decode = asyncio.create_task(play.turn(root, 900))
        turn = asyncio.create_task(
            bench.sessions.turn(bench.call(), (), sampling=SamplingOptions(max_tokens=900))
        )
        while engine.stats().running < 2:
            await asyncio.sleep(0.01)
        # Stopped first: what is asked now is never answered.
        os.kill(victims[0], signal.SIGSTOP)
        asked = [
            decode,
            turn,
            asyncio.create_task(play.extend(root, 30)),
            asyncio.create_task(engine.score(play.tokens(9), policy_version=0)),
            asyncio.create_task(engine.forget_all()),
        ]
        given_back = asyncio.create_task(engine.evict([root]))
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in (*asked, given_back))
        os.kill(victims[0], signal.SIGKILL)
        async with asyncio.timeout(SOON_S):
            *errors, forgotten = await asyncio.gather(*asked, return_exceptions=True)
            await given_back
        assert [type(error) for error in errors] == [Unavailable] * 4
        assert {str(error) for error in errors} == {str(error) for error in told}
        assert forgotten is None

        # Later calls are told at once, what is given back is given back, and the episode is data.
        async with asyncio.timeout(SOON_S):
            with pytest.raises(Unavailable, match="the engine is not started again"):
                await play.extend(root, 3)
            with pytest.raises(Unavailable, match="0 restarts in 3600 s"):
                await bench.sessions.turn(bench.call(), [Message(role="tool", content="o")])
            await engine.release([root])
            record = await bench.close(error_kind="Unavailable", error_message="engine gone")
            assert record.error_kind == "Unavailable" and len(record.nodes) == 2
    await until_gone(victims)


async def test_a_turn_is_told_that_its_engine_is_closed(servable_folder: Path) -> None:
    async with asynccontextmanager(serve)(servable_folder, "llama") as served:
        engine, play = served.engine, new_play(served, seed=1)
        root = await play.extend(None, 40)
        turn = asyncio.create_task(play.turn(root, 900))
        await until_sampled(engine, 10)
        await engine.close()
        async with asyncio.timeout(SOON_S):
            with pytest.raises(Unavailable, match="the engine is not running"):
                await turn


async def check_all_is_served(served: Served, tmp_path: Path) -> None:
    """Kill the process while every kind of call waits for it; each is served by the next."""
    engine, play = served.engine, new_play(served, seed=1)
    for version in (1, 2, 3):
        folder = tmp_path / str(version)
        save_adapter(folder, served.folder, served.family, seed=version)
        if version < 3:
            await engine.load_adapter(version, str(folder))
    proved = await engine.adapter_checksums(2)
    await engine.unload_adapter(1)
    root = await play.extend(None, 40)
    victims = engine_processes(engine)
    shared = shared_files(victims)
    assert len(victims) == 1 or shared, "ranks share memory"
    seeded = asyncio.create_task(play.turn(root, 60, seed=1))
    free = asyncio.create_task(play.turn(root, 60))
    await until_sampled(engine, 10)
    os.kill(victims[0], signal.SIGSTOP)
    waiting = [
        asyncio.create_task(play.extend(root, 30)),
        asyncio.create_task(engine.score(play.tokens(9), policy_version=2)),
        asyncio.create_task(engine.load_adapter(3, str(tmp_path / "3"))),
        asyncio.create_task(engine.adapter_checksums(2)),
    ]
    await asyncio.sleep(0.1)
    os.kill(victims[0], signal.SIGKILL)
    async with asyncio.timeout(START_S):
        extended, _, _, checksums = await asyncio.gather(*waiting)
        turn = await free
        with pytest.raises(Unavailable, match="a turn that has to be sampled whole"):
            await seeded
        assert checksums == proved != {}
        assert await engine.adapter_checksums(3) != proved
        again = await play.turn(root, 60, seed=1)
    assert engine.stats().restarts == 1
    # Tokens of both processes, and their log-probabilities.
    assert len(turn.sampled_logprobs) == 60
    play.check(turn)
    await engine.release([root, extended, turn, again])
    await check_nothing_left(engine)
    await until_gone(victims)
    assert not shared & set(Path("/dev/shm").iterdir())


async def test_every_call_is_served_by_the_next_process(
    servable_folder: Path, tmp_path: Path
) -> None:
    serving = asynccontextmanager(serve)(servable_folder, "llama", max_adapters=4)
    async with serving as served:
        await check_all_is_served(served, tmp_path)


async def test_a_service_outlives_its_engine_and_ends_where_that_ends_again(
    tmp_path: Path,
) -> None:
    model = save_chat_tokenizer(save_servable_model(tmp_path / "model", "llama"))
    port, log = free_port(), tmp_path / "rollout.log"
    address = f"127.0.0.1:{port}"
    process = await spawn(
        [*ROLLOUT, "--model.path", str(model), "--run-folder", str(tmp_path / "runs"),
         "--server.port", str(port), "--engine.name", "vllm", "--engine.max-tokens", "4096",
         "--engine.vllm.max-restarts", "1", "--model.preamble", "compact"],
        log_path=log,
    )  # fmt: skip
    try:
        await until_listening(process, port, log)
        async with OctopusClient.connect(address) as client:
            before = family(process.pid)
            async with client.episode(primitives=("fork",)) as episode:
                sampling = SamplingOptions(max_tokens=400, temperature=0.0)
                turn = asyncio.create_task(episode.root.generate("Go on.", sampling=sampling))
                while (await client.status()).metrics["tokens/sampled"] < 20:
                    await asyncio.sleep(0.05)
                os.kill(core_of(process.pid), signal.SIGKILL)
                while (await client.status()).metrics["engine/serving"]:
                    await asyncio.sleep(0.05)
                assert await asyncio.to_thread(main, ["status", "--address", address]) == 1
                async with asyncio.timeout(START_S):
                    told = await turn
                assert (told.finish_reason, len(told.sampled_logprobs)) == ("length", 400)
                metrics = (await client.status()).metrics
                assert (metrics["engine/serving"], metrics["engine/restarts"]) == (1, 1)
                assert metrics["tokens/recomputed_restart"] > 20
                await episode.close(reward=1.0)
            os.kill(core_of(process.pid), signal.SIGKILL)
            async with asyncio.timeout(60):
                assert await process.wait() == 1
            await until_gone(before)
    finally:
        await stop(process, 0)
    text = log.read_text()
    assert "the engine is not started again" in text and "1 restarts in 3600 s" in text
    assert "its last lines:\n" in text


def core_of(service: int) -> int:
    """The engine's process: of the service's children the one that has the most memory."""
    children = [pid for pid in family(service) if pid != service]
    sizes = {pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in children}
    return max(sizes, key=lambda pid: sizes[pid])


@pytest.mark.soak
@pytest.mark.parametrize("family", ["granitemoehybrid"])
async def test_random_use_with_kills_stays_exact_and_leaks_nothing(
    served: Served, oracle: Engine, tmp_path: Path
) -> None:
    before = served.engine.stats().restarts
    world = World(served, oracle, tmp_path, seed=3, kills=3)
    await check_random_use(world, 120, share=1.0)
    assert served.engine.stats().restarts == before + 3


@pytest.mark.soak
async def test_ranks_of_a_killed_process_end_and_what_they_shared_is_freed(
    servable_folder: Path, tmp_path: Path
) -> None:
    serving = asynccontextmanager(serve)(
        servable_folder, "granitemoehybrid", max_adapters=4, tensor_parallel_size=2
    )
    async with serving as served:
        await check_all_is_served(served, tmp_path)
