"""A step's copies on a GPU: every layout against counted addresses, and what a step costs."""

from __future__ import annotations

import random

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from rollout_service.engine.vllm.blocks import block_regions
from rollout_service.engine.vllm.step_copier import GroupCaches, LaunchedCopier
from tests.page_cases import (
    GROUPS,
    NUM_BLOCKS,
    NUM_LAYERS,
    all_cases,
    new_pages,
    some_copies,
    wrong_cases,
)

pytestmark = pytest.mark.gpu


def test_kernels_equal_counted_addresses_in_every_layout() -> None:
    assert wrong_cases(all_cases(), "cuda") == []


def test_a_step_is_one_message_and_two_launches_and_waits_for_nothing() -> None:
    pages = new_pages("LBNHC", torch.bfloat16, (528, 10), 33, "cuda")
    views = [pages.layer(layer) for layer in range(NUM_LAYERS)]
    groups = [
        GroupCaches(page_rows=528, caches=[views[layer] for layer in group])
        for group in (*GROUPS, ())
    ]
    copier = LaunchedCopier(block_regions(views, NUM_BLOCKS), groups)
    copies = some_copies(random.Random(1), 528)
    copier.copy(copies)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        torch.cuda.set_sync_debug_mode("error")
        try:
            copier.copy(copies)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    events = profiled.events() or []
    names = [event.name for event in events if event.device_type.name == "CUDA"]
    assert sum("kernel" in name for name in names) == 2
    assert sum("Memcpy" in name for name in names) == 1
