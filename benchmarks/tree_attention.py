"""Tree attention on one GPU against dense causal attention with PyTorch's fastest backend.

python -m benchmarks.tree_attention --out FOLDER
Forward and backward in bfloat16, in TF/s of the pairs that rows see: 4 FLOPs a pair, head and
dimension forward, 10 backward. Writes tree_attention.json and its details, and prints a table last.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tree_kernels.attention import tree_attention
from tree_kernels.attention.groups import PIECE_ROWS, grid_of
from tree_kernels.layout import TreeLayout

REPEATS = 3
VISIBLE = 16_384
"""Rows that the last row of a leaf sees."""
TOKENS = 65_536
_WAYS = ("forward", "backward")
_OF = ("tflops", "of_dense")
BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, key heads, and their size."""

    query: int
    key: int
    dim: int

    def __str__(self) -> str:
        return f"{self.query}/{self.key} heads of {self.dim}"


QWEN = Heads(16, 4, 256)
"""Full attention of Qwen3.5-4B."""
SMALL = Heads(32, 8, 128)
"""Attention of Qwen3-4B and Llama."""

Spans = list[list[tuple[int, int]]]


def star(trunk: int, leaves: int, length: int, mounts: Spans | None = None) -> TreeLayout:
    """A trunk with equal leaves."""
    return TreeLayout.build([-1] + [0] * leaves, [trunk] + [length] * leaves, mounts)


def comb(depth: int, length: int) -> TreeLayout:
    """A chain of `depth` nodes, each but the last with a leaf of its own; all of one length."""
    parents = [*range(-1, depth - 1), *range(depth - 2, -1, -1)]
    return TreeLayout.build(parents, [length] * len(parents))


def chain(tokens: int) -> TreeLayout:
    """One path."""
    return TreeLayout.build([-1], [tokens])


def mounting_star() -> TreeLayout:
    """A trunk of 8,192 and 8 leaves of 7,168, of which each mounts 1,024 rows of 3 others."""
    mounts: Spans = [[]]
    for leaf in range(8):
        sources = [(leaf + step) % 8 for step in (1, 2, 3)]
        begins = [8192 + 7168 * source + 512 for source in sources]
        mounts.append([(begin, begin + 1024) for begin in begins])
    return star(8192, 8, 7168, mounts)


def shapes() -> dict[str, tuple[TreeLayout, Heads]]:
    """What is measured, by name."""
    found = {"trunk 8,192 + 8 x 7,168": (star(8192, 8, 7168), QWEN)}
    for length in (4096, 2048, 1024, 512, 128):
        leaves = (TOKENS - VISIBLE) // length
        found[f"star, leaves of {length:,}"] = (star(VISIBLE - length, leaves, length), QWEN)
    for length in (2048, 512, 128):
        found[f"comb, nodes of {length:,}"] = (comb(VISIBLE // length, length), QWEN)
    found["comb of 5"] = (comb(5, 3640), QWEN)
    found["comb of 60"] = (comb(60, 275), QWEN)
    found["chain of 16,384"] = (chain(VISIBLE), QWEN)
    found["chain of 32,760"] = (chain(32_760), QWEN)
    found["24 mounts of 1,024"] = (mounting_star(), QWEN)
    found["trunk 8,192 + 8 x 7,168, 128"] = (star(8192, 8, 7168), SMALL)
    found["star, leaves of 512, 128"] = (star(VISIBLE - 512, 96, 512), SMALL)
    found["comb, nodes of 512, 128"] = (comb(32, 512), SMALL)
    return found


def main() -> None:
    """Measure dense attention, then every tree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the figures")
    parser.add_argument("--seconds", type=float, default=50, help="start no shape after this long")
    parser.add_argument("--dense", action="store_true", help="print the rows of dense attention")
    args = parser.parse_args()
    begin = time.monotonic()
    torch.manual_seed(0)
    if args.dense:
        found = [dense(heads, backend) for heads in (QWEN, SMALL) for backend in BACKENDS]
        sys.stdout.write(json.dumps(found) + "\n")
        return
    rows = _dense_rows()
    best = {
        str(heads): {
            way: max(row[f"{way}_tflops"] or 0 for row in rows if row["heads"] == str(heads))
            for way in _WAYS
        }
        for heads in (QWEN, SMALL)
    }
    for name, (layout, heads) in shapes().items():
        if time.monotonic() - begin > args.seconds:
            break
        row = tree(name, layout, heads)
        for way in _WAYS:
            row[f"{way}_of_dense"] = row[f"{way}_tflops"] / best[str(heads)][way]
        rows.append(row)
        _write(args.out, rows)
    for row in rows:
        sys.stdout.write(_line(row) + "\n")


def _write(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Figures, and beside them how they were measured."""
    names = ("shape", "heads", "tokens", *(f"{way}_{of}" for way in _WAYS for of in _OF))
    figures = [{name: row.get(name) for name in names} for row in rows]
    details = {
        "hardware": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version()},
        "command": "python -m benchmarks.tree_attention --out FOLDER",
        "rows": rows,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, report in (("tree_attention", figures), ("tree_attention_detail", details)):
        (folder / f"{name}.json").write_text(json.dumps(_rounded(report), indent=1) + "\n")


def _rounded(report: Any) -> Any:
    """With five digits: what is behind them differs from run to run."""
    if isinstance(report, dict):
        return {name: _rounded(each) for name, each in report.items()}
    if isinstance(report, list):
        return [_rounded(each) for each in report]
    return float(f"{report:.5g}") if isinstance(report, float) else report


def _dense_rows() -> list[dict[str, Any]]:
    """Dense attention in a process of its own, where cuDNN makes plans of exact lengths."""
    command = [sys.executable, "-m", "benchmarks.tree_attention", "--dense", "--out", "."]
    environment = {**os.environ, "TORCH_CUDNN_SDPA_AVOID_RECOMPILE": "0"}
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout)


def dense(heads: Heads, backend: SDPBackend) -> dict[str, Any]:
    """Causal attention of 16,384 rows with one backend of PyTorch."""
    row: dict[str, Any] = {"shape": f"dense, {backend.name.lower()}", "heads": str(heads)}
    query, key, value, d_out = (each.transpose(0, 1)[None] for each in _inputs(VISIBLE, heads))

    def attend() -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            )

    try:
        measured = _measure(attend, (query, key, value), d_out)
    except RuntimeError as error:
        return {**row, "forward_tflops": None, "backward_tflops": None, "error": str(error)[:200]}
    return {**row, **_rates(measured, VISIBLE * (VISIBLE + 1) // 2, heads)}


def tree(name: str, layout: TreeLayout, heads: Heads) -> dict[str, Any]:
    """Tree attention over one layout."""
    layout = layout.to("cuda")
    query, key, value, d_out = _inputs(layout.num_tokens, heads)
    begin = time.monotonic()
    parts = layout.parts(mounted=True, grid=grid_of(PIECE_ROWS))
    built_s = time.monotonic() - begin

    def attend() -> torch.Tensor:
        return tree_attention(query, key, value, layout, scale=heads.dim**-0.5, mounted=True)

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    measured = _measure(attend, (query, key, value), d_out)
    row = {
        "shape": name,
        "heads": str(heads),
        "tokens": layout.num_tokens,
        "nodes": layout.num_nodes,
        "parts": len(parts.queries),
        "parts_built_s": built_s,
        "calls": [len(plan.calls) for plan in parts.tables.values()],
        "peak_gib": (torch.cuda.max_memory_allocated() - before) / 2**30,
    }
    return {**row, **_rates(measured, parts.num_pairs, heads)}


def _inputs(rows: int, heads: Heads) -> list[torch.Tensor]:
    counts = (heads.query, heads.key, heads.key, heads.query)
    found = [
        torch.randn(rows, count, heads.dim, device="cuda", dtype=torch.bfloat16) for count in counts
    ]
    return [*(each.requires_grad_() for each in found[:3]), found[3]]


def _measure(
    attend: Callable[[], torch.Tensor], inputs: tuple[torch.Tensor, ...], d_out: torch.Tensor
) -> tuple[float, float, float]:
    """Milliseconds of the first forward and backward, and of later ones each."""
    torch.cuda.synchronize()
    begin = time.monotonic()
    torch.autograd.grad(attend(), inputs, d_out)
    torch.cuda.synchronize()
    first_ms = (time.monotonic() - begin) * 1e3
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    forward_ms = backward_ms = 0.0
    for _ in range(REPEATS):
        marks[0].record()
        out = attend()
        marks[1].record()
        torch.autograd.grad(out, inputs, d_out)
        marks[2].record()
        torch.cuda.synchronize()
        forward_ms += marks[0].elapsed_time(marks[1]) / REPEATS
        backward_ms += marks[1].elapsed_time(marks[2]) / REPEATS
    return first_ms, forward_ms, backward_ms


def _rates(measured: tuple[float, float, float], pairs: int, heads: Heads) -> dict[str, float]:
    first_ms, forward_ms, backward_ms = measured
    flops = 4 * heads.query * heads.dim * pairs
    return {
        "first_ms": first_ms,
        "forward_ms": forward_ms,
        "backward_ms": backward_ms,
        "forward_tflops": flops / forward_ms / 1e9,
        "backward_tflops": 2.5 * flops / backward_ms / 1e9,
    }


def _line(row: dict[str, Any]) -> str:
    if row["forward_tflops"] is None:
        return f"{row['shape']:28} {row['heads']:20} {row['error']}"
    ratios = [row.get(f"{way}_of_dense") for way in _WAYS]
    told = "  ".join("" if ratio is None else f"{ratio:5.0%}" for ratio in ratios)
    return (
        f"{row['shape']:28} {row['heads']:20} first {row['first_ms']:6.0f} ms  "
        f"forward {row['forward_ms']:7.2f} ms {row['forward_tflops']:4.0f} TF/s  "
        f"backward {row['backward_ms']:7.2f} ms {row['backward_tflops']:4.0f} TF/s  {told}"
    )


if __name__ == "__main__":
    main()
