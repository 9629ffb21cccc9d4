"""Copying single K/V rows between pages, whatever the attention backend's layout of a page.

A fragment at a mount's edge is less than a page; copying pages would waste the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from harness_sdk.errors import ConfigError

Rows = tuple[int, int, int, int, int]
"""Source block, first row, destination block, first row, number."""


class RowCopier(Protocol):
    """Copies rows within attention layers' caches."""

    def copy(self, caches: Sequence[Tensor], page_rows: int, rows: Sequence[Rows]) -> None:
        """Copy `rows` in each of `caches`; a block of the scheduler holds `page_rows` rows."""
        ...


class PackedRows:
    """vLLM-CPU: a page is packed for the instruction set, so rows are found by writing known ones.

    The cache is `[kernel blocks, H, rows, 2D]` in shape alone; where a row's numbers lie inside a
    block is learned once per instruction set and dtype.
    """

    def __init__(self, isa: str) -> None:
        """Learn the packing that vLLM calls `isa`."""
        self._isa = isa
        self._places: Tensor | None = None

    def copy(self, caches: Sequence[Tensor], page_rows: int, rows: Sequence[Rows]) -> None:
        """Copy `rows` head by head in place."""
        _, heads, kernel_rows, width = caches[0].shape
        if self._places is None:
            self._places = self._learn(kernel_rows, width, caches[0].dtype)
        flat = _flat_rows(page_rows, rows)
        head = torch.arange(heads)[None, :, None]
        source, destination = (
            (blocks[:, None, None], head, self._places[places][:, None, :])
            for blocks, places in zip(flat // kernel_rows, flat % kernel_rows, strict=True)
        )
        for cache in caches:
            numbers = cache.view(-1, heads, kernel_rows * width)
            numbers[destination] = numbers[source]

    def _learn(self, kernel_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Where each row's keys, then values, lie in a block, `[rows, 2D]`."""
        write: Any = importlib_ops().cpu_attn_reshape_and_cache
        dim = width // 2
        probe = torch.zeros(1, 1, kernel_rows, width, dtype=dtype)
        keys, values = probe.view(1, 1, kernel_rows * 2, dim).chunk(2, dim=2)
        row = torch.arange(1, dim + 1, dtype=torch.float32).to(dtype).view(1, 1, dim)
        if row.unique().numel() != dim:
            raise ConfigError("head dimension too large to learn the page layout", value=dim)
        places = torch.full((kernel_rows, width), -1, dtype=torch.long)
        for slot in range(kernel_rows):
            probe.zero_()
            write(row, -row, keys, values, torch.tensor([slot]), self._isa)
            flat = probe.view(-1).float()
            for wanted, first in ((flat > 0, 0), (flat < 0, dim)):
                at = wanted.nonzero()[:, 0]
                places[slot, first + flat[at].abs().long() - 1] = at
        if (places < 0).any() or places.unique().numel() != places.numel():
            raise ConfigError(
                "the CPU attention backend's page layout could not be learned", value=self._isa
            )
        return places


def importlib_ops() -> Any:
    """vLLM's custom operators; imported late, in the worker alone."""
    import importlib

    return importlib.import_module("vllm._custom_ops")


def _flat_rows(page_rows: int, rows: Sequence[Rows]) -> Tensor:
    """Source and destination row numbers over the whole cache, `[2, n]`."""
    table = np.asarray(rows, dtype=np.int64)
    from_block, from_row, to_block, to_row, count = table.T
    # Each run's rows count up from its first.
    within = np.arange(count.sum()) - np.repeat(count.cumsum() - count, count)
    first = np.stack((from_block * page_rows + from_row, to_block * page_rows + to_row))
    return torch.from_numpy(np.repeat(first, count, axis=1) + within)
