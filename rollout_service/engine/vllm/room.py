"""Room in the pool: how much is taken, and what a request is told that found too little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness_sdk.errors import ResourceExhausted


@dataclass(slots=True)
class PoolUse:
    """Occupancy as the core last told it."""

    page_rows: int = 1
    blocks_per_page: int = 1
    """Groups of attention layers that each take a block for a page's rows."""
    total: int = 0
    free: int = 0
    residencies: int = 0
    states: int = 0
    preemptions: int = 0
    preempted_rows: int = 0
    """Rows that preempted requests had computed, and compute again."""
    foreign: int = 0
    """Blocks read under another version than computed them."""

    @property
    def num_rows(self) -> int:
        """Rows of the blocks that are taken."""
        return (self.total - self.free) * self.page_rows // self.blocks_per_page

    @property
    def capacity(self) -> int:
        """Rows of all blocks."""
        return self.total * self.page_rows // self.blocks_per_page

    def take(self, report: Mapping[str, Any]) -> None:
        """Believe the core's latest report."""
        self.page_rows, self.total, self.free = report["page_rows"], report["total"], report["free"]
        self.blocks_per_page = report["blocks_per_page"]
        self.residencies, self.states = report["residencies"], report["states"]
        self.preemptions, self.preempted_rows = report["preemptions"], report["preempted_rows"]
        self.foreign = report["foreign"]


class NotReady(Exception):
    """A request could not run now; nothing of it was computed."""

    residencies: Sequence[int] = ()
    """What it read and is gone."""

    def as_error(self) -> ResourceExhausted:
        """What its caller hears where waiting does not help."""
        raise NotImplementedError


class ResidencyMissing(NotReady):
    """Pressure had evicted what the request read: rebuild it and ask again."""

    def __init__(self, residencies: Sequence[int]) -> None:
        super().__init__(f"{len(residencies)} residencies are gone")
        self.residencies = residencies

    def as_error(self) -> ResourceExhausted:
        """Thrashing."""
        return ResourceExhausted(
            "what the request reads does not fit into the pool at a time",
            remedy="run fewer episodes at once, or give the engine a larger max_tokens",
        )


class PoolFull(NotReady):
    """The pool cannot hold the request beside what is being read."""

    def __init__(self, use: PoolUse) -> None:
        super().__init__(f"{use.num_rows} rows in use")
        self._use = use

    def as_error(self) -> ResourceExhausted:
        """Too large."""
        return ResourceExhausted(
            "no room for more tokens: running requests read all that is resident",
            value=f"{self._use.num_rows} tokens in use",
            limit=f"{self._use.capacity} tokens",
            remedy="run fewer episodes at once, or give the engine a larger max_tokens",
        )
