"""What `read_thread` makes visible: clamping, transitive spans, visibility as a set."""

from __future__ import annotations

from dataclasses import dataclass

from harness_sdk.errors import InvalidRequest
from rollout_service.cursors import Cursor, Mount
from rollout_service.sessions.threads import Step, Thread


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSpan:
    """A read, resolved."""

    first: int
    """After clamping to the source's finished steps."""
    last: int
    all: tuple[Mount, ...]
    """The steps and what was mounted inside them, whatever the reader saw before: what a reader
    of the reader gets through this call."""
    new: tuple[Mount, ...]
    """Those of them that the reader did not see before."""

    @property
    def num_tokens(self) -> int:
        """Tokens that become visible."""
        return sum(mount.num_tokens for mount in self.new)


def resolve_read(reader: Thread, source: Thread, first: int, last: int) -> ReadSpan:
    """The spans that reading steps `first..last` of `source` adds to `reader`.

    Raises:
        InvalidRequest: `reader` reads itself or an orphan, or no finished step is in range.
    """
    if source is reader:
        raise InvalidRequest(
            "a thread cannot read itself",
            value=source.thread_id,
            limit="another branch",
            remedy="its own steps are in its context already",
        )
    if source.orphan:
        raise InvalidRequest(
            "the branch hangs on steps that were rewound",
            value=source.thread_id,
            remedy="read a branch of the surviving path",
        )
    lowest, highest = readable_steps(reader, source)
    begin, end = max(first, lowest), min(last, highest)
    if first > last or begin > end:
        finished = f"{lowest} to {highest}" if lowest <= highest else "none yet"
        raise InvalidRequest(
            f"no finished step of {source.thread_id} in the range",
            value=f"[{first}, {last}]",
            limit=f"finished steps {finished}",
            remedy="wait for the branch to go on, or read steps that it has finished",
        )
    steps = [step for step in source.steps if begin <= step.number <= end]
    spans = _spans(steps)
    return ReadSpan(first=begin, last=end, all=spans, new=_unseen(reader, spans))


def readable_steps(reader: Thread, source: Thread) -> tuple[int, int]:
    """First and last step of `source` that `reader` may read; empty where first > last."""
    lowest, child = 1, reader
    for ancestor in reader.ancestors():
        if ancestor is source:
            lowest = child.first_unseen_step
            break
        child = ancestor
    return lowest, source.last_finished


def _spans(steps: list[Step]) -> tuple[Mount, ...]:
    """Whole cursors of `steps`, each step after what was mounted inside it."""
    # Every mount covers a whole cursor, so visibility is a set of cursors.
    found: dict[Cursor, Mount] = {}
    for step in steps:
        whole = [
            Mount(source=node.cursor, begin=0, end=len(node.cursor.token_ids))
            for node in step.nodes
            if node.on_path
        ]
        for mount in (*step.mounted, *whole):
            found.setdefault(mount.source, mount)
    return tuple(found.values())


def _unseen(reader: Thread, spans: tuple[Mount, ...]) -> tuple[Mount, ...]:
    head = reader.head
    seen: set[Cursor] = set(head.ancestors()) if head is not None else set()
    seen.update(mount.source for mount in reader.mounts)
    # A thread's own rewound tokens do not come back through another's mounts: that would be
    # reading itself.
    seen |= reader.rewound
    return tuple(mount for mount in spans if mount.source not in seen)
