"""Calls out of sampled text: good ones whole, bad ones with their fault."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.chat.hermes import parse_reply


def test_text_reasoning_and_calls_are_told_apart() -> None:
    raw = (
        "<think>\nfirst <tool_call>{}</tool_call>\n</think>\n\nI look it up.\n"
        '<tool_call>\n{"name": "search", "arguments": {"query": "a"}}\n</tool_call>\n'
        '<tool_call>{"name": "wait"}</tool_call> bye'
    )
    parsed = parse_reply(raw, step=3)
    assert parsed.reasoning == "first <tool_call>{}</tool_call>"
    assert parsed.text == "I look it up.\n\n bye"
    first, second = parsed.tool_calls
    assert (first.call_id, first.name, first.arguments) == ("call_3_0", "search", {"query": "a"})
    assert (second.call_id, second.name, second.arguments) == ("call_3_1", "wait", {})
    assert not first.error and not second.error


def test_the_closing_tag_inside_a_string_does_not_end_the_call() -> None:
    body = json.dumps({"name": "done", "arguments": {"answer": "</tool_call> x"}})
    parsed = parse_reply(f"<tool_call>{body}</tool_call>", step=1)
    assert parsed.tool_calls[0].arguments == {"answer": "</tool_call> x"}
    assert parsed.text == ""


def test_arguments_written_as_a_string_are_read() -> None:
    body = json.dumps({"name": "done", "arguments": json.dumps({"answer": 1})})
    assert parse_reply(f"<tool_call>{body}", step=1).tool_calls[0].arguments == {"answer": 1}


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ('{"name": "done"', "no valid JSON"),
        ("", "no valid JSON"),
        ("[1]", "no JSON object"),
        ('{"arguments": {}}', 'no "name"'),
        ('{"name": " "}', 'no "name"'),
        ('{"name": "done", "arguments": [1]}', '"arguments" is no JSON object'),
        ('{"name": "done", "arguments": "x"}', '"arguments" is no JSON object'),
        ('{"name": "done"} and more', "text stands between"),
        ('{"name": "a", "arguments": {"x": "\\ud800"}}', "surrogate"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_bad_call_names_its_fault_and_the_form(body: str, fault: str) -> None:
    good = '<tool_call>{"name": "wait"}</tool_call>'
    parsed = parse_reply(f"<tool_call>{body}</tool_call>{good}", step=1)
    bad, after = parsed.tool_calls
    assert fault in bad.error
    assert '{"name": ..., "arguments": {...}}' in bad.error
    assert bad.arguments == {}
    assert after.name == "wait" and not after.error, "the next call is read all the same"


def test_a_call_cut_by_length_names_its_fault() -> None:
    (call,) = parse_reply('x <tool_call>{"name": "don', step=1).tool_calls
    assert "no valid JSON" in call.error


def test_unfinished_reasoning_holds_no_calls() -> None:
    parsed = parse_reply('<think>hm <tool_call>{"name": "wait"}</tool_call>', step=1)
    assert parsed.tool_calls == () and parsed.text == ""
    assert parsed.reasoning.startswith("hm")


@given(st.text(alphabet='<>/_tolcalthink{}[]":, \\u0da\ud7ff', max_size=80))
def test_any_text_parses(raw: str) -> None:
    for call in parse_reply(f"<tool_call>{raw}", step=1).tool_calls:
        assert call.error or call.name
