"""Random models in the model-driven loop: whatever they call, every rule of an episode holds."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from harness_sdk import Limits, LoopEvent, LoopResult, OctopusClient, SamplingOptions, ToolLoop
from harness_sdk.measures import measure
from harness_sdk.record import EpisodeRecord, Node, NodeKind
from harness_sdk.types import ThreadStatus, Turn
from rollout_service.chat import ChatRenderer
from rollout_service.cursors import Cursor
from rollout_service.engine.base import Generated
from tests.chat_tokenizers import chat_tokenizer
from tests.service.sdk_service import Running, ScriptedEngine, calls, running

LIMITS = Limits(thread_budget=2_500, answer_reserve=250, max_threads=10, max_depth=6, max_turns=12)
CHAT = ChatRenderer(chat_tokenizer(), preamble="compact")


def random_model(text: str) -> str:
    """Up to three calls, drawn by what it sees; now and then none, or a bad one."""
    episode = text.split("episode ", 1)[1].split("<", 1)[0]
    rng = random.Random(f"{episode} {text}")
    depth = text.count("[branch ")
    if rng.random() < 0.03:
        return rng.choice(["I am done.", "<tool_call>\n{broken\n</tool_call>", ""])
    # Deep rather than broad, and with an end in sight.
    kinds = ["look"] * 3 + ["fork"] * (2 + 2 * depth) + ["wait"] * 3 + ["read_thread"] * 3
    kinds += ["rewind"] * 2 + ["done"] * (1 + depth) + ["unknown"]
    return calls(*(_call(rng, rng.choice(kinds), text) for _ in range(rng.randint(1, 3))))


def _call(rng: random.Random, kind: str, text: str) -> tuple[str, dict[str, Any]]:
    if kind == "look":
        return "look", {"length": rng.randrange(120)}
    if kind == "fork":
        # Some names are taken already.
        names = {f"b{rng.randrange(40)}" for _ in range(1 + (rng.random() < 0.2))}
        return "fork", {"branches": dict.fromkeys(sorted(names), "go on")}
    if kind == "read_thread":
        known = sorted({*re.findall(r"\bb\d+\b", text), "root"})
        first = rng.randrange(4)
        return "read_thread", {
            "branch": rng.choice(known),
            "steps": [first, first + rng.randrange(3)],
        }
    if kind == "rewind":
        return "rewind", {"step": rng.randrange(5), "note": "again"}
    if kind == "done":
        return "done", {"answer": f"a{rng.randrange(9)}"}
    return kind, {}


async def look(length: int) -> str:
    """Look around."""
    return "o" * length


class CountingEngine(ScriptedEngine):
    """Counts what it computes, and keeps what each turn saw."""

    def __init__(self) -> None:
        super().__init__(CHAT, random_model)
        self._rng = random.Random(0)
        self.computed: Counter[int] = Counter()
        """Tokens by the first cursor of their episode."""
        self.abandoned: Counter[int] = Counter()
        """Those of turns that were cancelled."""
        self.prompts: set[tuple[int, ...]] = set()
        """Path and generation prompt of each turn."""

    async def extend(self, parent: Cursor | None, token_ids: Sequence[int], **known: Any) -> Cursor:
        cursor = await super().extend(parent, token_ids, **known)
        self.computed[_first(cursor)] += len(cursor.token_ids)
        return cursor

    async def generate(
        self, parent: Cursor, prompt_token_ids: Sequence[int], *args: Any, **known: Any
    ) -> AsyncGenerator[Any, None]:
        path = [token for cursor in parent.path() for token in cursor.token_ids]
        # Long enough for others to cancel it.
        await asyncio.sleep(self._rng.random() * 0.01)
        async for event in super().generate(parent, prompt_token_ids, *args, **known):
            # Without a message for each token, which is most of the time that this takes.
            if isinstance(event, Generated):
                self.computed[_first(event.cursor)] += len(event.cursor.token_ids)
                self.prompts.add((*path, *prompt_token_ids))
                yield event

    async def release(self, cursors: Sequence[Cursor]) -> None:
        # The end of an episode releases its first cursor too; a turn that failed does not.
        if all(cursor.parent is not None for cursor in cursors):
            for cursor in cursors:
                self.abandoned[_first(cursor)] += len(cursor.token_ids)
        await super().release(cursors)


def _first(cursor: Cursor) -> int:
    return cursor.path()[0].cursor_id


@dataclass(slots=True)
class Played:
    """One episode from outside and from inside."""

    record: EpisodeRecord
    result: LoopResult
    turns: list[tuple[str, Turn]] = field(default_factory=list)


async def play(client: OctopusClient, service: Running, number: int) -> Played:
    turns: list[tuple[str, Turn]] = []

    def note(event: LoopEvent) -> None:
        if event.turn is not None:
            turns.append((event.thread_id, event.turn))

    loop = ToolLoop([look], on_event=note)
    sampling = SamplingOptions(max_tokens=400)
    async with client.episode(limits=LIMITS, task_id=str(number), sampling=sampling) as episode:
        async with asyncio.timeout(60):
            result = await loop.run(episode.root, f"episode {number}")
        await episode.close(reward=0.0)
    (record,) = [each for each in service.records.written if each.task_id == str(number)]
    return Played(record, result, turns)


def check_ends(played: Played) -> None:
    """Every thread has ended, by itself or by another, and as its loop says."""
    ends = {thread.thread_id: ThreadStatus(thread.status) for thread in played.record.threads}
    assert all(status.is_final for status in ends.values()), ends
    told, left = {}, [played.result]
    while left:
        result = left.pop()
        told[result.thread_id] = result.status
        left += result.children.values()
    # A loop that was cancelled during a call may not have heard what the call did, and one that
    # no further turn fits cancels its branch.
    sure = {ThreadStatus.DONE, ThreadStatus.NO_DONE}
    differing = [name for name in told if told[name] in sure and told[name] is not ends[name]]
    assert not differing, {name: (told[name], ends[name]) for name in differing}
    assert told.keys() <= ends.keys()


def check_budgets(played: Played) -> None:
    """No thread appended, turned, forked or went deeper than it may."""
    assert LIMITS.thread_budget and LIMITS.max_turns and LIMITS.max_threads and LIMITS.max_depth
    record = played.record
    for thread_id, turn in played.turns:
        assert turn.budget.tokens_used <= LIMITS.thread_budget, thread_id
        assert turn.budget.tokens_used + turn.budget.tokens_left == LIMITS.thread_budget
    kept: Counter[str] = Counter()
    for node in record.nodes:
        kept[node.thread_id] += 0 if node.rewound else len(node.token_ids)
    assert max(kept.values()) <= LIMITS.thread_budget
    assert len(record.threads) - 1 <= LIMITS.max_threads
    for thread in record.threads:
        assert thread.depth <= LIMITS.max_depth
        assert thread.num_turns <= LIMITS.max_turns


def check_prompts(played: Played, engine: CountingEngine) -> None:
    """What a turn saw is what the record has before it: nothing was put in or changed later."""
    nodes = played.record.nodes
    for node in nodes:
        if node.kind is NodeKind.TURN and not node.sampled[0]:
            opening = node.token_ids[: node.sampled.index(True)]
            assert (*path_tokens(nodes, node.parent), *opening) in engine.prompts
    # The first prompt of all lists neither read_thread nor a branch.
    assert "[readable]" not in CHAT.tokenizer.decode(nodes[0].token_ids)
    assert "read_thread" not in CHAT.tokenizer.decode(nodes[0].token_ids)


def path_tokens(nodes: Sequence[Node], node_id: int) -> tuple[int, ...]:
    path: tuple[int, ...] = ()
    while node_id >= 0:
        path = (*nodes[node_id].token_ids, *path)
        node_id = nodes[node_id].parent
    return path


def check_measures(record: EpisodeRecord) -> None:
    found = measure(record)
    assert found.turns == sum(thread.num_turns for thread in record.threads)
    assert found.critical_path <= found.generated
    assert found.surviving_context <= found.explored_context
    assert found.active_context_max <= found.explored_context


async def check_episodes(numbers: range) -> Counter[str]:
    """Play the episodes, eight at a time, and check each; returns what happened in them."""
    engine, happened = CountingEngine(), Counter[str]()
    slots = asyncio.Semaphore(8)
    async with running(engine, CHAT) as service, OctopusClient.connect(service.address) as client:

        async def one(number: int) -> None:
            async with slots:
                played = await play(client, service, number)
            record = played.record
            check_ends(played)
            check_budgets(played)
            check_prompts(played, engine)
            check_measures(record)
            happened.update(thread.status for thread in record.threads)
            happened.update(f"depth {thread.depth}" for thread in record.threads)
            happened.update(node.kind.name for node in record.nodes)
            happened["rewinds"] += sum(thread.num_rewinds for thread in record.threads)
            happened["readable"] += "[readable]" in CHAT.tokenizer.decode(
                [token for node in record.nodes for token in node.token_ids]
            )
            happened["tokens"] += record.num_tokens

        async with asyncio.TaskGroup() as tasks:
            for number in numbers:
                tasks.create_task(one(number))
        # Each token of every record was computed once: no shared prefix twice.
        computed = sum(engine.computed.values()) - sum(engine.abandoned.values())
        assert computed == happened["tokens"]
        assert engine.stats().resident_cursors == 0
    return happened


async def test_random_models_keep_every_rule() -> None:
    happened = await check_episodes(range(20))
    for what in (
        "done",
        "cancelled",
        "depth 3",
        "STUB",
        "NOTE",
        "TERMINATION",
        "rewinds",
        "readable",
    ):
        assert happened[what] > 0, happened


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_five_hundred_random_models_keep_every_rule() -> None:
    happened = await check_episodes(range(500))
    for what in ("no_done", "budget", "max_turns", "depth 6"):
        assert happened[what] > 0, happened
