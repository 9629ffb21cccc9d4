"""The figures of an episode: by hand, and against brute force on random DAGs."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness_sdk.measures import (
    EpisodeMeasures,
    critical_path,
    mean_measures,
    measure,
    path_lengths,
)
from harness_sdk.model_cost import ModelCost
from harness_sdk.record import EpisodeRecord, MountSpan, Node, NodeKind, ThreadSummary
from tests.branching import branching_record
from tests.random_records import RecordWriter, random_record

COST = ModelCost(weights=50, head_weights=9, attention_layers=2, attention_width=4, recurrent=3)


def node(
    nodes: list[Node],
    parent: int,
    thread: str,
    context: int,
    sampled: int,
    *,
    step: int = 1,
    mounts: tuple[MountSpan, ...] = (),
    kind: NodeKind | None = None,
    joined: tuple[str, ...] = (),
    rewound: bool = False,
) -> int:
    """Add a node of `context` given tokens and then `sampled` sampled ones; returns its id."""
    given_kind = NodeKind.TURN if sampled else NodeKind.CONTEXT
    nodes.append(
        Node(
            node_id=len(nodes),
            parent=parent,
            thread_id=thread,
            step=step,
            kind=kind or given_kind,
            token_ids=(1,) * (context + sampled),
            sampled=(False,) * context + (True,) * sampled,
            sampled_logprobs=(-0.5,) * sampled,
            policy_version=0,
            position_start=0,
            mounts=mounts,
            joined=joined,
            rewound=rewound,
        )
    )
    return len(nodes) - 1


def record_of(nodes: list[Node], *threads: ThreadSummary) -> EpisodeRecord:
    writer = RecordWriter(rng=np.random.default_rng(0), vocab_size=2)
    return replace(writer.record(), nodes=tuple(nodes), threads=threads)


def thread(name: str, parent: str = "", depth: int = 0, **known: object) -> ThreadSummary:
    return replace(
        ThreadSummary(thread_id=name, parent=parent, depth=depth, status="done"),
        **known,  # type: ignore[arg-type]
    )


def worked_example() -> EpisodeRecord:
    """Root, two workers, a worker's worker that is read; one rewind, one unfinished branch."""
    nodes: list[Node] = []
    prompt = node(nodes, -1, "root", 100, 0, step=0)
    plan = node(nodes, prompt, "root", 2, 20)
    task_a = node(nodes, plan, "a", 8, 0, step=0, kind=NodeKind.NOTE)
    dead_end = node(nodes, task_a, "a", 2, 40, rewound=True)
    back = node(nodes, task_a, "a", 3, 0, kind=NodeKind.NOTE)
    look = node(nodes, back, "a", 2, 10)
    task_b = node(nodes, plan, "b", 8, 0, step=0, kind=NodeKind.NOTE)
    split = node(nodes, task_b, "b", 2, 5)
    task_c = node(nodes, split, "c", 8, 0, step=0, kind=NodeKind.NOTE)
    seen = MountSpan(node_id=look, begin=0, end=12)
    stub = node(nodes, task_c, "c", 4, 0, mounts=(seen,), kind=NodeKind.STUB, step=0)
    found = node(nodes, stub, "c", 2, 7, mounts=(seen,))
    node(nodes, found, "c", 0, 1, mounts=(seen,))
    joined = node(nodes, plan, "root", 6, 0, kind=NodeKind.NOTE, joined=("a",))
    node(nodes, joined, "root", 2, 30, step=2)
    assert dead_end == 3
    return record_of(
        nodes,
        thread("root"),
        thread("a", "root", 1, num_rewinds=1),
        thread("b", "root", 1, status="cancelled"),
        thread("c", "b", 2),
    )


def test_worked_example_measures_as_by_hand() -> None:
    found = measure(worked_example(), COST)
    # Prompts: 102; 132 and 135 in a; 132 in b; 8 + 4 + 2 after 137 + 2 and 12 mounted in c; 130.
    prompts = [102, 132, 135, 132, 122 + 8 + 7 + 8 + 4 + 12 + 2, 122 + 6 + 2]
    assert found == EpisodeMeasures(
        turns=6,
        active_context=fmean(prompts),
        active_context_max=163,
        explored_context=100 + 22 + 8 + 42 + 3 + 12 + 8 + 7 + 8 + 4 + 9 + 1 + 6 + 32,
        surviving_context=100 + 22 + 8 + 3 + 12 + 8 + 7 + 8 + 4 + 9 + 1 + 6 + 32,
        rewound_turns=1,
        generated=20 + 40 + 10 + 5 + 7 + 1 + 30,
        # root 20, a 40 that were rewound and 10; root's 30 after them. c: 70 + 7 + 1.
        critical_path=100,
        depth=2,
        workers=3,
        worker_children=1,
        rewinds=1,
        mounts=1,
        mounted_tokens=12,
        rewound_workers=1,
        rewound_workers_done=1,
        other_workers=2,
        other_workers_done=1,
        flops=found.flops,
    )


def test_a_wait_that_nothing_follows_leaves_the_longest_branch() -> None:
    nodes: list[Node] = []
    plan = node(nodes, -1, "root", 10, 20)
    for name, tokens in (("a", 30), ("b", 50)):
        node(nodes, plan, name, 8, tokens)
    assert critical_path(record_of(nodes)) == 70
    node(nodes, plan, "root", 8, 0, joined=("a", "b"))
    node(nodes, 3, "root", 2, 5)
    assert critical_path(record_of(nodes)) == 75
    assert critical_path(record_of([])) == 0


def test_a_thread_that_nobody_waits_for_costs_no_time() -> None:
    nodes: list[Node] = []
    plan = node(nodes, -1, "root", 10, 20)
    node(nodes, plan, "a", 8, 30)
    node(nodes, plan, "root", 8, 40)
    assert critical_path(record_of(nodes)) == 60
    nodes[-1] = replace(nodes[-1], joined=("a",))
    assert critical_path(record_of(nodes)) == 90


def test_an_empty_record_measures_nothing() -> None:
    found = measure(record_of([], thread("root")), COST)
    assert (found.turns, found.active_context, found.explored_context, found.flops) == (0, 0, 0, 0)
    assert mean_measures([]) == {}


def test_means_are_per_episode_and_ratios_of_sums() -> None:
    first = measure(worked_example())
    alone = record_of([], thread("root"))
    second = replace(measure(alone), workers=1, other_workers=1, rewound_turns=3, turns=4)
    means = mean_measures([first, second])
    assert means["workers"] == 2.0
    assert means["generated"] == 113 / 2
    assert means["children_per_worker"] == 1 / 4
    assert means["parallelism"] == 113 / 100
    assert means["pruned"] == 4 / 10
    assert means["done_gap"] == 1 / 1 - 1 / 3
    assert means["fork_rate"] == 1.0
    assert "flops" not in means
    few = mean_measures([measure(alone)])
    assert few["fork_rate"] == 0.0
    assert not few.keys() & {"parallelism", "pruned", "children_per_worker", "done_gap"}


def test_orphans_do_not_count_in_the_gap() -> None:
    left = thread("a", "root", 1, orphan=True, status="cancelled", num_rewinds=1)
    found = measure(record_of([], thread("root"), left, thread("b", "root", 1)))
    assert (found.rewound_workers, found.other_workers, found.workers) == (0, 1, 2)


def with_waits(record: EpisodeRecord, rng: np.random.Generator) -> EpisodeRecord:
    """`record` with some nodes that report the end of threads that go no further."""
    last = {node.thread_id: node.node_id for node in record.nodes}
    nodes = list(record.nodes)
    for index, each in enumerate(nodes):
        over = [name for name, end in last.items() if end < index and name != each.thread_id]
        if over and each.kind is not NodeKind.TURN and rng.random() < 0.4:
            nodes[index] = replace(each, joined=tuple(rng.choice(over, size=1).tolist()))
    return replace(record, nodes=tuple(nodes))


def longest_chain(record: EpisodeRecord) -> int:
    """The critical path token by token: an edge for each token that waits for another."""
    tokens = [(n.node_id, i) for n in record.nodes for i in range(len(n.token_ids))]
    length: dict[tuple[int, int], int] = {}
    for at, offset in tokens:
        own = record.nodes[at]
        waits_for = [(at, offset - 1)] if offset else []
        if not offset:
            earlier = {own.thread_id, *own.joined}
            waits_for += [
                (n.node_id, len(n.token_ids) - 1)
                for n in record.nodes
                if (n.node_id < at and n.thread_id in earlier) or n.node_id == own.parent
            ]
            waits_for += [(m.node_id, m.end - 1) for m in own.mounts]
            # A source is read when its turn is over.
            waits_for += [
                (m.node_id, len(record.nodes[m.node_id].token_ids) - 1) for m in own.mounts
            ]
        longest = max((length[each] for each in waits_for), default=0)
        length[at, offset] = longest + own.sampled[offset]
    return max(length.values(), default=0)


def counted_flops(record: EpisodeRecord) -> int:
    """Each token with every token that each layer of it sees."""
    total = 0
    for each in record.nodes:
        path, above = 0, each.parent
        while above >= 0:
            path += len(record.nodes[above].token_ids)
            above = record.nodes[above].parent
        mounted = {(m.node_id, i) for m in each.mounts for i in range(m.begin, m.end)}
        for offset, sampled in enumerate(each.sampled):
            total += 2 * COST.weights + COST.recurrent + sampled * 2 * COST.head_weights
            for layer in range(COST.attention_layers):
                seen = path + offset + 1 + (len(mounted) if layer in record.mount_layers else 0)
                total += 4 * COST.attention_width * seen
    return total


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), num_events=st.integers(0, 30))
def test_random_episodes_measure_as_by_brute_force(seed: int, num_events: int) -> None:
    rng = np.random.default_rng(seed)
    record = with_waits(random_record(rng, 50, num_events=num_events), rng)
    found = measure(record, COST)
    assert found.critical_path == longest_chain(record)
    assert found.flops == counted_flops(record)
    assert found.critical_path <= found.generated == record.num_sampled
    spans = {span for each in record.nodes for span in each.mounts}
    assert found.mounts == sum(each.kind is NodeKind.STUB for each in record.nodes)
    assert found.mounted_tokens >= sum(span.end - span.begin for span in spans)
    assert found.active_context <= found.active_context_max


@pytest.mark.parametrize("seed", range(3))
def test_a_single_thread_waits_for_all_of_itself(seed: int) -> None:
    rng = np.random.default_rng(seed)
    writer = RecordWriter(rng=rng, vocab_size=9)
    writer.heads["root"] = writer.append("root", NodeKind.CONTEXT, sampled=False)
    for _ in range(5):
        writer.turn("root")
        writer.rewind("root")
    found = measure(writer.record())
    assert found.critical_path == found.generated
    assert found.surviving_context == found.explored_context, "no node is flagged here"


def test_path_lengths_are_those_of_each_walk_from_a_leaf_to_the_root() -> None:
    record = branching_record()
    by_id = {node.node_id: node for node in record.nodes}
    lengths: list[int] = []
    for node in record.nodes:
        if any(other.parent == node.node_id for other in record.nodes):
            continue
        walk, at = 0, by_id.get(node.node_id)
        while at is not None:
            walk, at = walk + len(at.token_ids), by_id.get(at.parent)
        lengths.append(walk)
    assert len(lengths) > 2
    assert path_lengths(record) == lengths
