"""Cases for the Triton kernels of the tree convolution, on a GPU or, run as a program, interpreted.

Triton reads TRITON_INTERPRET where it is imported first, so the interpreter needs its own process:
`python -m tests.conv_cases` prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

import numpy as np
import torch

from tests.tree_cases import poisoned_empty, random_case, relative_rms
from tree_kernels.causal_conv.function import table_causal_conv
from tree_kernels.causal_conv.naive import naive_tree_causal_conv
from tree_kernels.causal_conv.self_test import kernels_work
from tree_kernels.layout import Layout, PieceLayout, TreeLayout, cut_pieces

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvCase:
    """A strip or its second piece, and what runs over it."""

    tree: TreeLayout
    piece_rows: int = 0
    """Rows of a piece; 0 takes the whole strip."""
    columns: int = 20
    width: int = 4
    with_bias: bool = True
    silu: bool = True

    @property
    def layout(self) -> Layout:
        """As the operator takes it."""
        if not self.piece_rows:
            return self.tree
        return PieceLayout(self.tree, cut_pieces(self.tree, self.piece_rows)[1])


def _random(num_tokens: int, num_nodes: int) -> TreeLayout:
    rng = np.random.default_rng(num_tokens)
    return random_case(rng, num_tokens, num_nodes, with_mounts=False).layout


_STAR = TreeLayout.build([-1] + [0] * 70, [3] + [1, 2, 4, 1, 3] * 14)
"""More readers of a row than a block of rows has."""

CASES = {
    "one_row": ConvCase(tree=_random(1, 1)),
    "random_97": ConvCase(tree=_random(97, 30)),
    "no_bias": ConvCase(tree=_random(40, 9), with_bias=False),
    "no_silu": ConvCase(tree=_random(40, 9), silu=False),
    "width_1": ConvCase(tree=_random(40, 9), width=1),
    "width_2": ConvCase(tree=_random(40, 9), width=2),
    "star": ConvCase(tree=_STAR),
    "columns": ConvCase(tree=_random(20, 5), columns=130),
    "piece": ConvCase(tree=_random(90, 25), piece_rows=31),
}


def inputs_of(case: ConvCase, device: str, dtype: torch.dtype) -> Tensors:
    """Leaves of one call; the inputs' rows stand apart, as a slice of wider ones does."""
    generator = torch.Generator().manual_seed(0)
    rows = case.layout.num_conv_rows(case.width)
    wide = torch.randn(rows, case.columns + 4, generator=generator).to(device, dtype)
    weight = torch.randn(case.columns, case.width, generator=generator)
    tensors = {"x": wide[:, : case.columns], "weight": weight.to(device, dtype)}
    if case.with_bias:
        tensors["bias"] = torch.randn(case.columns, generator=generator).to(device, dtype)
    return {name: each.requires_grad_() for name, each in tensors.items()}


def run_triton(case: ConvCase, leaves: Tensors) -> Tensors:
    """Outputs and gradients of the kernels."""
    layout = case.layout if leaves["x"].device.type == "cpu" else _on_gpu(case)
    out = table_causal_conv(
        leaves["x"], leaves["weight"], leaves.get("bias"), layout, silu=case.silu
    )
    return _with_gradients(out, leaves)


def _on_gpu(case: ConvCase) -> Layout:
    tree = case.tree.to("cuda")
    if not case.piece_rows:
        return tree
    return PieceLayout(tree, cut_pieces(tree, case.piece_rows)[1])


def run_naive(case: ConvCase, leaves: Tensors) -> Tensors:
    """The same in PyTorch, in float64 on the CPU, of the values that the kernels read."""
    exact = {name: each.detach().cpu().double().requires_grad_() for name, each in leaves.items()}
    out = naive_tree_causal_conv(
        exact["x"], exact["weight"], exact.get("bias"), case.layout, silu=case.silu
    )
    return _with_gradients(out, exact)


def _with_gradients(out: torch.Tensor, leaves: Tensors) -> Tensors:
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    grads = torch.autograd.grad(out, list(leaves.values()), upstream.to(out))
    return {
        "out": out.detach(),
        **{f"d_{name}": grad for name, grad in zip(leaves, grads, strict=True)},
    }


def errors_of(case: ConvCase, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Relative RMS error of every tensor."""
    leaves = inputs_of(case, device, dtype)
    found, wanted = run_triton(case, leaves), run_naive(case, leaves)
    return {name: relative_rms(found[name].cpu(), wanted[name]) for name in wanted}


def unrepeated(device: str, dtype: torch.dtype) -> list[str]:
    """Tensors that a second run gives other bits."""
    leaves = inputs_of(CASES["star"], device, dtype)
    found, again = run_triton(CASES["star"], leaves), run_triton(CASES["star"], leaves)
    return [name for name in found if not torch.equal(found[name], again[name])]


def main() -> None:
    """Print what the interpreter finds, in float32 on the CPU."""
    with poisoned_empty():
        report = {
            "errors": {name: errors_of(case, "cpu", torch.float32) for name, case in CASES.items()},
            "unrepeated": unrepeated("cpu", torch.float32),
            "works": kernels_work(torch.device("cpu"), torch.float32, 4, True, True),
        }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
