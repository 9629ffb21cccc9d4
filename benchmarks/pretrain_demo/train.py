"""Train the demo's base model: `python -m benchmarks.pretrain_demo.train DATA OUT`.

Phase one copies random tokens, phase two imitates scripted episodes over their DAGs, mounts
included. Needs torch and transformers only; a few minutes on one H200.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.pretrain_demo.dataset import COPIED, GUESSED, WRITTEN, Episodes
from benchmarks.pretrain_demo.forward import DagBatch, hidden_states
from benchmarks.pretrain_demo.synthetic import CopyTask

logger = logging.getLogger(__name__)


DEMO_SIZES = {
    "hidden_size": 160,
    "intermediate_size": 384,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 4096,
}
"""A quarter of a million parameters a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A phase ends after so many steps or seconds, whichever comes first."""

    max_steps: int
    max_s: float

    def steps(self) -> Iterator[tuple[int, float]]:
        """Each step with the share of the phase that is over."""
        started = time.monotonic()
        for step in range(self.max_steps):
            progress = max(step / self.max_steps, (time.monotonic() - started) / self.max_s)
            if progress >= 1.0:
                return
            yield step, progress


class Trainer:
    """A model and its optimiser; each phase has a cosine of its own."""

    def __init__(self, model: Any, *, seed: int, lr: float, log_every: int) -> None:
        self.model = model
        device = next(model.parameters()).device
        self.generator = torch.Generator(device).manual_seed(seed)
        self._lr = lr
        self._log_every = log_every
        self._optimizer = torch.optim.AdamW(
            model.parameters(), betas=(0.9, 0.98), weight_decay=0.01, fused=device.type == "cuda"
        )

    def copy_phase(self, task: CopyTask, *, limit: Limit, rows: int) -> None:
        """Learn to copy runs of random tokens."""
        for step, progress in limit.steps():
            batch, known = task.draw(rows, self.generator)
            order = torch.arange(known.shape[1], device=known.device)
            before = (order - 1).clamp(min=0).expand_as(known)
            loss, hit = self._learn(batch, before, known, step, progress)
            if step % self._log_every == 0:
                logger.info("copy %d loss %.4f accuracy %.4f", step, loss, hit[known].mean())

    def episode_phase(
        self, data: Episodes, train_rows: torch.Tensor, *, limit: Limit, rows: int
    ) -> None:
        """Imitate scripted episodes."""
        for step, progress in limit.steps():
            pick = torch.randint(
                len(train_rows), (rows,), generator=self.generator, device=train_rows.device
            )
            batch, before, role = data.draw(train_rows[pick], self.generator)
            loss, hit = self._learn(batch, before, role > 0, step, progress)
            if step % self._log_every == 0:
                copied = hit[role == COPIED].mean()
                logger.info("episodes %d loss %.4f copied %.4f", step, loss, copied)

    def _learn(
        self,
        batch: DagBatch,
        before: torch.Tensor,
        wanted: torch.Tensor,
        step: int,
        progress: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, hit = score(self.model, batch, before, wanted)
        loss = -logprobs.sum() / wanted.sum()
        for group in self._optimizer.param_groups:
            group["lr"] = self._lr * _schedule(step, progress)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        return loss.detach(), hit


def score(
    model: Any, batch: DagBatch, before: torch.Tensor, wanted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each wanted token and whether it was the likeliest, `[B, T]`.

    Args:
        model: The causal language model.
        batch: What to run.
        before: Row that predicts each token, `[B, T]`.
        wanted: Tokens to score, `[B, T]` bool; the others get 0.
    """
    hidden = hidden_states(model, batch)
    rows = hidden.gather(1, before[..., None].expand(-1, -1, hidden.shape[-1]))[wanted]
    logits = model.lm_head(rows)
    targets = batch.token_ids[wanted]
    logprobs = torch.zeros(wanted.shape, device=hidden.device)
    logprobs = logprobs.masked_scatter(wanted, -F.cross_entropy(logits, targets, reduction="none"))
    hit = torch.zeros(wanted.shape, device=hidden.device)
    hit = hit.masked_scatter(wanted, (logits.argmax(-1) == targets).float())
    return logprobs, hit


@torch.no_grad()
def evaluate(model: Any, data: Episodes, rows: torch.Tensor, *, seed: int) -> dict[str, float]:
    """Teacher-forced figures over held-out episodes with numbers never seen."""
    generator = torch.Generator(rows.device).manual_seed(seed)
    hits: dict[int, list[torch.Tensor]] = {COPIED: [], GUESSED: [], WRITTEN: []}
    nats: dict[int, list[torch.Tensor]] = {COPIED: [], GUESSED: [], WRITTEN: []}
    whole, certain = [], []
    for part in rows.split(64):
        batch, before, role = data.draw(part, generator)
        logprobs, hit = score(model, batch, before, role > 0)
        for kind in hits:
            hits[kind].append(hit[role == kind])
            nats[kind].append(-logprobs[role == kind])
        has = (role == COPIED).any(1)
        whole.append(((hit > 0) | (role != COPIED)).all(1)[has].float())
        certain.append((logprobs * (role == COPIED)).sum(1)[has].exp())
    return {
        "copied_accuracy": float(torch.cat(hits[COPIED]).mean()),
        "copied_nats": float(torch.cat(nats[COPIED]).mean()),
        "episodes_copied_right": float(torch.cat(whole).mean()),
        "episodes_copied_right_sampled": float(torch.cat(certain).mean()),
        "written_accuracy": float(torch.cat(hits[WRITTEN]).mean()),
        "written_nats": float(torch.cat(nats[WRITTEN]).mean()),
        "guessed_nats": float(torch.cat(nats[GUESSED]).mean()),
    }


def main(argv: list[str] | None = None) -> int:
    """Train, evaluate before and after rounding to bfloat16, save."""
    args = _parse(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stdout)
    torch.manual_seed(args.seed)
    model = fresh_hybrid(args.data / "tokenizer.json", args.device, DEMO_SIZES)
    vocab_size = model.config.vocab_size
    logger.info("largest difference to transformers: %.2g", _difference(model, vocab_size))
    # TF32 is exact enough to learn with; the demo itself runs in float32.
    torch.set_float32_matmul_precision("high")
    data = Episodes(args.data / "episodes.npz", args.device)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(args.seed))
    held_out, train_rows = order.to(args.device).split([args.held_out, len(data) - args.held_out])
    started = time.monotonic()
    trainer = Trainer(model, seed=args.seed, lr=args.lr, log_every=args.log_every)
    trainer.copy_phase(
        CopyTask(vocab_size=vocab_size, span=args.copy_span),
        limit=Limit(max_steps=args.copy_steps, max_s=args.copy_seconds),
        rows=args.copy_rows,
    )
    logger.info("copy phase took %.0f s", time.monotonic() - started)
    trainer.episode_phase(
        data,
        train_rows,
        limit=Limit(max_steps=args.episode_steps, max_s=args.episode_seconds),
        rows=args.episode_rows,
    )
    logger.info("both phases took %.0f s", time.monotonic() - started)
    figures = {"float32": evaluate(model, data, held_out, seed=1)}
    model.to(torch.bfloat16).float()
    figures["bfloat16"] = evaluate(model, data, held_out, seed=1)
    figures["seconds"] = {"training": round(time.monotonic() - started, 1)}
    save(model, args.data / "tokenizer.json", args.out)
    logger.info("%s", json.dumps(figures, indent=1))
    return 0


def fresh_hybrid(tokenizer: Path, device: str, sizes: Mapping[str, Any]) -> Any:
    """A hybrid of Qwen3.5's kind with random weights, in float32.

    Args:
        tokenizer: Its file; `<|im_end|>` ends a turn.
        device: Where it computes.
        sizes: Layers, widths and heads, as `Qwen3_5TextConfig` names them.
    """
    from transformers import Qwen3_5ForCausalLM

    content = json.loads(tokenizer.read_text())
    added = {token["content"]: token["id"] for token in content["added_tokens"]}
    vocab_size = 1 + max(*added.values(), *content["model"]["vocab"].values())
    config = hybrid_config(sizes, vocab_size, added["<|im_end|>"])
    config._attn_implementation = "sdpa"
    model: Any = Qwen3_5ForCausalLM(config)
    return model.float().to(device)


def hybrid_config(sizes: Mapping[str, Any], vocab_size: int, eos_token_id: int) -> Any:
    """The architecture, its embedding tied."""
    from transformers import Qwen3_5TextConfig

    eighth = sizes["head_dim"] // 8
    return Qwen3_5TextConfig(
        **sizes,
        num_hidden_layers=len(sizes["layer_types"]),
        vocab_size=vocab_size,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [eighth, eighth // 2, eighth // 2],
        },
        tie_word_embeddings=True,
        eos_token_id=eos_token_id,
        bos_token_id=None,
        pad_token_id=None,
    )


def save(model: Any, tokenizer: Path, folder: Path) -> None:
    """Write the model in bfloat16 with its tokenizer, in Hugging Face form."""
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    shutil.copy(tokenizer, folder / "tokenizer.json")
    size = sum(file.stat().st_size for file in folder.iterdir())
    logger.info("%d parameters, %d bytes in %s", model.num_parameters(), size, folder)


@torch.no_grad()
def _difference(model: Any, vocab_size: int) -> float:
    """How far this forward pass is from the library's own, in logits.

    Raises:
        ValueError: They differ: this release of transformers computes something else.
    """
    device = next(model.parameters()).device
    token_ids = torch.arange(100, device=device)[None] % vocab_size
    order = torch.arange(100, device=device)
    batch = DagBatch(
        token_ids=token_ids,
        position_ids=order[None],
        visible=(order[:, None] >= order[None])[None],
        paths=order[None, None],
        path_slot=order[None],
    )
    found = model.lm_head(hidden_states(model, batch))
    difference = float((found - model(token_ids).logits).abs().max())
    if not difference < 1e-4:
        raise ValueError(f"logits differ from transformers' by {difference:.2g}, limit 1e-4")
    return difference


def _schedule(step: int, progress: float) -> float:
    """Ramp up over 100 steps; half a cosine down to 5 % at the phase's end."""
    return min(1.0, (step + 1) / 100) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="folder that benchmarks.pretrain_demo.corpus wrote")
    parser.add_argument("out", type=Path, help="folder for the model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--copy-steps", type=int, default=6000)
    parser.add_argument("--copy-seconds", type=float, default=75.0)
    parser.add_argument("--copy-rows", type=int, default=256)
    parser.add_argument("--copy-span", type=int, default=64)
    parser.add_argument("--episode-steps", type=int, default=20000)
    parser.add_argument("--episode-seconds", type=float, default=240.0)
    parser.add_argument("--episode-rows", type=int, default=256)
    parser.add_argument("--held-out", type=int, default=400)
    parser.add_argument("--log-every", type=int, default=250)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
