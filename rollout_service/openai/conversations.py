"""All open sessions: begun where a request continues none, ended by request or when idle."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
import weakref
from collections import OrderedDict
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from harness_sdk.deltas import TokenDelta
from harness_sdk.errors import (
    ERRORS_BY_NAME,
    BudgetExhausted,
    EpisodeNotFound,
    HarnessError,
    InvalidRequest,
    Unavailable,
)
from harness_sdk.types import EpisodeResult, Limits, StopReason, ThreadStatus
from rollout_service.background import Background
from rollout_service.openai.ask import Ask, Placed, Reply, Said, SessionNames
from rollout_service.openai.conversation import Conversation, Place, function_calls
from rollout_service.openai.errors import ContextExceeded
from rollout_service.openai.known_replies import KnownReplies
from rollout_service.openai.messages import digests
from rollout_service.openai.reply_text import ReplyText, plain_content
from rollout_service.sessions import Call, OpenRequest, Sessions

logger = logging.getLogger(__name__)

_MAX_SWEEP_S = 1.0

Name = tuple[str, str]
"""Owner and key of a session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """How a session ended."""

    session: str
    episode_id: str
    reward: float | None
    result: EpisodeResult


class Conversations:
    """The sessions of one endpoint.

    Args:
        sessions: The replica's episodes.
        max_threads: Branches of a session.
        idle_s: Seconds without a request after which a session is closed.
        spare_s: The same for one that nobody named, while new ones wait for room in the pool.
    """

    def __init__(
        self, sessions: Sessions, *, max_threads: int, idle_s: float, spare_s: float
    ) -> None:
        self._sessions = sessions
        self._max_threads = max_threads
        self._idle_s = idle_s
        self._spare_s = min(spare_s, idle_s)
        self._num_queued = 0
        self._open: dict[Name, Conversation] = {}
        self._opening: weakref.WeakValueDictionary[Name, asyncio.Lock] = (
            weakref.WeakValueDictionary()
        )
        self._replies = KnownReplies()
        self._ending: dict[Conversation, asyncio.Task[Closed]] = {}
        self._closed: OrderedDict[Name, Closed] = OrderedDict()
        self._background = Background()

    async def take(self, ask: Ask, reply_id: str) -> AsyncGenerator[Placed | Said | Reply, None]:
        """One completion as it happens; closing the generator cancels it.

        Args:
            ask: What is asked for.
            reply_id: Unique id that later requests may continue.

        Raises:
            HarnessError: It cannot be served; the session is where it was.
        """
        conversation, histories = await self._find(ask)
        place: Place | None = None
        try:
            place = conversation.claim(ask, histories)
            yield Placed(session=conversation.key)
            async with contextlib.aclosing(
                self._turn(conversation, place, ask, reply_id)
            ) as events:
                async for event in events:
                    yield event
        except BaseException as error:
            if not conversation.named and conversation.is_empty:
                # Nobody knows of it, so nobody would ever close it.
                self._background.begin(self._abandon(conversation, error))
            raise
        finally:
            if place is not None:
                conversation.release(place)

    async def close(self, key: str, *, owner: str = "", reward: float | None) -> Closed:
        """End a session of `owner` and put its record in the stream; a repeat returns the first
        reply.

        Raises:
            EpisodeNotFound: No such session.
            InvalidRequest: The reward is outside [0, 1].
            Unavailable: The record could not be written; repeat the call.
        """
        conversation = self._open.get((owner, key))
        if conversation is None:
            if (owner, key) in self._closed:
                return self._closed[owner, key]
            raise EpisodeNotFound(
                "no such session",
                value=key,
                remedy="name it as X-Octopus-Session does, in requests and replies",
            )
        return await self._end(conversation, reward=reward)

    async def sweep(self) -> None:
        """Close idle sessions, until cancelled."""
        while True:
            await asyncio.sleep(min(self._spare_s / 4, _MAX_SWEEP_S))
            now = time.monotonic()
            for conversation in [each for each in self._open.values() if self._is_over(each, now)]:
                # Closing one takes a while, in which another may have been called.
                if not self._is_over(conversation, now):
                    continue
                try:
                    await self._end(conversation, reward=None)
                except HarnessError as error:
                    logger.warning("session %s is not closed yet: %s", conversation.key, error)

    async def settle(self, timeout_s: float) -> None:
        """Wait until what failed requests left behind is cleared away."""
        await self._background.settle(timeout_s)

    async def _turn(
        self, conversation: Conversation, place: Place, ask: Ask, reply_id: str
    ) -> AsyncGenerator[Said | Reply, None]:
        episode = conversation.episode
        thread = episode.thread(place.thread_id)
        text = ReplyText()
        events = self._sessions.generate(
            Call(episode_id=episode.episode_id, thread_id=place.thread_id),
            place.messages,
            tools_json=place.tools_json if place.is_root else "",
            sampling=ask.sampling,
            with_events=ask.streams,
        )
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    if isinstance(event, TokenDelta):
                        yield text.push(event)
                        continue
                    turn = event.turn
                    calls = function_calls(turn, ask, reply_id)
                    has_text = bool(calls) or not turn.tool_calls
                    content = turn.text if has_text else plain_content(turn, ask.sampling.stop)
                    rest = text.finish(content, turn.reasoning)
                    reply = conversation.took(place, reply_id, turn, text, calls)
                    if self._open.get(_name(conversation)) is conversation:
                        # One closed since the turn's end nobody would ever forget.
                        self._replies.remember(conversation, ask, reply_id)
                    yield rest
                    yield reply
        except BudgetExhausted as error:
            if thread.exhausted is ThreadStatus.BUDGET:
                raise ContextExceeded(error.message, **error.context()) from error
            raise
        except EpisodeNotFound as error:
            if episode.closing is StopReason.CANCELLED:
                raise Unavailable("the service is shutting down") from error
            raise

    async def _find(self, ask: Ask) -> tuple[Conversation, list[bytes]]:
        """The request's session, opened where there is none, and the digests of its history."""
        if ask.previous:
            return self._replies.continued(ask)
        # Histories of different owners never meet.
        histories = digests(ask.names.owner.encode(), ask.messages)
        if not ask.names.session:
            found = self._replies.by_history(ask, histories)
            return found or await self._begin(uuid.uuid4().hex, ask.names, named=False), histories
        key = ask.names.session
        name = (ask.names.owner, key)
        lock = self._opening.setdefault(name, asyncio.Lock())
        async with lock:
            conversation = self._open.get(name)
            if conversation is not None and conversation.is_ending:
                # Its name is free once the record is written.
                await self._end(conversation, reward=None)
                conversation = None
            if conversation is None:
                conversation = await self._begin(key, ask.names, named=True)
        return conversation, histories

    async def _begin(self, key: str, names: SessionNames, *, named: bool) -> Conversation:
        request = OpenRequest(
            group_id=names.group,
            task_id=names.task,
            limits=Limits(max_threads=self._max_threads),
            owner=names.owner,
            # Most clients go on from where they were.
            forks=False,
        )
        self._num_queued += 1
        try:
            opened = await self._sessions.open(request)
        finally:
            self._num_queued -= 1
        episode = self._sessions.episode(opened.episode_id)
        self._open[names.owner, key] = conversation = Conversation(key, episode, named=named)
        return conversation

    def _is_over(self, conversation: Conversation, now_s: float) -> bool:
        # Clients that name no session close none, and what they leave would fill the pool.
        is_spare = self._num_queued > 0 and not conversation.named
        limit_s = self._spare_s if is_spare else self._idle_s
        return not conversation.in_use and now_s - conversation.last_used_s > limit_s

    async def _end(self, conversation: Conversation, *, reward: float | None) -> Closed:
        """Close once; whoever comes second waits for the first and is told the same."""
        task = self._ending.get(conversation)
        if task is None:
            conversation.is_ending = True
            task = asyncio.create_task(self._finish(conversation, reward))
            self._ending[conversation] = task
            task.add_done_callback(lambda task: self._ended(conversation, task))
        return await asyncio.shield(task)

    def _ended(self, conversation: Conversation, task: asyncio.Task[Closed]) -> None:
        del self._ending[conversation]
        # Retrieved, for nobody may be left to wait.
        _ = task.cancelled() or task.exception()

    async def _finish(self, conversation: Conversation, reward: float | None) -> Closed:
        # A first attempt may have given a reward and not reached the stream.
        reward = conversation.reward = conversation.reward if reward is None else reward
        episode_id = conversation.episode.episode_id
        try:
            result = await self._sessions.close(
                episode_id, reward=reward, idempotency_key=conversation.key
            )
        except EpisodeNotFound:
            # The service has closed it.
            self._forget(conversation)
            raise
        except InvalidRequest:
            conversation.is_ending, conversation.reward = False, None
            raise
        closed = Closed(
            session=conversation.key, episode_id=episode_id, reward=reward, result=result
        )
        self._forget(conversation)
        self._closed[_name(conversation)] = closed
        while len(self._closed) > self._sessions.options.max_closed:
            self._closed.popitem(last=False)
        return closed

    async def _abandon(self, conversation: Conversation, error: BaseException) -> None:
        """End a session of which no client knows."""
        self._forget(conversation)
        known = (cls.__name__ for cls in type(error).__mro__ if cls.__name__ in ERRORS_BY_NAME)
        with contextlib.suppress(EpisodeNotFound):
            await self._sessions.close(
                conversation.episode.episode_id,
                error_kind=next(known, "Cancelled"),
                error_message=str(error),
            )

    def _forget(self, conversation: Conversation) -> None:
        if self._open.get(_name(conversation)) is conversation:
            del self._open[_name(conversation)]
        self._replies.forget(conversation)


def _name(conversation: Conversation) -> Name:
    return conversation.owner, conversation.key
