"""Where a parser writes: trimmed text and reasoning, and calls with their ids and faults."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from harness_sdk.deltas import (
    AllWasReasoning,
    CallArguments,
    CallBegun,
    CallFinished,
    ReasoningDelta,
    ReplyEvent,
    TextDelta,
)
from harness_sdk.types import ToolCall, ToolSchemas
from rollout_service.chat.calls.reader import Broken, Fault

_NAME = re.compile(r"[^\s<>{}\[\]()\"'`=,;]{1,200}")


class Output:
    """The events of one reply.

    Args:
        step: The turn's step; part of each call's id.
        tools: Schemas of the tools that the model knows.
        taken: Ids of earlier calls, which none of this reply may have.
    """

    def __init__(self, step: int, tools: ToolSchemas, taken: Collection[str] = ()) -> None:
        self._step = step
        self._earlier = frozenset(taken)
        self._taken = set(taken)
        self._num_calls = 0
        self._events: list[ReplyEvent] = []
        self._text, self._reasoning = _Trimmed(), _Trimmed()
        self._tools = {tool["function"]["name"]: tool["function"] for tool in tools}

    def drain(self) -> list[ReplyEvent]:
        """The events since the last time."""
        events = self._events.copy()
        # Calls that are being read write into the same list.
        self._events.clear()
        return events

    def text(self, text: str) -> None:
        """More text."""
        if text := self._text.push(text):
            self._events.append(TextDelta(text=text))

    def reasoning(self, text: str) -> None:
        """More reasoning."""
        if text := self._reasoning.push(text):
            self._events.append(ReasoningDelta(text=text))

    def all_was_reasoning(self, raw: str) -> None:
        """What was written so far is void; `raw` is what it stood for."""
        self._num_calls = 0
        self._taken = set(self._earlier)
        self._text, self._reasoning = _Trimmed(), _Trimmed()
        self._events.append(AllWasReasoning(reasoning=self._reasoning.push(raw)))

    def call(self, form: str) -> Call:
        """The next call; `form` shows how one is written."""
        call_id = f"call_{self._step}_{self._num_calls}"
        self._num_calls += 1
        return Call(self._events, call_id, form, self._tools, self._taken)

    def knows(self, name: object) -> bool:
        """Whether a tool has that name."""
        return name in self._tools if isinstance(name, str) else False

    def take_back_call(self) -> None:
        """The call handed out last was none; nothing was written about it."""
        self._num_calls -= 1


class Call:
    """A call that is being read; ends with `finish` or `fail`.

    Args:
        events: Where its events go.
        call_id: Its id, unless the model gives one of its own.
        form: How a call is written, for the model that wrote it wrong.
        tools: The known functions' schemas by name.
        taken: Ids of other calls; the call's own is added.
    """

    def __init__(
        self,
        events: list[ReplyEvent],
        call_id: str,
        form: str,
        tools: Mapping[str, Any],
        taken: set[str],
    ) -> None:
        self.form = form
        self.name = ""
        self._is_told = False
        """Something of the arguments was told already, in pairs or as the model wrote it."""
        self._in_pairs = False
        self._events = events
        self._call_id = call_id
        self._tools = tools
        self._taken = taken

    def named_by_model(self, call_id: str) -> None:
        """Take the id that the model wrote, so that its answer is rendered with it.

        One that another call of the thread has is left: answers are told apart by their ids.
        """
        if call_id not in self._taken:
            self._call_id = call_id

    def begin(self, name: str) -> None:
        """Its name is known.

        Raises:
            Fault: It is blank, or another one than before.
        """
        name = name.strip().encode("utf-8", "replace").decode()
        if not name:
            raise Fault("the call has no name")
        if self.name and name != self.name:
            raise Fault("the call has two names")
        if not self.name:
            self.name = name
            self._events.append(CallBegun(name=name))

    def begin_checked(self, name: str) -> None:
        """Its name was written outside JSON, where anything may stand.

        Raises:
            Broken: That is no name.
        """
        if name.strip() not in self._tools and not _NAME.fullmatch(name.strip()):
            raise Broken(f"{name.strip()[:40]!r} is no tool's name")
        self.begin(name)

    @property
    def properties(self) -> Mapping[str, Any]:
        """Argument schemas of the tool; empty where it is not known."""
        return self._tools.get(self.name, {}).get("parameters", {}).get("properties", {})

    def tell(self, text: str) -> None:
        """More of the arguments, which the model itself writes as JSON."""
        if text:
            self._is_told = True
            self._events.append(CallArguments(text=text))

    def tell_argument(self, key: str, value: Any) -> None:
        """One more argument, of a model that writes no JSON."""
        pair = f"{json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
        # Escapes in the value may have made half of a surrogate pair.
        pair = pair.encode("utf-8", "replace").decode()
        self.tell(f", {pair}" if self._in_pairs else f"{{{pair}")
        self._in_pairs = True

    def finish(self, arguments: Mapping[str, Any]) -> None:
        """The call is whole.

        Raises:
            Fault: The arguments cannot be sent on.
        """
        try:
            written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            written.encode()
        except UnicodeEncodeError as error:
            raise Fault("the arguments hold half of a surrogate pair") from error
        except ValueError as error:
            raise Fault("the arguments hold a number that is too large") from error
        if not self._is_told:
            self.tell(written)
        elif self._in_pairs:
            self.tell("}")
        self._end(arguments, "")

    def fail(self, fault: Fault) -> None:
        """The call is bad."""
        if not self.name:
            self._events.append(CallBegun(name=""))
        self._end({}, f"{fault}; write {self.form}")

    def _end(self, arguments: Mapping[str, Any], error: str) -> None:
        call = ToolCall(
            call_id=self._call_id, name=self.name, arguments=dict(arguments), error=error
        )
        self._taken.add(self._call_id)
        self._events.append(CallFinished(call=call))


class _Trimmed:
    """Text without white space at either end, given out as soon as that is sure."""

    def __init__(self) -> None:
        self._begun = False
        self._held = ""

    def push(self, text: str) -> str:
        text = self._held + text
        if not self._begun:
            text = text.lstrip()
        given = text.rstrip()
        self._held = text[len(given) :]
        self._begun = self._begun or bool(given)
        return given
