"""Random episode records that a rollout service could have written: forks, rewinds, mounts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from harness_sdk.record import EpisodeRecord, MountSpan, Node, NodeKind, ThreadSummary


def random_record(
    rng: np.random.Generator,
    vocab_size: int,
    *,
    episode_id: str = "episode-0",
    group_id: str = "group-0",
    num_events: int = 10,
    max_run: int = 6,
    mount_layers: tuple[int, ...] = (0,),
    with_mounts: bool = True,
    with_demonstrations: bool = False,
    temperatures: tuple[float, ...] = (1.0,),
    reward: float | None = 1.0,
    policy_version: int = 0,
) -> EpisodeRecord:
    """A record after `num_events` turns, forks, rewinds and reads.

    Args:
        rng: Source of all choices.
        vocab_size: Token ids are below it.
        episode_id: Id of the episode.
        group_id: Id of its group.
        num_events: Events after the prompt; each adds one to three nodes.
        max_run: Most tokens of a node; nodes of one token are common.
        mount_layers: Written to the record as they are.
        with_mounts: Whether threads read each other.
        with_demonstrations: Whether some turns are imitation data.
        temperatures: Each turn takes one of these.
        reward: Outcome of the episode.
        policy_version: Of every node.

    Returns:
        A record that keeps design.md's rules: positions jump past mounts (Octopus Eq. 2),
        visibility is a set, sources precede their readers.
    """
    writer = RecordWriter(
        rng=rng,
        vocab_size=vocab_size,
        max_run=max_run,
        temperatures=temperatures,
        demonstrations=with_demonstrations,
        policy_version=policy_version,
    )
    writer.heads["root"] = writer.append("root", NodeKind.CONTEXT, sampled=False)
    writer.turn("root")
    events = [writer.turn, writer.turn, writer.fork, writer.rewind, writer.stop_leaf]
    events += [writer.read, writer.read] if with_mounts else []
    for _ in range(num_events):
        event = events[rng.integers(len(events))]
        event(str(rng.choice(sorted(writer.heads))))
    return writer.record(
        episode_id=episode_id, group_id=group_id, mount_layers=mount_layers, reward=reward
    )


@dataclass(slots=True, kw_only=True)
class RecordWriter:
    """Writes a record node by node; positions and inherited mounts follow the rules."""

    rng: np.random.Generator
    vocab_size: int
    max_run: int = 6
    temperatures: tuple[float, ...] = (1.0,)
    demonstrations: bool = False
    policy_version: int = 0
    nodes: list[Node] = field(default_factory=list)
    heads: dict[str, int] = field(default_factory=dict)

    def append(
        self,
        thread: str,
        kind: NodeKind,
        *,
        sampled: bool,
        parent: int | None = None,
        length: int | None = None,
        mounts: tuple[MountSpan, ...] | None = None,
    ) -> int:
        """Add a node at the thread's head, or at `parent`; returns its id."""
        above = parent if parent is not None else self.heads.get(thread, -1)
        count = length or int(self.rng.integers(1, self.max_run + 1))
        prompt = int(self.rng.integers(0, 3)) if sampled and length is None else 0
        flags = (False,) * prompt + (sampled,) * count
        visible = self.nodes[above].mounts if mounts is None and above >= 0 else mounts or ()
        own = (
            self.nodes[above].position_start + len(self.nodes[above].token_ids) if above >= 0 else 0
        )
        ends = [self.nodes[m.node_id].position_start + m.end for m in visible]
        node = Node(
            node_id=len(self.nodes),
            parent=above,
            thread_id=thread,
            step=0,
            kind=kind,
            token_ids=tuple(self.rng.integers(0, self.vocab_size, prompt + count).tolist()),
            sampled=flags,
            sampled_logprobs=tuple((-self.rng.random(sum(flags)) * 3).tolist()),
            policy_version=self.policy_version,
            position_start=max([own, *ends]),
            mounts=visible,
            temperature=float(self.rng.choice(self.temperatures)),
        )
        self.nodes.append(node)
        return node.node_id

    def record(
        self,
        *,
        episode_id: str = "episode-0",
        group_id: str = "group-0",
        mount_layers: tuple[int, ...] = (0,),
        reward: float | None = 1.0,
    ) -> EpisodeRecord:
        """What has been written so far."""
        return EpisodeRecord(
            run="test",
            episode_id=episode_id,
            group_id=group_id,
            task_id=group_id,
            replica_id="replica-0",
            nodes=tuple(self.nodes),
            threads=tuple(
                ThreadSummary(
                    thread_id=name, parent="" if name == "root" else "root", depth=0, status="done"
                )
                for name in self.heads
            ),
            reward=reward,
            answer="",
            stop_reason="done",
            opened_at_s=0.0,
            closed_at_s=1.0,
            mount_layers=mount_layers,
            model_hash="",
            tokenizer_hash="",
            template_hash="",
            engine="test",
        )

    def turn(self, thread: str) -> None:
        """A sampled (or demonstrated) turn and, mostly, an observation."""
        taught = self.demonstrations and self.rng.random() < 0.3
        kind = NodeKind.DEMONSTRATION if taught else NodeKind.TURN
        self.heads[thread] = self.append(thread, kind, sampled=True)
        if self.rng.random() < 0.7:
            self.heads[thread] = self.append(thread, NodeKind.CONTEXT, sampled=False)

    def fork(self, thread: str) -> None:
        """One or two children that begin with a note each; the parent goes on with its own."""
        head = self.heads[thread]
        for _ in range(int(self.rng.integers(1, 3))):
            child = f"t{len(self.heads)}"
            self.heads[child] = self.append(child, NodeKind.NOTE, sampled=False, parent=head)
            self.turn(child)
        self.heads[thread] = self.append(thread, NodeKind.NOTE, sampled=False)

    def rewind(self, thread: str) -> None:
        """Back to a node on the path; the dropped nodes stay in the record."""
        path = self.path(self.heads[thread])
        self.heads[thread] = path[self.rng.integers(1, len(path))]
        self.heads[thread] = self.append(thread, NodeKind.NOTE, sampled=False)

    def stop_leaf(self, thread: str) -> None:
        """A sampled stop id that is no part of the terminator: a leaf of one token."""
        self.append(thread, NodeKind.TURN, sampled=True, length=1)

    def read(self, thread: str) -> None:
        """Mount one or two spans of any other node, with what their owners had mounted."""
        head = self.heads[thread]
        visible = self.visible(head)
        wanted: set[tuple[int, int]] = set()
        for _ in range(int(self.rng.integers(1, 3))):
            source = self.nodes[int(self.rng.integers(len(self.nodes)))]
            begin = int(self.rng.integers(0, len(source.token_ids)))
            end = int(self.rng.integers(begin, len(source.token_ids))) + 1
            wanted |= {(source.node_id, offset) for offset in range(begin, end)}
            wanted |= {(m.node_id, o) for m in source.mounts for o in range(m.begin, m.end)}
        new = sorted(wanted - visible)
        if not new:
            self.turn(thread)
            return
        mounts = self.nodes[head].mounts + _spans(new)
        self.heads[thread] = self.append(thread, NodeKind.STUB, sampled=False, mounts=mounts)
        self.turn(thread)

    def path(self, node: int) -> list[int]:
        """Node ids from the root to `node`."""
        found = []
        while node >= 0:
            found.append(node)
            node = self.nodes[node].parent
        return found[::-1]

    def visible(self, node: int) -> set[tuple[int, int]]:
        """(node, offset) that a child of `node` sees."""
        own = {(u, o) for u in self.path(node) for o in range(len(self.nodes[u].token_ids))}
        return own | {
            (m.node_id, o) for m in self.nodes[node].mounts for o in range(m.begin, m.end)
        }


def _spans(offsets: list[tuple[int, int]]) -> tuple[MountSpan, ...]:
    spans: list[MountSpan] = []
    for node_id, offset in offsets:
        last = spans[-1] if spans else None
        if last is not None and last.node_id == node_id and last.end == offset:
            spans[-1] = MountSpan(node_id=node_id, begin=last.begin, end=offset + 1)
        else:
            spans.append(MountSpan(node_id=node_id, begin=offset, end=offset + 1))
    return tuple(spans)
