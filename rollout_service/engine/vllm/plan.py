"""What a request reads before it computes: rows of residencies, told by the host to the core.

Travels in the sampling parameters' `extra_args`, so it is plain numbers on the wire.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

EXTRA_ARG = "octopus"
"""Key of the plan in `SamplingParams.extra_args`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSpan:
    """Rows `[begin, end)` of a residency's block table."""

    residency: int
    begin: int
    end: int

    @property
    def num_rows(self) -> int:
        """Length of the span."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachPlan:
    """Where a request's context comes from, and who keeps what it computes."""

    parent: int | None
    """Residency whose rows and recurrent state are inherited."""
    mounts: tuple[RowSpan, ...]
    """Spans made visible beside the parent's rows."""
    num_rows: int
    """Rows that count as computed: the parent's and the mounted ones."""
    num_mounted: int
    """Rows among them that were mounted, here or for an ancestor; some layers lack them."""
    offset: int
    """Added to a row's index to make its rotary position."""
    keep_as: int | None
    """Residency that takes the blocks at the end; None frees them."""

    def reads(self) -> list[int]:
        """Residencies that must be held, each once."""
        reads = [] if self.parent is None else [self.parent]
        return list(dict.fromkeys([*reads, *(span.residency for span in self.mounts)]))

    def to_wire(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "parent": self.parent,
            "mounts": [[span.residency, span.begin, span.end] for span in self.mounts],
            "num_rows": self.num_rows,
            "num_mounted": self.num_mounted,
            "offset": self.offset,
            "keep_as": self.keep_as,
        }


def plan_from_wire(extra_args: Mapping[str, Any] | None) -> AttachPlan | None:
    """The plan among a request's `extra_args`; None where there is none."""
    wire = (extra_args or {}).get(EXTRA_ARG)
    if wire is None:
        return None
    return AttachPlan(
        parent=wire["parent"],
        mounts=tuple(RowSpan(residency=r, begin=b, end=e) for r, b, e in wire["mounts"]),
        num_rows=wire["num_rows"],
        num_mounted=wire["num_mounted"],
        offset=wire["offset"],
        keep_as=wire["keep_as"],
    )
