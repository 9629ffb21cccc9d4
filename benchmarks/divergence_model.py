"""A hybrid trained for a minute on the shipped passages, for `benchmarks.divergence`.

    python -m benchmarks.divergence_model OUT --device cuda --seconds 60

Twelve layers of Qwen3.5's kind, 45 million parameters: a user gives the beginning of a passage, the
assistant goes on. Random weights would not do: rounding is louder in them.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer

from benchmarks.pretrain_demo.corpus import byte_tokenizer
from benchmarks.pretrain_demo.forward import DagBatch
from benchmarks.pretrain_demo.train import Limit, Trainer, fresh_hybrid, save
from examples.deep_search.corpus import Passage, shipped_passages

logger = logging.getLogger(__name__)

_VOCABULARY = 4096
_ROW_TOKENS = 256
_MAX_STEPS = 100_000
_SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 8192,
}


class TextTrainer(Trainer):
    """Learns rows of text."""

    def text_phase(
        self, token_ids: torch.Tensor, lengths: torch.Tensor, *, limit: Limit, rows: int
    ) -> None:
        """Predict every token from those before it.

        Args:
            token_ids: `[N, T]` int64, padded at the end.
            lengths: Tokens of each row, `[N]`.
            limit: When to stop.
            rows: In a step.
        """
        order = torch.arange(token_ids.shape[1], device=token_ids.device)
        for step, progress in limit.steps():
            pick = torch.randint(
                len(token_ids), (rows,), generator=self.generator, device=token_ids.device
            )
            wanted = (order > 0) & (order < lengths[pick][:, None])
            before = (order - 1).clamp(min=0).expand_as(wanted)
            loss, hit = self._learn(_batch(token_ids[pick], order), before, wanted, step, progress)
            if step % self._log_every == 0:
                logger.info("text %d loss %.3f right %.3f", step, loss, hit[wanted].mean())


def main(argv: list[str] | None = None) -> int:
    """Train and save."""
    args = _parse(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stdout)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    texts = [_chat(passage) for passage in shipped_passages()]
    tokenizer = byte_tokenizer(texts, _VOCABULARY)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.out / "learned.json"))
    token_ids, lengths = (each.to(args.device) for each in _rows(tokenizer, texts))
    logger.info("%d rows, %d tokens", len(lengths), int(lengths.sum()))
    kinds = [*["linear_attention"] * 3, "full_attention"] * (args.layers // 4)
    model = fresh_hybrid(args.out / "learned.json", args.device, _SIZES | {"layer_types": kinds})
    trainer = TextTrainer(model, seed=0, lr=args.lr, log_every=args.log_every)
    limit = Limit(max_steps=_MAX_STEPS, max_s=args.seconds)
    trainer.text_phase(token_ids, lengths, limit=limit, rows=args.rows)
    save(model, args.out / "learned.json", args.out)
    return 0


def _chat(passage: Passage) -> str:
    """As the rollout service renders a question and its answer."""
    begin, rest = passage.text[: len(passage.text) // 2], passage.text[len(passage.text) // 2 :]
    question = f"<|im_start|>user\n{passage.title}. {begin}<|im_end|>\n"
    return f"{question}<|im_start|>assistant\n{rest}<|im_end|>"


def _rows(tokenizer: Tokenizer, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, `[N, T]`, and how many of each row count, `[N]`."""
    encoded = [tokenizer.encode(text).ids[:_ROW_TOKENS] for text in texts]
    padded = [[*ids, *[0] * (_ROW_TOKENS - len(ids))] for ids in encoded]
    return torch.tensor(padded), torch.tensor([len(ids) for ids in encoded])


def _batch(token_ids: torch.Tensor, order: torch.Tensor) -> DagBatch:
    """Rows that are each one path."""
    rows = len(token_ids)
    return DagBatch(
        token_ids=token_ids,
        position_ids=order.expand(rows, -1),
        visible=(order[:, None] >= order[None]).expand(rows, -1, -1),
        paths=order.expand(rows, 1, -1),
        path_slot=order.expand(rows, -1),
    )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder for the model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--layers", type=int, default=12, help="4, 8 or 12")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--log-every", type=int, default=50)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
