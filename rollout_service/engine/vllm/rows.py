"""Copying single K/V rows between pages, whatever the attention backend's layout of a page.

A fragment at a mount's edge is less than a page; copying pages would waste the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from harness_sdk.errors import ConfigError
from rollout_service.engine.vllm.ahead import on_device

Rows = tuple[int, int, int, int, int]
"""Source block, first row, destination block, first row, number."""


class BlockMemory:
    """A block's bytes in every layer, whatever they hold: a page, or a recurrent state.

    Groups overlay each other and a block belongs to one of them at a time, so one copy of the
    bytes serves all groups: a few launches instead of several for each layer. vLLM has a function
    of its own for this; 0.32.0 copies only the first of several layers whose views begin at one
    address, as those of a hybrid's groups do.
    """

    def __init__(self, caches: Iterable[Tensor], num_blocks: int) -> None:
        """Find the memory behind `caches`.

        Args:
            caches: Each layer's cache or first state, `[num_blocks * k, ...]`: the backend may
                split a block in k.
            num_blocks: Blocks of the scheduler.
        """
        regions = [region for cache in caches for region in _bytes_by_block(cache, num_blocks)]
        self._regions = list({region.data_ptr(): region for region in regions}.values())

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks `(source, destination)`, in place."""
        if not copies:
            return
        source, destination = on_device(torch.tensor(copies), self._regions[0].device).unbind(1)
        for region in self._regions:
            region.index_copy_(0, destination, region.index_select(0, source))

    def zero(self, blocks: Sequence[int]) -> None:
        """Fill blocks with zeros."""
        if not blocks:
            return
        index = on_device(torch.tensor(blocks), self._regions[0].device)
        for region in self._regions:
            region.index_fill_(0, index, 0)


def _bytes_by_block(cache: Tensor, num_blocks: int) -> list[Tensor]:
    """The memory that a block takes from the start of `cache` on, `[num_blocks, n]` int32 each."""
    storage = cache.untyped_storage()
    stride = cache.stride(0) * cache.element_size() * (cache.shape[0] // num_blocks)
    begins = [int(cache.storage_offset()) * cache.element_size()]
    if stride * num_blocks == storage.nbytes():
        # All layers' pages of a block lie together.
        begins = [0]
    elif cache.dim() > 1 and cache.stride(1) >= cache.stride(0) * cache.shape[0]:
        # Heads outside blocks: a piece of the block for each.
        step = cache.stride(1) * cache.element_size()
        begins = [begins[0] + head * step for head in range(cache.shape[1])]
    return [_words(storage, begin, (num_blocks, stride), cache.device) for begin in begins]


def _words(storage: Any, begin: int, shape: tuple[int, int], device: torch.device) -> Tensor:
    """Bytes `[rows, n]` from `begin` on as int32."""
    size, (rows, length) = torch.int32.itemsize, shape
    assert length % size == 0 and begin % size == 0
    words = torch.empty(0, dtype=torch.int32, device=device)
    return words.set_(storage, begin // size, (rows, length // size), (length // size, 1))


class RowCopier(Protocol):
    """Copies rows within attention layers' caches."""

    def copy(self, caches: Sequence[Tensor], page_rows: int, rows: Sequence[Rows]) -> None:
        """Copy `rows` in each of `caches`; a block of the scheduler holds `page_rows` rows."""
        ...


class StridedRows:
    """GPU layouts: the logical view is `[kernel blocks, H, rows, 2D]`, K then V, strides free.

    FLASH_ATTN and TRITON_ATTN take every order of layers, blocks, heads and rows in memory, and a
    page may be cut into several kernel blocks; the numbers of one row and head lie together.
    """

    def copy(self, caches: Sequence[Tensor], page_rows: int, rows: Sequence[Rows]) -> None:
        """Copy `rows` on the caches' device; waits for nothing there."""
        kernel_rows = caches[0].shape[2]
        flat = on_device(_flat_rows(page_rows, rows), caches[0].device)
        (source, destination), (from_row, to_row) = flat // kernel_rows, flat % kernel_rows
        for cache in caches:
            cache[destination, :, to_row] = cache[source, :, from_row]


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
