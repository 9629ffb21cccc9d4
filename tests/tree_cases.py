"""Random trees, their brute-force visibility, and loops over tokens for the tree operators."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tree_kernels.layout import TreeLayout, heavy_first_order


@dataclass(frozen=True)
class TreeCase:
    """Nodes in strip order, with the rows that each of them mounts."""

    parents: list[int]
    lengths: list[int]
    mounts: list[list[tuple[int, int]]]

    @property
    def layout(self) -> TreeLayout:
        """As the operators take it."""
        return TreeLayout.build(self.parents, self.lengths, self.mounts)

    def row_paths(self) -> list[list[int]]:
        """For each row the rows on its path, itself last."""
        starts = np.concatenate([[0], np.cumsum(self.lengths)])
        paths: list[list[int]] = []
        for node, (parent, length) in enumerate(zip(self.parents, self.lengths, strict=True)):
            path = list(paths[starts[parent + 1] - 1]) if parent >= 0 else []
            for row in range(starts[node], starts[node] + length):
                path = [*path, row]
                paths.append(path)
        return paths

    def visible(self, *, mounted: bool) -> torch.Tensor:
        """Which row sees which, `[T, T]` bool."""
        total = sum(self.lengths)
        seen = torch.zeros(total, total, dtype=torch.bool)
        for row, path in enumerate(self.row_paths()):
            seen[row, path] = True
        begin = 0
        for spans, length in zip(self.mounts, self.lengths, strict=True):
            for key_begin, key_end in spans if mounted else ():
                # A node never mounts its own rows or those of its ancestors a second time.
                seen[begin : begin + length, key_begin:key_end] |= ~_own(self, begin)[
                    key_begin:key_end
                ]
            begin += length
        return seen


def _own(case: TreeCase, begin: int) -> torch.Tensor:
    """Rows of the node that starts at `begin` and of its ancestors, `[T]` bool."""
    own = torch.zeros(sum(case.lengths), dtype=torch.bool)
    starts = np.concatenate([[0], np.cumsum(case.lengths)])
    node = int(np.searchsorted(starts, begin))
    while node >= 0:
        own[starts[node] : starts[node + 1]] = True
        node = case.parents[node]
    return own


def strip_order(parents: list[int], lengths: list[int]) -> tuple[list[int], list[int]]:
    """Parents and lengths of the nodes in heavy-first order."""
    order = heavy_first_order(parents, lengths)
    place = {node: index for index, node in enumerate(order)}
    return (
        [place[parents[node]] if parents[node] >= 0 else -1 for node in order],
        [lengths[node] for node in order],
    )


def random_case(
    rng: np.random.Generator, num_tokens: int, num_nodes: int, *, with_mounts: bool = True
) -> TreeCase:
    """A forest of `num_tokens` rows in at most `num_nodes` nodes."""
    num_nodes = min(num_nodes, num_tokens)
    cuts = np.sort(rng.choice(num_tokens - 1, num_nodes - 1, replace=False)) + 1
    lengths = np.diff([0, *cuts, num_tokens]).tolist()
    parents = [-1]
    for node in range(1, num_nodes):
        parents.append(int(rng.integers(-1 if rng.random() < 0.1 else 0, node)))
    parents, lengths = strip_order(parents, lengths)
    mounts: list[list[tuple[int, int]]] = [[] for _ in lengths]
    for node in range(num_nodes):
        while with_mounts and rng.random() < 0.4:
            begin = int(rng.integers(0, num_tokens))
            mounts[node].append((begin, int(rng.integers(begin, num_tokens)) + 1))
    return TreeCase(parents, lengths, mounts)


_GUARD = 1024
"""Elements on either side; a multiple of what kernels read at once."""


@contextlib.contextmanager
def poisoned_empty() -> Iterator[None]:
    """Fresh memory from `torch.empty` and its kin is NaN and lies between NaN.

    So reading what nobody wrote, or beyond a tensor, shows in results; writing beyond one fails
    here.
    """
    guards: list[torch.Tensor] = []

    def between_guards(fresh: torch.Tensor) -> torch.Tensor:
        if fresh.is_meta or not fresh.is_floating_point() or not fresh.is_contiguous():
            return fresh
        wide = fresh.new_full((fresh.numel() + 2 * _GUARD,), float("nan"))
        guards.extend((wide[:_GUARD], wide[-_GUARD:]))
        return wide[_GUARD:-_GUARD].view(fresh.shape)

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            original = getattr(owner, name)

            def poisoned(*args: object, _original: object = original, **kwargs: object) -> object:
                return between_guards(_original(*args, **kwargs))  # type: ignore[operator]

            patch.setattr(owner, name, poisoned)
        yield
    assert all(bool(guard.isnan().all()) for guard in guards), "written outside of a tensor"


def relative_rms(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Root mean square of the difference over that of `wanted`."""
    difference = (found.detach().double() - wanted.detach().double()).square().mean()
    return float((difference / wanted.detach().double().square().mean().clamp_min(1e-60)).sqrt())


def path_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    case: TreeCase,
    *,
    scale: float,
    mounted: bool,
) -> torch.Tensor:
    """Softmax attention under the dense mask."""
    group = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
    scores = scores.masked_fill(~case.visible(mounted=mounted), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


def path_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    case: TreeCase,
) -> torch.Tensor:
    """The recurrence row by row, each from the state of the row before it on its path."""
    group = value.shape[1] // key.shape[1]
    queries = query.repeat_interleave(group, 1) * query.shape[2] ** -0.5
    keys = key.repeat_interleave(group, 1)
    states: list[torch.Tensor] = []
    outputs = []
    for row, path in enumerate(case.row_paths()):
        k = keys[row]
        fresh = value.new_zeros(value.shape[1], k.shape[1], value.shape[2])
        before = states[path[-2]] if len(path) > 1 else fresh
        state = before * log_decay[row, :, None, None].exp()
        write = (value[row] - (state * k[..., None]).sum(1)) * beta[row, :, None]
        state = state + k[..., None] * write[:, None]
        states.append(state)
        outputs.append((state * queries[row][..., None]).sum(1))
    return torch.stack(outputs)


def path_ssd(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    case: TreeCase,
) -> torch.Tensor:
    """The recurrence row by row, each from the state of the row before it on its path."""
    group = x.shape[1] // b.shape[1]
    inputs, outputs_of = b.repeat_interleave(group, 1), c.repeat_interleave(group, 1)
    states: list[torch.Tensor] = []
    outputs = []
    for row, path in enumerate(case.row_paths()):
        fresh = x.new_zeros(*x.shape[1:], b.shape[2])
        before = states[path[-2]] if len(path) > 1 else fresh
        write = (x[row] * dt[row, :, None])[..., None] * inputs[row][:, None]
        state = before * (dt[row] * a).exp()[:, None, None] + write
        states.append(state)
        outputs.append((state * outputs_of[row][:, None]).sum(-1) + d[:, None] * x[row])
    return torch.stack(outputs)


def path_causal_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, case: TreeCase
) -> torch.Tensor:
    """Each row's window gathered from its path."""
    width = weight.shape[1]
    outputs = []
    for path in case.row_paths():
        window = path[-width:]
        taps = weight[:, width - len(window) :]
        out = (x[window] * taps.t()).sum(0)
        outputs.append(out if bias is None else out + bias)
    return torch.stack(outputs)
