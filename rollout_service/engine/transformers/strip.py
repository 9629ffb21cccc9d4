"""The strip: tokens of many runs packed into one forward pass, `[1, T]`.

Owns what a layer needs to know about them: growing K/V per run, recurrent states per run,
and rows grouped so that recurrences run batched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout_service.engine.transformers.precision import widened, widened_dtype
from rollout_service.engine.transformers.recurrent import CHUNK_TOKENS

State = tuple[Tensor, Tensor]
"""A recurrent layer's convolution inputs `[W-1, C]` and recurrent state `[H, K, V]`."""


class KvBuffer:
    """Keys and values that one run attends to in one layer, widened, in a growing buffer."""

    def __init__(self, pieces: Sequence[Tensor], num_more: int) -> None:
        """Gather the context.

        Args:
            pieces: Mounted rows, then the path's, root first; each `[2, H, n, D]`.
            num_more: Rows that will be appended, as far as known.
        """
        self._rows: Tensor | None = None
        self._num_more = num_more
        self.num_rows = 0
        if pieces:
            self._append_all(pieces)

    @property
    def rows(self) -> Tensor:
        """Everything visible, `[2, H, num_rows, D]`."""
        assert self._rows is not None
        return self._rows[:, :, : self.num_rows]

    def append(self, rows: Tensor) -> Tensor:
        """Add `rows`, `[2, H, n, D]`; returns everything visible."""
        end = self.num_rows + rows.shape[2]
        if self._rows is None or end > self._rows.shape[2]:
            self._grow(rows, end)
        assert self._rows is not None
        self._rows[:, :, self.num_rows : end].copy_(rows)
        self.num_rows = end
        return self._rows[:, :, :end]

    def _append_all(self, pieces: Sequence[Tensor]) -> None:
        total = sum(piece.shape[2] for piece in pieces)
        heads, dim = pieces[0].shape[1], pieces[0].shape[3]
        self._rows = _new_rows(pieces[0], heads, total + self._num_more, dim)
        torch.cat(list(pieces), dim=2, out=self._rows[:, :, :total])
        self.num_rows = total

    def _grow(self, like: Tensor, end: int) -> None:
        # Doubling keeps the cost of a token independent of the context's length.
        capacity = max(2 * self.num_rows, end, self._num_more)
        grown = _new_rows(like, like.shape[1], capacity, like.shape[3])
        if self._rows is not None:
            grown[:, :, : self.num_rows].copy_(self.rows)
        self._rows = grown


def _new_rows(like: Tensor, heads: int, capacity: int, dim: int) -> Tensor:
    return like.new_empty(2, heads, capacity, dim, dtype=widened_dtype(like.dtype, like.device))


@dataclass(eq=False, slots=True)
class Run:
    """A cursor's tokens on their way through the model."""

    token_ids: list[int]
    """The cursor's own tokens known so far."""
    position_start: int
    num_done: int
    """Tokens of `token_ids` that have been computed."""
    keys_values: list[KvBuffer]
    """One for each attention layer; own rows at the end."""
    states: dict[int, State]
    """By decoder layer, after `num_done` tokens."""
    last_hidden: Tensor | None = None
    """Final hidden state of the newest computed token, or of the parent's last, `[hidden]`."""
    num_reserved: int = 0
    """Tokens that the store keeps room for until the run ends."""
    num_resident: int = 0
    """Tokens that were resident before the run began."""

    @property
    def num_left(self) -> int:
        """Tokens known and not yet computed."""
        return len(self.token_ids) - self.num_done


@dataclass(slots=True)
class Segment:
    """The next tokens of one run, at rows `[begin, end)` of the strip."""

    run: Run
    begin: int
    end: int


@dataclass(slots=True)
class RowGroup:
    """Segments of similar length, padded to one length for the recurrent layers."""

    runs: list[Run]
    index: Tensor | slice
    """Strip rows: a slice of single tokens, or `[N, L]` with T at padding."""
    lengths: Tensor
    """`[N]`."""
    valid: Tensor | None = None
    """`[N, L]`; None where nothing is padded."""

    def pack(self, rows: Tensor) -> Tensor:
        """Strip rows `[T, ...]` as `[N, L, ...]`, zero at padding."""
        if isinstance(self.index, slice):
            return rows[self.index].unsqueeze(1)
        return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, 1))[self.index]

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        """Write `[N, L, ...]` back to its rows of `out`, `[T, ...]`, rounded to its type."""
        packed = packed.to(out.dtype)
        if isinstance(self.index, slice):
            out[self.index] = packed[:, 0]
        elif self.valid is None:
            out[self.index] = packed
        else:
            out[self.index[self.valid]] = packed[self.valid]

    def masked(self, packed: Tensor) -> Tensor:
        """`[N, L, H]` with zeros at padding."""
        return packed if self.valid is None else packed * self.valid.unsqueeze(-1)

    def states(self, layer: int) -> State:
        """The runs' states at `layer`, stacked: `[N, W-1, C]`, `[N, H, K, V]`."""
        states = [run.states[layer] for run in self.runs]
        return torch.stack([s[0] for s in states]), torch.stack([s[1] for s in states])

    def set_states(self, layer: int, conv: Tensor, recurrent: Tensor) -> None:
        """Advance each run at `layer`."""
        for run, one_conv, one_state in zip(
            self.runs, conv.unbind(0), recurrent.unbind(0), strict=True
        ):
            run.states[layer] = (one_conv, one_state)


@dataclass(slots=True)
class Strip:
    """One forward pass."""

    segments: list[Segment]
    token_ids: Tensor
    """`[1, T]`; rows after the last segment are filling."""
    position_ids: Tensor
    """`[1, T]`."""
    groups: list[RowGroup]
    attention_index: dict[int, int]
    """Decoder layer -> index into `Run.keys_values`."""
    masks: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    """Visibility by (groups, new rows, all rows), shared by the layers."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention of each segment over its run's context and itself.

        Args:
            layer: Decoder layer.
            query: `[HQ, T, D]`, rotated.
            key: `[H, T, D]`, rotated.
            value: `[H, T, D]`.
            scale: Of the logits.

        Returns:
            `[T, HQ, D]`.
        """
        fresh = torch.stack([key, value])
        heads, num_rows, dim = key.shape
        queries = widened(query).transpose(0, 1).reshape(num_rows, heads, -1, dim)
        index = self.attention_index[layer]
        mixed = []
        for segment in self.segments:
            rows = slice(segment.begin, segment.end)
            visible = segment.run.keys_values[index].append(fresh[:, :, rows])
            mixed.append(self._attend_one(queries[rows], visible, scale))
        output = query.new_zeros(num_rows, query.shape[0], dim)
        output[: self.segments[-1].end] = torch.cat(mixed).flatten(1, 2)
        return output

    def _attend_one(self, query: Tensor, visible: Tensor, scale: float) -> Tensor:
        """Query `[n, H, G, D]` over rows `[2, H, m, D]`, the last n of them its own."""
        keys, values = visible.unsqueeze(1).unbind(0)
        num_new, heads, per_head, dim = query.shape
        if num_new == 1:
            return F.scaled_dot_product_attention(query, keys, values, scale=scale)
        mixed = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3).reshape(1, heads, per_head * num_new, dim),
            keys,
            values,
            attn_mask=self._mask(per_head, num_new, visible.shape[2], query.device),
            scale=scale,
        )
        return mixed.view(heads, per_head, num_new, dim).permute(2, 0, 1, 3)

    def _mask(self, per_head: int, num_new: int, num_all: int, device: torch.device) -> Tensor:
        key = (per_head, num_new, num_all)
        if key not in self.masks:
            mask = torch.ones(num_new, num_all, dtype=torch.bool, device=device)
            self.masks[key] = mask.tril(num_all - num_new).repeat(per_head, 1)
        return self.masks[key]


def build_strip(
    work: Sequence[tuple[Run, int]],
    attention_index: dict[int, int],
    device: torch.device,
    *,
    min_rows: int,
) -> Strip:
    """Pack the next tokens of each run.

    Args:
        work: Runs and how many of their next tokens to compute.
        attention_index: Decoder layer -> index into `Run.keys_values`.
        device: Where the model is.
        min_rows: Rows that the strip is filled up to.
    """
    work = sorted(work, key=lambda item: item[1] > 1)
    segments: list[Segment] = []
    token_ids: list[int] = []
    position_ids: list[int] = []
    for run, count in work:
        begin = len(token_ids)
        token_ids.extend(run.token_ids[run.num_done : run.num_done + count])
        first = run.position_start + run.num_done
        position_ids.extend(range(first, first + count))
        segments.append(Segment(run, begin, begin + count))
    filling = [0] * (min_rows - len(token_ids))
    token_ids += filling
    position_ids += filling
    return Strip(
        segments=segments,
        token_ids=torch.tensor([token_ids], device=device),
        position_ids=torch.tensor([position_ids], device=device),
        groups=_group(segments, len(token_ids), device),
        attention_index=attention_index,
    )


def _group(segments: list[Segment], num_rows: int, device: torch.device) -> list[RowGroup]:
    """Single tokens together, longer segments by padded length."""
    buckets: dict[int, list[Segment]] = {}
    for segment in segments:
        buckets.setdefault(_padded_length(segment.end - segment.begin), []).append(segment)
    groups = []
    for length, members in buckets.items():
        runs = [segment.run for segment in members]
        if length == 1:
            ones = torch.ones(len(runs), dtype=torch.long, device=device)
            groups.append(RowGroup(runs, slice(members[0].begin, members[-1].end), ones))
            continue
        begins = torch.tensor([segment.begin for segment in members], device=device)
        lengths = torch.tensor([s.end - s.begin for s in members], device=device)
        offsets = torch.arange(length, device=device)
        valid = offsets < lengths[:, None]
        index = torch.where(valid, begins[:, None] + offsets, num_rows)
        padded = any(s.end - s.begin < length for s in members)
        groups.append(RowGroup(runs, index, lengths, valid if padded else None))
    return groups


def _padded_length(length: int) -> int:
    """Next power of two within a chunk, else whole chunks."""
    if length <= CHUNK_TOKENS:
        return 1 << (length - 1).bit_length()
    return -(-length // CHUNK_TOKENS) * CHUNK_TOKENS
