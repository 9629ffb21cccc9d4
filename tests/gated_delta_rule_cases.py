"""Cases for the gated delta rule's Triton kernels, on a GPU or, run as a program, interpreted.

Triton reads TRITON_INTERPRET where it is imported first, so the interpreter needs its own process:
`python -m tests.gated_delta_rule_cases` prints one JSON object.
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.tree_cases import TreeCase, poisoned_empty, random_case, relative_rms
from tree_kernels.gated_delta_rule.naive import naive_tree_gated_delta_rule
from tree_kernels.gated_delta_rule.self_test import kernels_work
from tree_kernels.layout import chains as chain_tables


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


_MIXED = _tree([-1, 0, 1, 1, 0, 4, 5, 5, -1, 8], [64, 1, 2, 3, 65, 1, 1, 2, 3, 64])
"""A forest of two roots whose nodes have 1, 2, 3, 64 and 65 rows."""

CASES = {
    "one_row": ScanCase(tree=_tree([-1], [1])),
    "one_node_63": ScanCase(tree=_tree([-1], [63]), block_t=64, max_decay=40.0),
    "one_node_64": ScanCase(tree=_tree([-1], [64]), block_t=64),
    "one_node_65": ScanCase(tree=_tree([-1], [65]), block_t=64),
    "chain": ScanCase(
        tree=_tree([-1, 0, 1], [64, 3, 133]), block_t=32, end_nodes=(0, 1, 2), max_decay=40.0
    ),
    "star": ScanCase(tree=_tree([-1, 0, 0, 0, 0, 0], [3, 2, 17, 1, 2, 1])),
    "random_65": ScanCase(tree=_random(65, 7), with_initial=True),
    "random_200": ScanCase(
        tree=_random(200, 11), block_t=32, end_nodes=(3, 0, 10), with_initial=True
    ),
    "lengths": ScanCase(tree=_MIXED, block_t=64, end_nodes=(1, 5), with_initial=True),
    "cut": ScanCase(
        tree=_tree([-1, 0, 1, 1, 0], [70, 40, 90, 20, 33]),
        end_nodes=(2, 0),
        with_initial=True,
        run_rows=32,
        group_rows=64,
    ),
    "heads": ScanCase(
        tree=_random(20, 3), key_heads=2, heads=4, key_dim=20, value_dim=40, with_initial=True
    ),
}
"""Beside the kernel's own sizes, T is 1, 63, 64, 65 and 200; node lengths 1, 2, 3, 64 and 65."""

_ROW_INPUTS = ("query", "key", "value", "log_decay", "beta")

Tensors = dict[str, torch.Tensor]


def inputs_of(case: ScanCase, device: str, dtype: torch.dtype) -> Tensors:
    """Leaves of one call."""
    generator = torch.Generator().manual_seed(0)
    rows = sum(case.tree.lengths)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    tensors = {
        "query": F.normalize(normal(rows, case.key_heads, case.key_dim), dim=-1),
        "key": F.normalize(normal(rows, case.key_heads, case.key_dim), dim=-1),
        "value": normal(rows, case.heads, case.value_dim),
        "log_decay": -uniform(rows, case.heads).pow(4) * case.max_decay,
        "beta": uniform(rows, case.heads),
    }
    leaves = {name: each.to(device, dtype).requires_grad_() for name, each in tensors.items()}
    if case.with_initial:
        roots = sum(parent < 0 for parent in case.tree.parents)
        states = normal(roots, case.heads, case.key_dim, case.value_dim)
        leaves["initial_states"] = states.to(device).requires_grad_()
    return leaves


def forward(case: ScanCase, leaves: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and end states of the kernels."""
    from tree_kernels.gated_delta_rule.function import chain_scan

    layout = case.tree.layout.to(leaves["value"].device)
    query, key, value, log_decay, beta = (leaves[name] for name in _ROW_INPUTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain_tables, "RUN_ROWS", case.run_rows)
        patch.setattr(chain_tables, "GROUP_ROWS", case.group_rows)
        return chain_scan(
            query,
            key,
            value,
            log_decay,
            beta,
            layout,
            initial_states=leaves.get("initial_states"),
            end_nodes=case.end_nodes,
            chunk_size=case.block_t,
        )


def run_triton(case: ScanCase, leaves: Tensors) -> Tensors:
    """Outputs, end states and gradients of the kernels."""
    return _with_gradients(*forward(case, leaves), leaves)


def run_naive(case: ScanCase, leaves: Tensors) -> Tensors:
    """The same in PyTorch, in float64 on the CPU, of the values that the kernels read."""
    exact = {name: each.detach().cpu().double().requires_grad_() for name, each in leaves.items()}
    query, key, value, log_decay, beta = (exact[name] for name in _ROW_INPUTS)
    out, ends = naive_tree_gated_delta_rule(
        query,
        key,
        value,
        log_decay,
        beta,
        case.tree.layout,
        initial_states=exact.get("initial_states"),
        end_nodes=case.end_nodes,
        chunk_size=16,
    )
    return _with_gradients(out, ends, exact)


def _with_gradients(out: torch.Tensor, ends: torch.Tensor, leaves: Tensors) -> Tensors:
    generator = torch.Generator().manual_seed(3)
    upstream = [torch.randn(each.shape, generator=generator) for each in (out, ends)]
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


def errors_of(case: ScanCase, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Relative RMS error of every tensor; of one that should be zero, its largest value."""
    leaves = inputs_of(case, device, dtype)
    found, wanted = run_triton(case, leaves), run_naive(case, leaves)
    return {
        name: relative_rms(found[name].cpu(), wanted[name])
        if wanted[name].any()
        else float(found[name].abs().max())
        for name in wanted
    }


def unrepeated(device: str, dtype: torch.dtype) -> list[str]:
    """Tensors that a second run gives other bits."""
    case = CASES["star"]
    leaves = inputs_of(case, device, dtype)
    found, again = run_triton(case, leaves), run_triton(case, leaves)
    return [name for name in found if not torch.equal(found[name], again[name])]


def changed_nodes(device: str, dtype: torch.dtype) -> list[int]:
    """Nodes whose outputs change when one branch of a tree does, by bits."""
    case = CASES["lengths"]
    leaves = inputs_of(case, device, dtype)
    before = forward(case, leaves)[0]
    starts = case.tree.layout.cu_seqlens
    with torch.no_grad():
        leaves["value"][starts[4] : starts[5]] += 1
    after = forward(case, leaves)[0]
    pairs = itertools.pairwise(starts)
    return [n for n, (a, b) in enumerate(pairs) if not torch.equal(before[a:b], after[a:b])]


def branch_errors(device: str, dtype: torch.dtype) -> list[float]:
    """Errors of a tree's outputs against each of its paths alone."""
    case = CASES["star"]
    leaves = inputs_of(case, device, dtype)
    out = forward(case, leaves)[0]
    paths = {path[-1]: path for path in case.tree.row_paths()}
    ends = set(paths) - {row for path in paths.values() for row in path[:-1]}
    errors = []
    for end in sorted(ends):
        rows = torch.tensor(paths[end], device=device)
        alone = {name: each.detach()[rows].requires_grad_() for name, each in leaves.items()}
        branch = ScanCase(tree=_tree([-1], [len(rows)]))
        errors.append(relative_rms(out[rows], forward(branch, alone)[0]))
    return errors


def main() -> None:
    """Print what the interpreter finds, in float32 on the CPU."""
    with poisoned_empty():
        errors = {name: errors_of(case, "cpu", torch.float32) for name, case in CASES.items()}
        report = {
            "errors": errors,
            "unrepeated": unrepeated("cpu", torch.float32),
            "changed_nodes": changed_nodes("cpu", torch.float32),
            "branches": branch_errors("cpu", torch.float32),
            "works": kernels_work(torch.device("cpu"), torch.float32, 1, 2, 12, 20),
        }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
