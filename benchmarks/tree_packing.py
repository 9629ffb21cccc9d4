"""Packed trees against the same paths flattened, with the same operators, on this machine.

python -m benchmarks.tree_packing [--json FILE]
Forward and backward of a LoRA policy over synthetic trees: a trunk and K branches. The bound is
1 / (1 - POR), Tree Training section 3.1: flat tokens over unique tokens.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from harness_sdk.record import EpisodeRecord, Node, NodeKind
from trainer_service.dag import pack_episodes
from trainer_service.policy import LoraOptions, Policy
from trainer_service.strip import Strip

MODEL = Path(__file__).parents[1] / "harness_sdk" / "cli" / "demo" / "model"
REPEATS = 5

SHAPES = {
    "2 branches, short trunk": (2, 128, 256),
    "4 branches": (4, 256, 128),
    "8 branches": (8, 512, 128),
    "10 branches, long trunk": (10, 1024, 64),
}
"""Name -> branches, tokens of the trunk, tokens of a branch."""


def main() -> None:
    """Measure every shape and print one row each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    policy = Policy.load(MODEL, lora=LoraOptions(rank=8, alpha=16.0))
    rows = [_measure(policy, name, *shape) for name, shape in SHAPES.items()]
    machine = {"processor": _processor(), "threads": 1, "torch": torch.__version__}
    if args.json:
        report = {"command": "python -m benchmarks.tree_packing", "machine": machine, "rows": rows}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    sys.stdout.write(f"{machine}\n")
    for row in rows:
        sys.stdout.write(
            f"{row['tree']:26} unique {row['tokens_unique']:6} flat {row['tokens_flat']:6} "
            f"bound {row['bound_tokens']:.2f} measured {row['speedup']:.2f} "
            f"({row['tokens_per_s']:.0f} unique tokens/s)\n"
        )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return names[0] if names else platform.machine()


def _measure(policy: Policy, name: str, branches: int, trunk: int, branch: int) -> dict[str, Any]:
    record = _tree(branches, trunk, branch)
    packed = pack_episodes([record])
    flat = pack_episodes([_path(record, leaf) for leaf in range(1, branches + 1)])
    pairs = []
    for strip in (packed, flat):
        _step_seconds(policy, strip)
    for _ in range(REPEATS):
        pairs.append((_step_seconds(policy, packed), _step_seconds(policy, flat)))
    return {
        "tree": name,
        "tokens_unique": packed.num_tokens,
        "tokens_flat": packed.tokens_flat,
        "nodes": len(packed.nodes),
        "bound_tokens": packed.tokens_flat / packed.num_tokens,
        "speedup": statistics.median(slow / fast for fast, slow in pairs),
        "tokens_per_s": packed.num_tokens / statistics.median(fast for fast, _ in pairs),
    }


def _step_seconds(policy: Policy, strip: Strip) -> float:
    for parameter in policy.trainable_parameters():
        parameter.grad = None
    begin = time.perf_counter()
    (-policy.logprobs(strip).policy_logprobs.sum()).backward()
    return time.perf_counter() - begin


def _tree(branches: int, trunk: int, branch: int) -> EpisodeRecord:
    generator = torch.Generator().manual_seed(branches)
    nodes = [_node(0, -1, 0, trunk, generator, sampled=False)]
    nodes += [_node(i + 1, 0, trunk, branch, generator, sampled=True) for i in range(branches)]
    return EpisodeRecord(
        run="bench", episode_id="tree", group_id="", task_id="", replica_id="",
        nodes=tuple(nodes), threads=(), reward=1.0, answer="", stop_reason="done",
        opened_at_s=0.0, closed_at_s=0.0, mount_layers=(), model_hash="", tokenizer_hash="",
        template_hash="", engine="",
    )  # fmt: skip


def _path(record: EpisodeRecord, leaf: int) -> EpisodeRecord:
    branch = replace(record.nodes[leaf], node_id=1)
    return replace(record, episode_id=f"path-{leaf}", nodes=(record.nodes[0], branch))


def _node(
    node_id: int,
    parent: int,
    position: int,
    length: int,
    generator: torch.Generator,
    *,
    sampled: bool,
) -> Node:
    return Node(
        node_id=node_id,
        parent=parent,
        thread_id=str(node_id),
        step=1,
        kind=NodeKind.TURN if sampled else NodeKind.CONTEXT,
        token_ids=tuple(torch.randint(0, 256, (length,), generator=generator).tolist()),
        sampled=(sampled,) * length,
        sampled_logprobs=(-1.0,) * (length if sampled else 0),
        policy_version=0,
        position_start=position,
    )


if __name__ == "__main__":
    main()
