"""Calls out of whole replies, family by family: good ones whole, bad ones with their fault."""

from __future__ import annotations

from typing import Any

import pytest

from harness_sdk.types import ToolCall
from rollout_service.chat.calls import FAMILIES, ParsedReply, opens_reasoning, parse_reply
from tests.call_cases import BROKEN, WRITERS

ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"q": "a"},
    {"q": 'quotes " and \\ and\nlines', "empty": "", "spaces": "  x  "},
    {"deep": {"a": [1, {"b": None}], "c": {}}, "list": [], "n": -1.5, "i": 3, "yes": True},
    {"q": "漢字 é 🦑", "キー": "値"},
    {"q": "</tool_call>"},
    {"q": "<|tool_call_end|> <｜tool▁call▁end｜> <|end|> <|call|> ``` [TOOL_CALLS] ]"},
    {"q": "{not json"},
]
SCHEMA = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {
                "q": {"type": "string"},
                "n": {"type": "number"},
                "i": {"type": "integer"},
                "yes": {"type": "boolean"},
            },
        },
    },
}
TO_THE_END = ("cut off", "before its", "too deeply", "no <|message|>", "neither JSON", "KEY=")
"""In faults of calls that the end of the reply ends."""
FORMS = pytest.mark.parametrize("form", WRITERS)


def parse(family: str, raw: str, **options: Any) -> ParsedReply:
    return parse_reply(raw, family=family, step=3, tools=[SCHEMA], **options)


def told(calls: tuple[ToolCall, ...]) -> list[tuple[str, dict[str, Any], str]]:
    return [(call.name, dict(call.arguments), call.error) for call in calls]


@FORMS
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_arguments_are_read_as_written(form: str, arguments: dict[str, Any]) -> None:
    family, write = WRITERS[form]
    parsed = parse(family, write("look", arguments))
    assert told(parsed.tool_calls) == [("look", arguments, "")]
    assert (parsed.text, parsed.reasoning) == ("", "")


@FORMS
def test_several_calls_are_numbered_in_order(form: str) -> None:
    family, write = WRITERS[form]
    raw = write("look", {"q": "a"}) + write("wait", {}) + write("look", {"q": "b"})
    calls = parse(family, raw).tool_calls
    assert told(calls) == [("look", {"q": "a"}, ""), ("wait", {}, ""), ("look", {"q": "b"}, "")]
    # The model's own, where it wrote any: here the first alone, for the rest are taken.
    own = {"mistral": ["123456789"], "kimi_k2": ["functions.look:0", "functions.wait:0"]}
    ids = own.get(form, [])
    ids += [f"call_3_{index}" for index in range(len(ids), 3)]
    assert [call.call_id for call in calls] == ids


@pytest.mark.parametrize(
    ("family", "raw", "call_id"),
    [
        ("mistral", '[TOOL_CALLS]look[CALL_ID]abcDEF123[ARGS]{"q": 1}', "abcDEF123"),
        ("mistral", '[TOOL_CALLS]look[CALL_ID]abc[ARGS]{"q": 1}', "call_3_0"),
        ("mistral", '[TOOL_CALLS][{"id": "a-b-c-d-e", "name": "look"}]', "call_3_0"),
        ("mistral", '[TOOL_CALLS][{"id": 123456789, "name": "look"}]', "call_3_0"),
        ("kimi_k2", "functions.look:12", "functions.look:12"),
        ("kimi_k2", " functions.look:12 ", "functions.look:12"),
        ("kimi_k2", "look:12", "call_3_0"),
        ("kimi_k2", "functions.look:12345678", "call_3_0"),
        ("hermes", '<tool_call>{"id": "123456789", "name": "look"}</tool_call>', "call_3_0"),
        ("granite", '<|tool_call|>[{"id": "123456789", "name": "look"}]', "call_3_0"),
    ],
)
def test_id_that_the_family_writes_is_kept_where_no_other_call_has_it(
    family: str, raw: str, call_id: str
) -> None:
    if family == "kimi_k2":
        raw = f"<|tool_call_begin|>{raw}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    (call,) = parse(family, raw).tool_calls
    assert (call.name, call.call_id, call.error) == ("look", call_id, "")
    (again,) = parse(family, raw, taken={call_id}).tool_calls
    assert again.call_id == "call_3_0"


@pytest.mark.parametrize("form", [form for form in WRITERS if form != "harmony"])
def test_text_and_reasoning_stand_beside_a_call(form: str) -> None:
    family, write = WRITERS[form]
    call = write("look", {"q": "a"})
    parsed = parse(family, f"<think>\nfirst {call}\n</think>\n\nI look.\n{call}")
    assert parsed.text == "I look."
    assert parsed.reasoning == f"first {call}".strip()
    assert told(parsed.tool_calls) == [("look", {"q": "a"}, "")]


@pytest.mark.parametrize("form", [form for form in WRITERS if form != "harmony"])
def test_reasoning_that_never_ends_holds_no_calls(form: str) -> None:
    family, write = WRITERS[form]
    call = write("look", {"q": "a"})
    opened = parse(family, f"so <think>hm {call}")
    assert (opened.text, opened.tool_calls) == ("so", ())
    assert opened.reasoning == f"hm {call}".strip()
    begun = parse(family, f"hm {call}", in_reasoning=True)
    assert begun == ParsedReply(text="", reasoning=f"hm {call}".strip(), tool_calls=())


@pytest.mark.parametrize("form", [form for form in WRITERS if form != "harmony"])
def test_reasoning_that_the_prompt_opened_ends_at_its_tag(form: str) -> None:
    family, write = WRITERS[form]
    call = write("look", {"q": "a"})
    for begin in ("", "<think>\n"):
        parsed = parse(family, f"{begin}hm {call}</think>ok {call} </think>", in_reasoning=True)
        assert parsed.reasoning == f"hm {call}".strip()
        assert parsed.text.startswith("ok") and parsed.text.endswith("</think>")
        # A bare JSON object is a call at the beginning of a line only.
        assert len(parsed.tool_calls) == 1


@pytest.mark.parametrize("form", [form for form in WRITERS if form != "harmony"])
def test_reasoning_without_a_beginning_holds_no_calls_either(form: str) -> None:
    family, write = WRITERS[form]
    call = write("look", {"q": "a"})
    parsed = parse(family, f"hm {call}</think>{call}")
    assert parsed.reasoning == f"hm {call}".strip()
    assert told(parsed.tool_calls) == [("look", {"q": "a"}, "")]
    assert parsed.text == ""


def test_channels_of_harmony_are_reasoning_text_and_calls() -> None:
    raw = (
        "<|channel|>analysis<|message|>maybe to=functions.look {}<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant to=functions.look<|channel|>commentary json<|message|>"
    )
    parsed = parse("harmony", f'{raw}{{"q": "a"}}<|call|>')
    assert (parsed.reasoning, parsed.text) == ("maybe to=functions.look {}", "I look.")
    assert told(parsed.tool_calls) == [("look", {"q": "a"}, "")]
    # The stop token, which the text does not hold, ends a call without arguments.
    assert told(parse("harmony", raw).tool_calls) == [("look", {}, "")]
    body = parse("harmony", f"hm<|end|><|start|>assistant{raw}", in_reasoning=True)
    assert body.reasoning == "hm\nmaybe to=functions.look {}"
    cut = parse("harmony", "<|channel|>analysis<|message|>to=functions.look<|message|>{}")
    assert (cut.text, cut.tool_calls) == ("", ())
    assert parse("harmony", "plain").text == "plain"
    assert parse("harmony", "a<|end|><|start|>assistant").text == "a"


@pytest.mark.parametrize(("family", "raw", "fault"), BROKEN)
def test_a_bad_call_names_its_fault_and_the_form(family: str, raw: str, fault: str) -> None:
    (call,) = parse(family, raw).tool_calls
    assert fault in call.error
    assert call.arguments == {}
    form = call.error.partition("; write ")[2]
    as_asked = form.replace("{...}", "{}").replace("...", '"look"')
    as_asked = as_asked.replace("NAME", "look").replace("KEY", "q").replace("VALUE", "a")
    (good,) = parse(family, as_asked).tool_calls
    assert (good.name, good.error) == ("look", ""), "the form itself is a good call"


@pytest.mark.parametrize(
    ("family", "raw", "fault"),
    [
        (family, raw, fault)
        for family, raw, fault in BROKEN
        if not any(part in fault for part in TO_THE_END)
    ],
)
def test_the_call_behind_a_bad_one_is_read(family: str, raw: str, fault: str) -> None:
    write = next(write for known, write in WRITERS.values() if known == family)
    calls = parse(family, f"{raw}{write('look', {'q': 'b'})}").tool_calls
    assert fault in calls[0].error
    assert (calls[-1].name, calls[-1].arguments, calls[-1].error) == ("look", {"q": "b"}, "")
    assert len(calls) == 2


def test_a_lost_quote_does_not_swallow_the_next_call() -> None:
    good = '<tool_call>{"name": "wait"}</tool_call>'
    bad, after = parse("hermes", f'<tool_call>{{"name": "don</tool_call>{good}').tool_calls
    assert bad.error and not bad.name
    assert (after.name, after.error) == ("wait", "")


def test_arguments_written_as_a_string_are_read() -> None:
    body = '{"name": "look", "arguments": "{\\"q\\": 1}"}'
    assert parse("hermes", f"<tool_call>{body}").tool_calls[0].arguments == {"q": 1}
    (call,) = parse("harmony", ' to=functions.look<|message|>"{\\"q\\": 1}"').tool_calls
    assert call.arguments == {"q": 1}


def test_a_list_cut_off_keeps_its_whole_calls() -> None:
    for family, marker in (("mistral", "[TOOL_CALLS]"), ("granite", "<|tool_call|>")):
        raw = f'{marker}[{{"name": "look", "arguments": {{}}}}, {{"name": "wait", "ar'
        first, second = parse(family, raw).tool_calls
        assert (first.name, first.error) == ("look", "")
        assert (second.name, second.call_id) == ("wait", "call_3_1")
        assert "cut off" in second.error


def test_json_in_the_text_of_llama_is_no_call() -> None:
    for raw in (
        '{"name": "Ada", "age": 36}',
        '{"answer": 3}',
        'as {"name": "look", "parameters": {}}',
        "if (x) {\n{ y }\n}",
        '{"na',
    ):
        parsed = parse("llama_json", raw)
        assert (parsed.text, parsed.tool_calls) == (raw, ())
    (known,) = parse("llama_json", '{"name": "look"}').tool_calls
    assert (known.name, known.call_id) == ("look", "call_3_0")
    raw = '{"name": "Ada"}\n{"name": "look", "parameters": {}}; {"name": "look"}'
    parsed = parse("llama_json", raw)
    assert [call.call_id for call in parsed.tool_calls] == ["call_3_0", "call_3_1"]
    assert parsed.text == '{"name": "Ada"}'


def test_built_in_calls_of_llama_are_read() -> None:
    (call,) = parse("llama_json", '<|python_tag|>web.call(query="a, b=", n="3")').tool_calls
    assert told((call,)) == [("web", {"query": "a, b=", "n": "3"}, "")]


def test_brackets_in_the_text_of_pythonic_calls_are_none() -> None:
    for raw in (
        "[1, 2]",
        "[main()](docs/main.md)",
        "[see(the notes)]",
        "as [look(q=1)]",
        "[x(y) for y in z]",
        "[loo",
        "[wait(",
    ):
        parsed = parse("pythonic", raw)
        assert (parsed.text, parsed.tool_calls) == (raw, ())
    for raw in ("[wait()]", "[wait()]\n", "[ wait ( ) , look(q='a')]"):
        assert parse("pythonic", raw).tool_calls[0].name == "wait"


def test_pythonic_calls_stand_between_tags_too() -> None:
    parsed = parse("pythonic", "I look.<|python_start|>[look(q='a'), wait()]<|python_end|>")
    assert told(parsed.tool_calls) == [("look", {"q": "a"}, ""), ("wait", {}, "")]
    assert parsed.text == "I look."
    official = '<|python_start|>{"name": "look", "parameters": {"q": "a"}}<|python_end|>'
    assert told(parse("llama_json", official).tool_calls) == [("look", {"q": "a"}, "")]


def test_quoted_values_of_pythonic_calls_have_the_types_of_the_schema() -> None:
    (call,) = parse("pythonic", '[look(q="3", n="3", i="4.0", yes="true", other="3")]').tool_calls
    assert call.arguments == {"q": "3", "n": 3, "i": 4, "yes": True, "other": "3"}


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("true", True),
        ("null", None),
        ("(1, 2)", [1, 2]),
        ("(1)", 1),
        ("(1,)", [1]),
        ("()", []),
        ("[1, 2,]", [1, 2]),
        ("+1_000", 1000),
        (".5e3", 500.0),
        ("007", 7),
        ("'two\nlines'", "two\nlines"),
        (
            r"'a\d\w \x41\u00e9\101\
b'",
            "a\\d\\w A\u00e9Ab",
        ),
        (r"'\ud83e\udd91'", "🦑"),
        ('"""say "so" or \'so\' """', "say \"so\" or 'so' "),
        ("''", ""),
    ],
)
def test_values_of_pythonic_calls(written: str, value: object) -> None:
    (call,) = parse("pythonic", f"[look(q={written})]").tool_calls
    assert (call.arguments, call.error) == ({"q": value}, "")


def test_dsml_values_are_what_their_attribute_says() -> None:
    parameters = "".join(
        f'<｜DSML｜parameter name="{name}"{kind}>3</｜DSML｜parameter>'
        for name, kind in (("q", ' string="false"'), ("n", ' string="true"'), ("i", ""), ("a", ""))
    )
    (call,) = parse("dsml", f'<｜DSML｜invoke name="look">{parameters}</｜DSML｜invoke>').tool_calls
    assert call.arguments == {"q": 3, "n": "3", "i": 3, "a": 3}


def test_qwen_calls_without_the_outer_tag_are_read() -> None:
    raw = "Hm <function=look>\n<parameter=q>\n3\n</parameter>\n</function></tool_call> so"
    parsed = parse("qwen_xml", raw)
    assert told(parsed.tool_calls) == [("look", {"q": "3"}, "")]
    assert parsed.text == "Hm  so"


def test_closing_tags_inside_untyped_values_do_not_end_them() -> None:
    xml = "see </parameter> and </function> and </tool_call>"
    pairs = "see </arg_value> and </tool_call>"
    tags = "see </｜DSML｜parameter> and </｜DSML｜invoke>"
    for form, value in (("qwen_xml", xml), ("glm", pairs), ("dsml", tags)):
        family, write = WRITERS[form]
        assert parse(family, write("look", {"q": value})).tool_calls[0].arguments == {"q": value}


def test_half_a_surrogate_pair_in_the_reply_becomes_text_that_can_be_sent() -> None:
    for family in FAMILIES:
        parsed = parse(family, "a\ud800<think>\udfff</think>")
        (parsed.text + parsed.reasoning).encode()


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(ValueError, match="no family 'x' of tool calls; one of harmony"):
        parse("x", "")


def test_a_prompt_opens_reasoning_where_its_last_tag_does() -> None:
    assert opens_reasoning("<|im_start|>assistant\n<think>\n", family="qwen_xml")
    assert not opens_reasoning("<think>\n\n</think>\n\n", family="qwen_xml")
    assert not opens_reasoning("<|im_start|>assistant\n", family="hermes")
    assert opens_reasoning("[/INST][THINK]", family="mistral")
    analysis = "<|start|>assistant<|channel|>analysis<|message|>"
    assert opens_reasoning(analysis, family="harmony")
    assert not opens_reasoning("<|start|>assistant", family="harmony")
