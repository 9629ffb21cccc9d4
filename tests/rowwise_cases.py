"""The kernels of row by row operations on a GPU or, run as a program, interpreted.

`python -m tests.rowwise_cases` prints one JSON object, in Triton's interpreter.
"""

from __future__ import annotations

import json
import math
import sys

import torch

from tests.tree_cases import poisoned_empty, relative_rms
from tree_kernels.rowwise.self_test import CASES, kernels_work
from tree_kernels.self_test import with_gradients


def errors_of(name: str, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Relative RMS error of every tensor against float64 on the CPU; rows of inputs stand apart."""
    ours, wanted, shapes = CASES[name]
    generator = torch.Generator().manual_seed(5)
    inputs = {}
    for key, (rows, *rest) in shapes.items():
        width = math.prod(rest)
        apart = torch.randn(rows, width + 8, generator=generator).to(device, dtype)[:, :width]
        inputs[key] = apart.unflatten(1, rest) if rest else apart[:, 0].contiguous()
    exact = {key: each.cpu().double() for key, each in inputs.items()}
    found, expected = with_gradients(ours, inputs), with_gradients(wanted, exact)
    return {key: relative_rms(found[key].cpu(), each) for key, each in expected.items()}


def main() -> None:
    """Print what the interpreter finds, in float32 on the CPU."""
    with poisoned_empty():
        report = {
            "errors": {name: errors_of(name, "cpu", torch.float32) for name in CASES},
            "works": kernels_work(torch.device("cpu"), torch.float32),
        }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
