"""The service over the vLLM engine: random use, waiting parents, versions of running episodes."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness_sdk.types import Limits, Message, Role, SamplingOptions, ThreadStatus
from rollout_service.engine.base import Engine
from rollout_service.sessions import Call, OpenRequest
from rollout_service.sessions.replies import WaitReply
from tests.engine_cases import save_adapter
from tests.session_cases import CHAT, LOOK, Bench
from tests.vllm.audit import ask, check_nothing_left
from tests.vllm.audited_scheduler import GATHER, STEPS
from tests.vllm.conftest import Served
from tests.vllm.episodes import logprobs_of
from tests.vllm.models import DTYPES, HYBRIDS, MOE_FAMILIES
from tests.vllm.session_play import World

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.slow,
    # PEFT 0.21 reads a property that transformers has renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]

TOLERANCE = 3e-5
ADAPTED_TOLERANCE = 1e-3
"""Random adapters as large as the tests' amplify rounding."""
RMS_LIMIT = 5e-6
BF16_RMS_LIMIT = 0.4
"""Nats; one kind of rounding beside the other, so it tells of gross errors alone."""
RANDOM_FAMILIES = ("llama", "qwen3", "qwen3_moe", "granitemoehybrid", "qwen3_5")
OPERATIONS = {
    "open_episode", "say", "sample", "fork", "rewind", "read", "finish_thread", "cancel_thread",
    "cancel_call", "kill_client", "close", "push_adapter", "evict",
}  # fmt: skip


async def check_random_use(world: World, num_operations: int, share: float) -> None:
    """Play, compare, and find all given back: pages, state slots, reference counts."""
    served, began = world.served, time.monotonic()
    await world.play(num_operations)
    await check_nothing_left(served.engine)
    played_s = time.monotonic() - began
    base, adapted = await world.gaps(share)
    stats = served.engine.stats()
    print(f"{served.family}: {played_s:.0f} s, {dict(world.done)}")
    print(f"  base {told(base)}; adapted {told(adapted)}")
    print(f"  recomputed {dict(stats.tokens_recomputed)}, preemptions {stats.preemptions}")
    assert len(base) + len(adapted) > num_operations * share
    if DTYPES[served.family] == "float32":
        assert rms_of(base) <= RMS_LIMIT and worst_of(base) <= TOLERANCE, told(base)
        assert worst_of(adapted) <= ADAPTED_TOLERANCE, told(adapted)
    else:
        assert rms_of(base + adapted) <= BF16_RMS_LIMIT, told(base + adapted)


def rms_of(gaps: Sequence[float]) -> float:
    return math.hypot(*gaps) / math.sqrt(max(len(gaps), 1))


def worst_of(gaps: Sequence[float]) -> float:
    return max(map(abs, gaps), default=0.0)


def told(gaps: Sequence[float]) -> str:
    return f"{len(gaps)} tokens, rms {rms_of(gaps):.2e}, worst {worst_of(gaps):.2e} nats"


@pytest.mark.parametrize("family", RANDOM_FAMILIES)
async def test_sixty_random_operations_stay_exact_and_leak_nothing(
    served: Served, oracle: Engine, tmp_path: Path
) -> None:
    await check_random_use(World(served, oracle, tmp_path, seed=1), 60, share=1.0)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("family", RANDOM_FAMILIES)
async def test_a_thousand_random_operations_stay_exact_and_leak_nothing(
    served: Served, oracle: Engine, tmp_path: Path
) -> None:
    world = World(served, oracle, tmp_path, seed=2)
    await check_random_use(world, 1000, share=0.5)
    expected = OPERATIONS - ({"push_adapter"} if served.family in MOE_FAMILIES else set())
    assert expected <= set(world.done), "an operation never went through"


@pytest.mark.parametrize("family", ["qwen3", "granitemoehybrid"])
async def test_children_enter_one_step_and_each_turn_leaves_two_states(served: Served) -> None:
    engine, num_children = served.engine, 6
    # After the observation, and after the model's turn.
    num_states = 2 if served.family in HYBRIDS else 0
    bench = Bench(engine=engine)
    await bench.open(primitives=("fork",))

    async def turn(thread: str, role: Role = "tool") -> None:
        sampling = SamplingOptions(max_tokens=4, seed=len(thread))
        messages = [Message(role=role, content="so")]
        await bench.sessions.turn(bench.call(thread), messages, sampling=sampling)

    await turn("root", "user")
    assert engine.stats().recurrent_slots == num_states
    await turn("root")
    assert engine.stats().recurrent_slots == num_states * 2
    names = [f"b{index}" for index in range(num_children)]
    await bench.fork(*names)
    await ask(engine, STEPS)
    gathered = asyncio.ensure_future(ask(engine, GATHER, num_children))
    await asyncio.gather(gathered, *(turn(name) for name in names))
    begun = await ask(engine, STEPS)
    # Their observations at once, then their turns as they come.
    assert (begun[0], sum(begun)) == (num_children, 2 * num_children)
    assert engine.stats().recurrent_slots == num_states * (2 + num_children)
    await bench.close(reward=0.0)
    assert engine.stats().recurrent_slots == 0


@pytest.mark.parametrize("family", ["llama"])
async def test_a_waiting_parent_never_blocks_its_children(served: Served, oracle: Engine) -> None:
    engine = served.engine
    bench = Bench(engine=engine, answer_reserve=100)
    await bench.open(primitives=("fork", "wait"), limits=Limits(thread_budget=1500))
    await bench.say("root", "so", "q" * 700)
    names = [f"b{index}" for index in range(9)]
    await bench.fork(*names)
    waiting = asyncio.ensure_future(bench.wait(*names))
    before = engine.stats()

    async def work(name: str) -> None:
        # Together they need more than the pool holds, beside what the parent has.
        for seed in range(3):
            await bench.sessions.turn(
                bench.call(name),
                [Message(role="tool", content="o" * 250)],
                sampling=SamplingOptions(max_tokens=12, seed=seed),
            )
        await bench.sessions.done(bench.call(name), name)

    async with asyncio.timeout(200):
        await asyncio.gather(*(work(name) for name in names))
        *_, reply = await waiting
    assert isinstance(reply, WaitReply)
    assert {result.status for result in reply.results} == {ThreadStatus.DONE}
    root = bench.sessions.episode("e").root
    turn = await bench.sessions.turn(bench.call(), (), sampling=SamplingOptions(max_tokens=9))
    assert len(turn.token_ids) == 9
    # The parent had lost what was its own: it was rebuilt, exactly.
    assert engine.stats().tokens_recomputed["eviction"] > before.tokens_recomputed["eviction"]
    assert root.head is not None
    for cursor in (root.head, *(bench.sessions.episode("e").thread(n).head for n in names)):
        assert cursor is not None
        expected = await logprobs_of(oracle, cursor)
        assert cursor.sampled_logprobs == pytest.approx(expected, abs=TOLERANCE)
    await bench.close(reward=1.0)
    assert engine.stats().tokens_resident == 0


@pytest.mark.parametrize("family", ["llama"])
async def test_a_burst_of_episodes_is_let_in_as_the_pool_allows(served: Served) -> None:
    engine = served.engine
    bench = Bench(engine=engine, thread_budget=1600, admission_poll_s=0.005)
    uses: list[float] = []
    num_open = 0

    async def agent(number: int) -> None:
        nonlocal num_open
        name = f"e{number}"
        await bench.sessions.open(OpenRequest(episode_id=name))
        num_open += 1
        for turn in range(4):
            role = "tool" if turn else "user"
            await bench.sessions.turn(
                Call(episode_id=name, thread_id="root"),
                [Message(role=role, content="o" * 350)],
                sampling=SamplingOptions(max_tokens=5, seed=turn),
            )
            uses.append(engine.stats().kv_use)
        await bench.sessions.close(name, reward=0.0)

    before = engine.stats()
    async with asyncio.timeout(200):
        agents = [asyncio.create_task(agent(number)) for number in range(16)]
        await asyncio.sleep(0.1)
        assert 1 <= num_open < 8, "all at once they take three times the pool"
        await asyncio.gather(*agents)
    after = engine.stats()
    assert sorted(uses)[int(0.9 * len(uses))] <= 0.76
    assert after.tokens_recomputed["eviction"] == before.tokens_recomputed["eviction"]
    assert after.preemptions == before.preemptions
    assert after.tokens_resident == 0


@pytest.mark.parametrize("family", ["llama"])
@pytest.mark.parametrize("policy", ["keep", "refresh"])
async def test_running_episodes_keep_or_refresh_their_version(
    served: Served, oracle: Engine, tmp_path: Path, policy: str
) -> None:
    engine = served.engine
    bench = Bench(engine=engine)
    episode = await bench.open(version_policy=policy)
    await bench.say("root", LOOK, "q" * 40)
    await bench.fork("a")
    sampling = SamplingOptions(max_tokens=150, seed=1)
    running = asyncio.ensure_future(bench.sessions.turn(bench.call(), (), sampling=sampling))
    for version in (1, 2):
        folder = tmp_path / str(version)
        save_adapter(folder, served.folder, served.family, seed=version)
        await oracle.load_adapter(version, str(folder))
        await engine.load_adapter(version, str(folder))
        bench.version = version
    begun = await running
    # It went on to its own end, on the version that it began with.
    assert begun.policy_version == 0
    assert len(begun.token_ids) == 150 or begun.token_ids[-1] in CHAT.stop_token_ids
    child = await bench.sessions.turn(
        bench.call("a"), (), sampling=SamplingOptions(max_tokens=9, seed=2)
    )
    assert child.policy_version == (0 if policy == "keep" else 2)
    assert bench.sessions.versions_in_use() == ({0} if policy == "keep" else set())
    again = engine.stats().tokens_recomputed["refresh"]
    onward = await bench.sessions.turn(
        bench.call(), [Message(role="tool", content="o")], sampling=sampling
    )
    assert onward.policy_version == child.policy_version
    recomputed = engine.stats().tokens_recomputed["refresh"] - again
    assert (recomputed > 0) == (policy == "refresh")
    await bench.sessions.read_thread(bench.call("a"), "root", 2, 2)
    for node in episode.nodes:
        if node.cursor.sampled_logprobs:
            expected = await logprobs_of(oracle, node.cursor)
            assert node.cursor.sampled_logprobs == pytest.approx(expected, abs=ADAPTED_TOLERANCE)
    assert engine.stats().foreign_blocks == 0
    await bench.close(reward=1.0)
