"""Seconds of a training step: forward, loss and backward, and nothing else."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from trainer_service.objectives import OBJECTIVES, ObjectiveOptions
from trainer_service.policy import Policy
from trainer_service.strip import Strip


def train(policy: Policy, strips: Sequence[Strip], *, max_piece_tokens: int | None = None) -> None:
    """One step of DAG-GRPO over `strips`; gradients start at none."""
    for parameter in policy.trainable_parameters():
        parameter.grad = None
    total = sum(strip.num_episodes for strip in strips)
    for strip in strips:
        strip = strip.to(policy.device)
        logprobs = policy.logprobs(strip, max_piece_tokens=max_piece_tokens)
        advantages = torch.ones(strip.num_episodes, device=policy.device)
        options = ObjectiveOptions(num_episodes=total)
        loss = OBJECTIVES["dag_grpo"](logprobs, strip, advantages, options).loss
        logprobs.backward(loss)


def seconds(step: Callable[[], None], device: torch.device) -> float:
    """Seconds of a call: of the clock on a GPU, of this process on the CPU.

    Other processes of a busy machine then cost nothing that is counted.
    """
    begin = _now(device)
    step()
    return _now(device) - begin


def matmul_peak(device: torch.device) -> float:
    """Operations per second of a large matrix product, in the type that the steps compute in."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))

    def multiply() -> None:
        torch.matmul(left, right)

    return 2.0 * size**3 / statistics.median([seconds(multiply, device) for _ in range(13)][3:])


def _now(device: torch.device) -> float:
    if device.type != "cuda":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()
