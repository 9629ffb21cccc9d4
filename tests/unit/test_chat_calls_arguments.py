"""Values that a model writes without quotes, by the types that the tool's schema names."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_service.chat.calls import parse_reply
from rollout_service.chat.calls.arguments import typed
from rollout_service.chat.calls.python_text import keyword_arguments
from tests.call_cases import WRITERS


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("007", {"type": "string"}, "007"),
        ("3", {"type": "string"}, "3"),
        ("true", {"type": "string"}, "true"),
        ("null", {"type": "string"}, "null"),
        ('"a"', {"type": "string"}, '"a"'),
        ('{"a": 1}', {"type": "string"}, '{"a": 1}'),
        ("3", {"type": "integer"}, 3),
        (" 3\n", {"type": "integer"}, 3),
        ("3.0", {"type": "integer"}, 3),
        ("3.5", {"type": "integer"}, "3.5"),
        ("three", {"type": "integer"}, "three"),
        ("true", {"type": "integer"}, "true"),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("3", {"type": "number"}, 3),
        ("-1e-05", {"type": "number"}, -1e-05),
        ("NaN", {"type": "number"}, "NaN"),
        ("True", {"type": "boolean"}, True),
        ("false", {"type": "boolean"}, False),
        ("1", {"type": "boolean"}, "1"),
        ("None", {"type": "null"}, None),
        ('["a", 1]', {"type": "array"}, ["a", 1]),
        ('{"a": [true]}', {"type": "object"}, {"a": [True]}),
        ('{"a": 1}', {"type": "array"}, '{"a": 1}'),
        ("null", {"type": ["string", "null"]}, None),
        ("3", {"type": ["string", "integer"]}, "3"),
        ('["a"]', {"anyOf": [{"type": "string"}, {"type": "array"}]}, ["a"]),
        ("3", {"oneOf": [{"type": "integer"}, {"type": "null"}]}, 3),
        ("3", {"anyOf": [{}, {"type": "string"}]}, 3),
        ("3", {"enum": ["3", "4"]}, "3"),
        ("3", {"enum": [3, 4]}, 3),
        ("3", {"const": "3"}, "3"),
        ("3", {}, 3),
        ("a b", {}, "a b"),
        ('"a"', {}, '"a"'),
        ("[" * 100_000, {}, "[" * 100_000),
        ("3", None, 3),
        ("3", True, 3),
    ],
)
def test_text_takes_the_type_of_the_schema(text: str, schema: Any, value: Any) -> None:
    found = typed(text, schema)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("form", ["qwen_xml", "glm"])
def test_the_schema_of_the_tool_that_is_called_counts(form: str) -> None:
    family, write = WRITERS[form]
    tools = [_tool("find", {"id": {"type": "integer"}}), _tool("look", {"id": {"type": "string"}})]
    for name, value in (("look", "7"), ("find", 7), ("unknown", 7)):
        parsed = parse_reply(write(name, {"id": 7}), family=family, step=1, tools=tools)
        assert parsed.tool_calls[0].arguments == {"id": value}


_TYPES: dict[str, st.SearchStrategy[Any]] = {
    "string": st.text(alphabet=st.characters(exclude_categories=["Cs"])),
    "integer": st.integers(),
    "number": st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
    "null": st.none(),
    "array": st.lists(st.one_of(st.integers(), st.text(max_size=3), st.booleans()), max_size=3),
    "object": st.dictionaries(st.text(max_size=3), st.none() | st.integers(), max_size=3),
}


@pytest.mark.parametrize("form", ["qwen_xml", "glm"])
@pytest.mark.parametrize("kind", _TYPES)
@settings(max_examples=30)
@given(data=st.data())
def test_any_value_of_its_type_comes_back(form: str, kind: str, data: st.DataObject) -> None:
    value = data.draw(_TYPES[kind])
    family, write = WRITERS[form]
    tools = [_tool("look", {"x": {"type": kind}})]
    (call,) = parse_reply(
        write("look", {"x": value}), family=family, step=1, tools=tools
    ).tool_calls
    assert call.arguments == {"x": value} and type(call.arguments["x"]) is type(value)


def _tool(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize("levels", [65, 900, 960, 970, 980, 990, 1000])
def test_value_nested_too_deeply_stays_text(levels: int) -> None:
    text = "[" * levels + "]" * levels
    assert typed(text, {"type": "array"}) == text
    written = f"<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>"
    reply = parse_reply(f"<tool_call>\n{written}\n</tool_call>", family="qwen_xml", step=0)
    assert [(call.arguments, call.error) for call in reply.tool_calls] == [({"a": text}, "")]


_PYTHON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=20).filter(lambda text: not any("\ud800" <= c <= "\udfff" for c in text)),
        st.text(alphabet="ab\\\"'\n\tx0u[](){},:=", max_size=12),
    ),
    lambda of: (
        st.lists(of, max_size=3)
        | st.tuples(of, of)
        | st.dictionaries(st.text(alphabet="ab'é\\", max_size=3), of, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=300)
@given(value=_PYTHON, write=st.sampled_from([repr, ascii, lambda value: f" {value!r}\n"]))
def test_python_literals_are_what_python_takes_them_for(
    value: Any, write: Callable[[object], str]
) -> None:
    written = write(value)
    assert keyword_arguments(f"q={written}, n = 1") == {
        "q": _as_json(ast.literal_eval(written.strip())),
        "n": 1,
    }


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_json(each) for key, each in value.items()}
    return [_as_json(each) for each in value] if isinstance(value, list | tuple) else value
