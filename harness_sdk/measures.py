"""What an episode's record tells about how it was worked: contexts, critical path, tree, pruning.

The figures of Octopus, sections 4.1 to 4.3; what the agent's domain adds (recall, say) is the
agent's own. Pure Python, over the record alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from harness_sdk.model_cost import ModelCost
from harness_sdk.record import EpisodeRecord, MountSpan, Node, NodeKind, ThreadSummary
from harness_sdk.types import ThreadStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeMeasures:
    """The figures of one episode; contexts and lengths are in tokens.

    Example:
        A root of 100 prompt tokens that samples 20, forks two workers that see 10 more each and
        sample 30 and 50, and samples 5 after the 8-token note of their end, has `generated` 105,
        `critical_path` 20 + 50 + 5 = 75, `explored_context` 233 and `workers` 2.
    """

    turns: int
    """Model turns, rewound ones included."""
    active_context: float
    """Mean over turns of the prompt: path and mounts that the first sampled token attends to
    (section 4.2)."""
    active_context_max: int
    """The longest prompt of a turn."""
    explored_context: int
    """Every token of the DAG once (section 4.2)."""
    surviving_context: int
    """Those that no rewind or cancellation took off the path: net context (Table 3)."""
    rewound_turns: int
    """Turns among the tokens that did not survive: pruned steps (section 4.2)."""
    generated: int
    """Sampled tokens, the total of Table 3."""
    critical_path: int
    """Most sampled tokens of which each had to wait for the one before: within a thread in order,
    rewound ones included, from a fork's parent to its children, from the end of a thread to the
    note that reports it, from what is read to its reader (Table 3)."""
    depth: int
    """Forks between the root and the deepest thread (section 4.3)."""
    workers: int
    """Threads beside the root (Table 6)."""
    worker_children: int
    """Those of them that a worker forked; over `workers`, the child ratio of Table 6."""
    rewinds: int
    mounts: int
    """Reads that made something new visible (section 4.3)."""
    mounted_tokens: int
    """What they made visible."""
    rewound_workers: int
    """Workers that rewound at least once; orphans, whose parents ended them, are left out."""
    rewound_workers_done: int
    """Those of them that called done (Appendix A: the gap in completion)."""
    other_workers: int
    """Workers that never rewound, orphans left out."""
    other_workers_done: int
    flops: float | None = None
    """Of the whole episode with every prefix reused (Table 3, PF/Q); None without a cost."""


def measure(record: EpisodeRecord, cost: ModelCost | None = None) -> EpisodeMeasures:
    """The figures of `record`.

    Args:
        record: Nodes in topological order, each thread's own in the order of time.
        cost: What a token costs the model; None leaves `flops` out.
    """
    nodes = record.nodes
    by_id = {node.node_id: node for node in nodes}
    before = _tokens_before(nodes)
    turns = [node for node in nodes if _is_turn(node, by_id.get(node.parent))]
    prompts = [before[node.node_id] + _mounted(node) + _opening(node) for node in turns]
    workers = [thread for thread in record.threads if thread.parent]
    roots = {thread.thread_id for thread in record.threads if not thread.parent}
    new = [new_mounts(node, by_id.get(node.parent)) for node in nodes if node.kind is NodeKind.STUB]
    kept = [worker for worker in workers if not worker.orphan]
    rewound = [worker for worker in kept if worker.num_rewinds]
    others = [worker for worker in kept if not worker.num_rewinds]
    return EpisodeMeasures(
        turns=len(turns),
        active_context=fmean(prompts) if prompts else 0.0,
        active_context_max=max(prompts, default=0),
        explored_context=record.num_tokens,
        surviving_context=sum(len(node.token_ids) for node in nodes if not node.rewound),
        rewound_turns=sum(node.rewound for node in turns),
        generated=record.num_sampled,
        critical_path=critical_path(record),
        depth=max((thread.depth for thread in record.threads), default=0),
        workers=len(workers),
        worker_children=sum(worker.parent not in roots for worker in workers),
        rewinds=sum(thread.num_rewinds for thread in record.threads),
        mounts=len(new),
        mounted_tokens=sum(span.end - span.begin for spans in new for span in spans),
        rewound_workers=len(rewound),
        rewound_workers_done=_num_done(rewound),
        other_workers=len(others),
        other_workers_done=_num_done(others),
        flops=episode_flops(record, cost) if cost is not None else None,
    )


def critical_path(record: EpisodeRecord) -> int:
    """Sampled tokens of the longest chain of dependent ones; see `EpisodeMeasures`.

    Calls of one turn count as made together, since the record keeps no order among them: a fork
    after a wait in the same turn begins where the turn ended.
    """
    ended: dict[int, int] = {}
    clock: Counter[str] = Counter()
    for node in record.nodes:
        begins = [clock[node.thread_id], *(clock[name] for name in node.joined)]
        sources = (node.parent, *(span.node_id for span in node.mounts))
        begins += [ended.get(source, 0) for source in sources]
        ended[node.node_id] = max(begins) + len(node.sampled_logprobs)
        clock[node.thread_id] = ended[node.node_id]
    return max(ended.values(), default=0)


def episode_flops(record: EpisodeRecord, cost: ModelCost) -> float:
    """Floating-point operations that compute each token of `record` once."""
    before = _tokens_before(record.nodes)
    return sum(
        cost.node_flops(
            num_tokens=len(node.token_ids),
            num_sampled=len(node.sampled_logprobs),
            num_before=before[node.node_id],
            num_mounted=_mounted(node),
            num_mount_layers=len(record.mount_layers),
        )
        for node in record.nodes
    )


def path_lengths(record: EpisodeRecord) -> list[int]:
    """Tokens of each root-to-leaf path, in the order of the leaves."""
    until: dict[int, int] = {}
    parents = {node.parent for node in record.nodes}
    for node in record.nodes:
        until[node.node_id] = until.get(node.parent, 0) + len(node.token_ids)
    return [until[node.node_id] for node in record.nodes if node.node_id not in parents]


def new_mounts(node: Node, parent: Node | None) -> tuple[MountSpan, ...]:
    """The spans that became visible with `node`."""
    inherited = parent.mounts if parent is not None else ()
    return tuple(span for span in node.mounts if span not in inherited)


def mean_measures(measures: Sequence[EpisodeMeasures]) -> dict[str, float]:
    """What many episodes come to: means per episode, and ratios of their sums.

    `fork_rate` is the share of episodes with a worker, `children_per_worker` the child ratio,
    `parallelism` generated tokens over critical path, `pruned` the share of turns that were
    rewound, `done_gap` the done rate of workers that rewound less that of the others. A ratio
    of nothing is left out.
    """
    if not measures:
        return {}
    means = {name: fmean(getattr(each, name) for each in measures) for name in _MEANS}
    flops = [each.flops for each in measures if each.flops is not None]
    if flops:
        means["flops"] = fmean(flops)
    means["fork_rate"] = fmean(each.workers > 0 for each in measures)

    def total(name: str) -> int:
        return sum(getattr(each, name) for each in measures)

    return means | _ratios(total)


_MEANS = (
    "active_context",
    "active_context_max",
    "explored_context",
    "surviving_context",
    "generated",
    "critical_path",
    "depth",
    "workers",
    "rewinds",
    "mounts",
    "mounted_tokens",
)


def _ratios(total: Callable[[str], int]) -> dict[str, float]:
    ratios: dict[str, float] = {}
    for name, part, whole in (
        ("parallelism", "generated", "critical_path"),
        ("pruned", "rewound_turns", "turns"),
        ("children_per_worker", "worker_children", "workers"),
    ):
        if total(whole):
            ratios[name] = total(part) / total(whole)
    if total("rewound_workers") and total("other_workers"):
        rewound = total("rewound_workers_done") / total("rewound_workers")
        ratios["done_gap"] = rewound - total("other_workers_done") / total("other_workers")
    return ratios


def _tokens_before(nodes: Sequence[Node]) -> dict[int, int]:
    """By node id, tokens on the path above the node."""
    before: dict[int, int] = {}
    after = {-1: 0}
    for node in nodes:
        before[node.node_id] = after[node.parent]
        after[node.node_id] = after[node.parent] + len(node.token_ids)
    return before


def _mounted(node: Node) -> int:
    return sum(span.end - span.begin for span in node.mounts)


def _opening(node: Node) -> int:
    """Tokens of a turn before the first sampled one: the generation prompt."""
    return node.sampled.index(True) if any(node.sampled) else len(node.sampled)


def _is_turn(node: Node, parent: Node | None) -> bool:
    """Whether a model turn is `node`, and not the stop id that a turn leaves as a leaf."""
    if node.kind not in (NodeKind.TURN, NodeKind.DEMONSTRATION):
        return False
    return parent is None or _opening(node) > 0 or not _continues(node, parent)


def _continues(node: Node, above: Node) -> bool:
    return (node.kind, node.thread_id, node.step) == (above.kind, above.thread_id, above.step)


def _num_done(threads: Sequence[ThreadSummary]) -> int:
    return sum(thread.status == ThreadStatus.DONE for thread in threads)
