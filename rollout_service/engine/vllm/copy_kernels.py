"""Triton kernels that copy blocks and rows of all layers at once, by a table of addresses.

Layers lie in allocations of their own, so a kernel takes their addresses, not tensors. Numbers are
moved as words whose kind does not matter: NaN stays what it was.
"""

from __future__ import annotations

import triton
import triton.language as tl

WORDS = {4: tl.int32, 2: tl.int16, 1: tl.int8}
"""By their bytes."""


@triton.jit
def copy_blocks_kernel(copies, regions, PIECE_WORDS: tl.constexpr):
    """One piece of one block in one region; grid `(copies, regions, pieces)`.

    Args:
        copies: Source and destination block, `[num_copies, 2]` int64; source -1 writes zeros.
        regions: Address, and 32-bit words of a block, `[num_regions, 2]` int64.
        PIECE_WORDS: Words of a piece.
    """
    copy, region = copies + 2 * tl.program_id(0), regions + 2 * tl.program_id(1)
    source, target = tl.load(copy), tl.load(copy + 1)
    memory, num_words = tl.load(region).to(tl.pointer_type(tl.int32)), tl.load(region + 1)
    words = tl.program_id(2).to(tl.int64) * PIECE_WORDS + tl.arange(0, PIECE_WORDS)
    num_read = tl.where(source >= 0, num_words, 0)
    values = tl.load(memory + source * num_words + words, mask=words < num_read, other=0)
    tl.store(memory + target * num_words + words, values, mask=words < num_words)


@triton.jit
def copy_rows_kernel(
    runs,
    layers,
    WORD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
):
    """Some rows of one run, all heads, in one layer; grid `(runs, pieces, layers of a group)`.

    Args:
        runs: First source row, first destination row (both over the whole cache), number of rows,
            first layer of the group in `layers`, layers of the group, `[num_runs, 5]` int64.
        layers: Address, rows of a kernel block, heads, words of a head's row, and the strides of
            kernel block, head and row in words, `[num_layers, 7]` int64.
        WORD: Integer type of a word.
        TILE_ROWS: Rows of a piece.
        TILE_WORDS: At least the words of all heads' rows.
    """
    run = runs + 5 * tl.program_id(0)
    source, target, num_rows = tl.load(run), tl.load(run + 1), tl.load(run + 2)
    if tl.program_id(2) < tl.load(run + 4):
        layer = layers + 7 * (tl.load(run + 3) + tl.program_id(2))
        memory = tl.load(layer).to(tl.pointer_type(WORD))  # type: ignore[arg-type]
        kernel_rows, heads, width = tl.load(layer + 1), tl.load(layer + 2), tl.load(layer + 3)
        block_stride, head_stride = tl.load(layer + 4), tl.load(layer + 5)
        row_stride = tl.load(layer + 6)
        rows = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        words = tl.arange(0, TILE_WORDS)
        is_inside = (rows < num_rows)[:, None] & (words < heads * width)[None, :]
        within = (words // width * head_stride + words % width)[None, :]
        read, written = source + rows, target + rows
        read = read // kernel_rows * block_stride + read % kernel_rows * row_stride
        written = written // kernel_rows * block_stride + written % kernel_rows * row_stride
        values = tl.load(memory + read[:, None] + within, mask=is_inside, other=0)
        tl.store(memory + written[:, None] + within, values, mask=is_inside)
