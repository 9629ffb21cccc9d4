"""A killed engine process is started again, and what ran on it goes on as if nothing had been."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from harness_sdk.record import EpisodeRecord, Node
from harness_sdk.types import Message, SamplingOptions
from rollout_service.engine.vllm import VllmEngine
from tests.session_cases import LOOK, Bench
from tests.vllm.audit import check_nothing_left
from tests.vllm.conftest import Served

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

GREEDY = SamplingOptions(max_tokens=8, temperature=0.0)
LONG = SamplingOptions(max_tokens=160, temperature=0.0)
TOLERANCE = 2e-5
SOON_S = 60.0
"""Of a busy machine; a start takes a few seconds on an idle one."""


def core_pid(engine: VllmEngine) -> int:
    (process,) = engine._supervisor.newest.process._processes
    return process.pid


async def until_sampled(engine: VllmEngine, num_more: int) -> None:
    before = engine.stats().tokens_sampled
    while engine.stats().tokens_sampled < before + num_more:
        await asyncio.sleep(0.005)


async def play_tree(
    served: Served, *, break_by: signal.Signals | None, within_s: float = SOON_S
) -> EpisodeRecord:
    """Forks, mounts and rewinds, before and after a turn in whose middle the engine may go."""
    engine = served.engine
    bench = Bench(engine=engine)
    episode = await bench.open(primitives=("fork", "rewind", "read_thread"))
    await bench.say("root", LOOK, "What is six times seven? " * 3)
    await bench.sessions.turn(bench.call(), [Message(role="tool", content="s")], sampling=GREEDY)
    await bench.fork("a", "b")
    await bench.say("a", LOOK)
    await bench.say("a", LOOK, "a long look " * 6)
    await bench.say("b", LOOK)
    await bench.sessions.read_thread(bench.call("b"), "a", 1, 2)
    await bench.sessions.turn(bench.call("b"), sampling=GREEDY)
    await bench.say("root", LOOK, "nothing")
    await bench.sessions.rewind(bench.call(), 2, "not that way")
    # Broken in the middle of two turns, one of which sees a mount, and of a mount that just begins.
    running = [
        asyncio.create_task(bench.sessions.turn(bench.call(name), sampling=LONG))
        for name in ("root", "b")
    ]
    await until_sampled(engine, 4)
    if break_by is not None:
        os.kill(core_pid(engine), break_by)
    # Not a turn: that would tell how far the others are, which they are at any time.
    late = asyncio.create_task(bench.sessions.read_thread(bench.call("a"), "b", 1, 1))
    async with asyncio.timeout(within_s):
        await asyncio.gather(*running)
        await late
    # Mounts of what was computed before and after, on a head of before; a rewind to before.
    await bench.sessions.read_thread(bench.call("a"), "b", 1, 3)
    await bench.sessions.turn(bench.call("a"), sampling=GREEDY)
    await bench.sessions.rewind(bench.call(), 1, "from the start")
    await bench.say("root", LOOK)
    await bench.fork("c")
    await bench.sessions.turn(bench.call("c"), sampling=GREEDY)
    assert not any(thread.busy for thread in episode.threads.values())
    return await bench.close(reward=1.0)


def by_thread(record: EpisodeRecord) -> list[Node]:
    """Threads beside each other end their turns in any order."""
    return sorted(record.nodes, key=lambda node: node.thread_id)


def told(record: EpisodeRecord, node: Node) -> tuple[object, ...]:
    """All of a node but its log-probabilities and numbers."""
    nodes = record.nodes
    seen = [
        (nodes[mount.node_id].thread_id, nodes[mount.node_id].step, mount.begin, mount.end)
        for mount in node.mounts
    ]
    where = (node.thread_id, node.step, node.kind, node.position_start, node.policy_version)
    return (*where, node.token_ids, node.sampled, node.rewound, seen)


@pytest.mark.parametrize("family", ["granitemoehybrid"])
async def test_an_episode_goes_on_over_a_kill_with_the_same_record(served: Served) -> None:
    engine = served.engine
    calm = await play_tree(served, break_by=None)
    before = engine.stats()
    record = await play_tree(served, break_by=signal.SIGKILL)
    after = engine.stats()
    assert (after.restarts, after.is_serving) == (before.restarts + 1, True)
    # Each of the two turns and all that it stands on, but no more than there is.
    again = after.tokens_recomputed["restart"] - before.tokens_recomputed["restart"]
    assert 300 < again < sum(len(node.token_ids) for node in record.nodes)
    assert [told(record, node) for node in by_thread(record)] == [
        told(calm, node) for node in by_thread(calm)
    ]
    assert any(node.mounts for node in record.nodes) and any(node.rewound for node in record.nodes)
    for node, other in zip(by_thread(record), by_thread(calm), strict=True):
        pairs = zip(node.sampled_logprobs, other.sampled_logprobs, strict=True)
        assert max((abs(a - b) for a, b in pairs), default=0.0) <= TOLERANCE
    await check_nothing_left(engine)
