"""Modules that treat each row alone, computed a tile of rows at a time within a checkpointed layer.

A checkpointed layer keeps its input; the backward computes it again and then holds all of its
activations at once, of which those of the feed-forward part are the widest. Here that part keeps
its own input alone, and its backward goes through the rows tile by tile, so that at most one tile's
activations exist. Nothing is computed more often than without tiles: the layer is computed again
up to the part's input, and each tile once more from there.

Peak memory of a backward through L checkpointed layers of width D over T rows, beyond weights and
the head: `L * T * D` kept inputs, one layer's mixer over T rows, its feed-forward part over
`tile_rows`, and a few `[T, D]`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import MethodType
from typing import Any

import torch
from torch import nn

RowForward = Callable[[torch.Tensor], torch.Tensor]


def use_row_tiles(model: nn.Module, class_names: Collection[str], tile_rows: int) -> None:
    """Compute modules of these classes in tiles of at most `tile_rows` rows from now on.

    Their parameters' gradients are added as `Tensor.backward` does: `torch.autograd.grad` finds
    none.
    """
    for module in model.modules():
        if type(module).__name__ in class_names:
            module.forward = MethodType(_tiled_forward(module.forward, tile_rows), module)


def _tiled_forward(forward: RowForward, tile_rows: int) -> Callable[..., torch.Tensor]:
    def tiled(self: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        """`[1, T, D]` to `[1, T, D]`."""
        del self
        if rows.shape[1] <= tile_rows:
            return forward(rows)
        if not (torch.is_grad_enabled() and rows.requires_grad):
            return _by_tiles(rows, forward, tile_rows)
        kept: Any = _Kept.apply(rows)
        # In a tuple, autograd takes it for no input. It must live: in PyTorch 2.11 a node loses
        # what it has saved when its output dies.
        return _RowTiles.apply(rows, (kept,), forward, tile_rows)

    return tiled


def _by_tiles(rows: torch.Tensor, forward: RowForward, tile_rows: int) -> torch.Tensor:
    out: torch.Tensor | None = None
    for begin in range(0, rows.shape[1], tile_rows):
        tile = forward(rows[:, begin : begin + tile_rows])
        out = rows.new_empty(*rows.shape[:2], tile.shape[2]) if out is None else out
        out[:, begin : begin + tile_rows] = tile
    assert out is not None
    return out


class _Kept(torch.autograd.Function):
    """Keeps its input for the backward of what follows.

    A node of its own: a checkpointed layer stops to compute again at the last tensor that it kept,
    which is then this one, before the tiles.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> None:
        raise AssertionError("nothing is computed from the empty output")


class _RowTiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        kept: tuple[torch.Tensor],
        forward: RowForward,
        tile_rows: int,
    ) -> torch.Tensor:
        ctx.kept, ctx.forward, ctx.tile_rows = kept, forward, tile_rows
        return _by_tiles(rows, forward, tile_rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        (rows,) = ctx.kept[0].grad_fn.saved_tensors
        # A layer's rows go with the layer, not with the whole graph.
        ctx.kept = None
        found = torch.empty_like(rows)
        for begin in range(0, rows.shape[1], ctx.tile_rows):
            own = slice(begin, begin + ctx.tile_rows)
            tile = rows[:, own].detach().requires_grad_()
            with torch.enable_grad():
                out = ctx.forward(tile)
            torch.autograd.backward(out, grads[0][:, own])
            assert tile.grad is not None
            found[:, own] = tile.grad
        return found, None, None, None
