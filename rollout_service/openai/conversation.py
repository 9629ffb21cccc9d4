"""One session: an episode, the histories that its cursors stand for, and where a request goes on.

Nothing here waits: a place is chosen and taken in one step of the loop.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from harness_sdk.types import ROOT_THREAD, Message, Role, Turn
from rollout_service.cursors import Cursor
from rollout_service.openai.ask import Ask, Reply
from rollout_service.openai.errors import ParameterError
from rollout_service.openai.messages import ChatMessage, FunctionCall, chain, to_message
from rollout_service.openai.reply_text import ReplyText
from rollout_service.sessions import offshoots
from rollout_service.sessions.episode import Episode
from rollout_service.sessions.threads import Step, Thread


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A cursor that a history may go on from."""

    thread_id: str
    step: int
    answered: Role | None
    """Role that what the step's turn answers ends with, where the point is before the turn; None
    where it is behind the turn."""
    tools_json: str
    """The tool list of its root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a request goes on; its thread is taken until `release`."""

    thread_id: str
    messages: tuple[Message, ...]
    tools_json: str
    """What its root lists."""
    is_root: bool
    """The thread has no turn yet, nor anything before it."""
    history: bytes
    """Digest of everything that the turn answers."""
    answered: Role
    """Role that it ends with."""
    cached_tokens: int


class Conversation:
    """A session that is open.

    Args:
        key: What clients call it.
        episode: Its episode.
        named: Whether a client chose the key; one that none chose is found by its history.
    """

    def __init__(self, key: str, episode: Episode, *, named: bool) -> None:
        self.key = key
        self.episode = episode
        self.named = named
        self.last_used_s = time.monotonic()
        self.is_ending = False
        """Its record is being written, or has still to be: no request may begin."""
        self.reward: float | None = None
        """What its record says, once it is ending."""
        self.calls: dict[str, tuple[str, str]] = {}
        """Of each call id that clients were given, the turn's own id and the tool's name."""
        self.replies: dict[str, bytes] = {}
        """By reply id, the digest of the history that ends with it."""
        self._points: dict[bytes, list[Point]] = {}
        self._taken: set[str] = set()

    @property
    def owner(self) -> str:
        """Whose it is."""
        return self.episode.request.owner

    @property
    def in_use(self) -> bool:
        """Whether a request runs."""
        return bool(self._taken)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was appended yet."""
        return not self.episode.nodes

    def claim(self, ask: Ask, histories: Sequence[bytes]) -> Place:
        """Take the place that shares most of the request's history.

        Args:
            ask: The request.
            histories: Digests of its history, without messages first, whole last.

        Raises:
            BudgetExhausted: It needs a branch and `max_threads` does not allow one.
            ParameterError: It continues a response with other tools.
        """
        count, points = self._longest(ask, histories)
        if points:
            thread, tools_json = self._go_on(points)
        else:
            thread, tools_json = self._root(), ask.tools_json
        self._taken.add(thread.thread_id)
        self.last_used_s = time.monotonic()
        head = thread.head
        return Place(
            thread_id=thread.thread_id,
            messages=self._messages(ask.messages, count),
            tools_json=tools_json,
            is_root=head is None,
            history=histories[-1],
            answered=ask.messages[-1].role if ask.messages else "assistant",
            cached_tokens=head.num_tokens if head is not None else 0,
        )

    def release(self, place: Place) -> None:
        """Let others take the place; a branch that came to nothing is forgotten."""
        self._taken.discard(place.thread_id)
        self.last_used_s = time.monotonic()
        thread = self.episode.threads.get(place.thread_id)
        if thread is not None:
            offshoots.withdraw(self.episode, thread)

    def can_go_on(self, history: bytes) -> bool:
        """Whether a thread ends with `history` and nobody has it."""
        return any(self._is_free_head(point) for point in self._points.get(history, ()))

    def took(
        self,
        place: Place,
        reply_id: str,
        turn: Turn,
        text: ReplyText,
        calls: tuple[FunctionCall, ...],
    ) -> Reply:
        """Remember a finished turn, of which `text` was shown and `calls` are given out."""
        thread = self.episode.thread(place.thread_id)
        step = thread.steps[-1]
        assert step.turn is not None, "a turn was just taken"
        message = ChatMessage(role="assistant", content=text.content, tool_calls=calls)
        self.replies[reply_id] = history = chain(place.history, message)
        # An agent that goes on, whether in this thread or another, was not ended by a limit.
        self.episode.root.exhausted = None
        self._add(place, thread, step, place.history, answered=place.answered)
        self._add(place, thread, step, history, answered=None)
        good = [call for call in turn.tool_calls if not call.error]
        for given, call in zip(calls, good, strict=False):
            self.calls[given.call_id] = (call.call_id, call.name)
        return Reply(
            session=self.key,
            thread_id=thread.thread_id,
            message=message,
            reasoning=text.reasoning,
            bad_calls=tuple(call for call in turn.tool_calls if call.error),
            turn=turn,
            prompt_tokens=_prompt_tokens(step.turn),
            cached_tokens=place.cached_tokens,
        )

    def _longest(self, ask: Ask, histories: Sequence[bytes]) -> tuple[int, list[Point]]:
        """How many messages the best points share with the request, and the points."""
        for count in range(len(histories) - 1, -1, -1):
            # Neighbouring tool answers share one turn of the template: no cut between them.
            sides = ask.messages[max(count - 1, 0) : count + 1]
            if count and [side.role for side in sides] == ["tool", "tool"]:
                continue
            points = self._points.get(histories[count], [])
            if ask.tools_json:
                points = [point for point in points if point.tools_json == ask.tools_json]
            if points:
                return count, points
        if ask.previous:
            raise ParameterError(
                "the response to continue was sampled with other tools",
                param="tools",
                value=ask.tools_json[:200],
                limit="the tools of the response's first request",
                remedy="leave tools out, or send the whole input without previous_response_id",
            )
        return 0, []

    def _root(self) -> Thread:
        root = self.episode.root
        if root.head is None and ROOT_THREAD not in self._taken:
            return root
        return offshoots.new_root(self.episode)

    def _go_on(self, points: Sequence[Point]) -> tuple[Thread, str]:
        free = next((point for point in points if self._is_free_head(point)), None)
        point = free or points[0]
        thread = self.episode.thread(point.thread_id)
        if free is None:
            thread = offshoots.branch(self.episode, thread, point.step, answered=point.answered)
        return thread, point.tools_json

    def _is_free_head(self, point: Point) -> bool:
        if point.answered is not None or point.thread_id in self._taken:
            return False
        thread = self.episode.thread(point.thread_id)
        return thread.steps[-1].number == point.step and not thread.status.is_final

    def _messages(self, messages: Sequence[ChatMessage], count: int) -> tuple[Message, ...]:
        calls = dict(self.calls)
        for message in messages:
            for call in message.tool_calls:
                calls.setdefault(call.call_id, (call.call_id, call.name))
        return tuple(to_message(message, calls) for message in messages[count:])

    def _add(
        self, place: Place, thread: Thread, step: Step, history: bytes, *, answered: Role | None
    ) -> None:
        point = Point(
            thread_id=thread.thread_id,
            step=step.number,
            answered=answered,
            tools_json=place.tools_json,
        )
        self._points.setdefault(history, []).append(point)


def function_calls(turn: Turn, ask: Ask, reply_id: str) -> tuple[FunctionCall, ...]:
    """The calls that a client is given; their ids are unique among all sessions."""
    if not ask.calls_allowed:
        return ()
    good = [call for call in turn.tool_calls if not call.error]
    return tuple(
        FunctionCall(
            call_id=f"call_{reply_id[-16:]}_{index}",
            name=call.name,
            arguments=json.dumps(dict(call.arguments), ensure_ascii=False),
        )
        for index, call in enumerate(good if ask.parallel_calls else good[:1])
    )


def _prompt_tokens(turn: Cursor) -> int:
    return turn.num_tokens - sum(turn.sampled)
