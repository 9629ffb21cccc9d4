"""Blocks of the pool as bytes in every layer: each a page, or a recurrent state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def block_regions(caches: Iterable[Tensor], num_blocks: int) -> list[Tensor]:
    """The memory behind `caches`, each region once.

    Groups overlay each other and a block belongs to one of them at a time, so a copy of the bytes
    serves all groups. vLLM has a function of its own for this; 0.32.0 copies only the first of
    several layers whose views begin at one address, as those of a hybrid's groups do.

    Args:
        caches: Each layer's cache or first state, `[num_blocks * k, ...]`: the backend may split
            a block in k.
        num_blocks: Blocks of the scheduler.

    Returns:
        A block's bytes in each region, `[num_blocks, words]` int32.
    """
    regions = [region for cache in caches for region in _bytes_by_block(cache, num_blocks)]
    return list({region.data_ptr(): region for region in regions}.values())


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
