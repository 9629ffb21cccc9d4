"""Arguments written without quotes, as values of the types that a tool's schema names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_service.chat.calls.json_text import loads
from rollout_service.chat.calls.reader import Fault

_LITERALS: dict[str, Any] = {
    "true": True,
    "True": True,
    "false": False,
    "False": False,
    "null": None,
    "None": None,
}


def typed(text: str, schema: object) -> Any:
    """The value that `text` stands for.

    A parameter that may be a string takes the text as it is, unless the schema also allows null or
    a container and the text is one. Text that fits no type stays text, for the tool to refuse.

    Args:
        text: As the model wrote it.
        schema: The parameter's JSON schema; anything but a mapping says nothing about it.
    """
    types = _types(schema)
    value = value_of(text)
    if not types:
        return text if isinstance(value, str) else value
    kind = _kind(value)
    if "string" in types:
        return value if kind in types and kind in ("null", "object", "array") else text
    if kind == "number" and "integer" in types and isinstance(value, float) and value.is_integer():
        return int(value)
    fits = kind in types or (kind == "integer" and "number" in types)
    return value if fits else text


def value_of(text: str) -> Any:
    """What `text` says where it is JSON or a literal of Python's, else the text."""
    stripped = text.strip()
    if stripped in _LITERALS:
        return _LITERALS[stripped]
    try:
        return loads(stripped)
    except Fault:
        return text


def _types(schema: object) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type")
    if isinstance(given, str):
        return {given}
    if isinstance(given, list):
        return {each for each in given if isinstance(each, str)}
    if isinstance(schema.get("enum"), list):
        return {_kind(option) for option in schema["enum"]}
    if "const" in schema:
        return {_kind(schema["const"])}
    options = schema.get("anyOf") or schema.get("oneOf")
    found = [_types(option) for option in options] if isinstance(options, list) else []
    # One option that may be anything leaves the whole open.
    return set().union(*found) if all(found) else set()


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"
