"""Triton kernels over rows against float64, on a GPU or, run as a program, interpreted.

Triton reads TRITON_INTERPRET where it is imported first, so the interpreter needs its own process:
`python -m tests.row_kernel_cases` prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from tests.tree_cases import poisoned_empty, relative_rms
from tree_kernels.logprob.naive import RowGrads, naive_row_statistics
from tree_kernels.rms_norm.naive import naive_rms_norm
from tree_kernels.swiglu import swiglu

NAMES = (
    "norm 1x20", "norm 63x48", "norm 100x256", "norm 3x2560", "gated norm 100x20",
    "gated norm 7x128", "swiglu 63x65", "swiglu 3x4096", "logprob 1x37", "logprob 63x300",
    "logprob 5x9001",
)  # fmt: skip

Tensors = list[torch.Tensor]


def errors_of(name: str, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Relative RMS error of outputs and gradients."""
    kind, _, shape = name.rpartition(" ")
    rows, width = (int(each) for each in shape.split("x"))
    if kind == "logprob":
        return _logprob_errors(rows, width, device, dtype)
    from tree_kernels.rms_norm.function import fused_rms_norm
    from tree_kernels.swiglu.function import fused_swiglu

    generator = torch.Generator().manual_seed(rows)
    x, gate, weight = (
        torch.randn(rows, width, generator=generator),
        torch.randn(rows, width, generator=generator),
        torch.rand(width, generator=generator) + 0.5,
    )
    given = [gate, x] if kind == "swiglu" else [x, gate] if kind == "gated norm" else [x]

    def fused(*each: torch.Tensor) -> torch.Tensor:
        if kind == "swiglu":
            return fused_swiglu(*each)
        return fused_rms_norm(each[0], weight.to(each[0]), each[1] if each[1:] else None, 1e-6)

    def exact(*each: torch.Tensor) -> torch.Tensor:
        if kind == "swiglu":
            return swiglu(*each)
        return naive_rms_norm(each[0], weight.to(each[0]), each[1] if each[1:] else None, 1e-6)

    wanted = _outputs(exact, [each.to(dtype).double() for each in given])
    found = _outputs(fused, [each.to(device, dtype) for each in given])
    pairs = zip(found, wanted, strict=True)
    return {str(index): relative_rms(f.cpu(), w) for index, (f, w) in enumerate(pairs)}


def _outputs(compute: Callable[..., torch.Tensor], given: Tensors) -> Tensors:
    """The output and the gradients of a random combination of it."""
    # Strided as a slice of a wider projection is.
    leaves = [torch.cat([each, each], -1).requires_grad_() for each in given]
    out = compute(*(leaf[:, : leaf.shape[1] // 2] for leaf in leaves))
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad(out, leaves, weights.to(out))
    return [out, *(grad[:, : grad.shape[1] // 2] for grad in grads)]


def _logprob_errors(rows: int, vocab: int, device: str, dtype: torch.dtype) -> dict[str, float]:
    from tree_kernels.logprob.triton import row_statistics

    generator = torch.Generator().manual_seed(rows)
    logits = (torch.randn(rows, vocab, generator=generator) * 3).to(dtype)
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    targets[-1] = vocab - 1
    scale = torch.rand(rows, generator=generator, dtype=torch.float64) + 0.5
    by_row = torch.randn(2, rows, generator=generator)
    errors = {}
    for with_grad in (False, True):
        grads = RowGrads(logprob=by_row[0], entropy=by_row[1])
        wanted = naive_row_statistics(logits.double(), targets, scale, grads, torch.float64)
        own_grads = RowGrads(logprob=by_row[0].to(device), entropy=by_row[1].to(device))
        given = (targets.to(device), scale.to(device), own_grads if with_grad else None)
        found = row_statistics(logits.to(device, copy=True), *given, dtype)
        errors[f"logprob {with_grad}"] = relative_rms(found.logprob.cpu(), wanted.logprob)
        errors[f"entropy {with_grad}"] = relative_rms(found.entropy.cpu(), wanted.entropy)
        if found.grad is not None and wanted.grad is not None:
            errors["grad"] = relative_rms(found.grad.cpu(), wanted.grad)
            kept = logits.float().to(device)
            # The interpreter cuts bfloat16 off, and rounds float16.
            narrow = row_statistics(kept, *given, torch.float16).grad
            wide = row_statistics(logits.float().to(device, copy=True), *given, torch.float32).grad
            assert narrow is not None and wide is not None
            errors["narrow grad"] = relative_rms(narrow, wide.half())
            errors["logits beside it"] = relative_rms(kept.cpu(), logits.double())
    return errors


def fused_errors(model: Any) -> dict[str, float]:
    """Relative RMS error of every class of modules that runs fused against its own forward."""
    from trainer_service.models import use_fused

    model.requires_grad_(False)
    use_fused(model)
    errors = {}
    for module in model.modules():
        own = type(module).forward
        if getattr(module.forward, "__func__", own) is own or type(module).__name__ in errors:
            continue
        norm = getattr(module, "weight", None)
        width = module.gate_proj.in_features if norm is None else norm.shape[0]
        if norm is not None:
            norm.uniform_(0.5, 1.5)
        x = torch.randn(1, 5, width, device=model.device)
        given = (x, torch.randn_like(x)) if "Gated" in type(module).__name__ else (x,)
        errors[type(module).__name__] = relative_rms(module(*given), own(module, *given))
    return errors


def main() -> None:
    """Print what the interpreter finds, in float32 on the CPU."""
    with poisoned_empty():
        report = {name: errors_of(name, "cpu", torch.float32) for name in NAMES}
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
