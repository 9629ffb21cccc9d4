"""Threads that begin at any turn and that no model is told of: what a resent history asks for."""

from __future__ import annotations

from harness_sdk.types import Role
from rollout_service.sessions.episode import Episode
from rollout_service.sessions.threads import Thread


def branch(episode: Episode, thread: Thread, step: int, *, answered: Role | None = None) -> Thread:
    """A new thread that shares `thread` up to the turn of `step`.

    Args:
        episode: The episode.
        thread: Thread to share.
        step: A step with a turn on the surviving path.
        answered: Share what the turn answered, which ends with a message of this role, but not
            the turn itself; None shares the turn too.

    Raises:
        BudgetExhausted: `max_threads` or `max_depth` does not allow it.
    """
    found = next(each for each in thread.steps if each.number == step)
    assert found.turn is not None, "the step has a turn"
    return episode.add_thread(
        _name(episode, thread, "branch"),
        parent=thread,
        base=found.turn if answered is None else found.turn.parent,
        due=found.turn_due if answered is None else (),
        fork_step=step if answered is None else step - 1,
        role_before=answered or "assistant",
    )


def new_root(episode: Episode) -> Thread:
    """A thread beside the root that shares nothing, for a history that has nothing in common.

    Raises:
        BudgetExhausted: `max_threads` does not allow it.
    """
    return episode.add_thread(_name(episode, episode.root, "root"), parent=None, base=None)


def withdraw(episode: Episode, thread: Thread) -> None:
    """Forget a thread that came to nothing; one that appended tokens stays."""
    used = thread is episode.root or thread.head is not thread.base or thread.children
    if used or episode.threads.get(thread.thread_id) is not thread:
        return
    del episode.threads[thread.thread_id]
    if thread.parent is not None:
        thread.parent.children.remove(thread)


def _name(episode: Episode, thread: Thread, kind: str) -> str:
    number = len(episode.threads)
    while (name := f"{kind}-{number}") in episode.threads:
        number += 1
    episode.guardrails.check_fork(thread, {name: ""}, list(episode.threads))
    return name
