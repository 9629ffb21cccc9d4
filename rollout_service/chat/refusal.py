"""Why a chat template cannot be served, and where two of its renderings part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness_sdk.errors import ConfigError, InvalidRequest

_SHOWN_CHARS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where two renderings part."""

    case: str
    at: int
    """Characters that they share, from the beginning of the conversation."""
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.case}, character {self.at}: {self.expected!r} becomes {self.found!r}"


class TemplateRefused(ConfigError):
    """A chat template that cannot be served by appending.

    Attributes:
        first_difference: Where its renderings part; None where it failed instead.
    """

    def __init__(
        self, message: str, *, first_difference: Difference | None = None, **context: Any
    ) -> None:
        super().__init__(message, **context)
        self.first_difference = first_difference

    def context(self) -> dict[str, Any]:
        """With the difference."""
        return super().context() | {"first_difference": self.first_difference}


def check_kept(before: str, after: str, case: str) -> None:
    """Refuse a template whose `after` does not begin with `before`.

    Raises:
        TemplateRefused: With the first difference.
    """
    difference = first_difference(before, after, case)
    if difference is not None:
        raise TemplateRefused(
            "the chat template takes back what it has written",
            first_difference=difference,
            value=difference,
            limit="text that stays as it is when more follows",
            remedy="serve the model with a template that only appends",
        )


def first_difference(before: str, after: str, case: str) -> Difference | None:
    """Where `after` stops being a continuation of `before`; None where it never does."""
    if after.startswith(before):
        return None
    at = shared_length(before, after)
    expected, found = (_shown(text[at : at + _SHOWN_CHARS]) for text in (before, after))
    return Difference(case=case, at=at, expected=expected, found=found)


def shared_length(first: str, second: str) -> int:
    """Number of characters that both texts begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))


def failed(case: str, error: InvalidRequest) -> TemplateRefused:
    """The refusal of a template that raises on a case of the probe."""
    return TemplateRefused(
        f"the chat template fails on {case}",
        value=error.value,
        remedy="serve the model with a template that can render it",
    )


def _shown(text: str) -> str:
    # The probe's marks are surrogates, which no terminal takes.
    return text.encode("utf-8", "replace").decode()
