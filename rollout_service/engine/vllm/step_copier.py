"""Worker side: carries out a step's copies, in all layers at once.

On a GPU that is one message and at most two launches, whatever the number of layers and requests,
and nothing waits for the device. A fragment's rows follow those of a copied partial page, so rows
come behind blocks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rollout_service.engine.vllm.ahead import NULL_BLOCK, on_device
from rollout_service.engine.vllm.copies import Copies
from rollout_service.engine.vllm.rows import RowCopier

_ZEROS = -1
"""A source that is no block: zeros."""
_PIECE_WORDS, _TILE_ROWS = 4096, 4
_MAX_WORD_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCaches:
    """One KV cache group's memory for rows."""

    page_rows: int
    """Rows of a block of the scheduler."""
    caches: Sequence[Tensor]
    """Each attention layer's cache, `[kernel blocks, H, rows, 2D]`; none where recurrent."""


class StepCopier(Protocol):
    """Carries out copies before a step."""

    def copy(self, copies: Copies) -> None:
        """Copy and zero in place."""
        ...


class PlainCopier:
    """Region by region and layer by layer, for CPUs."""

    def __init__(
        self, regions: Sequence[Tensor], groups: Sequence[GroupCaches], rows: RowCopier
    ) -> None:
        """Copy within `regions` and `groups`; `rows` knows the layout of a page."""
        self._regions = regions
        self._groups = groups
        self._rows = rows

    def copy(self, copies: Copies) -> None:
        """See `StepCopier.copy`."""
        sources = [source for _, source, _ in copies.blocks]
        targets = [target for _, _, target in copies.blocks]
        for region in self._regions:
            region[targets] = region[sources]
            region[[block for _, block in copies.zeroed]] = 0
        for index, group in enumerate(self._groups):
            rows = [run[1:] for run in copies.rows if run[0] == index]
            if rows:
                self._rows.copy(group.caches, group.page_rows, rows)


class LaunchedCopier:
    """Two Triton kernels over tables of addresses, for GPUs.

    Takes every order of layers, blocks, heads and rows in memory that FLASH_ATTN and TRITON_ATTN
    have, and pages cut into several kernel blocks; the numbers of a row and head lie together.
    """

    def __init__(self, regions: Sequence[Tensor], groups: Sequence[GroupCaches]) -> None:
        """Note where everything lies; compiles the kernels."""
        # They need Triton, which a CPU's process may lack.
        from rollout_service.engine.vllm import copy_kernels

        self._kernels: Any = copy_kernels
        self._device = regions[0].device
        self._regions = self._table([(r.data_ptr(), r.shape[1]) for r in regions])
        self._num_pieces = -(-max(r.shape[1] for r in regions) // _PIECE_WORDS)
        caches = [cache for group in groups for cache in group.caches]
        word_bytes = _word_bytes(caches)
        self._word = copy_kernels.WORDS[word_bytes]
        layers = [_layer(cache, word_bytes) for cache in caches]
        self._layers = self._table(layers)
        # A power of two: a tile's width.
        self._tile_words = 1 << (max(layer[2] * layer[3] for layer in layers) - 1).bit_length()
        self._page_rows = [group.page_rows for group in groups]
        sizes = [len(group.caches) for group in groups]
        self._layers_of = list(zip(itertools.accumulate([0, *sizes]), sizes, strict=False))
        # A step that waits for the compiler would hold up all others.
        itself = (NULL_BLOCK, 0, NULL_BLOCK, 0, 1)
        self.copy(
            Copies(blocks=[(0, NULL_BLOCK, NULL_BLOCK)], rows=[(sizes.index(max(sizes)), *itself)])
        )

    def copy(self, copies: Copies) -> None:
        """See `StepCopier.copy`."""
        pairs = [(source, target) for _, source, target in copies.blocks]
        pairs += [(_ZEROS, block) for _, block in copies.zeroed]
        runs = [self._run(*run) for run in copies.rows]
        # One message for both kernels.
        numbers = self._table(list(itertools.chain(*pairs, *runs)))
        if pairs:
            grid = (len(pairs), len(self._regions), self._num_pieces)
            self._kernels.copy_blocks_kernel[grid](numbers, self._regions, PIECE_WORDS=_PIECE_WORDS)
        if runs:
            num_tiles = -(-max(run[2] for run in runs) // _TILE_ROWS)
            self._kernels.copy_rows_kernel[(len(runs), num_tiles, max(run[4] for run in runs))](
                numbers[2 * len(pairs) :],
                self._layers,
                WORD=self._word,
                TILE_ROWS=_TILE_ROWS,
                TILE_WORDS=self._tile_words,
            )

    def _run(
        self, index: int, source: int, from_row: int, target: int, to_row: int, count: int
    ) -> tuple[int, ...]:
        """A run as the kernel reads it."""
        page = self._page_rows[index]
        return source * page + from_row, target * page + to_row, count, *self._layers_of[index]

    def _table(self, numbers: Sequence[Any]) -> Tensor:
        return on_device(torch.tensor(numbers, dtype=torch.int64), self._device)


def _word_bytes(caches: Sequence[Tensor]) -> int:
    """The widest word of which every row begins and ends at a whole one."""
    sizes = [
        size
        for cache in caches
        for size in (
            cache.data_ptr(),
            *(length * cache.element_size() for length in (*cache.stride()[:3], cache.shape[3])),
        )
    ]
    return math.gcd(_MAX_WORD_BYTES, *sizes)


def _layer(cache: Tensor, word_bytes: int) -> tuple[int, ...]:
    """A layer as the kernel reads it."""
    assert cache.stride(3) == 1
    _, heads, kernel_rows, width = cache.shape
    numbers = (width, *cache.stride()[:3])
    in_words = [number * cache.element_size() // word_bytes for number in numbers]
    return cache.data_ptr(), kernel_rows, heads, *in_words
