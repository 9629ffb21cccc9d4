"""What a template appends for new messages: rendered behind a minimal prefix, then sliced.

Text alone; tokens are the renderer's. The probe finds the shape that this goes by.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from harness_sdk.errors import InvalidRequest
from harness_sdk.types import Message, ToolCall
from rollout_service.chat.template import Template

Mode = Literal["suffix", "context"]
"""`suffix`: what new messages append depends on nothing before them; `context`: the minimal
prefix defines it."""

MARKER = "\udc01"
"""Stands in the minimal prefix where the model's own words would: a lone surrogate, which no
message can hold."""
NOTE_NAME = "harness"
"""The tool that a note of the harness answers for, where a template wants one."""

_INDEXED_ID = re.compile(r"functions\..*:(\d{1,4})")
_OWN_ID = re.compile(r"call_\d+_(\d+)")
"""As this package numbers a turn's calls."""
_LONG_ID = re.compile(r"[A-Za-z0-9]{9,}")
_USER: dict[str, Any] = {"role": "user", "content": "u"}

Rendered = dict[str, Any]
"""A message as templates read it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenTurn(Message):
    """An assistant's turn that no model sampled, with the calls that it makes."""

    tool_calls: tuple[ToolCall, ...] = ()

    def as_text(self) -> Message:
        """The turn for a template that prints no calls: they stand in its text, in Hermes' form."""
        texts = [self.content] if self.content else []
        for call in self.tool_calls:
            body = {"name": call.name, "arguments": dict(call.arguments)}
            text = json.dumps(body, ensure_ascii=False)
            texts.append(f"<tool_call>\n{text}\n</tool_call>")
        return Message(role="assistant", content="\n".join(texts))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """How this template wants a turn with tool calls."""

    content: str | None = ""
    """What stands beside the calls: some templates print them only beside None."""
    text_arguments: bool = False
    """Arguments are JSON text, not an object."""
    indexed_ids: bool = False
    """Calls are known as `functions.NAME:INDEX`."""
    counted_ids: bool = False
    """INDEX counts the calls of the whole conversation, not those of a turn."""
    long_ids: bool = False
    """Call ids have nine characters or more, letters and digits alone."""

    def turn(self, names: Sequence[str], argument: str = MARKER) -> Rendered:
        """An assistant's turn that calls each of `names` with `argument`."""
        made = [self._call(index, name, argument) for index, name in enumerate(names)]
        return {"role": "assistant", "content": self.content, "tool_calls": made}

    def call_id(self, message: Message, index: int) -> str:
        """What a tool message answers: its own id where the template can take it."""
        return self._id(message.tool_call_id, _name(message), index)

    def written(self, message: WrittenTurn) -> Rendered:
        """A turn with calls that a client wrote; without its text where only one is printed."""
        calls: list[Rendered] = []
        for index, call in enumerate(message.tool_calls):
            arguments: Any = dict(call.arguments)
            if self.text_arguments:
                arguments = json.dumps(arguments, ensure_ascii=False)
            function = {"name": call.name, "arguments": arguments}
            call_id = self._id(call.call_id, call.name, index)
            calls.append({"id": call_id, "type": "function", "function": function})
        content = self.content if self.content is None else message.content
        return {"role": "assistant", "content": content, "tool_calls": calls}

    def _id(self, given: str, name: str, index: int) -> str:
        if self.indexed_ids and not given.startswith("functions."):
            own = _OWN_ID.fullmatch(given)
            return f"functions.{name}:{own[1] if own is not None else index}"
        if self.long_ids and not _LONG_ID.fullmatch(given):
            text = given or str(index)
            return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:9]
        return given or f"call_{index}"

    def earlier(self, answers: Sequence[Message]) -> list[Rendered]:
        """A turn with as many calls, and their answers, as came before those that are answered."""
        counts = [_INDEXED_ID.fullmatch(message.tool_call_id) for message in answers[:1]]
        number = int(counts[0].group(1)) if self.counted_ids and counts and counts[0] else 0
        if not number:
            return []
        answer = {"role": "tool", "content": "x", "tool_call_id": "x"}
        return [self.turn([NOTE_NAME] * number, argument="x"), *([answer] * number), dict(_USER)]

    def _call(self, index: int, name: str, argument: str) -> Rendered:
        arguments: Any = f'{{"a": "{argument}"}}' if self.text_arguments else {"a": argument}
        function = {"name": name, "arguments": arguments}
        call_id = f"callnumb{index % 10}" if self.long_ids else f"call_{index}"
        return {"id": call_id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFormat:
    """The shape of a template's turns.

    Example:
        ChatML: `terminator` and `call_terminator` are `<|im_end|>` and a newline, `end` is the
        same, `openings` gives `<|im_start|>assistant` and a newline after every role.
    """

    mode: Mode
    terminator: str
    """What ends an assistant's turn in the history; empty where the next message's opening does."""
    call_terminator: str
    """The same of a turn that ends with a tool call."""
    end: str
    """What the template itself writes after the last turn; gpt-oss ends otherwise in history."""
    openings: Mapping[str, str]
    """What opens the model's turn, by the role of the message before."""
    call_form: CallForm | None
    """None where calls are not printed: tool messages then follow a plain turn."""
    call_tail: str
    """What stands between a call's argument and the message after the turn."""
    call_each: bool
    """Whether the minimal prefix makes a call for each answer, or one for all of them."""
    answers_apart: bool
    """Whether a turn makes one call at most, so that each answer has a prefix of its own."""
    roles: frozenset[str]
    """Roles of messages that can be appended."""
    tools_printed: bool
    """Whether the template lists the tools itself."""
    call_example: str
    """A call as this template prints one, `<function-name>` its name; empty if it does not."""
    turn_example: str
    """A turn with reasoning and text as this template prints it, its end included."""
    call_opening: str
    """What a turn holds before a call's name; empty if calls are not printed."""
    stops: tuple[str, ...]
    """Texts whose first control token ends a turn."""


class Increments:
    """Renders new messages as `template` appends them.

    Args:
        template: The chat template.
        shape: What the probe found.
    """

    def __init__(self, template: Template, shape: TurnFormat) -> None:
        self._template = template
        self.shape = shape

    def delta(self, messages: Sequence[Message]) -> str:
        """What `messages` append behind a terminated turn; no generation prompt.

        Raises:
            InvalidRequest: The template cannot append a message of this role.
        """
        for message in messages:
            if message.role not in self.shape.roles:
                raise InvalidRequest(
                    f"this model's chat template cannot append a {message.role} message",
                    value=message.content[:80],
                    limit=", ".join(sorted(self.shape.roles)),
                    remedy="put it into the first prompt, or into a user message",
                )
        if not messages:
            return ""
        if self.shape.answers_apart:
            return "".join(self._together(part) for part in _one_tool_each(messages))
        return self._together(messages)

    def _together(self, messages: Sequence[Message]) -> str:
        try:
            return self._behind_prefix(messages)
        except InvalidRequest:
            runs = _runs(messages)
            if len(runs) == 1:
                raise
            # The template will not have these roles in a row (Mistral): one run after the other.
            return "".join(self._behind_prefix(run) for run in runs)

    def conversation(
        self, messages: Sequence[Message], *, question: str = "u", words: str = MARKER
    ) -> list[Rendered]:
        """`messages` behind the minimal prefix: a user's `question` and a turn of `words`."""
        form = self.shape.call_form
        answers = [message for message in messages if message.role == "tool"]
        turn: Rendered = {"role": "assistant", "content": words}
        before: list[Rendered] = [{"role": "user", "content": question}]
        if answers and form is not None:
            called = answers if self.shape.call_each else answers[:1]
            turn = form.turn([_name(message) for message in called], words)
            before += form.earlier(answers)
        return [*before, turn, *as_rendered(messages, form or CallForm())]

    def _behind_user(self, messages: Sequence[Message]) -> str:
        """What `messages` append behind a user message; the first is an assistant's turn."""
        before: list[Rendered] = [{"role": "user", "content": MARKER}]
        rendered = as_rendered(messages, self.shape.call_form or CallForm())
        return _behind_marker(
            self._template.render([*before, *rendered]),
            self._template.render(before).rpartition(MARKER)[2],
            messages,
        )

    def _behind_prefix(self, messages: Sequence[Message]) -> str:
        if messages[0].role == "assistant":
            return self._behind_user(messages)
        conversation = self.conversation(messages)
        has_call = any("tool_calls" in message for message in conversation)
        tail = self.shape.call_tail if has_call else self.shape.terminator
        return _behind_marker(self._template.render(conversation), tail, messages)


def as_rendered(messages: Sequence[Message], form: CallForm) -> list[Rendered]:
    """`messages` in the form that templates read."""
    rendered: list[Rendered] = []
    num_answers = 0
    for message in messages:
        each: Rendered = {"role": message.role, "content": message.content}
        if isinstance(message, WrittenTurn) and message.tool_calls:
            each = form.written(message)
        if message.role == "assistant":
            num_answers = 0
        if message.role == "tool":
            each["tool_call_id"] = form.call_id(message, num_answers)
            if message.name:
                each["name"] = message.name
            num_answers += 1
        rendered.append(each)
    return rendered


def _behind_marker(text: str, tail: str, messages: Sequence[Message]) -> str:
    anchor = f"{MARKER}{tail}"
    at = text.rfind(anchor)
    if at < 0:
        raise InvalidRequest(
            "the chat template ends a turn in another way before these messages",
            value=", ".join(message.role for message in messages),
            remedy="append them one after the other",
        )
    return text[at + len(anchor) :]


def _name(message: Message) -> str:
    return message.name or NOTE_NAME


def _one_tool_each(messages: Sequence[Message]) -> list[list[Message]]:
    parts: list[list[Message]] = [[]]
    for message in messages:
        if message.role == "tool" and any(each.role == "tool" for each in parts[-1]):
            parts.append([])
        parts[-1].append(message)
    return parts


def _runs(messages: Sequence[Message]) -> list[list[Message]]:
    """Neighbouring tool messages together, every other message alone."""
    runs: list[list[Message]] = []
    for message in messages:
        if message.role == "tool" and runs and runs[-1][-1].role == "tool":
            runs[-1].append(message)
        else:
            runs.append([message])
    return runs
