"""Replies read piece by piece: the same however they are cut, and each piece as early as it can."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness_sdk.deltas import (
    AllWasReasoning,
    CallArguments,
    CallBegun,
    CallFinished,
    ReasoningDelta,
    ReplyEvent,
    TextDelta,
)
from rollout_service.chat.calls import FAMILIES, ParsedReply, ReplyStream, parse_reply
from tests.call_cases import BROKEN, WRITERS

_JSON = [
    '{"name": "look", "arguments": {"q": ',
    '"',
    "\\",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    '"a"',
    "1",
]
_MARKERS = {
    "hermes": ["<tool_call>", "</tool_call>"],
    "qwen_xml": [
        *("<tool_call>", "</tool_call>", "<function=look>", "</function>", "<parameter=q>"),
        *("<parameter=", ">", "</parameter>"),
    ],
    "llama_json": ["<|python_tag|>", ";", 'look.call(q="a")', '{"name": "look"}', '"parameters"'],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "look"],
    "deepseek": [
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "```"),
        *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "function", "look", "```json"),
    ],
    "glm": [
        *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>"),
        *("</arg_value>", "look"),
    ],
    "harmony": [
        *("<|channel|>", "analysis", "commentary", "final", " to=functions.look", "<|message|>"),
        *("<|end|>", "<|call|>", "<|return|>", "<|start|>", "assistant"),
    ],
    "granite": ["<|tool_call|>", "<tool_call>", "</tool_call>", "<response>", "</response>"],
    "kimi_k2": [
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
        *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "functions.look:0"),
    ],
    "pythonic": [
        *("<|python_start|>", "<|python_end|>", "[look(", "(", ")", "q=", "'", '"""', "True", "-"),
        *("\n[", "look", "\\'", "{'a': "),
    ],
    "dsml": [
        *(
            "<｜DSML｜function_calls>",
            "</｜DSML｜function_calls>",
            "<｜DSML｜invoke",
            ' name="look">',
        ),
        *("</｜DSML｜invoke>", "<｜DSML｜parameter", ' name="q" string="true">', ">"),
        *("</｜DSML｜parameter>", '<｜DSML｜invoke name="look">', "</｜DSML｜tool_calls>"),
    ],
}


def replies(family: str) -> st.SearchStrategy[str]:
    """Good calls, bad calls, their markers and pieces of them, and any text, in any order."""
    written = [
        write("look", arguments)
        for known, write in WRITERS.values()
        for arguments in ({}, {"q": "é</tool_call>"})
        if known == family
    ]
    pieces = st.one_of(
        st.sampled_from(["<think>", "</think>", "\n", " ", *_MARKERS[family]]),
        st.sampled_from(_JSON),
        st.sampled_from(written + [raw for known, raw, _ in BROKEN if known == family]).filter(
            lambda raw: len(raw) < 1000
        ),
        st.text(alphabet='<>|/_tolcal"{}[]é漢 \n\ud800', max_size=6),
    )
    # Cut pieces are what a model that is stopped leaves.
    cut = st.builds(lambda piece, size: piece[:size], pieces, st.integers(1, 40))
    return st.lists(st.one_of(pieces, cut), max_size=12).map("".join)


def read(family: str, pieces: Iterable[str], *, in_reasoning: bool = False) -> list[ReplyEvent]:
    stream = ReplyStream(family, 1, in_reasoning=in_reasoning)
    events = [event for piece in pieces for event in stream.push(piece)]
    return events + stream.finish()


def cut_at(raw: str, cuts: Iterable[int]) -> list[str]:
    places = sorted({0, len(raw), *(cut % (len(raw) + 1) for cut in cuts)})
    return [raw[a:b] for a, b in itertools.pairwise(places)]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60)
@given(
    data=st.data(), cuts=st.lists(st.integers(0, 10_000), max_size=8), in_reasoning=st.booleans()
)
def test_events_add_up_to_the_whole_reply_however_it_is_cut(
    family: str, data: st.DataObject, cuts: list[int], in_reasoning: bool
) -> None:
    raw = data.draw(replies(family))
    whole = parse_reply(raw, family=family, step=1, in_reasoning=in_reasoning)
    told = arguments_told(read(family, [raw], in_reasoning=in_reasoning))
    for pieces in (cut_at(raw, cuts), list(raw)):
        events = read(family, pieces, in_reasoning=in_reasoning)
        assert ParsedReply.of(events) == whole
        assert_each_call_begins_before_it_ends(events, raw)
        assert arguments_told(events) == told
    for call, text in zip(whole.tool_calls, told[len(told) - len(whole.tool_calls) :], strict=True):
        assert call.error or isinstance(json.loads(text), dict)
    assert whole.text == whole.text.strip() and whole.reasoning == whole.reasoning.strip()
    (whole.text + whole.reasoning + "".join(call.error for call in whole.tool_calls)).encode()
    assert all(call.error or call.name for call in whole.tool_calls)


def arguments_told(events: Iterable[ReplyEvent]) -> list[str]:
    """What was told of the arguments of each call, void ones too."""
    told: list[str] = []
    for event in events:
        if isinstance(event, CallBegun):
            told.append("")
        elif isinstance(event, CallArguments):
            told[-1] += event.text
    return told


def assert_each_call_begins_before_it_ends(events: list[ReplyEvent], raw: str) -> None:
    begun: CallBegun | None = None
    given: list[str] = []
    number = 0
    for event in events:
        match event:
            case CallBegun():
                assert begun is None
                begun, number = event, number + 1
            case CallFinished():
                assert begun is not None
                assert event.call.name == begun.name
                own = f"call_1_{number - 1}"
                assert event.call.call_id == own or event.call.call_id in raw
                given.append(event.call.call_id)
                begun = None
            case AllWasReasoning():
                assert begun is None
                number, given = 0, []
            case CallArguments():
                assert event.text and begun is not None
            case TextDelta() | ReasoningDelta():
                assert event.text and begun is None
    assert begun is None and len(given) == len(set(given))


@pytest.mark.parametrize("form", WRITERS)
def test_a_call_begins_before_its_arguments_and_ends_with_its_last_character(form: str) -> None:
    family, write = WRITERS[form]
    written = write("look", {"q": "abc"})
    stream = ReplyStream(family, 1)
    before, argument, after = written.partition("abc")
    events = stream.push(before)
    assert isinstance(events[0], CallBegun) and len(events) <= 2
    assert all(isinstance(event, CallArguments) for event in [*events[1:], *stream.push(argument)])
    events = stream.push(after) or stream.finish()
    assert isinstance(events[-1], CallFinished)


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize("arguments", [{}, {"q": 'a "b" {é}\n'}, {"q": [1, {"a": None}], "n": 2.5}])
def test_arguments_are_told_as_json_while_they_come(form: str, arguments: dict[str, Any]) -> None:
    family, write = WRITERS[form]
    events = read(family, list(write("look", arguments) + write("look", arguments)))
    assert [json.loads(text) for text in arguments_told(events)] == [arguments] * 2


@pytest.mark.parametrize(
    "form",
    ["hermes", "llama_json", "mistral", "mistral, by name", "deepseek", "harmony", "kimi_k2"],
)
def test_arguments_written_as_json_are_told_character_by_character(form: str) -> None:
    family, write = WRITERS[form]
    before, argument, _ = write("look", {"q": "abcdef"}).partition("abcdef")
    stream = ReplyStream(family, 1)
    stream.push(before)
    assert [stream.push(character) for character in argument] == [
        [CallArguments(text=character)] for character in argument
    ]


def test_arguments_that_stand_before_the_name_are_told_at_the_end() -> None:
    for raw in (
        '<tool_call>{"arguments": {"q": 1}, "name": "look"}</tool_call>',
        '<tool_call>{"name": "look", "arguments": "{\\"q\\": 1}"}</tool_call>',
        '<tool_call>{"function": {"name": "look", "arguments": {"q": 1}}}</tool_call>',
    ):
        assert arguments_told(read("hermes", list(raw))) == ['{"q": 1}']


def test_text_is_given_out_but_for_what_may_become_a_marker() -> None:
    stream = ReplyStream("hermes", 1)
    assert stream.push("  I look ") == [TextDelta(text="I look")]
    assert stream.push("up <tool") == [TextDelta(text=" up")]
    assert stream.push("box> <think") == [TextDelta(text=" <toolbox>")]
    assert stream.push("> so") == [ReasoningDelta(text="so")]
    assert stream.push(" it </thin") == [ReasoningDelta(text=" it")]
    assert stream.push("k>b") == [TextDelta(text=" b")]
    assert stream.finish() == []


def test_reasoning_without_a_beginning_takes_back_what_was_given_out() -> None:
    stream = ReplyStream("hermes", 1)
    raw = 'hm\n<tool_call>{"name": "look"}</tool_call>\n'
    assert len(stream.push(raw)) == 4
    assert stream.push("</think>\n\nso") == [
        AllWasReasoning(reasoning=raw.strip()),
        TextDelta(text="so"),
    ]


@pytest.mark.parametrize(
    ("family", "opening", "repeated"),
    [
        ("hermes", "", "<tool_call>"),
        ("hermes", "", '<tool_call>{"a": "'),
        ("hermes", '<tool_call>{"name": "look", "arguments": {"q": "', "</tool_call> "),
        ("hermes", '<tool_call>{"name": "look", "arguments": {"q": "', '\\"'),
        ("hermes", "", "word "),
        ("hermes", "", "\n"),
        ("qwen_xml", "<tool_call><function=look><parameter=q>", "</parameter> "),
        ("qwen_xml", "<tool_call><function=look><parameter=q>", "</function>\n"),
        ("qwen_xml", "<tool_call><function=look><parameter=q></parameter>", "\n"),
        ("qwen_xml", "<tool_call><function=", "look"),
        ("glm", "<tool_call>look<arg_key>q</arg_key><arg_value>", "</arg_value>x"),
        ("llama_json", "", '{"name": 1\n'),
        ("llama_json", "", "{ "),
        ("mistral", "[TOOL_CALLS][", '{"name": "look"},'),
        ("deepseek", "", "<｜tool▁call▁begin｜>look<｜tool▁sep｜>{"),
        ("harmony", "", "<|start|>assistant to=functions.look<|message|>"),
        ("kimi_k2", "", "<|tool_call_begin|>look:0"),
        ("pythonic", "", "[look("),
        ("pythonic", "", "\n[a"),
        ("pythonic", "[look(q='", "\\'"),
        ("pythonic", '[look(q="""', '""\\'),
        ("pythonic", "[look(q=[", "1, "),
        ("pythonic", "[", "look(q=1), "),
        (
            "dsml",
            '<｜DSML｜invoke name="look"><｜DSML｜parameter name="q">',
            "</｜DSML｜parameter>x",
        ),
        ("dsml", "", '<｜DSML｜invoke name="look">'),
    ],
)
def test_time_grows_no_faster_than_the_reply(family: str, opening: str, repeated: str) -> None:
    raw = opening + repeated * (20_000 // len(repeated))
    started = time.process_time()
    events = read(family, [raw[i : i + 4] for i in range(0, len(raw), 4)])
    assert ParsedReply.of(events) == parse_reply(raw, family=family, step=1)
    # About 0.1 s; a quadratic reader needs ten seconds and more.
    assert time.process_time() - started < 5
