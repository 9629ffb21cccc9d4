"""Row copies in the layouts that vLLM itself makes: the GPU backends' and the CPU's packings."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
)
from vllm.v1.attention.backends.utils import (
    get_supported_kv_cache_layouts,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from rollout_service.engine.vllm.rows import PackedRows
from tests.page_cases import (
    NUM_BLOCKS,
    NUM_HEADS,
    NUM_LAYERS,
    ORDERS,
    cuts,
    new_pages,
    some_copies,
)

DIM = 24


def vllm_views(
    layout: KVCacheLayout, page_rows: int, num_kernel: int
) -> tuple[Tensor, list[Tensor]]:
    """The memory of all layers as vLLM allocates it, full of NaN, and its view of each."""
    spec = FullAttentionSpec(
        block_size=page_rows, num_kv_heads=NUM_HEADS, head_size=DIM, dtype=torch.bfloat16
    )
    layer_stride, block_stride, *_ = compute_layout_strides(spec, NUM_BLOCKS, NUM_LAYERS, layout)
    names = [f"layer{layer}" for layer in range(NUM_LAYERS)]
    size = NUM_LAYERS * NUM_BLOCKS * spec.page_size_bytes
    tensor = KVCacheTensor(
        size=size, layers=names, layer_stride=layer_stride, block_stride=block_stride, offset=0
    )
    raw = torch.full((size // 2,), float("nan"), dtype=torch.bfloat16).view(torch.int8)
    kernel_rows = page_rows // num_kernel
    views = create_kv_cache_views(raw, spec, NUM_BLOCKS, layout, tensor, kernel_rows)
    return raw.view(torch.bfloat16), views


def test_gpu_backends_take_every_layout() -> None:
    layouts = get_supported_kv_cache_layouts([FlashAttentionBackend, TritonAttentionBackend])
    assert {layout.name for layout in layouts} == set(ORDERS)


@pytest.mark.parametrize("order", ORDERS)
def test_keys_and_values_lie_where_the_copies_look_for_them(order: str) -> None:
    for page_rows in (16, 528):
        for num_kernel in cuts(order, page_rows):
            flat, views = vllm_views(KVCacheLayout[order], page_rows, num_kernel)
            pages = new_pages(order, torch.bfloat16, (page_rows, 2 * DIM), num_kernel, "cpu")
            for layer, view in enumerate(views):
                assert view.stride() == pages.layer(layer).stride()
                assert view.storage_offset() == pages.layer(layer).storage_offset()
                rows = random.sample(range(NUM_BLOCKS * page_rows), 20)
                # As reshape_and_cache_flash writes: rows of [kernel blocks, rows, H, D].
                keys, values = view.transpose(1, 2).split(DIM, dim=-1)
                for row in rows:
                    written = torch.randn(NUM_HEADS, 2 * DIM).bfloat16()
                    at = divmod(row, page_rows // num_kernel)
                    keys[at], values[at] = written.split(DIM, dim=-1)
                    (place,) = pages.places(layer, *divmod(row, page_rows), 1)
                    assert torch.equal(flat[place], written)


CPU_PACKINGS = [
    ("vec", torch.float32, 64),
    ("vec", torch.bfloat16, 128),
    ("vec16", torch.float32, 80),
    ("vec16", torch.bfloat16, 112),
    *([("amx", torch.bfloat16, 64)] if torch.cpu._is_amx_tile_supported() else []),
]


@pytest.mark.parametrize(("isa", "dtype", "dim"), CPU_PACKINGS)
def test_cpu_packings_are_learned_to_the_number(isa: str, dtype: torch.dtype, dim: int) -> None:
    heads, page_rows = 3, 64
    runs = [run[1:] for run in some_copies(random.Random(isa), page_rows).rows if not run[0]]
    moves = [
        (source * page_rows + row + at, target * page_rows + to_row + at)
        for source, row, target, to_row, count in runs
        for at in range(count)
    ]
    numbers = {source: torch.randn(2, 1, heads, dim).to(dtype) for source, _ in moves}
    shape = (NUM_BLOCKS, heads, page_rows, 2 * dim)
    cache, expected = (torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
    for source, row in numbers.items():
        _write(cache, row, source, isa)
        _write(expected, row, source, isa)
    for source, target in moves:
        _write(expected, numbers[source], target, isa)
    PackedRows(isa).copy([cache], page_rows, runs)
    whole = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(cache.view(whole), expected.view(whole))


def _write(pages: Tensor, row: Tensor, slot: int, isa: str) -> None:
    """A row's keys and values, `[2, 1, H, D]`, as the CPU backend writes them."""
    blocks, heads, rows, width = pages.shape
    keys, values = pages.view(blocks, heads, 2 * rows, width // 2).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(row[0], row[1], keys, values, torch.tensor([slot]), isa)
