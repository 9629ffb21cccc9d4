"""A step's gradients and speed on 1 to N ranks, its episodes divided by their tokens.

torchrun --standalone --nproc-per-node N -m benchmarks.ranks --out FILE
Through NCCL where CUDA is, else gloo on the CPU. Gradients are compared with those of one rank;
ranks beyond the measured ones add zeros to the sum. Prints a table and writes its rows as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.tree_training.hardware import hardware
from benchmarks.tree_training.models import random_policy
from benchmarks.tree_training.trees import comb, fork, octopus
from trainer_service.config import TrainerConfig
from trainer_service.feed import Batch
from trainer_service.groups import Group, Scored
from trainer_service.optim import Optimizer, StepOutcome
from trainer_service.policy import Policy
from trainer_service.ranks import Ranks
from trainer_service.share import divide
from trainer_service.step import take_share


class GradientKeeper(Optimizer):
    """Keeps what a step would apply, and applies nothing."""

    kept: torch.Tensor

    def step(self, *, loss: float) -> StepOutcome:
        """Of all parameters, `[P]`."""
        self.kept = torch.cat([p.grad.flatten() for p in self.parameters if p.grad is not None])
        return StepOutcome(grad_norm=float(self.kept.norm()), lr=0.0, skipped=False)


def batch_of_trees(num_trees: int, num_tokens: int, mount_layers: tuple[int, ...]) -> Batch:
    """Forks, combs and trees with mounts, of `num_tokens` down to half of them."""
    groups: list[Group] = []
    for index in range(num_trees):
        size = num_tokens - num_tokens * index // (2 * num_trees)
        writer = (fork(4, size // 2, size // 8, size // 20), comb(size, 8), octopus(size))
        name = f"tree-{index}"
        record = replace(writer[index % 3].record(mount_layers), episode_id=name, group_id=name)
        groups.append(Group(group_id=name, episodes=(Scored.of(name, record),)))
    return Batch(groups=tuple(groups))


def randomise(policy: Policy) -> None:
    """An adapter that has learned: B of a new one is zero, and A's gradient with it."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)


def measure(
    policy: Policy, batch: Batch, config: TrainerConfig, ranks: Ranks, num_ranks: int, repeats: int
) -> tuple[float, torch.Tensor]:
    """Shortest seconds of a step until its gradients are added, and the gradients."""
    keeper = GradientKeeper(policy.trainable_parameters(), config.optim)
    shares = divide(batch, config, version=0, num_ranks=num_ranks)
    share = shares[min(ranks.rank, num_ranks - 1)]
    if ranks.rank >= num_ranks:
        share = replace(share, records=(), advantages=share.advantages[:0])
    found: list[float] = []
    # The first one compiles kernels.
    for _ in range(repeats + 1):
        ranks.sum(0.0)
        begin = time.monotonic()
        take_share(policy, keeper, share, config, ranks)
        # The norm in the outcome has waited for the device.
        found.append(ranks.broadcast(time.monotonic() - begin))
    return min(found[1:]), keeper.kept


def main() -> None:
    """Measure 1, 2 and so on, up to the ranks that torchrun started."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="file of the rows")
    parser.add_argument("--shape", default="tiny_hybrid", help="of benchmarks.vllm_engine.shapes")
    parser.add_argument("--trees", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=512, help="of the longest tree")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ranks = Ranks.join(device)
    policy = random_policy(args.shape, device, checkpointing=device == "cuda")
    randomise(policy)
    batch = batch_of_trees(args.trees, args.tokens, policy.mount_layers)
    config = TrainerConfig.model_validate(
        {"objective": "sft", "model": {"path": "."}, "batch": {"max_strip_tokens": args.tokens}}
    )
    num_tokens = sum(episode.record.num_tokens for episode in batch.episodes)
    rows: list[dict[str, Any]] = []
    alone: torch.Tensor | None = None
    for count in range(1, ranks.size + 1):
        seconds, gradient = measure(policy, batch, config, ranks, count, args.repeats)
        alone = gradient if alone is None else alone
        rms = float((gradient - alone).norm() / alone.norm())
        rows.append({"ranks": count, "tokens_per_s": num_tokens / seconds, "rms": rms})
    if ranks.leads:
        told = {**hardware(device), "shape": args.shape, "tokens": num_tokens, "rows": rows}
        args.out.write_text(json.dumps(told, indent=1) + "\n")
        sys.stdout.write("ranks  tokens/s  relative rms to one rank\n")
        for row in rows:
            sys.stdout.write("{ranks:5}  {tokens_per_s:8.0f}  {rms:.1e}\n".format(**row))
    ranks.leave()


if __name__ == "__main__":
    main()
