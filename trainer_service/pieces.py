"""A strip past memory, computed piece by piece with the gradients of the whole.

The forward goes through the pieces without autograd and keeps what later pieces read. The backward
goes through them in reverse, computes each once more with autograd, and adds what it owes to the
boundary in float32: no row's forward is computed more than twice, as with checkpointed layers.

Peak memory beyond the weights and the strip's log-probabilities is that of
  - one piece: activations of at most `max_piece_tokens` rows, copies of what it reads (the keys and
    values on its paths and mounts, a state and a convolution's window for each of its roots), and
    one layer's attention scores over these keys: never more than a strip of the piece and the rows
    that it reads would take;
  - the boundary: keys and values of the rows that other pieces see, convolution inputs before their
    roots and one state per row that another piece continues, and as much again in float32 for their
    gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from tree_kernels.layout import PieceLayout, TreeLayout, cut_pieces, places

Outputs = tuple[torch.Tensor, ...]
Compute = Callable[[PieceLayout, "PieceBoundary"], Outputs]
"""Computes one piece; tensors of equal length, differentiable in the parameters."""


def num_pieces(num_tokens: int, max_tokens: int | None) -> int:
    """Pieces of a strip of `num_tokens` rows, at most `max_tokens` in each; None cuts none.

    Example:
        `num_pieces(9, 4)` is 3.
    """
    return 1 if max_tokens is None else -(-num_tokens // max_tokens)


class PiecePlan:
    """The pieces of one strip, and which rows pass between them."""

    def __init__(self, layout: TreeLayout, max_tokens: int) -> None:
        """Cut `layout` into pieces of at most `max_tokens` rows.

        Raises:
            ValueError: As `cut_pieces`.
        """
        self.pieces = [PieceLayout(layout, rows) for rows in cut_pieces(layout, max_tokens)]
        self.seen_rows = _union([piece.seen_rows for piece in self.pieces])
        """Rows whose keys and values other pieces see, int64."""
        self.end_rows = _union([piece.end_rows for piece in self.pieces])
        """Rows that other pieces continue, int64."""
        self.context_rows: Callable[[int], np.ndarray] = cache(self._context_rows)
        """Rows that convolutions of this width read in other pieces, int64."""

    def _context_rows(self, width: int) -> np.ndarray:
        return _union([piece.context_rows(width) for piece in self.pieces])


def _union(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.unique(np.concatenate(parts))


class PieceRun:
    """The boundary of a strip's pieces: values, and in the backward their gradients."""

    def __init__(self, plan: PiecePlan) -> None:
        """Start with nothing kept."""
        self.plan = plan
        self.values: dict[Hashable, torch.Tensor] = {}
        self.grads: dict[Hashable, torch.Tensor] = {}

    def forward(self, compute: Compute) -> list[Outputs]:
        """Outputs of each piece, without gradient."""
        outputs = []
        for piece in self.plan.pieces:
            with torch.no_grad():
                outputs.append(compute(piece, PieceBoundary(self, piece)))
            piece.forget_tables()
        return outputs

    def backward(self, compute: Compute, grads: Sequence[Outputs]) -> None:
        """Add to the parameters' gradients what `grads` of each piece's outputs give.

        Not to be called within a backward: FSDP2 keeps there the weights that a forward gathers.
        """
        self.grads = {
            slot: torch.zeros_like(values, dtype=torch.promote_types(values.dtype, torch.float32))
            for slot, values in self.values.items()
        }
        for piece, given in reversed(list(zip(self.plan.pieces, grads, strict=True))):
            boundary = PieceBoundary(self, piece)
            with torch.enable_grad():
                outputs = compute(piece, boundary)
            boundary.backward(outputs, given)
            piece.forget_tables()
        self.grads = {}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Taken:
    """Rows of a slot that a piece has read."""

    slot: Hashable
    leaf: torch.Tensor
    index: torch.Tensor


class PieceBoundary:
    """The boundary seen from one piece; see `trainer_service.models.Boundary`."""

    def __init__(self, run: PieceRun, piece: PieceLayout) -> None:
        """Read from and write to `run`; where autograd records, remember both for `backward`."""
        self._run = run
        self._piece = piece
        self._taken: list[_Taken] = []
        self._left: list[tuple[Hashable, torch.Tensor, torch.Tensor]] = []

    def with_seen(self, slot: tuple[int, int], rows: torch.Tensor) -> torch.Tensor:
        """`rows` behind those of other pieces that attention sees."""
        kept = self._run.plan.seen_rows
        return self._behind(("seen", slot), rows, kept, self._piece.seen_rows)

    def with_context(self, layer: int, rows: torch.Tensor, width: int) -> torch.Tensor:
        """`rows` behind those of other pieces in the windows of a convolution of `width`."""
        kept = self._run.plan.context_rows(width)
        return self._behind(("context", layer), rows, kept, self._piece.context_rows(width))

    def initial_states(self, layer: int) -> torch.Tensor | None:
        """State before each root, `[R, ...]`; None where all are zero."""
        parents = self._piece.root_parents
        if (parents < 0).all():
            return None
        continued = np.flatnonzero(parents >= 0)
        states = self._read(("state", layer), self._run.plan.end_rows, parents[continued])
        empty = states.new_zeros(len(parents), *states.shape[1:])
        return empty.index_copy(0, self._index(continued), states)

    def leave_states(self, layer: int, states: torch.Tensor) -> None:
        """Take the states that other pieces go on from, `[S, ...]`."""
        self._write(("state", layer), states, self._run.plan.end_rows, self._piece.end_rows)

    def backward(self, outputs: Outputs, grads: Outputs) -> None:
        """Backward of one piece: its outputs and all that it left, in one traversal."""
        roots = list(zip(outputs, grads, strict=True))
        roots += [
            (values, self._run.grads[slot][index].to(values.dtype))
            for slot, values, index in self._left
        ]
        roots = [(values, grad) for values, grad in roots if values.requires_grad]
        if roots:
            torch.autograd.backward([values for values, _ in roots], [grad for _, grad in roots])
        for taken in self._taken:
            if taken.leaf.grad is not None:
                grads_of = self._run.grads[taken.slot]
                grads_of.index_add_(0, taken.index, taken.leaf.grad.to(grads_of.dtype))

    def _behind(
        self, slot: Hashable, rows: torch.Tensor, kept: np.ndarray, wanted: np.ndarray
    ) -> torch.Tensor:
        leaving = np.flatnonzero(np.isin(self._piece.rows, kept))
        self._write(slot, rows[self._index(leaving)], kept, self._piece.rows[leaving])
        if len(wanted) == 0:
            return rows
        return torch.cat([self._read(slot, kept, wanted), rows])

    def _read(self, slot: Hashable, kept: np.ndarray, wanted: np.ndarray) -> torch.Tensor:
        index = self._index(places(wanted, kept))
        leaf = self._run.values[slot][index]
        if torch.is_grad_enabled():
            leaf.requires_grad_()
            self._taken.append(_Taken(slot=slot, leaf=leaf, index=index))
        return leaf

    def _write(
        self, slot: Hashable, values: torch.Tensor, kept: np.ndarray, rows: np.ndarray
    ) -> None:
        if len(rows) == 0:
            return
        index = self._index(places(rows, kept))
        if torch.is_grad_enabled():
            self._left.append((slot, values, index))
            return
        if slot not in self._run.values:
            self._run.values[slot] = values.new_zeros(len(kept), *values.shape[1:])
        self._run.values[slot][index] = values

    def _index(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._piece.device)
