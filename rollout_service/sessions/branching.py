"""fork, rewind, read_thread, wait, done and cancel on a thread (design.md section 4)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from harness_sdk.errors import InvalidRequest, StepNotFound
from harness_sdk.record import NodeKind
from harness_sdk.types import (
    BranchResult,
    ReadResult,
    RewindResult,
    ThreadStatus,
)
from rollout_service.chat import notes
from rollout_service.cursors import Cursor
from rollout_service.sessions.appending import extend, flush
from rollout_service.sessions.episode import Episode
from rollout_service.sessions.mounts import ReadSpan, resolve_read
from rollout_service.sessions.replies import (
    DoneReply,
    Forked,
    ForkReply,
    ReadReply,
    RewindReply,
    WaitReply,
)
from rollout_service.sessions.threads import Note, Step, Thread, harness_note, short


async def fork(episode: Episode, thread: Thread, branches: Mapping[str, str]) -> ForkReply:
    """Branch after the thread's last turn; each child begins with its sub-task.

    Where the step has no turn yet (a child before its first, a thread just rewound) the children
    see all that the thread sees.

    Raises:
        InvalidRequest: Bad names, or no prompt yet.
        BudgetExhausted: A limit does not allow it.
    """
    guard = episode.guardrails
    guard.check_primitive(thread, "fork")
    guard.check_fork(thread, branches, list(episode.threads))
    step = thread.steps[-1]
    if step.turn is None:
        _check_prompted(thread, "fork")
        await flush(episode, thread)
    base = step.turn or thread.head
    due = step.turn_due if step.turn is not None else thread.due
    assert base is not None
    # Rosters come with a turn's messages, so the prefix holds every one that the path has seen.
    inherited = thread.known
    tasks = {name: harness_note(notes.task_note(name, text)) for name, text in branches.items()}
    for note in tasks.values():
        guard.check_start(thread, base, len(due) + len(episode.service.chat.delta([note.message])))
    forked = []
    for name, note in tasks.items():
        child = episode.add_thread(name, parent=thread, base=base, due=due, inherited=inherited)
        child.pending.append(note)
        forked.append(Forked(thread_id=name, head=child.head_id))
    thread.pending.append(harness_note(notes.fork_note(list(branches))))
    return ForkReply(
        head=episode.moved(thread), threads=tuple(forked), budget=episode.budget(thread)
    )


async def rewind(episode: Episode, thread: Thread, step: int, note: str) -> RewindReply:
    """Return to the cursor after `step`; later steps stay in the DAG, off the path.

    Raises:
        StepNotFound: `step` is no finished step of the surviving path.
        BudgetExhausted: The answer reserve is reached.
    """
    episode.guardrails.check_primitive(thread, "rewind")
    target = next((s for s in thread.steps if s.number == step and s.finished), None)
    if target is None:
        last = thread.last_finished
        raise StepNotFound(
            "no finished step of that number on the surviving path",
            value=step,
            limit=f"0 to {last}" if last >= 0 else "none before the first observation",
            remedy="name a step that has its observation",
            episode_id=episode.episode_id,
            thread_id=thread.thread_id,
        )
    # From here to the reply nothing waits: a caller that leaves finds all of it done, or nothing.
    orphans = _forked_after(thread, step)
    later = [s for s in thread.steps if s.number > step]
    before = thread.joined
    dropped = _drop_steps(thread, target, later)
    for orphan in orphans:
        orphan.orphan = True
        dropped += _leave_path(orphan.steps)
    cancelled = episode.stop_threads(orphans, reason="its parent rewound", dropped=dropped)
    lost = [episode.thread(name) for name in sorted(before - thread.joined)]
    _append_after_rewind(thread, step, note, [other for other in lost if not other.orphan])
    return RewindReply(
        head=episode.moved(thread),
        result=RewindResult(
            step=step,
            tokens_returned=sum(s.num_tokens for s in later),
            cancelled_threads=tuple(cancelled),
        ),
        budget=episode.budget(thread),
    )


async def read_thread(
    episode: Episode, thread: Thread, branch: str, first: int, last: int
) -> ReadReply:
    """Mount steps `first..last` of `branch`; nothing new means no jump.

    Raises:
        ThreadNotFound: No such branch.
        InvalidRequest: Reading itself, or no finished step in the range.
        BudgetExhausted: The reserve is reached, or the model's limits do not allow it.
    """
    episode.guardrails.check_primitive(thread, "read_thread")
    _check_prompted(thread, "read_thread")
    source = episode.thread(branch)
    span = resolve_read(thread, source, first, last)
    if span.new:
        stub = notes.read_stub(branch, span.first, span.last, span.num_tokens)
        await _mount(episode, thread, span, harness_note(stub, NodeKind.STUB))
    else:
        stub = notes.read_nothing_new(branch, span.first, span.last)
        thread.pending.append(harness_note(stub))
    thread.steps[-1].mounted += span.all
    head = thread.head
    assert head is not None
    return ReadReply(
        head=episode.moved(thread),
        result=ReadResult(
            branch=branch,
            first_step=span.first,
            last_step=span.last,
            tokens_mounted=span.num_tokens,
            next_position=head.next_position,
            stub=stub,
        ),
        budget=episode.budget(thread),
    )


async def wait(
    episode: Episode,
    thread: Thread,
    branches: Sequence[str],
    timeout_s: float,
    emit: Callable[[BranchResult], None],
) -> WaitReply:
    """Suspend until the branches have ended or `timeout_s` (0: never) has passed.

    Raises:
        ThreadNotFound: No such branch.
        InvalidRequest: A branch that is no descendant, or none at all.
        BudgetExhausted: The answer reserve is reached.
    """
    episode.guardrails.check_primitive(thread, "wait")
    targets = _wait_targets(episode, thread, branches)
    thread.status = ThreadStatus.WAITING
    try:
        await _until_ended(targets, timeout_s, emit)
    finally:
        if thread.status is ThreadStatus.WAITING:
            thread.status = ThreadStatus.RUNNING
    results = tuple(branch_result(target) for target in targets)
    note = _join_note(targets)
    thread.pending.append(note)
    return WaitReply(
        head=episode.moved(thread),
        results=results,
        note=note.message.content,
        budget=episode.budget(thread),
    )


async def done(episode: Episode, thread: Thread, answer: str, evidence: str) -> DoneReply:
    """Close the thread with its answer; readers may still mount it."""
    thread.answer, thread.evidence = answer, evidence
    thread.end(ThreadStatus.DONE)
    return DoneReply(head=episode.moved(thread), status=thread.status)


async def cancel(episode: Episode, thread_id: str, reason: str) -> tuple[str, ...]:
    """End a thread and its descendants, whatever they are doing.

    Raises:
        ThreadNotFound: No such thread.
    """
    thread = episode.thread(thread_id)
    victims = [thread, *thread.descendants()]
    stopped = episode.stop_threads(victims, reason=reason)
    for victim in victims:
        if victim.thread_id in stopped:
            _leave_path(victim.steps)
    return tuple(stopped)


def branch_result(thread: Thread) -> BranchResult:
    """How a thread stands, as its parent sees it."""
    return BranchResult(
        thread_id=thread.thread_id,
        status=thread.status,
        answer=thread.answer,
        evidence=thread.evidence,
        summary=short(thread.cancel_reason or thread.summary),
        steps=thread.manifest(),
    )


def _check_prompted(thread: Thread, action: str) -> None:
    if thread.head is None:
        raise InvalidRequest(
            f"no {action} before the first turn",
            value=thread.thread_id,
            remedy="take a turn first: it brings the prompt that branches share",
            thread_id=thread.thread_id,
        )


def _forked_after(thread: Thread, step: int) -> list[Thread]:
    children = [child for child in thread.children if child.fork_step > step]
    return [each for child in children for each in (child, *child.descendants())]


def _drop_steps(thread: Thread, target: Step, later: Sequence[Step]) -> list[Cursor]:
    """Cut the path after `target`, what is pending included, and begin the next step.

    Returns:
        The cursors that left the path.
    """
    thread.pending.clear()
    thread.steps = [step for step in thread.steps if step.number <= target.number]
    dropped = _leave_path(later)
    thread.rewound.update(dropped)
    thread.num_rewinds += 1
    thread.due = ()
    thread.begin_step()
    return dropped


def _leave_path(steps: Sequence[Step]) -> list[Cursor]:
    nodes = [node for step in steps for node in step.nodes]
    for node in nodes:
        node.rewound = True
    return [node.cursor for node in nodes]


def _append_after_rewind(thread: Thread, step: int, note: str, joined: list[Thread]) -> None:
    thread.pending.append(harness_note(notes.rewind_note(step, note)))
    if joined:
        thread.pending.append(_join_note(joined))


async def _mount(episode: Episode, thread: Thread, span: ReadSpan, stub: Note) -> None:
    chat, guard = episode.service.chat, episode.guardrails
    tokens = chat.delta([stub.message])
    before = chat.delta([note.message for note in thread.pending]) if thread.pending else ()
    cost = len(thread.due) + len(before) + len(tokens)
    guard.check_cost(thread, cost)
    guard.check_mount(thread, span.new, cost)
    await flush(episode, thread)
    mounts = (*thread.mounts, *span.new)
    version = episode.current_version(thread)
    cursor = await extend(episode, thread.head, (*thread.due, *tokens), mounts, version)
    step = thread.steps[-1]
    episode.add_node(thread, step, cursor, NodeKind.STUB)
    thread.due = ()


def _wait_targets(episode: Episode, thread: Thread, branches: Sequence[str]) -> list[Thread]:
    below = [each for each in thread.descendants() if not each.orphan]
    if not branches:
        targets = [child for child in thread.children if not child.orphan]
    else:
        targets = [episode.thread(name) for name in dict.fromkeys(branches)]
    strangers = [target.thread_id for target in targets if target not in below]
    if strangers or not targets:
        raise InvalidRequest(
            "wait is for descendants alone" if strangers else "there is nobody to wait for",
            value=", ".join(strangers) or "no children",
            limit=", ".join(each.thread_id for each in below) or "no descendants",
            remedy="fork first, or read_thread a peer; waiting for peers could deadlock",
            thread_id=thread.thread_id,
        )
    return targets


async def _until_ended(
    targets: Sequence[Thread], timeout_s: float, emit: Callable[[BranchResult], None]
) -> None:
    waiting = {asyncio.ensure_future(target.ended.wait()): target for target in targets}
    try:
        async with asyncio.timeout(timeout_s or None):
            pending = set(waiting)
            while pending:
                ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    emit(branch_result(waiting[task]))
    except TimeoutError:
        return
    finally:
        for task in waiting:
            task.cancel()


def _join_note(threads: Sequence[Thread]) -> Note:
    ended = frozenset(thread.thread_id for thread in threads if thread.status.is_final)
    text = notes.join_note([branch_result(thread) for thread in threads])
    return harness_note(text, joined=ended)
