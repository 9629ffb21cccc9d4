"""A step's copies of blocks and rows in the GPU backends' page layouts, on the CPU."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from rollout_service.engine.vllm.blocks import block_regions
from rollout_service.engine.vllm.copies import Copies
from rollout_service.engine.vllm.rows import Rows
from rollout_service.engine.vllm.step_copier import GroupCaches, PlainCopier
from tests.interpreter import interpreted
from tests.page_cases import (
    GROUPS,
    NUM_BLOCKS,
    NUM_LAYERS,
    ORDERS,
    as_bytes,
    cuts,
    expected,
    new_pages,
    some_copies,
)


class LogicalRows:
    """Rows by vLLM's view of a layer, whatever lies behind it."""

    def copy(self, caches: Sequence[Tensor], page_rows: int, rows: Sequence[Rows]) -> None:
        size = caches[0].shape[2]
        for source, from_row, target, to_row, count in rows:
            for at in range(count):
                read, written = source * page_rows + from_row + at, target * page_rows + to_row + at
                for cache in caches:
                    cache[written // size, :, written % size] = cache[read // size, :, read % size]


def test_kernels_equal_counted_addresses_in_every_layout() -> None:
    assert interpreted("tests.page_cases") == []


@pytest.mark.parametrize("order", ORDERS)
def test_plain_copies_equal_counted_addresses_in_every_layout(order: str) -> None:
    for sizes in ((16, 6), (48, 2)):
        for num_kernel in cuts(order, sizes[0]):
            pages = new_pages(order, torch.bfloat16, sizes, num_kernel, "cpu")
            views = [pages.layer(layer) for layer in range(NUM_LAYERS)]
            # Two groups overlay each other: their layers begin at the same places.
            regions = block_regions([*views, *reversed(views)], NUM_BLOCKS)
            groups = [
                GroupCaches(page_rows=sizes[0], caches=[views[layer] for layer in group])
                for group in (*GROUPS, ())
            ]
            copies = some_copies(random.Random(order), sizes[0])
            wanted = expected(pages, copies)
            copier = PlainCopier(regions, groups, LogicalRows())
            copier.copy(copies)
            copier.copy(Copies())
            assert torch.equal(as_bytes(pages.flat), as_bytes(wanted))
