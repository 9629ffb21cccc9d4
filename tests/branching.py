"""An episode with everything a picture shows: fork, rewind, mount, termination, orphan."""

from __future__ import annotations

from harness_sdk.record import EpisodeRecord, MountSpan, Node, NodeKind, ThreadSummary

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\"'"


class _Builder:
    """Writes an episode node by node, as the rollout service would."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def add(
        self,
        parent: int,
        thread: str,
        step: int,
        kind: NodeKind,
        text: str,
        *,
        mounts: tuple[MountSpan, ...] = (),
        rewound: bool = False,
    ) -> int:
        token_ids = tuple(text.encode())
        above = self.nodes[parent] if parent >= 0 else None
        own = above.position_start + len(above.token_ids) if above else 0
        visible = (above.mounts if above else ()) + mounts
        ends = [self.nodes[m.node_id].position_start + m.end for m in visible]
        turn = kind in (NodeKind.TURN, NodeKind.DEMONSTRATION)
        sampled = tuple(turn and i >= 2 for i in range(len(token_ids)))
        self.nodes.append(
            Node(
                node_id=len(self.nodes),
                parent=parent,
                thread_id=thread,
                step=step,
                kind=kind,
                token_ids=token_ids,
                sampled=sampled,
                sampled_logprobs=tuple(-0.07 * (i % 60) for i in range(sum(sampled))),
                policy_version=3,
                position_start=max([own, *ends]),
                mounts=visible,
                rewound=rewound,
            )
        )
        return len(self.nodes) - 1


def branching_record(text: str = "What do the siblings know?", task: str = "task") -> EpisodeRecord:
    """Root, two children, a rewind in the first, the second reading the first."""
    build = _Builder()
    prompt = build.add(-1, "root", 0, NodeKind.CONTEXT, "You may fork. " * 9 + text)
    turn = build.add(prompt, "root", 1, NodeKind.TURN, "<|fork: look left, look right")
    left = build.add(turn, "root.1", 1, NodeKind.NOTE, "your part: left")
    dropped = build.add(
        left, "root.1", 1, NodeKind.TURN, "<|search(wrong) and much more of it", rewound=True
    )
    build.add(dropped, "root.1", 1, NodeKind.CONTEXT, "0 hits. " * 20, rewound=True)
    note = build.add(left, "root.1", 1, NodeKind.NOTE, "rewound: try another word")
    found = build.add(note, "root.1", 1, NodeKind.TURN, "<|search(right)" + text * 3)
    hits = build.add(found, "root.1", 1, NodeKind.CONTEXT, "10 hits. " * 30)
    build.add(hits, "root.1", 2, NodeKind.TURN, "<|done(the key is red)")
    right = build.add(turn, "root.2", 1, NodeKind.NOTE, "your part: right")
    asks = build.add(right, "root.2", 1, NodeKind.TURN, "<|read_thread(root.1)")
    spans = (
        MountSpan(node_id=found, begin=0, end=10),
        MountSpan(node_id=hits, begin=0, end=270),
    )
    stub = build.add(asks, "root.2", 1, NodeKind.STUB, "mounted 280 tokens", mounts=spans)
    build.add(stub, "root.2", 2, NodeKind.TURN, "<|done(the door is red too)")
    joined = build.add(turn, "root", 1, NodeKind.NOTE, "both are done")
    nudge = build.add(joined, "root", 2, NodeKind.TERMINATION, "call done")
    build.add(nudge, "root", 2, NodeKind.TURN, "<|done(red)")
    threads = (
        ThreadSummary(thread_id="root", parent="", depth=0, status="done", answer=text),
        ThreadSummary(thread_id="root.1", parent="root", depth=1, status="done", answer="key"),
        ThreadSummary(thread_id="root.2", parent="root", depth=1, status="done", orphan=True),
    )
    return EpisodeRecord(
        run="test",
        episode_id="ep-1",
        group_id="g",
        task_id=task,
        replica_id="r",
        nodes=tuple(build.nodes),
        threads=threads,
        reward=1.0,
        answer=text,
        stop_reason="done",
        opened_at_s=0.0,
        closed_at_s=1.0,
        mount_layers=(2,),
        model_hash="m",
        tokenizer_hash="t",
        template_hash="c",
        engine="transformers",
    )
