"""How each family writes a call, and the ways in which its calls go wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

Arguments = Mapping[str, Any]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _hermes(name: str, arguments: Arguments) -> str:
    return f"<tool_call>\n{_json({'name': name, 'arguments': arguments})}\n</tool_call>"


def _qwen_xml(name: str, arguments: Arguments) -> str:
    values = "".join(
        f"<parameter={key}>\n{_json(v) if isinstance(v, list | dict) else v}\n</parameter>\n"
        for key, v in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def _llama_json(name: str, arguments: Arguments) -> str:
    return f"\n{_json({'name': name, 'parameters': arguments})}\n"


def _mistral_list(name: str, arguments: Arguments) -> str:
    return f"[TOOL_CALLS] [{_json({'name': name, 'arguments': arguments, 'id': '123456789'})}]"


def _mistral_name(name: str, arguments: Arguments) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}"


def _deepseek_typed(name: str, arguments: Arguments) -> str:
    return (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n"
        f"```json\n{_json(arguments)}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )


def _deepseek_named(name: str, arguments: Arguments) -> str:
    return (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(arguments)}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )


def _glm(name: str, arguments: Arguments) -> str:
    pairs = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        for key, value in _as_glm_writes(arguments).items()
    )
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def _as_glm_writes(arguments: Arguments) -> dict[str, str]:
    return {key: v if isinstance(v, str) else _json(v) for key, v in arguments.items()}


def _harmony(name: str, arguments: Arguments) -> str:
    return (
        f"<|channel|>commentary to=functions.{name} <|constrain|>json"
        f"<|message|>{_json(arguments)}<|call|><|start|>assistant"
    )


def _granite(name: str, arguments: Arguments) -> str:
    return f"<|tool_call|>[{_json({'name': name, 'arguments': arguments})}]"


def _kimi_k2(name: str, arguments: Arguments) -> str:
    return (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0"
        f"<|tool_call_argument_begin|>{_json(arguments)}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    )


def _pythonic(name: str, arguments: Arguments) -> str:
    values = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return f"\n[{name}({values})]\n"


def _dsml(name: str, arguments: Arguments, section: str = "function_calls") -> str:
    values = "".join(
        f'<｜DSML｜parameter name="{key}" string="{str(isinstance(v, str)).lower()}">'
        f"{v if isinstance(v, str) else _json(v)}</｜DSML｜parameter>\n"
        for key, v in arguments.items()
    )
    return (
        f'<｜DSML｜{section}>\n<｜DSML｜invoke name="{name}">\n{values}</｜DSML｜invoke>\n'
        f"</｜DSML｜{section}>"
    )


def _dsml_4(name: str, arguments: Arguments) -> str:
    return _dsml(name, arguments, "tool_calls")


WRITERS: dict[str, tuple[str, Callable[[str, Arguments], str]]] = {
    "hermes": ("hermes", _hermes),
    "qwen_xml": ("qwen_xml", _qwen_xml),
    "llama_json": ("llama_json", _llama_json),
    "mistral": ("mistral", _mistral_list),
    "mistral, by name": ("mistral", _mistral_name),
    "deepseek": ("deepseek", _deepseek_named),
    "deepseek, with types": ("deepseek", _deepseek_typed),
    "glm": ("glm", _glm),
    "harmony": ("harmony", _harmony),
    "granite": ("granite", _granite),
    "granite 4": ("granite", _hermes),
    "kimi_k2": ("kimi_k2", _kimi_k2),
    "pythonic": ("pythonic", _pythonic),
    "dsml": ("dsml", _dsml),
    "dsml, of V4": ("dsml", _dsml_4),
}
"""Form to its family, and a call written in it."""

_SEP = "<｜tool▁call▁begin｜>"
_INVOKE = '<｜DSML｜invoke name="look">'

BROKEN: list[tuple[str, str, str]] = [
    ("hermes", '<tool_call>{"name": "look"', "cut off inside its JSON"),
    ("hermes", "<tool_call>", "cut off before its JSON"),
    ("hermes", "<tool_call></tool_call>", "no JSON object"),
    ("hermes", "<tool_call>[1]</tool_call>", "no JSON object"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'no "name"'),
    ("hermes", '<tool_call>{"name": " "}</tool_call>', 'no "name"'),
    ("hermes", '<tool_call>{"name": 1}</tool_call>', 'no "name"'),
    ("hermes", '<tool_call>{"name": "a", "name": "b"}</tool_call>', "two names"),
    ("hermes", '<tool_call>{"name": "a", "arguments": [1]}</tool_call>', '"arguments" is no JSON'),
    ("hermes", '<tool_call>{"name": "a", "arguments": "x"}</tool_call>', '"arguments" is no JSON'),
    ("hermes", '<tool_call>{"name": "a", "q": "x"}</tool_call>', "has q instead"),
    ("hermes", '<tool_call>{"name": "a"} more</tool_call>', "text stands between"),
    ("hermes", '<tool_call>{"name": "a" "x"}</tool_call>', "delimiter at character 13"),
    ("hermes", '<tool_call>{"name": "a"]</tool_call>', "']' at character 12"),
    ("hermes", '<tool_call>{"a": "\n"}</tool_call>', "control character"),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', "'N'"),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": "\\ud800"}}</tool_call>', "surrogate"),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": 1e999}}</tool_call>', "too large"),
    ("hermes", '<tool_call>{"name": ' + "[" * 100_000, "nested too deeply"),
    ("hermes", '<tool_call>{"name": ' + "9" * 5_000 + "}</tool_call>", "no valid JSON"),
    ("qwen_xml", "<tool_call>\n</tool_call>", "<function=NAME> is missing"),
    ("qwen_xml", '<tool_call>\n{"name": "look"}\n</tool_call>', "<function=NAME> is missing"),
    ("qwen_xml", "<tool_call>\n<function=>\n</function>\n</tool_call>", "no tool's name"),
    ("qwen_xml", "<tool_call>\n<function=a b>\n</function>\n</tool_call>", "no tool's name"),
    ("qwen_xml", "<tool_call>\n<function=look\n</tool_call>", "> is missing before"),
    ("qwen_xml", "<tool_call>\n<function=look>\nq=1\n</function></tool_call>", "text stands where"),
    ("qwen_xml", "<tool_call>\n<function=look>\n", "cut off before </function>"),
    ("qwen_xml", "<tool_call>\n<function=look>\n<parameter=q>\n1", "cut off before </parameter>"),
    (
        "qwen_xml",
        "<tool_call>\n<function=look>\n<parameter=q>\n1\n</function>\n</tool_call>",
        "q is not closed",
    ),
    ("qwen_xml", "<tool_call>\n<function=look>\n</function>\nmore</tool_call>", "text stands betw"),
    ("llama_json", '{"name": "look", "parameters": {"q"', "cut off inside its JSON"),
    ("llama_json", '{"name": "look", "parameters": {"q": }}', "Expecting value"),
    ("llama_json", '{"name": "look", "parameters": [1]}', '"parameters" is no JSON object'),
    ("llama_json", '{"parameters": {}}', 'no "name"'),
    ("llama_json", '<|python_tag|>{"a": 1}', 'no "name"'),
    ("llama_json", "<|python_tag|>print(1)", "neither JSON nor NAME.call(...)"),
    ("llama_json", "<|python_tag|>look.call(q=1)", 'not written as KEY="VALUE"'),
    ("mistral", "[TOOL_CALLS]", "no tool's name"),
    ("mistral", "[TOOL_CALLS] [", "cut off before its JSON"),
    ("mistral", '[TOOL_CALLS] [{"name": "look", "argu', "cut off inside its JSON"),
    ("mistral", '[TOOL_CALLS] [{"name": "look", arguments: {}}]', "'g' at character"),
    ("mistral", '[TOOL_CALLS] [{"arguments": {}}]', 'no "name"'),
    ("mistral", "[TOOL_CALLS]I look it up", "no tool's name"),
    ("mistral", "[TOOL_CALLS]look", "cut off before its arguments"),
    ("mistral", '[TOOL_CALLS]look{"q": 1', "cut off inside its JSON"),
    ("mistral", "[TOOL_CALLS]look[CALL_ID]x{}", "[ARGS] is missing before {"),
    ("deepseek", f"{_SEP}look<｜tool▁call▁end｜>", "<｜tool▁sep｜> is missing"),
    ("deepseek", f"{_SEP}look", "cut off before <｜tool▁sep｜>"),
    ("deepseek", f"{_SEP}look<｜tool▁sep｜>", "cut off before its arguments"),
    ("deepseek", f'{_SEP}look<｜tool▁sep｜>{{"q": 1<｜tool▁call▁end｜>', "'<' at character 7"),
    ("deepseek", f"{_SEP}look<｜tool▁sep｜>[1]<｜tool▁call▁end｜>", "arguments is no JSON object"),
    ("deepseek", f"{_SEP}look<｜tool▁sep｜>{{}} x<｜tool▁call▁end｜>", "text stands between"),
    (
        "deepseek",
        f"{_SEP}function<｜tool▁sep｜>look<｜tool▁call▁end｜>",
        "end of the line is missing",
    ),
    ("deepseek", f"{_SEP}function<｜tool▁sep｜>look\n```json\nq\n```", "no JSON object"),
    ("glm", "<tool_call>", "cut off before </tool_call>"),
    ("glm", "<tool_call></tool_call>", "no tool's name"),
    ("glm", '<tool_call>{"name": "look"}</tool_call>', "no tool's name"),
    ("glm", "<tool_call>look\n<arg_key>q</tool_call>", "</arg_key> is missing"),
    ("glm", "<tool_call>look\n<arg_key>q</arg_key>\n1</tool_call>", "<arg_value> is missing"),
    ("glm", "<tool_call>look\n<arg_key>q</arg_key>\n<arg_value>1", "cut off before </arg_value>"),
    (
        "glm",
        "<tool_call>look\n<arg_key>q</arg_key><arg_value>1</tool_call>",
        "value of q is not closed",
    ),
    (
        "glm",
        "<tool_call>look<arg_key>q</arg_key><arg_value>1</arg_value>",
        "cut off before </tool_call>",
    ),
    ("harmony", "<|channel|>commentary to=functions.look json", "no <|message|>"),
    ("harmony", '<|channel|>commentary to=functions.look<|message|>{"q"', "cut off inside"),
    ("harmony", "<|channel|>commentary to=functions.look<|message|>q<|call|>", "no JSON object"),
    ("harmony", "<|channel|>commentary to=functions.look<|message|>[]<|call|>", "arguments is no"),
    ("harmony", "<|channel|>commentary to=functions.look<|message|>{} q<|call|>", "text stands"),
    ("harmony", "<|channel|>commentary to=functions.<|message|>{}<|call|>", "no tool's name"),
    ("granite", "<|tool_call|>", "cut off before its JSON"),
    ("granite", '<|tool_call|>[{"name": "look"', "cut off inside its JSON"),
    ("granite", "<|tool_call|>look", "no JSON object"),
    ("granite", '<|tool_call|>[{"name": "look", "arguments": 1}]', '"arguments" is no JSON object'),
    ("granite", '<tool_call>{"name": look}</tool_call>', "'o' at character"),
    ("kimi_k2", "<|tool_call_begin|>functions.look:0", "cut off before <|tool_call_argument_begin"),
    ("kimi_k2", "<|tool_call_begin|>functions.look:0<|tool_call_end|>", "is missing before"),
    ("kimi_k2", "<|tool_call_begin|>:0<|tool_call_argument_begin|>{}<|tool_call_end|>", "name"),
    ("kimi_k2", '<|tool_call_begin|>look:0<|tool_call_argument_begin|>{"q"', "cut off inside"),
    ("kimi_k2", "<|tool_call_begin|>look:0<|tool_call_argument_begin|>", "before its arguments"),
    (
        "kimi_k2",
        "<|tool_call_begin|>look:0<|tool_call_argument_begin|>{]<|tool_call_end|>",
        "']' at character 1",
    ),
    ("pythonic", '[look(q="a"', "cut off before its )"),
    ("pythonic", "[look(q='a", "cut off before its )"),
    ("pythonic", '[look("a")]', "no KEY= at character 0"),
    ("pythonic", "[look(q=a)]", "no value at character 2"),
    ("pythonic", "[look(q=-)]", "no value at character 2"),
    ("pythonic", "[look(q=[1 2])]", "a comma is missing at character 5"),
    ("pythonic", "[look(q=1 i=2)]", "a comma is missing at character 4"),
    ("pythonic", "[look(q=1, q=2)]", "q is given twice"),
    ("pythonic", "[look(q={1: 2})]", "key is no text"),
    ("pythonic", "[look(q={'a' 2})]", "a colon is missing"),
    ("pythonic", "[look(q=[1)]", "')' at character 4"),
    ("pythonic", "[look(q=f'a')]", "no value"),
    ("pythonic", "[look(q='a\\ud800')]", "surrogate"),
    ("pythonic", "[look(q=1e999)]", "too large"),
    ("pythonic", f"[look(q={'9' * 5_000})]", "too long: 5000 digits"),
    ("pythonic", f"[look(q={'[' * 100_000}", "nested too deeply"),
    ("pythonic", "[look(q=look(1))]", "no value"),
    ("pythonic", "[look(q=<b>)]", "'<' at character 2"),
    ("dsml", "<｜DSML｜invoke>", 'no name="NAME"'),
    ("dsml", "<｜DSML｜invoke name=look>", 'no name="NAME"'),
    ("dsml", '<｜DSML｜invoke name="a b">', "no tool's name"),
    ("dsml", "<｜DSML｜invoke", "cut off before >"),
    ("dsml", _INVOKE, "cut off before </｜DSML｜invoke>"),
    ("dsml", f"{_INVOKE}q=1</｜DSML｜invoke>", "text stands where"),
    ("dsml", f"{_INVOKE}<｜DSML｜parameter>a</｜DSML｜invoke>", 'no name="KEY"'),
    ("dsml", f'{_INVOKE}<｜DSML｜parameter name="q">a', "cut off before </｜DSML｜parameter>"),
    (
        "dsml",
        f'{_INVOKE}<｜DSML｜parameter name="q" string="true">a</｜DSML｜invoke>',
        "q is not closed",
    ),
]
"""Family, a reply with one bad call, and a part of its fault."""
