"""Which number types a rollout may have sampled in: one rule, for records and for settings.

Importable without torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from trainer_service.config import TrainerConfig

NARROW = ("bfloat16", "float16")
"""Types whose logits `head_dtype` decides; wider models' are as wide as they are."""


class TypeOptions(Protocol):
    """The settings of a model, on rollout or trainer."""

    @property
    def dtype(self) -> str: ...
    @property
    def head_dtype(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberTypes:
    """What a model computes in; empty where a record does not say.

    Example:
        `NumberTypes(dtype="bfloat16", head_dtype="float32")`
    """

    dtype: str
    """Of weights."""
    head_dtype: str
    """Of logits."""

    @classmethod
    def of(cls, options: TypeOptions) -> NumberTypes:
        """What a model with these settings computes in."""
        is_wider = options.head_dtype == "float32" and options.dtype in NARROW
        return cls(dtype=options.dtype, head_dtype="float32" if is_wider else options.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unequal:
    """One thing that rollout and trainer compute in two types."""

    what: str
    """weights or logits."""
    setting: str
    """Its key on both sides, as model.dtype."""
    sampled: str
    own: str


def unequal_types(
    config: TrainerConfig, own: NumberTypes, sampled: NumberTypes
) -> Iterator[Unequal]:
    """Where the loss would compare log-probabilities of two types; never for imitation.

    Args:
        config: Of the trainer, whose objective decides.
        own: What the trainer computes in.
        sampled: What the rollout computed in.
    """
    if not config.needs_groups:
        return
    for what, setting, theirs, ours in (
        ("weights", "model.dtype", sampled.dtype, own.dtype),
        ("logits", "model.head_dtype", sampled.head_dtype, own.head_dtype),
    ):
        if theirs and theirs != ours:
            yield Unequal(what=what, setting=setting, sampled=theirs, own=ours)
