"""Copies of blocks and rows in the GPU backends' page layouts, as bytes on the CPU."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from rollout_service.engine.vllm.rows import BlockMemory, Rows, StridedRows

ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""Outermost first, the orders of layer, block, head, row and content in vLLM 0.32.0's memory."""
NUM_LAYERS, NUM_BLOCKS, NUM_HEADS = 3, 7, 5


@dataclasses.dataclass(frozen=True, slots=True)
class Pages:
    """One allocation of all layers, by element."""

    flat: Tensor
    strides: dict[str, int]
    page_rows: int
    content: int

    def layer(self, layer: int, num_kernel: int = 1) -> Tensor:
        """vLLM's view of a layer: `[blocks * num_kernel, H, rows, content]`."""
        rows, strides = self.page_rows // num_kernel, dict(self.strides)
        if num_kernel > 1:
            assert strides["B"] == NUM_HEADS * self.page_rows * self.content
            strides["B"] //= num_kernel
            # Heads outside rows count a kernel block's rows.
            strides["H"] = rows * self.content if strides["H"] > strides["N"] else strides["H"]
        return self.flat.as_strided(
            (NUM_BLOCKS * num_kernel, NUM_HEADS, rows, self.content),
            tuple(strides[axis] for axis in "BHNC"),
            layer * strides["L"],
        )

    def address(self, layer: int, block: int, head: int, row: int, num_kernel: int) -> int:
        """Where the first number of a row and head lies; heads come inside kernel blocks."""
        s, size = self.strides, self.page_rows // num_kernel
        begin = layer * s["L"] + block * s["B"]
        if num_kernel == 1 or s["H"] < s["N"]:
            return begin + head * s["H"] + row * s["N"]
        kernel_block = (row // size) * NUM_HEADS * size
        return begin + (kernel_block + head * size + row % size) * self.content


def new_pages(order: str, dtype: torch.dtype, *, page_rows: int, content: int) -> Pages:
    """Pages full of NaN, or of a byte's highest value."""
    sizes = {"L": NUM_LAYERS, "B": NUM_BLOCKS, "H": NUM_HEADS, "N": page_rows, "C": content}
    strides, stride = {}, 1
    for axis in reversed(order):
        strides[axis], stride = stride, stride * sizes[axis]
    flat = torch.empty(stride, dtype=dtype)
    flat.fill_(float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max)
    return Pages(flat, strides, page_rows, content)


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def some_runs(rng: random.Random, page_rows: int) -> list[Rows]:
    """Runs between blocks of the lower and the upper half, of odd lengths at odd places."""
    runs, blocks = [], list(range(NUM_BLOCKS // 2, NUM_BLOCKS))
    for block in blocks:
        edges = sorted(rng.sample(range(page_rows + 1), 4))
        for begin, end in list(pairwise(edges))[::2]:
            first = rng.randrange(page_rows - (end - begin) + 1)
            runs.append((rng.randrange(NUM_BLOCKS // 2), first, block, begin, end - begin))
    return runs


def kernel_cuts(order: str, page_rows: int) -> Iterator[int]:
    """Into how many kernel blocks the layout lets a page be cut."""
    yield 1
    if order in ("LBHNC", "LBNHC"):
        yield page_rows // 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_rows_are_copied_in_every_layout(order: str, dtype: torch.dtype) -> None:
    rng = random.Random(order)
    for page_rows, content in ((16, 6), (48, 2), (528, 10)):
        for num_kernel in kernel_cuts(order, page_rows):
            pages = new_pages(order, dtype, page_rows=page_rows, content=content)
            runs = some_runs(rng, page_rows)
            layers = [pages.layer(layer, num_kernel) for layer in (0, 2)]
            for block, row, _, _, count in runs:
                for layer in layers:
                    for at in range(row, row + count):
                        number = block * page_rows + at
                        size = page_rows // num_kernel
                        cell = layer[number // size, :, number % size]
                        cell.copy_(torch.randint(1, 100, cell.shape))
            expected = pages.flat.clone()
            for source, row, target, to_row, count in runs:
                for at in range(count):
                    _copy_row(
                        pages, expected, (source, row + at), (target, to_row + at), num_kernel
                    )
            StridedRows().copy(layers, page_rows, runs)
            assert torch.equal(as_bytes(pages.flat), as_bytes(expected))


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_are_copied_whole_in_every_layout(order: str) -> None:
    for page_rows, content in ((16, 6), (48, 2)):
        for num_kernel in kernel_cuts(order, page_rows):
            pages = new_pages(order, torch.bfloat16, page_rows=page_rows, content=content)
            pages.flat.copy_(torch.randn_like(pages.flat))
            # Two groups overlay each other: their layers begin at the same places.
            views = [pages.layer(layer, num_kernel) for layer in (0, 1, 2, 1, 0)]
            memory, expected = BlockMemory(views, NUM_BLOCKS), pages.flat.clone()
            twin = dataclasses.replace(pages, flat=expected)
            for layer in range(NUM_LAYERS):
                before = pages.layer(layer).clone()
                twin.layer(layer)[5], twin.layer(layer)[0] = before[2], before[6]
                twin.layer(layer)[4] = 0
            memory.copy([(2, 5), (6, 0)])
            memory.zero([4])
            memory.copy([])
            memory.zero([])
            assert torch.equal(as_bytes(pages.flat), as_bytes(expected))


def _copy_row(
    pages: Pages, flat: Tensor, source: tuple[int, int], target: tuple[int, int], num_kernel: int
) -> None:
    """The plain reference: number by number, by its address."""
    for layer in (0, 2):
        for head in range(NUM_HEADS):
            begin = pages.address(layer, source[0], head, source[1], num_kernel)
            end = pages.address(layer, target[0], head, target[1], num_kernel)
            for number in range(pages.content):
                flat[end + number] = pages.flat[begin + number]
