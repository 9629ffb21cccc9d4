"""Teach the demo's model the vault: `python -m benchmarks.learning.pretrain OUT`.

All weights are trained on scripted episodes of all variants, packed as the trainer packs them. No
service runs: the sessions compute nothing but tokens, positions and mounts. One CPU core and some
twenty minutes are enough.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import random
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.learning.teacher import draw_script, play
from benchmarks.learning.variants import VARIANTS
from benchmarks.learning.world import LIMITS, draw_tasks
from benchmarks.pretrain_demo.dry_episodes import DryService
from harness_sdk.cli.demo.config import MODEL
from harness_sdk.record import EpisodeRecord
from trainer_service.dag import pack_episodes
from trainer_service.policy import Policy

logger = logging.getLogger(__name__)

TAUGHT = ("octopus", "no_mounts", "no_rewind", "no_fork", "single", "prompt", "strict")
"""Variants whose scripts differ."""

_SEED = 2_000_003
"""Of tasks and scripts; those of the study are others."""


def main(argv: list[str] | None = None) -> int:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder for the model")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seconds", type=float, default=1200.0, help="end earlier, after so long")
    parser.add_argument("--episodes", type=int, default=2, help="of each variant in a step")
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stdout)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    policy = Policy.from_model(model, model_path=MODEL, lora=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98))
    episodes = _Episodes(args.episodes)
    for step, progress in _progress(args.steps, args.seconds):
        # An engine without a model names no mount layers.
        strip = replace(pack_episodes(asyncio.run(episodes.draw())), mount_layers=None)
        loss = -policy.logprobs(strip).policy_logprobs.mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * _schedule(step, progress)
        optimizer.step()
        if step % 20 == 0:
            logger.info("step %d loss %.4f tokens %d", step, float(loss.detach()), strip.num_tokens)
    model.to(torch.bfloat16).save_pretrained(args.out)
    shutil.copy(MODEL / "tokenizer.json", args.out / "tokenizer.json")
    return 0


class _Episodes:
    """Scripted episodes without end."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._rng = random.Random(_SEED)
        self._tasks = draw_tasks(_SEED)
        self._service = DryService(MODEL)

    async def draw(self) -> list[EpisodeRecord]:
        """Some of each variant."""
        return [await self._play(name) for name in TAUGHT for _ in range(self._count)]

    async def _play(self, name: str) -> EpisodeRecord:
        variant, task = VARIANTS[name], next(self._tasks)
        script = draw_script(self._rng, task, variant)
        service = self._service
        async with service.episode(
            task.task_id, primitives=variant.primitives, limits=LIMITS
        ) as episode:
            await play(episode, task, script, variant)
        return service.last_record


def _progress(max_steps: int, max_s: float) -> Iterator[tuple[int, float]]:
    """Each step with the share of the training that is over, by steps or seconds."""
    begin_s = time.monotonic()
    for step in range(max_steps):
        progress = max(step / max_steps, (time.monotonic() - begin_s) / max_s)
        if progress >= 1.0:
            return
        yield step, progress


def _schedule(step: int, progress: float) -> float:
    """Ramp up over 20 steps; half a cosine down to 5 %."""
    return min(1.0, (step + 1) / 20) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


if __name__ == "__main__":
    sys.exit(main())
