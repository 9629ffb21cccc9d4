"""Functions as tools: schemas from signatures, arguments checked and coerced."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness_sdk._arguments import coerce, json_schema
from harness_sdk.errors import ConfigError, InvalidRequest
from harness_sdk.tools import Tool, as_text, tools_by_name


class Color(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Page:
    doc: str
    number: int = 1


@dataclass
class Numbered(Page):
    def __post_init__(self) -> None:
        if self.number < 1:
            raise ValueError("pages count from 1")


async def search(
    query: str,
    k: int = 5,
    mode: Literal["fast", "deep"] = "fast",
    within: list[str] | None = None,
) -> str:
    """Search the corpus.

    Finds passages.

    Args:
        query: Words to
            look for.
        k (int): How many: at most 10.

    Returns:
        Hits.
    """
    return f"{query}/{k}/{mode}/{within}"


def test_schema_comes_from_signature_and_docstring() -> None:
    assert Tool.from_function(search).schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the corpus.\n\nFinds passages.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "Words to look for."},
                    "k": {"type": "integer", "description": "How many: at most 10."},
                    "mode": {"type": "string", "enum": ["fast", "deep"]},
                    "within": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["query"],
            },
        },
    }


@pytest.mark.parametrize(
    ("annotation", "schema"),
    [
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (Any, {}),
        (list, {"type": "array", "items": {}}),
        (dict, {"type": "object"}),
        (dict[str, int], {"type": "object", "additionalProperties": {"type": "integer"}}),
        (int | str, {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
        (Color, {"type": "string", "enum": ["red", "blue"]}),
        (Literal[1, "a"], {"enum": [1, "a"]}),
        (
            tuple[int, str],
            {
                "type": "array",
                "prefixItems": [{"type": "integer"}, {"type": "string"}],
                "minItems": 2,
                "maxItems": 2,
            },
        ),
        (
            Page,
            {
                "type": "object",
                "properties": {"doc": {"type": "string"}, "number": {"type": "integer"}},
                "required": ["doc"],
            },
        ),
    ],
)
def test_schema_of_a_type(annotation: Any, schema: dict[str, Any]) -> None:
    assert json_schema(annotation) == schema


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        ("3", int, 3),
        (3.0, int, 3),
        (3, float, 3.0),
        ("0.5", float, 0.5),
        (7, str, "7"),
        ("true", bool, True),
        ("[1, 2]", list[int], [1, 2]),
        ('{"a": "1"}', dict[str, int], {"a": 1}),
        (["1", 2], tuple[int, int], (1, 2)),
        ("red", Color, Color.RED),
        ("1", Literal[1, 2], 1),
        (None, int | None, None),
        ("3", int | str, "3"),
        ({"doc": "d", "number": "2"}, Page, Page("d", 2)),
    ],
)
def test_spelling_that_loses_nothing_is_coerced(value: Any, annotation: Any, expected: Any) -> None:
    found = coerce(value, annotation, "x")
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        ("three", int),
        (3.5, int),
        (True, int),
        (1, bool),
        (None, str),
        (["a"], str),
        ("a", list[str]),
        ([1, "x"], list[int]),
        ([1], tuple[int, int]),
        ("green", Color),
        (True, Literal[1]),
        ("x", int | None),
        ([1], int | str),
        ({"number": 1}, Page),
        ({"doc": "d", "page": 1}, Page),
        ({"doc": "d", "number": 0}, Numbered),
        ("1_0", int),
        ("٣", int),
        ("9" * 5_000, int),
        (10**400, float),
        ("nan", float),
        (float("inf"), float),
        ("[" * 100_000, list[int]),
    ],
)
def test_wrong_type_is_refused_with_name_and_value(value: Any, annotation: Any) -> None:
    with pytest.raises(InvalidRequest, match="argument `x`"):
        coerce(value, annotation, "argument `x` of f")


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists, max_leaves=5))
def test_any_json_value_is_coerced_or_refused(value: Any) -> None:
    for annotation in (int, str, bool, list[int], dict[str, int], Color, Page, int | None):
        try:
            coerce(value, annotation, "x")
        except InvalidRequest as error:
            assert error.limit


def test_refusal_names_argument_type_and_value() -> None:
    with pytest.raises(InvalidRequest) as caught:
        Tool.from_function(search).bind({"query": "a", "k": "many"})
    assert str(caught.value) == (
        'argument `k` of search has the wrong type; got "many" (str); allowed: integer'
    )


def test_missing_and_unknown_arguments_are_named() -> None:
    tool = Tool.from_function(search)
    with pytest.raises(InvalidRequest, match="needs the argument `query`; got k; allowed: q"):
        tool.bind({"k": 1})
    with pytest.raises(InvalidRequest, match="no argument `limit`; allowed: query, k, mode"):
        tool.bind({"query": "a", "limit": 3})


async def test_defaults_are_left_to_the_function() -> None:
    tool = Tool.from_function(search)
    assert await tool.run(tool.bind({"query": "a", "k": "2"})) == "a/2/fast/None"


async def test_function_that_is_not_async_runs_off_the_loop() -> None:
    def where(x: int) -> dict[str, Any]:
        """Where."""
        return {"other_thread": threading.current_thread() is not threading.main_thread()}

    tool = Tool.from_function(where)
    assert await tool.run(tool.bind({"x": 1})) == '{"other_thread": true}'


async def test_method_is_a_tool_without_its_self() -> None:
    class Corpus:
        async def open(self, doc: str) -> Page:
            """Open a page."""
            return Page(doc)

    tool = Tool.from_function(Corpus().open)
    assert [parameter.name for parameter in tool.parameters] == ["doc"]
    assert await tool.run(tool.bind({"doc": "d"})) == '{"doc": "d", "number": 1}'


def test_results_read_as_text() -> None:
    assert as_text("é") == "é"
    assert as_text(["é", 1]) == '["é", 1]'
    assert as_text(None) == "ok"
    assert as_text({"b": {3, 1}, "c": Color.RED}) == '{"b": [1, 3], "c": "Color.RED"}'


def test_function_that_cannot_be_a_tool_is_refused_with_the_reason() -> None:
    def untyped(x):
        return x

    def star(*words: str) -> str:
        return ""

    def odd(x: bytes) -> str:
        return ""

    for function, message in ((untyped, "no type hint"), (star, "variadic"), (odd, "bytes")):
        with pytest.raises(ConfigError, match=message):
            Tool.from_function(function)
    with pytest.raises(ConfigError, match="needs a name"):
        Tool.from_function(lambda: None)
    assert Tool.from_function(lambda: None, name="noop").name == "noop"


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="got search"):
        tools_by_name([search, search])
