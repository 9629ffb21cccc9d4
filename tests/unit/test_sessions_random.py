"""Random episodes keep every rule that the trainer relies on."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from harness_sdk.errors import HarnessError
from harness_sdk.record import EpisodeRecord, Node, NodeKind, record_from_bytes, record_to_bytes
from harness_sdk.types import Limits, Message
from rollout_service.sessions.episode import Episode
from rollout_service.sessions.threads import Thread
from tests.session_cases import CHAT, Bench, tool_call

BUDGET = 1500
LIMITS = Limits(thread_budget=BUDGET, answer_reserve=150, max_threads=6, max_turns=25)


class Player:
    """Plays random calls, and counts what each refusal was."""

    def __init__(self, bench: Bench, episode: Episode, rng: random.Random) -> None:
        self.bench = bench
        self.episode = episode
        self.rng = rng
        self.done: Counter[str] = Counter()
        self.turns: list[tuple[int, ...]] = []

    async def play(self, num_calls: int) -> None:
        await self.bench.say()
        calls = ["say"] * 5 + ["fork", "rewind", "read", "read", "done", "cancel"]
        for _ in range(num_calls):
            call = self.rng.choice(calls)
            thread = self._choose()
            before = (thread.head_id, thread.tokens_used, thread.head)
            try:
                await getattr(self, f"_{call}")(thread)
                self.done[call] += 1
            except HarnessError as error:
                self.done[type(error).__name__] += 1
                assert (thread.head_id, thread.tokens_used, thread.head) == before
            self.check(thread)

    def _choose(self) -> Thread:
        threads = list(self.episode.threads.values())
        live = [thread for thread in threads if not thread.status.is_final]
        return self.rng.choice(live if live and self.rng.random() < 0.95 else threads)

    def check(self, thread: Thread) -> None:
        used = sum(len(node.cursor.token_ids) for step in thread.steps for node in step.nodes)
        budget = self.episode.budget(thread)
        assert thread.tokens_used == used == budget.tokens_used <= BUDGET
        assert budget.tokens_left == BUDGET - used
        assert [step.number for step in thread.steps] == list(range(len(thread.steps)))
        assert all(step.turn is not None and step.finished for step in thread.steps[1:-1])
        assert all(node.step == step.number for step in thread.steps for node in step.nodes)
        path = set(thread.head.ancestors()) if thread.head is not None else set()
        mounted = [mount.source for mount in thread.mounts]
        assert len(set(mounted)) == len(mounted), "visibility is a set"
        assert path.isdisjoint(mounted), "nobody mounts its own path"
        for node in (node for step in thread.steps for node in step.nodes if node.on_path):
            assert node.cursor in path, "the surviving path holds every surviving node"

    async def _say(self, thread: Thread) -> None:
        reply = self.rng.choice(["plain", "<tool_call>bad", *[tool_call("look")] * 10])
        observations = [Message(role="tool", content="o" * self.rng.randrange(30))]
        turn = await self.bench.sessions.turn(
            self.bench.call(thread.thread_id),
            observations[: self.rng.randrange(2)],
            demonstration=reply,
        )
        self.turns.append(turn.token_ids)

    async def _fork(self, thread: Thread) -> None:
        names = [f"b{len(self.episode.threads) + i}" for i in range(self.rng.randint(1, 2))]
        await self.bench.fork(*names, thread=thread.thread_id)

    async def _rewind(self, thread: Thread) -> None:
        step = self.rng.randrange(len(thread.steps) + 1)
        before = list(thread.steps)
        await self.bench.sessions.rewind(self.bench.call(thread.thread_id), step, "n")
        kept = before[: step + 1]
        assert thread.steps[:-1] == kept and thread.steps[-1].awaits_turn
        heads = [each.head for each in kept if each.head is not None]
        assert thread.head is (heads[-1] if heads else thread.base), "exactly c_k"
        assert thread.tokens_used == sum(each.num_tokens for each in kept)

    async def _read(self, thread: Thread) -> None:
        source = self.rng.choice(list(self.episode.threads))
        first = self.rng.randrange(4)
        await self.bench.sessions.read_thread(
            self.bench.call(thread.thread_id), source, first, first + self.rng.randrange(4)
        )

    async def _done(self, thread: Thread) -> None:
        if thread is not self.episode.root and self.rng.random() < 0.15:
            await self.bench.sessions.done(self.bench.call(thread.thread_id), "x")

    async def _cancel(self, thread: Thread) -> None:
        if thread is not self.episode.root and self.rng.random() < 0.1:
            await self.bench.sessions.cancel(self.bench.call(thread.thread_id))


def check_record(record: EpisodeRecord) -> None:
    for index, node in enumerate(record.nodes):
        assert node.node_id == index and node.parent < index
        assert all(mount.node_id < index for mount in node.mounts), "sources come first"
        assert len(node.sampled) == len(node.token_ids) > 0
        assert sum(node.sampled) == len(node.sampled_logprobs)
        assert node.position_start == expected_position(record, node)
        if node.parent >= 0:
            parent = record.nodes[node.parent]
            assert set(parent.mounts) <= set(node.mounts), "mounts are inherited"
            if set(node.mounts) != set(parent.mounts):
                assert node.kind is NodeKind.STUB
        path = path_ids(record, node)
        assert path.isdisjoint(mount.node_id for mount in node.mounts)
        check_terminators(record, node)


def expected_position(record: EpisodeRecord, node: Node) -> int:
    """Octopus Eq. 2."""
    own = 0
    if node.parent >= 0:
        parent = record.nodes[node.parent]
        own = parent.position_start + len(parent.token_ids)
    mounted = (record.nodes[m.node_id].position_start + m.end for m in node.mounts)
    return max([own, *mounted])


def path_ids(record: EpisodeRecord, node: Node) -> set[int]:
    ids = {node.node_id}
    while node.parent >= 0:
        node = record.nodes[node.parent]
        ids.add(node.node_id)
    return ids


def check_terminators(record: EpisodeRecord, node: Node) -> None:
    """Every path reads as well-formed ChatML."""
    ids: list[int] = []
    for each in sorted(path_ids(record, node)):
        ids += record.nodes[each].token_ids
    starts = ids.count(CHAT.generation_prompt[0])
    assert starts == ids.count(CHAT.terminator[0])
    assert CHAT.tokenizer.decode(ids).count("<|im_end|>\n<|im_start|>") == starts - 1


@pytest.mark.parametrize("seed", range(40))
async def test_random_episodes_keep_the_rules(seed: int) -> None:
    bench = Bench(busy_grace_s=0.0)
    episode = await bench.open(limits=LIMITS)
    player = Player(bench, episode, random.Random(seed))
    await player.play(80)
    resident = bench.engine.stats().resident_cursors
    assert resident == len(episode.nodes), "a refused call leaves no residency"
    record = await bench.close(reward=0.0)
    check_record(record)
    assert record_from_bytes(record_to_bytes(record)) == record
    assert bench.engine.stats().resident_cursors == 0
    turns = [n for n in record.nodes if n.kind is NodeKind.DEMONSTRATION]
    sampled = [tuple(t for t, s in zip(n.token_ids, n.sampled, strict=True) if s) for n in turns]
    assert sampled[1:] == player.turns, "each sampled token stands once, in order"
    assert record.num_sampled == sum(map(len, sampled))
    assert sum(t.num_tokens for t in record.threads) == record.num_tokens
    assert sum(t.num_turns for t in record.threads) == len(turns)


async def test_the_random_episodes_do_what_they_should() -> None:
    done: Counter[str] = Counter()
    for seed in range(10):
        bench = Bench(busy_grace_s=0.0)
        player = Player(bench, await bench.open(limits=LIMITS), random.Random(seed))
        await player.play(80)
        done += player.done
    for call in ("say", "fork", "rewind", "read", "done", "cancel", "ThreadEnded", "StepNotFound",
                 "InvalidRequest", "BudgetExhausted"):  # fmt: skip
        assert done[call] > 0, done
