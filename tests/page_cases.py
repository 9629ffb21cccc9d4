"""Copies of blocks and rows in every layout of a page, against addresses counted out one by one.

TRITON_INTERPRET=1 python -m tests.page_cases    # the kernels' wrong cases, as JSON
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from collections.abc import Iterable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from rollout_service.engine.vllm.blocks import block_regions
from rollout_service.engine.vllm.copies import Copies
from rollout_service.engine.vllm.step_copier import GroupCaches, LaunchedCopier

ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""Outermost first, the orders of layer, block, head, row and content in vLLM 0.32.0's memory."""
SIZES = ((16, 6), (48, 2), (528, 10))
"""Rows of a page, numbers of a row and head."""
DTYPES = (torch.float32, torch.bfloat16, torch.uint8)
NUM_LAYERS, NUM_BLOCKS, NUM_HEADS = 3, 11, 5
GROUPS = ((0, 2), (1,))
"""Layers of two groups that read mounts; a third, recurrent one overlays all of them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pages:
    """One allocation of all layers, by element."""

    flat: Tensor
    strides: dict[str, int]
    page_rows: int
    content: int
    num_kernel: int
    """Kernel blocks of a page."""

    def layer(self, layer: int) -> Tensor:
        """vLLM's view of a layer: `[blocks * num_kernel, H, rows, content]`."""
        rows, strides = self.page_rows // self.num_kernel, dict(self.strides)
        if self.num_kernel > 1:
            assert strides["B"] == NUM_HEADS * self.page_rows * self.content
            strides["B"] //= self.num_kernel
            # Heads outside rows count a kernel block's rows.
            strides["H"] = rows * self.content if strides["H"] > strides["N"] else strides["H"]
        return self.flat.as_strided(
            (NUM_BLOCKS * self.num_kernel, NUM_HEADS, rows, self.content),
            tuple(strides[axis] for axis in "BHNC"),
            layer * strides["L"],
        )

    def places(self, layer: int, block: int, row: int, count: int) -> Tensor:
        """Where the numbers of `count` rows lie, `[count, H, content]`."""
        strides, size = self.strides, self.page_rows // self.num_kernel
        rows = torch.arange(row, row + count)[:, None, None]
        heads = torch.arange(NUM_HEADS)[None, :, None]
        numbers = torch.arange(self.content)[None, None, :]
        begin = layer * strides["L"] + block * strides["B"] + numbers
        if self.num_kernel == 1 or strides["H"] < strides["N"]:
            return begin + heads * strides["H"] + rows * strides["N"]
        # Heads come inside kernel blocks.
        outer = rows // size * NUM_HEADS * size
        return begin + (outer + heads * size + rows % size) * self.content


def new_pages(
    order: str, dtype: torch.dtype, sizes: tuple[int, int], num_kernel: int, device: str
) -> Pages:
    """Pages of random numbers among NaN, or among a byte's highest value."""
    page_rows, content = sizes
    extents = {"L": NUM_LAYERS, "B": NUM_BLOCKS, "H": NUM_HEADS, "N": page_rows, "C": content}
    strides, stride = {}, 1
    for axis in reversed(order):
        strides[axis], stride = stride, stride * extents[axis]
    flat = torch.randint(1, 100, (stride,)).to(dtype)
    poison = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
    flat[torch.rand(stride) < 0.2] = poison
    return Pages(flat.to(device), strides, page_rows, content, num_kernel)


def cuts(order: str, page_rows: int) -> Iterator[int]:
    """Into how many kernel blocks the layout lets a page be cut."""
    yield 1
    if order in ("LBHNC", "LBNHC"):
        yield page_rows // 16


def some_copies(rng: random.Random, page_rows: int) -> Copies:
    """Blocks 0 to 4 are read, the others written; some take rows behind those of a copied block."""
    copies = Copies(blocks=[(0, 2, 5), (1, 4, 6), (2, 0, 7)], zeroed=[(2, 8), (2, 9)])
    for index in range(len(GROUPS)):
        for target in (5, 6, 10):
            edges = sorted(rng.sample(range(page_rows + 1), 4))
            for begin, end in list(pairwise(edges))[::2]:
                first = rng.randrange(page_rows - (end - begin) + 1)
                source = rng.randrange(5)
                copies.rows.append((index, source, first, target, begin, end - begin))
    return copies


def expected(pages: Pages, copies: Copies) -> Tensor:
    """The memory after the copies, number by number."""
    flat = pages.flat.cpu().clone()
    for layer in range(NUM_LAYERS):
        whole = [pages.places(layer, block, 0, pages.page_rows) for block in range(NUM_BLOCKS)]
        for _, source, target in copies.blocks:
            flat[whole[target]] = flat[whole[source]]
        for _, block in copies.zeroed:
            flat[whole[block]] = 0
    for index, source, row, target, to_row, count in copies.rows:
        for layer in GROUPS[index]:
            read = pages.places(layer, source, row, count)
            flat[pages.places(layer, target, to_row, count)] = flat[read]
    return flat


def as_bytes(tensor: Tensor) -> Tensor:
    """Bit for bit."""
    return tensor.cpu().view(torch.uint8)


Case = tuple[str, tuple[int, int], torch.dtype, int]
"""Order, sizes, type, kernel blocks of a page."""


def all_cases() -> list[Case]:
    """Every layout with every size and type."""
    return [
        (order, sizes, dtype, num_kernel)
        for order in ORDERS
        for sizes in SIZES
        for num_kernel in cuts(order, sizes[0])
        for dtype in DTYPES
    ]


def few_cases() -> list[Case]:
    """Every layout once, sizes and types in turns: the interpreter takes its time."""
    return [
        (order, SIZES[index % 2], DTYPES[index % 3], num_kernel)
        for index, order in enumerate(ORDERS)
        for num_kernel in cuts(order, SIZES[index % 2][0])
    ] + [("LBNHC", SIZES[2], torch.bfloat16, 33)]


def wrong_cases(cases: Iterable[Case], device: str) -> list[str]:
    """Those of `cases` in which the kernels differ from the reference."""
    wrong = []
    for order, sizes, dtype, num_kernel in cases:
        pages = new_pages(order, dtype, sizes, num_kernel, device)
        views = [pages.layer(layer) for layer in range(NUM_LAYERS)]
        groups = [
            GroupCaches(page_rows=sizes[0], caches=[views[layer] for layer in group])
            for group in (*GROUPS, ())
        ]
        copier = LaunchedCopier(block_regions([*views, *views], NUM_BLOCKS), groups)
        copies = some_copies(random.Random(f"{order} {sizes}"), sizes[0])
        wanted = expected(pages, copies)
        copier.copy(copies)
        copier.copy(Copies())
        if not torch.equal(as_bytes(pages.flat), as_bytes(wanted)):
            wrong.append(f"{order} {sizes} {dtype} {num_kernel}")
    return wrong


if __name__ == "__main__":
    sys.stdout.write(json.dumps(wrong_cases(few_cases(), "cpu")))
