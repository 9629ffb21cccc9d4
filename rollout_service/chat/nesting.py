"""How deeply JSON may be nested: what reads it later recurses, and Python's stack is short."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

MAX_DEPTH = 64
"""Levels; deeper than any tool's schema or arguments, and far from where `json` gives up."""


def is_too_deep(value: Any) -> bool:
    """Whether `value` has more than `MAX_DEPTH` levels of objects and arrays."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [child for each in level for child in _children(each)]
        if not any(isinstance(each, dict | list) for each in level):
            return False
    return True


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
