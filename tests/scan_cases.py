"""Cases for the Triton kernels of both recurrences, on a GPU or, run as a program, interpreted.

Triton reads TRITON_INTERPRET where it is imported first, so the interpreter needs its own process:
`python -m tests.scan_cases` (or `... soak`, for the longer cases) prints one JSON object.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.tree_cases import TreeCase, poisoned_empty, random_case, relative_rms
from tree_kernels.gated_delta_rule import self_test as gated_delta_rule_self_test
from tree_kernels.gated_delta_rule.function import chain_scan
from tree_kernels.gated_delta_rule.naive import naive_tree_gated_delta_rule
from tree_kernels.layout import chains as chain_tables
from tree_kernels.ssd import self_test as ssd_self_test
from tree_kernels.ssd.function import chain_ssd
from tree_kernels.ssd.naive import naive_tree_ssd


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanCase:
    """One tree and the shapes that run over it."""

    tree: TreeCase
    block_t: int = 16
    key_heads: int = 1
    heads: int = 1
    key_dim: int = 12
    value_dim: int = 20
    end_nodes: tuple[int, ...] = ()
    with_initial: bool = False
    max_decay: float = 0.2
    """Of 40, some tokens forget everything: e**-40."""
    run_rows: int = chain_tables.RUN_ROWS
    group_rows: int = chain_tables.GROUP_ROWS


def _random(num_tokens: int, num_nodes: int) -> TreeCase:
    rng = np.random.default_rng(num_tokens)
    return random_case(rng, num_tokens, num_nodes, with_mounts=False)


def _tree(parents: list[int], lengths: list[int]) -> TreeCase:
    return TreeCase(parents, lengths, [[] for _ in parents])


def _comb(depth: int) -> TreeCase:
    """A path of `depth` nodes, each but the last with a leaf beside its next."""
    spine = list(range(-1, depth - 1))
    return _tree([*spine, *range(depth - 2, -1, -1)], [1 + n % 4 for n in range(2 * depth - 1)])


_MIXED = [-1, 0, 1, 1, 0, 4, 5, 5, -1, 8]
"""Parents of a forest of two roots."""

CASES = {
    "one_row": ScanCase(tree=_tree([-1], [1])),
    "one_node_65": ScanCase(tree=_tree([-1], [65]), block_t=64),
    "forgetful": ScanCase(tree=_tree([-1, 0], [30, 33]), block_t=32, max_decay=40.0),
    "star": ScanCase(tree=_tree([-1, 0, 0, 0, 0, 0], [3, 2, 17, 1, 2, 1])),
    "lengths": ScanCase(
        tree=_tree(_MIXED, [16, 1, 2, 3, 17, 1, 1, 2, 3, 16]), end_nodes=(1, 5), with_initial=True
    ),
    "cut": ScanCase(
        tree=_tree([-1, 0, 1, 1, 0], [30, 10, 40, 5, 9]),
        end_nodes=(2, 0),
        with_initial=True,
        run_rows=16,
        group_rows=32,
    ),
    "heads": ScanCase(
        tree=_random(12, 3), key_heads=2, heads=4, key_dim=20, value_dim=40, with_initial=True
    ),
}
"""Node lengths are 1, 2, 3, a chunk's and one more."""

SOAK_CASES = {
    "lengths_64": ScanCase(
        tree=_tree(_MIXED, [64, 1, 2, 3, 65, 1, 1, 2, 3, 64]),
        block_t=64,
        end_nodes=(1, 5),
        with_initial=True,
    ),
    "one_node_63": ScanCase(tree=_tree([-1], [63]), block_t=64, max_decay=40.0),
    "one_node_64": ScanCase(tree=_tree([-1], [64]), block_t=64),
    "chain": ScanCase(
        tree=_tree([-1, 0, 1], [64, 3, 133]), block_t=32, end_nodes=(0, 1, 2), max_decay=40.0
    ),
    "random_200": ScanCase(
        tree=_random(200, 11), block_t=32, end_nodes=(3, 0, 10), with_initial=True
    ),
    "node_1000": ScanCase(tree=_tree([-1, 0, 0], [1000, 4, 63]), block_t=64),
    "depth_60": ScanCase(tree=_comb(60)),
    "leaves_512": ScanCase(tree=_tree([-1] + [0] * 512, [3] + [1, 2] * 256), with_initial=True),
    "long_cut": ScanCase(
        tree=_random(500, 9), end_nodes=(0, 1), with_initial=True, run_rows=48, group_rows=160
    ),
}

Tensors = dict[str, torch.Tensor]
Compute = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """A recurrence: its kernels, what they must equal, and what they are given."""

    ours: Compute
    naive: Compute
    inputs: Callable[[ScanCase, Callable[..., torch.Tensor], Callable[..., torch.Tensor]], Tensors]
    """From a case, normal numbers by shape and uniform ones."""
    works: Callable[..., bool]
    """The self-test."""


def _delta_inputs(
    case: ScanCase, normal: Callable[..., torch.Tensor], uniform: Callable[..., torch.Tensor]
) -> Tensors:
    rows = sum(case.tree.lengths)
    # A slice of wider rows, as the mixer's projection gives it.
    values = normal(rows, case.heads * case.value_dim + 8)[:, :-8]
    return {
        "query": F.normalize(normal(rows, case.key_heads, case.key_dim), dim=-1),
        "key": F.normalize(normal(rows, case.key_heads, case.key_dim), dim=-1),
        "value": values.unflatten(1, (case.heads, case.value_dim)),
        "log_decay": -uniform(rows, case.heads).pow(4) * case.max_decay,
        "beta": uniform(rows, case.heads),
    }


def _ssd_inputs(
    case: ScanCase, normal: Callable[..., torch.Tensor], uniform: Callable[..., torch.Tensor]
) -> Tensors:
    rows = sum(case.tree.lengths)
    return {
        "x": normal(rows, case.heads, case.value_dim),
        "dt": uniform(rows, case.heads).pow(4) * 2,
        "a": -(uniform(case.heads) + 0.05) * case.max_decay,
        "b": normal(rows, case.key_heads, case.key_dim),
        "c": normal(rows, case.key_heads, case.key_dim),
        **({"d": normal(case.heads)} if case.with_initial else {}),
    }


OPERATORS = {
    "gated_delta_rule": Operator(
        ours=chain_scan,
        naive=naive_tree_gated_delta_rule,
        inputs=_delta_inputs,
        works=gated_delta_rule_self_test.kernels_work,
    ),
    "ssd": Operator(
        ours=chain_ssd,
        naive=naive_tree_ssd,
        inputs=_ssd_inputs,
        works=ssd_self_test.kernels_work,
    ),
}


def inputs_of(operator: Operator, case: ScanCase, device: str, dtype: torch.dtype) -> Tensors:
    """Leaves of one call."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    tensors = operator.inputs(case, normal, uniform)
    leaves = {name: _placed(each, device, dtype) for name, each in tensors.items()}
    if case.with_initial:
        roots = sum(parent < 0 for parent in case.tree.parents)
        states = normal(roots, case.heads, case.key_dim, case.value_dim)
        leaves["initial_states"] = _placed(states, device, torch.float32)
    return leaves


def _placed(values: torch.Tensor, device: str, dtype: torch.dtype) -> torch.Tensor:
    """A leaf of these values and strides in fresh memory."""
    fresh = torch.empty(len(values) * values.stride(0), dtype=dtype, device=device)
    return fresh.as_strided(values.shape, values.stride()).copy_(values).requires_grad_()


def forward(
    operator: Operator, case: ScanCase, leaves: Tensors
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and end states of the kernels."""
    device = next(iter(leaves.values())).device
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain_tables, "RUN_ROWS", case.run_rows)
        patch.setattr(chain_tables, "GROUP_ROWS", case.group_rows)
        return operator.ours(
            **_optional(leaves),
            layout=case.tree.layout.to(device),
            end_nodes=case.end_nodes,
            chunk_size=case.block_t,
        )


def _optional(leaves: Tensors) -> dict[str, torch.Tensor | None]:
    optional = {"d": None} if "x" in leaves else {}
    return {"initial_states": None, **optional, **leaves}


def run_triton(operator: Operator, case: ScanCase, leaves: Tensors) -> Tensors:
    """Outputs, end states and gradients of the kernels."""
    return _with_gradients(*forward(operator, case, leaves), leaves, leaves)


def run_naive(operator: Operator, case: ScanCase, leaves: Tensors) -> Tensors:
    """The same in PyTorch, in float64 on the CPU, of the values that the kernels read."""
    exact = {name: each.detach().cpu().double().requires_grad_() for name, each in leaves.items()}
    out, ends = operator.naive(
        **_optional(exact), layout=case.tree.layout, end_nodes=case.end_nodes, chunk_size=16
    )
    return _with_gradients(out, ends, exact, leaves)


def _with_gradients(
    out: torch.Tensor, ends: torch.Tensor, leaves: Tensors, given_leaves: Tensors
) -> Tensors:
    """Gradients of `leaves` under upstream ones rounded to the type of `given_leaves`."""
    generator = torch.Generator().manual_seed(3)
    dtype = next(iter(given_leaves.values())).dtype
    upstream = [
        torch.randn(out.shape, generator=generator).to(dtype),
        torch.randn(ends.shape, generator=generator),
    ]
    grads = torch.autograd.grad(
        (out, ends),
        list(leaves.values()),
        [
            given.to(each.device, each.dtype)
            for given, each in zip(upstream, (out, ends), strict=True)
        ],
    )
    found = {f"d_{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {"out": out.detach(), **({"ends": ends.detach()} if len(ends) else {}), **found}


def errors_of(
    operator: Operator, case: ScanCase, device: str, dtype: torch.dtype
) -> dict[str, float]:
    """Relative RMS error of every tensor; of one that should be zero, its largest value."""
    leaves = inputs_of(operator, case, device, dtype)
    found, wanted = run_triton(operator, case, leaves), run_naive(operator, case, leaves)
    return {
        name: relative_rms(found[name].cpu(), wanted[name])
        if wanted[name].any()
        else float(found[name].abs().max())
        for name in wanted
    }


def unrepeated(operator: Operator, case: ScanCase, device: str, dtype: torch.dtype) -> list[str]:
    """Tensors that a second run gives other bits."""
    leaves = inputs_of(operator, case, device, dtype)
    found, again = run_triton(operator, case, leaves), run_triton(operator, case, leaves)
    return [name for name in found if not torch.equal(found[name], again[name])]


def changed_nodes(operator: Operator, case: ScanCase, device: str, dtype: torch.dtype) -> list[int]:
    """Nodes whose outputs change when one branch of a tree does, by bits."""
    leaves = inputs_of(operator, case, device, dtype)
    before = forward(operator, case, leaves)[0]
    starts = case.tree.layout.cu_seqlens
    with torch.no_grad():
        leaves["value" if "value" in leaves else "x"][starts[4] : starts[5]] += 1
    after = forward(operator, case, leaves)[0]
    pairs = itertools.pairwise(starts)
    return [n for n, (a, b) in enumerate(pairs) if not torch.equal(before[a:b], after[a:b])]


def branch_errors(
    operator: Operator, case: ScanCase, device: str, dtype: torch.dtype
) -> list[float]:
    """Errors of a tree's outputs against each of its paths alone."""
    leaves = inputs_of(operator, case, device, dtype)
    out = forward(operator, case, leaves)[0]
    paths = {path[-1]: path for path in case.tree.row_paths()}
    ends = set(paths) - {row for path in paths.values() for row in path[:-1]}
    errors = []
    for end in sorted(ends):
        rows = torch.tensor(paths[end], device=device)
        alone = {
            name: (each.detach()[rows] if len(each) == len(out) else each.detach()).requires_grad_()
            for name, each in leaves.items()
        }
        branch = replace(case, tree=_tree([-1], [len(rows)]))
        errors.append(relative_rms(out[rows], forward(operator, branch, alone)[0]))
    return errors


def main() -> None:
    """Print what the interpreter finds, in float32 on the CPU, of quick or of soak cases."""
    cases = SOAK_CASES if sys.argv[1:] == ["soak"] else CASES
    with poisoned_empty():
        json.dump({name: _report(each, cases) for name, each in OPERATORS.items()}, sys.stdout)


def _report(operator: Operator, cases: dict[str, ScanCase]) -> dict[str, object]:
    exact = ("cpu", torch.float32)
    errors, seconds = {}, {}
    for name, case in cases.items():
        begin = time.perf_counter()
        errors[name] = errors_of(operator, case, *exact)
        seconds[name] = round(time.perf_counter() - begin, 2)
    return {
        "errors": errors,
        "half_errors": errors_of(operator, CASES["heads"], "cpu", torch.float16),
        "seconds": seconds,
        "unrepeated": unrepeated(operator, CASES["star"], *exact),
        "changed_nodes": changed_nodes(operator, CASES["lengths"], *exact),
        "branches": branch_errors(operator, CASES["star"], *exact),
        "works": operator.works(torch.device("cpu"), torch.float32, 1, 2, 12, 20),
    }


if __name__ == "__main__":
    main()
