"""What JSON and TOML parse to, told apart with types."""

from __future__ import annotations

from typing import Any, TypeGuard


def is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    """Whether `value` is an object; its keys are text, as every parser makes them."""
    return isinstance(value, dict)


def is_array(value: Any) -> TypeGuard[list[Any]]:
    """Whether `value` is an array."""
    return isinstance(value, list)


def within(value: dict[str, Any], *keys: str) -> dict[str, Any]:
    """The object that stands under `keys`, one in the other; empty where one is not there."""
    for key in keys:
        value = value.get(key) or {}
    return value
