"""Appending through the engine: one place for its errors, its kinds and the pending notes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

from harness_sdk.errors import EngineError, HarnessError
from harness_sdk.record import NodeKind
from harness_sdk.types import Message, ToolSchemas
from rollout_service.cursors import Cursor, Mount
from rollout_service.sessions.episode import Episode
from rollout_service.sessions.threads import Note, Thread

# A byte-level tokenizer takes about 1 microsecond a character: 20 ms at most on the loop.
_MAX_INLINE_CHARS = 20_000


async def extend(
    episode: Episode,
    parent: Cursor | None,
    token_ids: Sequence[int],
    mounts: tuple[Mount, ...],
    policy_version: int,
    *,
    score_from: int | None = None,
) -> Cursor:
    """`Engine.extend`, with every failure typed.

    Raises:
        EngineError: The engine failed.
    """
    with engine_errors(episode):
        return await episode.service.engine.extend(
            parent,
            token_ids,
            mounts=mounts,
            policy_version=policy_version,
            score_from=score_from,
        )


@contextlib.contextmanager
def engine_errors(episode: Episode) -> Iterator[None]:
    """Type what an engine raises; its own typed errors pass."""
    try:
        yield
    except HarnessError as error:
        episode.service.metrics.add(f"errors/{type(error).__name__}")
        raise
    except Exception as error:
        episode.service.metrics.add("errors/EngineError")
        raise EngineError(
            f"the engine failed: {error}",
            value=type(error).__name__,
            remedy="repeat the call; the thread is where it was",
            episode_id=episode.episode_id,
        ) from error


async def render(
    episode: Episode, messages: Sequence[Message], listed: ToolSchemas | None = None
) -> tuple[int, ...]:
    """Token ids of `messages`, of a first prompt where tools are `listed`; off the loop if long."""
    chat = episode.service.chat
    if sum(len(message.content) for message in messages) <= _MAX_INLINE_CHARS:
        return chat.delta(messages) if listed is None else chat.prompt(messages, listed)
    if listed is None:
        return await asyncio.to_thread(chat.delta, messages)
    return await asyncio.to_thread(chat.prompt, messages, listed)


async def flush(episode: Episode, thread: Thread) -> None:
    """Append what is pending to the current step, as one node; the terminator opens it."""
    if not thread.pending:
        return
    notes = list(thread.pending)
    token_ids = (*thread.due, *await render(episode, [note.message for note in notes]))
    episode.guardrails.check_cost(thread, len(token_ids))
    version = episode.current_version(thread)
    cursor = await extend(episode, thread.head, token_ids, thread.mounts, version)
    step = thread.steps[-1]
    episode.add_node(thread, step, cursor, kind_of(notes), joined=joined_by(notes))
    step.took(notes)
    thread.pending.clear()
    thread.due = ()


def joined_by(notes: Sequence[Note]) -> frozenset[str]:
    """The branches whose end `notes` report."""
    return frozenset[str]().union(*(note.joined for note in notes))


def kind_of(notes: Sequence[Note]) -> NodeKind:
    """The kind of a node that renders `notes`: a guardrail among them names it."""
    kinds = {note.kind for note in notes}
    for kind in (NodeKind.TERMINATION, NodeKind.NOTE):
        if kind in kinds:
            return kind
    return NodeKind.CONTEXT
