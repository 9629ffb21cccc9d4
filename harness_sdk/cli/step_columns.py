"""The figures of a trainer's step as a table shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_COLUMNS = (
    ("step", "step", ".0f"),
    ("version", "policy/version", ".0f"),
    ("mean reward", "reward/mean", ".3f"),
    ("KL", "divergence/kl_mean", ".1e"),
    ("largest |dlogp|", "divergence/dlogp_max", ".1e"),
    ("lag", "policy/lag_max", ".0f"),
    ("packed", "tokens/packed", ",.0f"),
    ("flat", "tokens/flat", ",.0f"),
    ("tokens/s", "tokens/per_s", ",.0f"),
    ("dropped", "dropped/total", ",.0f"),
    ("s", "seconds/step", ".2f"),
)

COLUMNS = tuple(name for name, _, _ in _COLUMNS)

MISSING = "-"
"""Stands where a step has no such figure."""


def step_cells(step: Mapping[str, Any]) -> list[str]:
    """The cells of `COLUMNS` for one line of the trainer's metrics."""
    return [
        format(step[key], form) if isinstance(step.get(key), int | float) else MISSING
        for _, key, form in _COLUMNS
    ]
