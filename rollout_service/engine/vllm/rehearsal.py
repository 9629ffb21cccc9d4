"""A version that changes nothing, loaded, used and dropped before the first caller comes.

What the first version would wait for is done by then: vLLM compiles at the first score, and its
LoRA kernels once for each kind of number of rows. The version is as large as one may be, so the
pinned memory that loading and reading back take is PyTorch's already.
"""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from harness_sdk.control import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from harness_sdk.errors import AdapterError, InvalidRequest
from rollout_service.cursors import child_cursor
from rollout_service.engine.vllm.adapters import Adapters
from rollout_service.engine.vllm.builder import FootingBuilder

logger = logging.getLogger(__name__)

_VERSION = 2**31 - 1
"""No policy's."""
_NUM_ROWS = (32, 33, 128, 129)
"""Even and odd ones, of the two sizes at which the kernels change."""


async def rehearse(adapters: Adapters, builder: FootingBuilder, *, max_tokens: int) -> None:
    """Load, read back, score with and drop a version; one that is refused is told in the log.

    Args:
        adapters: With a free slot.
        builder: Of the same process.
        max_tokens: The longest context that the engine holds.
    """
    begin_s = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="octopus-rehearsal-") as folder:
            await asyncio.to_thread(_write_zeros, Path(folder), adapters)
            await adapters.load(_VERSION, folder)
        try:
            await _use(adapters, builder, max_tokens)
        finally:
            await adapters.unload(_VERSION, is_running=False)
    except (AdapterError, InvalidRequest) as error:
        logger.warning("no version was rehearsed, so the first one may take seconds: %s", error)
    else:
        logger.info("a version was rehearsed in %.1f s", time.monotonic() - begin_s)


async def _use(adapters: Adapters, builder: FootingBuilder, max_tokens: int) -> None:
    await adapters.checksums(_VERSION)
    for num_rows in _NUM_ROWS:
        if num_rows + 1 < max_tokens:
            tokens = (0,) * (num_rows + 1)
            cursor = child_cursor(None, tokens, mounts=(), policy_version=_VERSION)
            await builder.score(_VERSION, cursor, 1, keep=False)


def _write_zeros(folder: Path, adapters: Adapters) -> None:
    """Write an adapter of the highest rank that adds nothing to any module it may change."""
    rank, targets = adapters.max_rank, adapters.reader.targets()
    tensors: dict[str, torch.Tensor] = {}
    for name, module in adapters.reader.shapes().named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in targets:
            for part, shape in (
                ("A", (rank, module.in_features)),
                ("B", (module.out_features, rank)),
            ):
                zeros = torch.zeros(shape, dtype=adapters.dtype)
                tensors[f"base_model.model.{name}.lora_{part}.weight"] = zeros
    save_file(tensors, folder / ADAPTER_FILE)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(targets),
        "bias": "none",
    }
    (folder / ADAPTER_CONFIG_FILE).write_text(json.dumps(config))
