"""Trees for tree attention, and attention as its definition in float64: a dense mask.

`python -m tests.attention_cases` prints what the GPU's path finds in Triton's interpreter, with
libraries of the CPU, as one JSON object. Triton reads TRITON_INTERPRET where it is imported first.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import torch

from tests.tree_cases import TreeCase, poisoned_empty, random_case, relative_rms, strip_order
from tree_kernels.attention import groups
from tree_kernels.attention.calls import Call, CallPlan, plan_calls
from tree_kernels.layout import AttentionParts, Grid

Tensors = dict[str, torch.Tensor]
Attend = Callable[..., torch.Tensor]
Mounts = dict[int, list[tuple[int, int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """One tree and the heads that run over it."""

    tree: TreeCase
    query_heads: int = 4
    heads: int = 2
    dim: int = 16
    mounted: bool = True

    @property
    def num_tokens(self) -> int:
        """Rows, T."""
        return sum(self.tree.lengths)


def _tree(parents: list[int], lengths: list[int], mounts: Mounts | None = None) -> TreeCase:
    return TreeCase(
        parents, lengths, [(mounts or {}).get(node, []) for node in range(len(lengths))]
    )


def _comb(depth: int, length: int) -> TreeCase:
    """A chain of `depth` nodes, each but the last with a leaf of its own."""
    parents = [*range(-1, depth - 1), *range(depth - 2, -1, -1)]
    return _tree(parents, [length + node % 3 for node in range(len(parents))])


def _star(trunk: int, leaves: int, length: int) -> TreeCase:
    return _tree([-1] + [0] * leaves, [trunk] + [length] * leaves)


def _random(num_tokens: int, num_nodes: int) -> TreeCase:
    return random_case(np.random.default_rng(num_tokens), num_tokens, num_nodes)


def _nested_mounts() -> TreeCase:
    """A subtree that mounts a later leaf; inside it a node that mounts more, in part again."""
    parents, lengths = strip_order([-1, 0, 0, 0, 1, 1, 4], [30, 9, 70, 5, 4, 1, 65])
    sizes = np.cumsum([0, *lengths])
    spans = [(int(a), int(b)) for a, b in pairwise(sizes)]
    last, inner = len(parents) - 1, 1
    mounts = {node: [spans[last]] for node in range(len(parents)) if parents[node] == inner}
    mounts[inner] = [spans[last], (spans[last][0], spans[last][1] - 1), (0, 3)]
    mounts[last] = [(spans[last - 1][0], spans[last - 1][1])]
    return _tree(parents, lengths, mounts)


_LENGTHS = (1, 2, 3, 4, 63, 64, 65)

CASES = {
    "one_row": AttentionCase(tree=_tree([-1], [1])),
    **{f"one_node_{n}": AttentionCase(tree=_tree([-1], [n])) for n in (2, 63, 64, 65, 129)},
    "one_node_1000": AttentionCase(tree=_tree([-1], [1000]), query_heads=2, heads=1),
    "lengths": AttentionCase(
        tree=_tree([-1, 0, 1, 1, 0, 4, 4, -1, 7], [*_LENGTHS, 1000 - 202, 2]), query_heads=2
    ),
    "comb_60": AttentionCase(tree=_comb(60, 1), heads=1),
    "star_512": AttentionCase(tree=_star(65, 512, 1), query_heads=2, heads=1),
    "star_7": AttentionCase(tree=_star(64, 7, 63)),
    "nested_mounts": AttentionCase(tree=_nested_mounts()),
    "random_65": AttentionCase(tree=_random(65, 9), query_heads=6, dim=20),
    "random_200": AttentionCase(tree=_random(200, 17)),
    "random_200_unmounted": AttentionCase(tree=_random(200, 17), mounted=False),
    "random_500": AttentionCase(tree=_random(500, 60), query_heads=3, heads=3),
}


def visible(case: AttentionCase) -> torch.Tensor:
    """Which row sees which, from parents and spans alone, `[T, T]` bool."""
    tree, total = case.tree, case.num_tokens
    starts = np.cumsum([0, *tree.lengths])
    path = np.zeros((len(tree.parents), total), dtype=bool)
    seen = np.zeros((total, total), dtype=bool)
    for node, (parent, spans) in enumerate(zip(tree.parents, tree.mounts, strict=True)):
        begin, end = starts[node], starts[node + 1]
        if parent >= 0:
            path[node] = path[parent]
        seen[begin:end] = path[node]
        seen[begin:end, begin:end] = np.tri(end - begin, dtype=bool)
        path[node, begin:end] = True
        for key_begin, key_end in spans if case.mounted else ():
            mounted = ~path[node]
            mounted[:key_begin], mounted[key_end:] = False, False
            seen[begin:end] |= mounted
    return torch.from_numpy(seen)


def inputs_of(case: AttentionCase, device: str, dtype: torch.dtype) -> Tensors:
    """Leaves of one call."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"query": case.query_heads, "key": case.heads, "value": case.heads}
    return {
        name: torch.randn(case.num_tokens, heads, case.dim, generator=generator)
        .to(device, dtype)
        .requires_grad_()
        for name, heads in shapes.items()
    }


def dense_attention(inputs: Tensors, seen: torch.Tensor, scale: float) -> torch.Tensor:
    """Softmax attention under a dense mask."""
    query, key, value = inputs["query"], inputs["key"], inputs["value"]
    group = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


def outputs_and_gradients(out: torch.Tensor, leaves: Tensors) -> Tensors:
    """The output, and each leaf's gradient under one random gradient of the output."""
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    grads = torch.autograd.grad(out, list(leaves.values()), upstream.to(out.device, out.dtype))
    found = {f"d_{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {"out": out.detach(), **found}


def errors_of(
    attend: Attend, case: AttentionCase, device: str, dtype: torch.dtype, scale: float = 0.3
) -> dict[str, float]:
    """Relative RMS error of the output and of every gradient."""
    leaves = inputs_of(case, device, dtype)
    exact = {name: each.detach().cpu().double().requires_grad_() for name, each in leaves.items()}
    found = outputs_and_gradients(attend(*leaves.values()), leaves)
    wanted = outputs_and_gradients(dense_attention(exact, visible(case), scale), exact)
    if float(wanted["d_query"].norm()) < 1e-12:
        # One visible key: softmax leaves nothing to queries and keys but rounding.
        for name in ("d_query", "d_key"):
            assert float(found.pop(name).abs().max()) < 1e-5, name
    return {name: relative_rms(each.cpu(), wanted[name]) for name, each in found.items()}


def changed_rows(
    attend: Attend, case: AttentionCase, device: str, dtype: torch.dtype
) -> dict[str, list[int]]:
    """Rows of outputs and gradients whose bits change where the last node's inputs do."""
    leaves = inputs_of(case, device, dtype)
    before = outputs_and_gradients(attend(*leaves.values()), leaves)
    with torch.no_grad():
        for each in leaves.values():
            each[case.num_tokens - case.tree.lengths[-1] :] += 1
    after = outputs_and_gradients(attend(*leaves.values()), leaves)
    return {
        name: (each != after[name]).flatten(1).any(1).nonzero()[:, 0].tolist()
        for name, each in before.items()
    }


def spoilt_rows(
    attend: Attend, case: AttentionCase, node: int, device: str, dtype: torch.dtype
) -> dict[str, list[int]]:
    """Rows that are NaN or infinite where a leaf's inputs and its output's gradient are, of all but
    what this leaf's rows see."""
    leaves = inputs_of(case, device, dtype)
    starts = np.cumsum([0, *case.tree.lengths])
    rows = slice(int(starts[node]), int(starts[node + 1]))
    with torch.no_grad():
        for each, value in zip(leaves.values(), (torch.nan, torch.inf, torch.nan), strict=True):
            each[rows] = value
    out = attend(*leaves.values())
    d_out = torch.ones_like(out)
    d_out[rows] = torch.nan
    grads = torch.autograd.grad(out, list(leaves.values()), d_out)
    found = {"out": out, **dict(zip(("d_query", "d_key", "d_value"), grads, strict=True))}
    spoilt = {name: ~each.isfinite().flatten(1).all(1).cpu() for name, each in found.items()}
    assert all(bool(each[rows].all()) for each in spoilt.values())
    seen = visible(case)[rows].any(0)
    for name in ("d_key", "d_value"):
        spoilt[name] &= ~seen
    for each in spoilt.values():
        each[rows] = False
    return {name: each.nonzero()[:, 0].tolist() for name, each in spoilt.items()}


class HostLibrary:
    """A library for plans of calls whose sequences PyTorch's kernel for the CPU computes."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """As `libraries.Library`."""
        out, logsumexp = torch.empty_like(query), query.new_empty(query.shape[:2])
        for rows, keys in self._sequences(call):
            scores = self._scores(query[rows], key[keys], call, scale)
            logsumexp[rows] = scores.logsumexp(-1).t()
            values = value[keys].repeat_interleave(query.shape[1] // key.shape[1], 1)
            out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        return out, logsumexp, len(query)

    def backward(
        self, rows: tuple[torch.Tensor, ...], state: int, call: Call, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `libraries.Library`."""
        d_out, query, key, value, out, logsumexp = rows
        assert state + call.padding >= len(query)
        group = query.shape[1] // key.shape[1]
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        for own, keys in self._sequences(call):
            weights = self._scores(query[own], key[keys], call, scale)
            weights = (weights - logsumexp[own].t()[..., None]).exp()
            values = value[keys].repeat_interleave(group, 1)
            d_weights = torch.einsum("qhd,khd->hqk", d_out[own], values)
            correction = (d_out[own] * out[own]).sum(-1).t()[..., None]
            d_scores = weights * (d_weights - correction) * scale
            keys_of = key[keys].repeat_interleave(group, 1)
            grads[0][own] = torch.einsum("hqk,khd->qhd", d_scores, keys_of)
            d_key = torch.einsum("hqk,qhd->khd", d_scores, query[own])
            d_value = torch.einsum("hqk,qhd->khd", weights, d_out[own])
            grads[1][keys] = d_key.unflatten(1, (-1, group)).sum(2)
            grads[2][keys] = d_value.unflatten(1, (-1, group)).sum(2)
        return grads

    def _sequences(self, call: Call) -> list[tuple[slice, slice]]:
        rows, keys = call.query_begins.tolist(), call.key_begins.tolist()
        assert max(b - a for a, b in pairwise(rows)) == call.max_queries
        assert max(b - a for a, b in pairwise(keys)) == call.max_keys
        return [
            (slice(*own), slice(*seen))
            for own, seen in zip(pairwise(rows), pairwise(keys), strict=True)
        ]

    def _scores(
        self, query: torch.Tensor, key: torch.Tensor, call: Call, scale: float
    ) -> torch.Tensor:
        keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
        if call.square:
            later = torch.ones_like(scores).triu(1 + len(key) - len(query)).bool()
            scores = scores.masked_fill(later, -torch.inf)
        return scores


SHORT_GRID = Grid(step=4, digits=2)


@contextmanager
def short_lengths() -> Iterator[None]:
    """Padding and pieces for parts of some rows: lengths of two binary digits."""
    settings = {"_DIGITS": 2, "_PADDED_DIGITS": 2, "_MOST_KEYS": 16, "_MOST_ROWS": 40}
    with ExitStack() as stack:
        for name, value in settings.items():
            stack.enter_context(patch.object(groups, name, value))
        yield


def device_parts(case: AttentionCase, *, short: bool) -> AttentionParts:
    """What a GPU computes; on a grid that is `short` enough for trees of some rows."""
    grid = SHORT_GRID if short else groups.grid_of(groups.PIECE_ROWS)
    return case.tree.layout.parts(mounted=case.mounted, grid=grid)


def device_plan(
    case: AttentionCase, *, width: int, lone_flops: float, piece_rows: int | None, short: bool
) -> CallPlan:
    """The calls of a GPU, planned where the CPU can look at them."""
    total = case.num_tokens
    with short_lengths() if short else nullcontext():
        return plan_calls(
            device_parts(case, short=short),
            total,
            total,
            torch.device("cpu"),
            width=width,
            lone_flops=lone_flops,
            piece_rows=piece_rows,
        )


def planned(
    case: AttentionCase, lone: bool, piece_rows: int | None = None, short: bool = False
) -> Attend:
    """The product's path for a GPU with libraries of the CPU; its kernels need the interpreter."""
    from tree_kernels.attention.device import run_plan

    plan = device_plan(
        case,
        width=case.query_heads * case.dim,
        lone_flops=4e3 if lone else math.inf,
        piece_rows=piece_rows,
        short=short,
    )
    libraries = (HostLibrary(), HostLibrary() if lone else None)
    return partial(run_plan, plan=plan, libraries=libraries, scale=0.3)


GROUPINGS = {
    "batched": (False,),
    "batched on a grid": (False, None, True),
    "lone": (True,),
    "exact": (True, 1),
    "padded": (True, 1, True),
}
"""Whether long parts are calls of their own, the shortest piece that backward cuts off, and whether
lengths are few."""

INTERPRETED = {
    "one_row": CASES["one_row"],
    "chain": AttentionCase(tree=_tree([-1, 0], [5, 3])),
    "comb": AttentionCase(tree=_comb(5, 1), query_heads=6, dim=20),
    "mounts": AttentionCase(tree=_random(24, 7)),
}
"""Few rows: the interpreter takes them one by one."""


SHARED = AttentionCase(tree=_comb(4, 4))
"""Two of its rectangles share a call, with padding."""


def main() -> None:
    """Print what the kernels in the interpreter find, in float32 on the CPU."""
    star = AttentionCase(tree=_star(7, 3, 5))
    with poisoned_empty():
        report = {
            "errors": {
                f"{name} {grouping}": errors_of(planned(case, *how), case, "cpu", torch.float32)
                for name, case in INTERPRETED.items()
                for grouping, how in GROUPINGS.items()
            },
            "changed": changed_rows(planned(star, True, 1, True), star, "cpu", torch.float32),
            "shared": errors_of(planned(SHARED, True, 1, True), SHARED, "cpu", torch.float32),
            "spoilt": [
                spoilt_rows(planned(SHARED, True, 1, True), SHARED, leaf, "cpu", torch.float32)
                for leaf in (4, 5, 6)
            ],
        }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
