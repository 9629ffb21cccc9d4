"""A thread's state: its steps, cursors and what is about to be appended. Decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from harness_sdk.record import NodeKind
from harness_sdk.types import Message, Role, StepSummary, ThreadStatus, ToolSchemas
from rollout_service.cursors import Cursor, Mount

_SUMMARY_CHARS = 80


@dataclass(slots=True, eq=False, kw_only=True)
class NodeEntry:
    """A cursor as a node of the episode's record."""

    cursor: Cursor
    thread_id: str
    step: int
    kind: NodeKind
    temperature: float = 1.0
    rewound: bool = False
    joined: frozenset[str] = frozenset()
    """Branches whose end it reports."""
    on_path: bool = True
    """False for a sampled stop id that does not open the terminator: a leaf."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A message that the next append renders, and what it tells the model."""

    message: Message
    kind: NodeKind = NodeKind.CONTEXT
    announced: frozenset[str] = frozenset()
    """Branches that it introduces as readable."""
    joined: frozenset[str] = frozenset()
    """Branches whose end it reports."""
    is_reserve: bool = False
    """It says that the answer reserve is reached."""


def harness_note(text: str, kind: NodeKind = NodeKind.NOTE, **told: Any) -> Note:
    """A note of the harness: a tagged tool response."""
    return Note(message=Message(role="tool", content=text), kind=kind, **told)


@dataclass(slots=True, eq=False, kw_only=True)
class Step:
    """A model turn and the observation that follows; step 0 is the thread's start.

    What a rewind appends, and what follows up to the next turn, begins that turn's step: going
    back to the same step again drops it too.
    """

    number: int
    turn: Cursor | None = None
    """After the model's turn; None in step 0 and until the turn after a rewind."""
    turn_due: tuple[int, ...] = ()
    """What of the turn's terminator follows `turn`."""
    head: Cursor | None = None
    """The newest cursor on the path; after the observation once the step is finished."""
    finished: bool = False
    nodes: list[NodeEntry] = field(default_factory=list)
    num_tokens: int = 0
    """Tokens of `nodes`."""
    mounted: list[Mount] = field(default_factory=list)
    """Spans that calls inside this step read, those included that were visible before."""
    announced: set[str] = field(default_factory=set)
    joined: set[str] = field(default_factory=set)
    reserve_noted: bool = False
    call_ids: tuple[str, ...] = ()
    """Of the calls in the turn."""
    summary: str = ""

    @property
    def awaits_turn(self) -> bool:
        """Whether a rewind began it and its turn is still to come."""
        return self.number > 0 and self.turn is None

    def took(self, notes: list[Note]) -> None:
        """Remember what `notes` told the model."""
        for note in notes:
            self.announced |= note.announced
            self.joined |= note.joined
            self.reserve_noted |= note.is_reserve


class Thread:
    """One branch of an episode.

    Args:
        thread_id: Name, unique in the episode.
        parent: Thread that forked it; None at the root.
        base: Cursor that it begins from; None at the root.
        due: What of the parent turn's terminator the first append must begin with.
        head_id: Number of its first state.
        policy_version: Version that its first turn runs under.
        inherited: Branches that the shared prefix has introduced as readable.
        fork_step: Step of the parent that it forks from; None is the parent's last.
        role_before: Role of the message that its base ends with.
    """

    def __init__(
        self,
        thread_id: str,
        *,
        parent: Thread | None,
        base: Cursor | None,
        due: tuple[int, ...] = (),
        head_id: int,
        policy_version: int,
        inherited: frozenset[str] = frozenset(),
        fork_step: int | None = None,
        role_before: Role = "tool",
    ) -> None:
        self.thread_id = thread_id
        self.parent = parent
        last = parent.steps[-1].number if parent is not None else 0
        self.fork_step = last if fork_step is None else fork_step
        """Step of the parent that forked it; rewinding the parent to an earlier one ends it."""
        before_turn = fork_step is None and parent is not None and parent.steps[-1].awaits_turn
        self.first_unseen_step = self.fork_step + (0 if before_turn else 1)
        """First step of the parent that its prefix does not hold."""
        self.depth = parent.depth + 1 if parent is not None else 0
        self.children: list[Thread] = []
        self.base = base
        self.role_before: Role = role_before
        self.tools: ToolSchemas = parent.tools if parent is not None else ()
        """The agent's tools, as the first prompt of its root listed them."""
        self.due = due
        self.head_id = head_id
        self.policy_version = policy_version
        self.inherited = inherited
        self.steps = [Step(number=0)]
        self.pending: list[Note] = []
        self.rewound: set[Cursor] = set()
        """Its own cursors that rewinds dropped."""
        self.status = ThreadStatus.RUNNING
        self.ended = asyncio.Event()
        self.orphan = False
        self.num_turns = 0
        """Model turns taken; a rewind gives none back."""
        self.num_rewinds = 0
        self.termination_prompted = False
        self.exhausted: ThreadStatus | None = None
        """Limit that last refused a turn."""
        self.answer = ""
        self.evidence = ""
        self.cancel_reason = ""
        self.busy = ""
        """Call that runs on the thread now."""
        self.task: asyncio.Task[Any] | None = None
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def head(self) -> Cursor | None:
        """The cursor that the next append extends."""
        for step in reversed(self.steps):
            if step.head is not None:
                return step.head
        return self.base

    @property
    def mounts(self) -> tuple[Mount, ...]:
        """Spans visible at the head."""
        head = self.head
        return head.mounts if head is not None else ()

    @property
    def tokens_used(self) -> int:
        """Tokens appended on the surviving path."""
        return sum(step.num_tokens for step in self.steps)

    @property
    def last_finished(self) -> int:
        """Number of the last finished step; -1 before the first."""
        return max((step.number for step in self.steps if step.finished), default=-1)

    @property
    def known(self) -> frozenset[str]:
        """Branches that the path has introduced as readable."""
        told = (*(s.announced for s in self.steps), *(n.announced for n in self.pending))
        return self.inherited.union(*told)

    @property
    def joined(self) -> set[str]:
        """Branches whose end the path has reported."""
        told = (*(s.joined for s in self.steps), *(n.joined for n in self.pending))
        return set[str]().union(*told)

    @property
    def reserve_noted(self) -> bool:
        """Whether the path says that the answer reserve is reached."""
        return any(s.reserve_noted for s in self.steps) or any(n.is_reserve for n in self.pending)

    def call_ids(self) -> set[str]:
        """Ids of all calls on the path, those of the prefix included."""
        found = {call_id for step in self.steps for call_id in step.call_ids}
        below = self
        for thread in self.ancestors():
            shared = (step for step in thread.steps if step.number <= below.fork_step)
            found.update(call_id for step in shared for call_id in step.call_ids)
            below = thread
        return found

    def ancestors(self) -> Iterator[Thread]:
        """The parent, then its parent, up to the root."""
        thread = self.parent
        while thread is not None:
            yield thread
            thread = thread.parent

    def descendants(self) -> Iterator[Thread]:
        """Children before grandchildren."""
        # A tree may be deeper than Python's stack.
        left = self.children[::-1]
        while left:
            thread = left.pop()
            yield thread
            left += reversed(thread.children)

    def begin_step(self) -> Step:
        """Finish the last step and begin the next."""
        self.steps[-1].finished = True
        self.steps.append(Step(number=self.steps[-1].number + 1))
        return self.steps[-1]

    def end(self, status: ThreadStatus) -> None:
        """Close the thread; what was pending will never be appended."""
        self.status = status
        self.steps[-1].finished = not self.steps[-1].awaits_turn
        self.pending.clear()
        self.ended.set()

    @property
    def summary(self) -> str:
        """Of the last turn on the surviving path."""
        return next((step.summary for step in reversed(self.steps) if step.turn is not None), "")

    def manifest(self) -> tuple[StepSummary, ...]:
        """One line for each finished step."""
        last = self.last_finished
        return tuple(
            StepSummary(step=s.number, num_tokens=s.num_tokens, summary=s.summary)
            for s in self.steps
            if 1 <= s.number <= last
        )


def short(text: str) -> str:
    """The first line of `text`, cut to what a manifest shows."""
    line = text.strip().split("\n", 1)[0]
    return line if len(line) <= _SUMMARY_CHARS else f"{line[: _SUMMARY_CHARS - 3]}..."
