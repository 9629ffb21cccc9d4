"""Tool calls in a sampled turn, Hermes and Qwen style: `<tool_call>{json}</tool_call>`.

A bad call is data that names its fault; nothing here raises on what a model wrote.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from harness_sdk.types import ToolCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"
_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    """What a turn says, taken apart."""

    text: str
    """Without reasoning and calls."""
    reasoning: str
    tool_calls: tuple[ToolCall, ...]


def parse_reply(raw: str, *, step: int) -> ParsedReply:
    """Split a turn into reasoning, text and calls.

    Args:
        raw: Everything sampled, without the stop token.
        step: The turn's step; part of each call's id.
    """
    reasoning, answer = _split_reasoning(raw)
    calls: list[ToolCall] = []
    text: list[str] = []
    position = 0
    while (start := answer.find(_OPEN, position)) >= 0:
        text.append(answer[position:start])
        call, position = _parse_call(answer, start + len(_OPEN), f"call_{step}_{len(calls)}")
        calls.append(call)
    text.append(answer[position:])
    return ParsedReply(
        text="".join(text).strip(), reasoning=reasoning.strip(), tool_calls=tuple(calls)
    )


def _split_reasoning(raw: str) -> tuple[str, str]:
    before, close, after = raw.partition(_THINK_CLOSE)
    if close:
        return before.replace(_THINK_OPEN, "", 1), after
    # Reasoning that never ended: nothing in it counts as a call.
    head, opened, thought = raw.partition(_THINK_OPEN)
    return (thought, head) if opened else ("", raw)


def _parse_call(text: str, start: int, call_id: str) -> tuple[ToolCall, int]:
    """The call whose body begins at `start`, and where the text after it begins."""
    begin = _skip_space(text, start)
    try:
        body, end = _DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", "nested too deeply")
        return _bad(call_id, f"the call is no valid JSON: {reason}"), _after_call(text, start)
    end = _skip_space(text, end)
    if not (text.startswith(_CLOSE, end) or text.startswith(_OPEN, end) or end == len(text)):
        fault = f"text stands between the call's JSON and {_CLOSE}"
        return _bad(call_id, fault), _after_call(text, end)
    if text.startswith(_CLOSE, end):
        end += len(_CLOSE)
    return _call_from_json(body, call_id), end


def _call_from_json(body: Any, call_id: str) -> ToolCall:
    if not isinstance(body, dict):
        return _bad(call_id, "the call is no JSON object")
    name = body.get("name")
    if not isinstance(name, str) or not name.strip():
        return _bad(call_id, 'the call has no "name"')
    name = name.strip().encode("utf-8", "replace").decode()
    arguments = body.get("arguments")
    if isinstance(arguments, str):
        # Some models write the object once more as a string.
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return _bad(call_id, '"arguments" is no JSON object', name)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return _bad(call_id, '"arguments" is no JSON object', name)
    try:
        json.dumps(arguments, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return _bad(call_id, '"arguments" hold half of a surrogate pair', name)
    return ToolCall(call_id=call_id, name=name, arguments=arguments)


def _bad(call_id: str, fault: str, name: str = "") -> ToolCall:
    form = f'write {_OPEN}{{"name": ..., "arguments": {{...}}}}{_CLOSE}'
    return ToolCall(call_id=call_id, name=name, arguments={}, error=f"{fault}; {form}")


def _after_call(text: str, start: int) -> int:
    close, following = text.find(_CLOSE, start), text.find(_OPEN, start)
    if close >= 0 and (following < 0 or close < following):
        return close + len(_CLOSE)
    return following if following >= 0 else len(text)


def _skip_space(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    return match.end() if match is not None else start
