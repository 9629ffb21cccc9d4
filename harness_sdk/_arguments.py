"""Type hints as JSON schemas, and JSON values checked and coerced to type hints."""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any, Literal, Union, cast

from harness_sdk.errors import ConfigError, InvalidRequest

_SCALARS: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}


def json_schema(annotation: Any, where: str = "a value") -> dict[str, Any]:
    """The JSON schema of a type hint.

    Raises:
        ConfigError: JSON cannot express it; `where` says whose hint it was.
    """
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in _SCALARS:
        return {"type": _SCALARS[annotation]}
    if annotation is Any:
        return {}
    if origin is Literal:
        return _enum_schema(args)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return _enum_schema([member.value for member in annotation])
    if origin in (Union, types.UnionType):
        options = [json_schema(arg, where) for arg in args if arg is not types.NoneType]
        return options[0] if len(options) == 1 else {"anyOf": options}
    if annotation is list or origin in (list, tuple):
        return _array_schema(origin, args, where)
    if annotation is dict or origin is dict:
        return _map_schema(args, where)
    if isinstance(annotation, type) and is_dataclass(annotation):
        return _object_schema(annotation, where)
    raise ConfigError(
        f"{where} has a type that JSON cannot express",
        value=str(cast(object, annotation)),
        limit="str, int, float, bool, list, tuple, dict, Literal, Enum, Optional, dataclass, Any",
    )


def coerce(value: Any, annotation: Any, where: str) -> Any:
    """`value` as `annotation`: exact, or a spelling of it that loses nothing ("3" for 3).

    Raises:
        InvalidRequest: It is neither; the message names `where`, the type and the value.
    """
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return value
    if annotation in _SCALARS:
        return _coerce_scalar(value, annotation, where)
    if origin is Literal:
        return _pick(value, {arg: arg for arg in args}, where)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return _pick(value, {member.value: member for member in annotation}, where)
    if origin in (Union, types.UnionType):
        return _coerce_union(value, args, where)
    if annotation is list or origin in (list, tuple):
        return _coerce_array(value, origin, args, where)
    if annotation is dict or origin is dict:
        return _coerce_map(value, args, where)
    return _coerce_object(value, annotation, where)


def _enum_schema(values: typing.Iterable[Any]) -> dict[str, Any]:
    values = list(values)
    kinds = {_SCALARS.get(type(value)) for value in values}
    only = kinds.pop() if len(kinds) == 1 else None
    return {"type": only, "enum": values} if only else {"enum": values}


def _array_schema(origin: Any, args: tuple[Any, ...], where: str) -> dict[str, Any]:
    if origin is tuple and not (len(args) == 2 and args[1] is Ellipsis):
        return {
            "type": "array",
            "prefixItems": [json_schema(arg, where) for arg in args],
            "minItems": len(args),
            "maxItems": len(args),
        }
    return {"type": "array", "items": json_schema(args[0], where) if args else {}}


def _map_schema(args: tuple[Any, ...], where: str) -> dict[str, Any]:
    if not args:
        return {"type": "object"}
    if args[0] is not str:
        raise ConfigError(f"{where} has a dict whose keys are no strings", value=args[0])
    return {"type": "object", "additionalProperties": json_schema(args[1], where)}


def _object_schema(annotation: Any, where: str) -> dict[str, Any]:
    hints = typing.get_type_hints(annotation)
    return {
        "type": "object",
        "properties": {
            each.name: json_schema(hints[each.name], f"{where}.{each.name}")
            for each in fields(annotation)
        },
        "required": [each.name for each in fields(annotation) if _is_required(each)],
    }


def _coerce_scalar(value: Any, annotation: Any, where: str) -> Any:
    if annotation is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if annotation in (int, float) and isinstance(value, str):
        value = _number(value)
    if annotation is bool and value in ("true", "True", "false", "False"):
        return value in ("true", "True")
    fits = isinstance(value, annotation) and not (annotation is int and isinstance(value, bool))
    if fits and not (isinstance(value, float) and not math.isfinite(value)):
        return value
    if annotation is float and isinstance(value, int) and not isinstance(value, bool):
        return _as_float(value, where)
    if annotation is int and isinstance(value, float) and value.is_integer():
        return int(value)
    raise _mismatch(value, _SCALARS[annotation], where)


def _number(text: str) -> int | float | str:
    """The number that `text` is, as JSON writes one."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, int | float) and not isinstance(value, bool) else text


def _as_float(value: int, where: str) -> float:
    try:
        return float(value)
    except OverflowError:
        raise _mismatch(value, "number that a float can hold", where) from None


def _pick(value: Any, options: Mapping[Any, Any], where: str) -> Any:
    for option, result in options.items():
        if option == value and isinstance(option, bool) == isinstance(value, bool):
            return result
    for option, result in options.items():
        if isinstance(value, str) and str(option) == value:
            return result
    raise _mismatch(value, "one of " + ", ".join(repr(option) for option in options), where)


def _coerce_union(value: Any, args: tuple[Any, ...], where: str) -> Any:
    if value is None and types.NoneType in args:
        return None
    options = [arg for arg in args if arg is not types.NoneType]
    # An exact match wins over a coerced one: "3" stays text in `int | str`.
    for option in options:
        if isinstance(option, type) and type(value) is option:
            return value
    failures: list[InvalidRequest] = []
    for option in options:
        try:
            return coerce(value, option, where)
        except InvalidRequest as error:
            failures.append(error)
    if len(failures) == 1:
        raise failures[0]
    raise _mismatch(value, " or ".join(failure.limit for failure in failures), where)


def _coerce_array(value: Any, origin: Any, args: tuple[Any, ...], where: str) -> Any:
    value = _parsed(value, "[")
    if not isinstance(value, list):
        raise _mismatch(value, "array", where)
    items = cast("list[Any]", value)
    if origin is tuple and not (len(args) == 2 and args[1] is Ellipsis):
        if len(items) != len(args):
            raise _mismatch(items, f"array of {len(args)} items", where)
        pairs = zip(items, args, strict=True)
        return tuple(coerce(item, arg, f"{where}[{i}]") for i, (item, arg) in enumerate(pairs))
    kind = args[0] if args else Any
    found = [coerce(item, kind, f"{where}[{i}]") for i, item in enumerate(items)]
    return tuple(found) if origin is tuple else found


def _coerce_map(value: Any, args: tuple[Any, ...], where: str) -> dict[str, Any]:
    value = _parsed(value, "{")
    if not isinstance(value, dict):
        raise _mismatch(value, "object", where)
    kind = args[1] if args else Any
    items = cast("dict[str, Any]", value).items()
    return {key: coerce(item, kind, f'{where}["{key}"]') for key, item in items}


def _coerce_object(value: Any, annotation: Any, where: str) -> Any:
    given = _coerce_map(value, (), where)
    hints = typing.get_type_hints(annotation)
    known = {each.name: each for each in fields(annotation)}
    missing = [name for name, each in known.items() if _is_required(each) and name not in given]
    unknown = [name for name in given if name not in known]
    if missing or unknown:
        raise InvalidRequest(
            f"{where} has missing or unknown fields",
            value=", ".join([*(f"no {name}" for name in missing), *unknown]),
            limit=", ".join(known),
        )
    values = {name: coerce(item, hints[name], f"{where}.{name}") for name, item in given.items()}
    try:
        return annotation(**values)
    except (TypeError, ValueError) as error:
        # A check of the dataclass's own.
        raise InvalidRequest(f"{where} is refused: {error}") from error


def _is_required(each: Any) -> bool:
    return each.default is MISSING and each.default_factory is MISSING


def _parsed(value: Any, opening: str) -> Any:
    """Models sometimes send JSON within a string."""
    if isinstance(value, str) and value.lstrip().startswith(opening):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _mismatch(value: Any, expected: str, where: str) -> InvalidRequest:
    shown = json.dumps(value, ensure_ascii=False, default=str)
    return InvalidRequest(
        f"{where} has the wrong type",
        value=f"{shown[:200]} ({type(value).__name__})",
        limit=expected,
    )
