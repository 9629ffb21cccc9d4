"""Stock transformers and PEFT, each path alone: what a trainer without trees runs."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.tree_training.models import RANK, random_model
from harness_sdk.record import EpisodeRecord
from trainer_service.lora import LoraOptions, add_adapter
from trainer_service.models import model_hooks


class StockTrainer:
    """The same shape, weights and adapter, with Hugging Face's own mixers and SDPA attention."""

    def __init__(self, shape: str, device: str, *, checkpointing: bool) -> None:
        """Make the model on `device`."""
        model = random_model(shape, device)
        if checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", None)
            (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
        targets = model_hooks(model.config.get_text_config()).lora_targets
        options = LoraOptions(rank=RANK, alpha=2.0 * RANK)
        self._model: Any = add_adapter(model, options, targets, None)
        self._model.train(checkpointing)
        self._device = device

    def train(self, path: EpisodeRecord) -> None:
        """Forward, loss and backward of one path; logits of its sampled tokens alone."""
        tokens = [token for node in path.nodes for token in node.token_ids]
        sampled = [flag for node in path.nodes for flag in node.sampled]
        ids = torch.tensor(tokens, device=self._device)
        rows = torch.tensor(sampled, device=self._device).nonzero()[:, 0]
        out = self._model(input_ids=ids[None], use_cache=False, logits_to_keep=rows - 1)
        logprobs = out.logits[0].float().log_softmax(1).gather(1, ids[rows, None])
        (-logprobs.sum()).backward()
