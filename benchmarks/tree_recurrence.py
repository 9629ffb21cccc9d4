"""Times of the tree's recurrences and convolution on one GPU, by shape of the tree.

python -m benchmarks.tree_recurrence [--out FILE]
Trees of equal length differ in nothing but their shape, so that a ratio to the chain is what the
tree costs. Kernels are compiled first, each operator in a process of its own.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tree_kernels.causal_conv import tree_causal_conv
from tree_kernels.gated_delta_rule import tree_gated_delta_rule
from tree_kernels.gated_delta_rule.naive import naive_tree_gated_delta_rule
from tree_kernels.layout import TreeLayout
from tree_kernels.ssd import tree_ssd
from tree_kernels.ssd.naive import naive_tree_ssd

ROWS = 65536
REPEATS = 7
Inputs = dict[str, torch.Tensor]
Compute = Callable[..., torch.Tensor]


def main() -> None:
    """Measure every operator on every tree, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="write the figures to this file too")
    parser.add_argument("--compile", choices=OPERATORS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile:
        OPERATORS[args.compile](TreeLayout.build([-1, 0, 0], [300, 70, 5]).to("cuda"))[1]()
        return
    command = [sys.executable, "-m", "benchmarks.tree_recurrence", "--compile"]
    for each in [subprocess.Popen([*command, name]) for name in OPERATORS]:
        each.wait(timeout=200)
    report: dict[str, Any] = {
        "command": "python -m benchmarks.tree_recurrence",
        "machine": {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__},
        "dtype": "bfloat16",
        "errors": _errors(),
        "rows": [],
    }
    for operator, make in OPERATORS.items():
        for tree, layout in _trees(operator).items():
            report["rows"].append(_measured(operator, tree, layout.to("cuda"), make))
            if args.out:
                args.out.write_text(json.dumps(report, indent=1) + "\n")
    sys.stdout.write(_table(report))


def _trees(operator: str) -> dict[str, TreeLayout]:
    tenth = ROWS // 11
    trees = {
        "chain": TreeLayout.build([-1], [ROWS]),
        "trunk and 10 branches": TreeLayout.build(
            [-1] + [0] * 10, [ROWS - 10 * tenth] + [tenth] * 10
        ),
        "comb of 5 levels": _comb(5),
        "comb of 60 levels": _comb(60),
        "512 leaves": TreeLayout.build([-1] + [0] * 512, [ROWS - 512 * 96] + [96] * 512),
    }
    if operator == "gated delta rule":
        trees["chain of 32,768"] = TreeLayout.build([-1], [32768])
        trees["chain of 262,144"] = TreeLayout.build([-1], [262144])
    return trees


def _comb(depth: int) -> TreeLayout:
    """A path of `depth` nodes, each but the last with a leaf as long as itself beside its next."""
    parents = [*range(-1, depth - 1), *range(depth - 2, -1, -1)]
    length = ROWS // len(parents)
    return TreeLayout.build(
        parents, [ROWS - length * (len(parents) - 1)] + [length] * (len(parents) - 1)
    )


def _normal(*shape: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(len(shape))
    return torch.randn(*shape, generator=generator, device="cuda")


def _delta_inputs(rows: int, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """The head sizes of Qwen3.5-4B."""
    return {
        "query": F.normalize(_normal(rows, 16, 128), dim=-1).to(dtype),
        "key": F.normalize(_normal(rows, 16, 128) + 0.1, dim=-1).to(dtype),
        "value": _normal(rows, 32, 128).to(dtype),
        "log_decay": -_normal(rows, 32).abs() * 0.1,
        "beta": _normal(rows, 32).sigmoid(),
    }


def _ssd_inputs(rows: int, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """The head sizes of Granite 4 H Tiny."""
    return {
        "x": _normal(rows, 48, 64).to(dtype),
        "dt": _normal(rows, 48).sigmoid() * 0.2,
        "a": -_normal(48).abs() - 0.1,
        "b": _normal(rows, 1, 128).to(dtype),
        "c": (_normal(rows, 1, 128) * 0.9).to(dtype),
        "d": _normal(48),
    }


def _conv_inputs(rows: int) -> Inputs:
    """The width of Qwen3.5-4B's mixers; the taps are frozen, as with LoRA."""
    return {"x": _normal(rows, 8192).bfloat16()}


def _conv(x: torch.Tensor, layout: TreeLayout) -> torch.Tensor:
    return tree_causal_conv(x, _taps(), None, layout, silu=True)


@functools.cache
def _taps() -> torch.Tensor:
    return _normal(8192, 4).bfloat16()


def _runs(
    compute: Compute, inputs: Callable[[int], Inputs], layout: TreeLayout
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Forward, and forward with backward."""
    leaves = {name: each.requires_grad_() for name, each in inputs(layout.num_tokens).items()}
    upstream = torch.ones_like(compute(**leaves, layout=layout))

    def forward() -> object:
        with torch.no_grad():
            return compute(**leaves, layout=layout)

    def both() -> object:
        return torch.autograd.grad(
            compute(**leaves, layout=layout), list(leaves.values()), upstream
        )

    return forward, both


OPERATORS: dict[str, Callable[[TreeLayout], tuple[Callable[[], object], Callable[[], object]]]] = {
    "gated delta rule": functools.partial(_runs, tree_gated_delta_rule, _delta_inputs),
    "ssd": functools.partial(_runs, tree_ssd, _ssd_inputs),
    "convolution": functools.partial(_runs, _conv, _conv_inputs),
}


def _measured(operator: str, tree: str, layout: TreeLayout, make: Callable[..., Any]) -> Any:
    forward, both = make(layout)
    both()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    row = {
        "operator": operator,
        "tree": tree,
        "tokens": layout.num_tokens,
        "forward_ms": _median_ms(forward),
        "forward_backward_ms": _median_ms(both),
        "peak_gib_above_inputs": (torch.cuda.max_memory_allocated() - before) / 2**30,
        "kernels_ms": _kernels(both) if tree in ("chain", "comb of 60 levels") else None,
    }
    return row


def _median_ms(run: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def _kernels(run: Callable[[], object]) -> dict[str, float]:
    """The 15 kernels that take most of a run, in milliseconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    times = {event.key[:60]: event.device_time_total / 1000 for event in profile.key_averages()}
    return dict(sorted(times.items(), key=lambda item: -item[1])[:15])


def _errors() -> dict[str, dict[str, float]]:
    """Relative RMS error against PyTorch in float32, of 2,048 rows."""
    layout = TreeLayout.build([-1, 0, 1, 0], [700, 600, 300, 448]).to("cuda")
    found = {}
    operators: list[tuple[str, Compute, Callable[..., Any], Callable[[int], Inputs]]] = [
        ("gated delta rule", tree_gated_delta_rule, naive_tree_gated_delta_rule, _delta_inputs),
        ("ssd", tree_ssd, naive_tree_ssd, _ssd_inputs),
    ]
    for name, ours, naive, inputs in operators:
        leaves = {n: each.requires_grad_() for n, each in inputs(2048).items()}
        exact = {n: each.detach().float().requires_grad_() for n, each in leaves.items()}
        out = ours(**leaves, layout=layout)
        wanted, _ = naive(
            **exact, layout=layout, initial_states=None, end_nodes=(), chunk_size=None
        )
        upstream = _normal(*wanted.shape)
        pairs = zip(
            (out, *torch.autograd.grad(out, list(leaves.values()), upstream.to(out.dtype))),
            (wanted, *torch.autograd.grad(wanted, list(exact.values()), upstream)),
            strict=True,
        )
        errors = [((mine.float() - each).norm() / each.norm()).item() for mine, each in pairs]
        found[name] = dict(zip(("out", *leaves), errors, strict=True))
    return found


def _table(report: dict[str, Any]) -> str:
    lines = [f"{report['machine']}"]
    for operator, errors in report["errors"].items():
        lines.append(f"{operator} errors " + " ".join(f"{n} {e:.1e}" for n, e in errors.items()))
    for row in report["rows"]:
        for name, time_ms in (row["kernels_ms"] or {}).items():
            lines.append(f"  {row['operator']}, {row['tree']}: {time_ms:8.3f} ms {name}")
    chains = {r["operator"]: r for r in report["rows"] if r["tree"] == "chain"}
    for row in report["rows"]:
        chain = chains[row["operator"]]
        scale = chain["tokens"] / row["tokens"]
        ratio = scale * row["forward_backward_ms"] / chain["forward_backward_ms"]
        lines.append(
            f"{row['operator']:17} {row['tree']:22} {row['tokens']:7} tokens "
            f"forward {row['forward_ms']:7.2f} ms, with backward {row['forward_backward_ms']:7.2f} "
            f"ms ({ratio:.3f} of the chain), {row['peak_gib_above_inputs']:.2f} GiB"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
