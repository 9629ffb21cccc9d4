"""Proves a template's increments on synthetic conversations and says which mode they are.

What a template does to earlier turns does not matter: they are never rendered again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness_sdk.errors import InvalidRequest
from harness_sdk.types import Message
from rollout_service.chat.increments import (
    CallForm,
    Increments,
    Rendered,
    TurnFormat,
    as_rendered,
)
from rollout_service.chat.probe import PROBE_TOOL, find_shape
from rollout_service.chat.refusal import Difference, TemplateRefused, check_kept, first_difference
from rollout_service.chat.template import Template
from rollout_service.chat.time_limit import TimeIsUp, time_limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What the probe says of a template that can be served."""

    shape: TurnFormat
    depends: Difference | None
    """First increment that the whole history changes; None in mode `suffix`."""
    rewrites: Difference | None
    """First place where the template's own rendering changes the history; None where it never
    does. The history that is served does not change there."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is special about serving this template, a sentence each."""
        shape = self.shape
        found = (
            (self.depends, "increments are rendered behind a minimal prefix: the template lets "
             f"the history change them ({self.depends})"),
            (self.rewrites, "the template itself rewrites earlier turns; the history that is "
             "served keeps them"),
            (not shape.tools_printed, "the template lists no tools: the system message does"),
            (shape.call_form is None, "the template prints no tool calls: what the model sampled "
             "stays, and tool responses and notes are the template's tool messages"),
            (shape.answers_apart, "a turn makes one tool call at most"),
        )  # fmt: skip
        return tuple(text for applies, text in found if applies)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A model's turn of a synthetic conversation."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[str, ...] = ()
    """Names of the tools that it calls."""


Conversation = tuple[Message | Turn, ...]


def probe(template: Template, *, limit_s: float = 60.0) -> Probed:
    """Find the shape of `template`'s turns, prove its increments and classify it.

    Args:
        template: The template.
        limit_s: Seconds that all of it may take; the slowest known template needs one.

    Raises:
        TemplateRefused: It cannot be served; with the reason.
    """
    try:
        with time_limit(limit_s):
            return _probe(template)
    except TimeIsUp as error:
        raise TemplateRefused(
            "the chat template does not come to an end",
            value=template.source[:80],
            limit=f"{limit_s:g} s for all conversations of the probe",
            remedy="serve the model with a template that loops over its messages alone",
        ) from error


def _probe(template: Template) -> Probed:
    shape = find_shape(template)
    depends: Difference | None = _needs_call(template, shape)
    rewrites: Difference | None = None
    for case, conversation in CASES.items():
        proof = _Proof(template, shape, case, conversation)
        changed = proof.check()
        depends = depends or changed
        rewrites = rewrites or proof.rewrites()
    mode = "suffix" if depends is None else "context"
    shape = dataclasses.replace(shape, mode=mode)
    return Probed(shape=shape, depends=depends, rewrites=rewrites)


class _Proof:
    """One conversation, rendered whole and in increments."""

    def __init__(
        self, template: Template, shape: TurnFormat, case: str, conversation: Conversation
    ) -> None:
        self._template = template
        self._shape = shape
        self._increments = Increments(template, shape)
        self._case = case
        self._messages = as_whole(conversation, shape.call_form)
        self._blocks = list(_blocks(conversation))
        tools = case.startswith("tools") and shape.tools_printed
        self._tools = [PROBE_TOOL] if tools else []

    def check(self) -> Difference | None:
        """Where the whole history first changes an increment.

        Raises:
            TemplateRefused: Other words in the minimal prefix change an increment, or the
                generation prompt changes the prompt that it stands behind.
        """
        found: Difference | None = None
        for begin, end, block in self._blocks:
            if begin == 0:
                self._check_prompt(end)
                continue
            appended = self._increments.delta(block) + self._shape.openings[block[-1].role]
            whole = self._whole(self._messages[:end])
            if whole is not None and not whole.endswith(self._terminator(begin) + appended):
                found = found or self._parted(whole, appended)
            self._check_behind_other_words(block, appended)
        return found

    def rewrites(self) -> Difference | None:
        """Where rendering a longer history first changes an earlier prompt or turn."""
        before = ""
        for _, end, _ in self._blocks:
            has_turn = end < len(self._messages)
            for last, opened in ((end, True), (end + 1, False))[: 1 + has_turn]:
                text = self._whole(self._messages[:last], opened=opened)
                if text is None:
                    continue
                difference = first_difference(before, text, self._case)
                if difference is not None:
                    return difference
                before = text
        return None

    def _check_prompt(self, end: int) -> None:
        messages = self._messages[:end]
        text, opened = self._whole(messages, opened=False), self._whole(messages)
        if text is None or opened is None:
            return
        opening = self._shape.openings[messages[-1]["role"]]
        check_kept(text + opening, opened, f"the prompt of {self._case}")

    def _check_behind_other_words(self, block: Sequence[Message], appended: str) -> None:
        if self._shape.answers_apart and [m.role for m in block].count("tool") > 1:
            # Each has a minimal prefix of its own; other cases have one at a time.
            return
        conversation = self._increments.conversation(
            block, question="Another question?", words="other words"
        )
        alone = self._whole(conversation)
        if alone is None:
            return
        if not alone.endswith(appended):
            difference = self._parted(alone, appended)
            raise TemplateRefused(
                "what the chat template appends depends on the words before it",
                first_difference=difference,
                value=difference,
                remedy="serve the model with a template that only appends",
            )

    def _whole(self, messages: Sequence[Rendered], *, opened: bool = True) -> str | None:
        """None where the template refuses this order of roles."""
        try:
            return self._template.render(messages, tools=self._tools, generation_prompt=opened)
        except InvalidRequest:
            return None

    def _terminator(self, begin: int) -> str:
        called = "tool_calls" in self._messages[begin - 1]
        return self._shape.call_terminator if called else self._shape.terminator

    def _parted(self, whole: str, appended: str) -> Difference:
        begin = max(len(whole) - len(appended), 0)
        parted = first_difference(appended, whole[begin:], self._case)
        if parted is None:
            before = whole[max(begin - 20, 0) : begin]
            return Difference(case=self._case, at=begin, expected="the turn's end", found=before)
        return dataclasses.replace(parted, at=begin + parted.at)


def as_whole(conversation: Conversation, form: CallForm | None) -> list[Rendered]:
    """`conversation` as one request to the template."""
    form = form or CallForm()
    rendered: list[Rendered] = []
    for _, _, block in _blocks(conversation):
        rendered += as_rendered(block, form)
        if len(rendered) < len(conversation):
            turn = conversation[len(rendered)]
            assert isinstance(turn, Turn)
            rendered.append(_rendered_turn(turn, form))
    return rendered


def _rendered_turn(turn: Turn, form: CallForm) -> Rendered:
    message: Rendered = {"role": "assistant", "content": turn.text}
    if turn.calls:
        message = form.turn(turn.calls, argument="some value")
    if turn.reasoning:
        # Templates read one of the two.
        message |= {"reasoning_content": turn.reasoning, "thinking": turn.reasoning}
    return message


def _blocks(conversation: Conversation) -> Iterator[tuple[int, int, list[Message]]]:
    """The messages between two turns, and where they begin and end."""
    begin = 0
    block: list[Message] = []
    for index, each in enumerate((*conversation, Turn())):
        if isinstance(each, Message):
            block.append(each)
            continue
        if block:
            yield begin, index, block
        begin, block = index + 1, []


def _needs_call(template: Template, shape: TurnFormat) -> Difference | None:
    """Whether a tool response is rendered otherwise where no call came before."""
    answer = Message(role="tool", content="4 hits")
    if shape.call_form is not None:
        answer = dataclasses.replace(answer, tool_call_id=shape.call_form.call_id(answer, 0))
    plain = Increments(template, dataclasses.replace(shape, call_form=None))
    expected = Increments(template, shape).delta([answer])
    case = "a tool response without a call"
    try:
        found = plain.delta([answer])
    except InvalidRequest as error:
        return Difference(case=case, at=0, expected=expected[:40], found=error.value[:80])
    return first_difference(expected, found, case)


def _user(text: str) -> Message:
    return Message(role="user", content=text)


def _tool(text: str, name: str = "probe_tool") -> Message:
    return Message(role="tool", content=text, name=name)


_SYSTEM = Message(role="system", content="Be brief.")
_CALL = Turn(calls=("probe_tool",))
_NOTE = Message(role="tool", content="[fork] a, b")

CASES: dict[str, Conversation] = {
    "chat": (_SYSTEM, _user("One?"), Turn(text="1"), _user("Two?"), Turn(text="2"), _user("3?")),
    "reasoning": (
        _user("One?"), Turn(text="1", reasoning="I count."), _user("Two?"),
        Turn(text="2", reasoning="I go on."), _user("Three?"),
    ),
    "tools": (
        _SYSTEM, _user("One?"), _CALL, _tool("1 hit"), Turn(text="1"), _user("Two?"), _CALL,
        _tool("2 hits"), Turn(text="2"), _user("Three?"),
    ),
    "tools, two responses": (
        _user("Both?"), Turn(calls=("probe_tool", "probe_tool")), _tool("1 hit"),
        _tool("2 hits\nin two lines"), Turn(text="3"), _user("Sure?"),
    ),
    "tools, one after the other": (
        _user("One?"), _CALL, _tool("1 hit"), _CALL, _tool("2 hits"), Turn(text="2"), _user("3?"),
    ),
    "tools, then a user": (
        _user("One?"), _CALL, _tool("1 hit"), _user("And?"), Turn(text="1"), _user("Two?"),
    ),
    "notes": (_user("One?"), _CALL, _tool("1 hit"), _NOTE, Turn(text="1"), _NOTE),
    "nothing said": (_user("One?"), _CALL, _tool(""), Turn(text=""), _user("Two?")),
    "a long conversation": (
        *(each for i in range(20) for each in (_user(f"Number {i}?"), Turn(text=f"It is {i}."))),
        _user("More?"),
    ),
}  # fmt: skip
