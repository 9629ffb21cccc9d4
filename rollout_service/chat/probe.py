"""Finds the shape of a template's turns by rendering synthetic conversations at start-up.

What cannot be appended to is refused here, with the reason and the first differing position.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from harness_sdk.errors import InvalidRequest
from harness_sdk.types import Message, Role
from rollout_service.chat.increments import (
    MARKER,
    NOTE_NAME,
    CallForm,
    Increments,
    Rendered,
    TurnFormat,
    as_rendered,
)
from rollout_service.chat.refusal import TemplateRefused, check_kept, failed, shared_length
from rollout_service.chat.template import Template

_USER: Rendered = {"role": "user", "content": "u"}
_PLAIN: Rendered = {"role": "assistant", "content": MARKER}
_REASONED: Rendered = {
    "role": "assistant", "content": "x", "reasoning_content": "r", "thinking": "r",
}  # fmt: skip
_NAME = "function-name"
_EMPTY_THOUGHT = re.compile(r"^\s*(<think>)?\s*</think>\s*")
_TRICKY = 'two\nlines, "é"'
_CONTROL_AT_END = re.compile(r"(<[^<>\s]+>|\[/?[A-Z_]+\])$")
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Looks up.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "What to look up."}},
            "required": ["query"],
        },
    },
}


def find_shape(template: Template) -> TurnFormat:
    """The shape of `template`'s turns; which mode it is has still to be proven.

    Raises:
        TemplateRefused: It fails, or rewrites what an increment would be appended to.
    """
    opening = _opening(template, [_USER], "a user message")
    end, terminator, retry = _turn_end(template, opening)
    calls = _find_calls(template, terminator)
    shape = TurnFormat(
        mode="context",
        terminator=terminator,
        call_terminator=calls.terminator,
        end=end,
        openings={"user": opening, "assistant": retry},
        call_form=calls.form,
        call_tail=calls.tail,
        call_each=calls.each,
        answers_apart=calls.apart,
        roles=frozenset({"user", "tool", "system", "assistant"}),
        tools_printed=_prints_tools(template),
        call_example=calls.example,
        turn_example=_turn_text(template, dict(_REASONED)),
        call_opening=calls.opening,
        stops=("", ""),
    )
    return _with_roles(template, shape)


def _opening(template: Template, messages: Sequence[Rendered], case: str) -> str:
    """What opens the model's turn after `messages`."""
    before = _render(template, case, messages)
    after = _render(template, case, messages, generation_prompt=True)
    check_kept(before, after, f"the generation prompt after {case}")
    return after[len(before) :]


def _turn_end(template: Template, opening: str) -> tuple[str, str, str]:
    """What ends the last turn, what ends an earlier one, what opens another turn after it."""
    conversation = [dict(_USER), dict(_PLAIN)]
    last = _render(template, "a reply", conversation)
    answered = _render(template, "a second user message", [*conversation, dict(_USER)])
    again = _render(template, "a reply", conversation, generation_prompt=True)
    end = _tail(last, "a reply")
    if answered.startswith(last):
        return end, end, _tail(again, "a reply").removeprefix(end)
    # Its last turn may end in its own way (gpt-oss): with a generation prompt it is history.
    terminator = _tail(again, "a reply").removesuffix(opening)
    following = _tail(answered, "a reply")
    if following.startswith(end):
        return end, end, _tail(again, "a reply").removeprefix(end)
    if not opening or not again.endswith(opening) or not following.startswith(terminator):
        check_kept(last, answered, "a reply and the user message after it")
    return end, terminator, opening


def _with_roles(template: Template, shape: TurnFormat) -> TurnFormat:
    """Keep the roles whose messages an increment really shows, each with its opening."""
    increments = Increments(template, shape)
    openings = dict(shape.openings)
    shown: set[Role] = set()
    for role in ("user", "tool", "system", "assistant"):
        messages = [Message(role=role, content=_TRICKY)]
        try:
            text = increments.delta(messages)
        except InvalidRequest as error:
            if role in ("user", "tool"):
                raise failed(f"a {role} message after a turn", error) from error
            continue
        if _TRICKY in text or json.dumps(_TRICKY, ensure_ascii=False) in text:
            shown.add(role)
            if role != "assistant":
                openings[role] = _opening(
                    template, increments.conversation(messages), f"a {role} message"
                )
        elif role in ("user", "tool"):
            raise TemplateRefused(
                f"the chat template drops or changes the text of a {role} message",
                value=text[:200],
                limit=_TRICKY,
                remedy="serve the model with a template that keeps it",
            )
    user, tool = (increments.delta([Message(role=r, content="x")]) for r in ("user", "tool"))
    return dataclasses.replace(
        shape,
        roles=frozenset(shown),
        openings=openings,
        stops=(shape.end or user, shape.call_terminator or tool),
    )


def _prints_tools(template: Template) -> bool:
    messages = [{"role": "system", "content": "s"}, dict(_USER)]
    text = _render(template, "a list of tools", messages, tools=[PROBE_TOOL])
    return PROBE_TOOL["function"]["name"] in text


@dataclass(frozen=True, slots=True, kw_only=True)
class _CallShape:
    """How turns with calls look; `TurnFormat` says what each field means."""

    form: CallForm | None = None
    tail: str = ""
    terminator: str
    each: bool = False
    apart: bool = False
    example: str = ""
    opening: str = ""


def _find_calls(template: Template, terminator: str) -> _CallShape:
    form = _call_form(template)
    answer = as_rendered([Message(role="tool", content="x")], form or CallForm())
    if form is None:
        prefix = [dict(_USER), dict(_PLAIN)]
        _render(template, "a tool response after a plain turn", [*prefix, *answer])
        return _CallShape(terminator=terminator)
    call = [dict(_USER), form.turn([NOTE_NAME])]
    alone = _render(template, "a tool call", call)
    tail = _tail(alone, "a tool call")
    answered = _render(template, "a tool response", [*call, *answer])
    if not _tail(answered, "a tool call").startswith(tail):
        check_kept(alone, answered, "a tool call and its response")
    both = _try(template, [dict(_USER), form.turn([NOTE_NAME] * 2)]) or ""
    both_printed = both.count(MARKER) == 2
    before, _, after = _turn_text(template, form.turn([_NAME], argument="value")).partition(_NAME)
    before = _EMPTY_THOUGHT.sub("", before)
    call_terminator = _call_terminator(terminator, tail, both)
    return _CallShape(
        form=form,
        tail=tail,
        terminator=call_terminator,
        each=both_printed and both.endswith(MARKER + tail),
        apart=not both_printed,
        example=f"{before}<{_NAME}>{after}".removesuffix(call_terminator),
        opening=before,
    )


def _call_form(template: Template) -> CallForm | None:
    """The form whose calls are printed with the least after them; None where none is."""
    found: list[tuple[int, CallForm]] = []
    for form in _forms():
        calls = [dict(_USER), form.turn([NOTE_NAME])]
        text = _try(template, calls)
        if text is None or MARKER not in text:
            continue
        if f"functions.{NOTE_NAME}:0" in text:
            again = _try(template, [*calls, dict(_USER), calls[1]]) or ""
            counted = f"functions.{NOTE_NAME}:1" in again
            form = dataclasses.replace(form, indexed_ids=True, counted_ids=counted)
        answer = as_rendered([Message(role="tool", content="x")], form)
        if _try(template, [*calls, *answer]) is not None:
            found.append((len(_tail(text, "a tool call")), form))
    return min(found, key=lambda each: each[0])[1] if found else None


def _forms() -> Iterator[CallForm]:
    """The usual first: of equals, the first is taken."""
    for long_ids in (False, True):
        for content in ("", None):
            for text_arguments in (False, True):
                yield CallForm(content=content, text_arguments=text_arguments, long_ids=long_ids)


def _turn_text(template: Template, turn: Rendered) -> str:
    """What `turn` holds, its end included."""
    text = _render(template, "a turn", [dict(_USER), turn])
    before = _render(template, "a user message", [dict(_USER)], generation_prompt=True)
    shared = shared_length(before, text)
    if shared < len(before):
        # The prompt opens what this turn does not (reasoning): not in the middle of a tag.
        shared = max(text.rfind(end, 0, shared) + 1 for end in ">]\n")
    return text[shared:]


def _call_terminator(terminator: str, tail: str, both: str) -> str:
    """What ends a turn after a call: the usual, unless the template has its own (gpt-oss)."""
    if tail.endswith(terminator) or (both and both.endswith(terminator)):
        return terminator
    own = _CONTROL_AT_END.search(tail)
    return own.group() if own is not None else terminator


def _render(template: Template, case: str, messages: Sequence[Rendered], **options: Any) -> str:
    try:
        return template.render(messages, **options)
    except InvalidRequest as error:
        raise failed(case, error) from error


def _try(template: Template, messages: Sequence[Rendered]) -> str | None:
    try:
        return template.render(messages)
    except InvalidRequest:
        return None


def _tail(text: str, case: str) -> str:
    """What follows the last marker."""
    before, marker, after = text.rpartition(MARKER)
    if not marker:
        raise TemplateRefused(
            f"the chat template drops the text of {case}",
            value=before[-80:],
            remedy="serve the model with a template that keeps it",
        )
    return after
