"""What vLLM's CPU kernels cannot compute, told from a model's config.json before anything starts.

vLLM itself finds out at the first token, and its engine process dies of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness_sdk.errors import ConfigError, InvalidRequest
from rollout_service.cursors import Cursor

_HEAD_KEYS = ("linear_key_head_dim", "linear_value_head_dim")
"""Of models with gated delta rules, and of no others."""
_HEAD_SIZES = (64, 128)


def check_cpu_model(folder: Path | str, dtype: str) -> None:
    """Refuse a model whose gated delta rule vLLM 0.32.0 has no CPU kernel for.

    Args:
        folder: Hugging Face folder.
        dtype: Of weights and cache.

    Raises:
        ConfigError: The dtype is not bfloat16, or a head is not of a size that the kernel has.
    """
    config = _text_config(folder)
    sizes = {config[key] for key in _HEAD_KEYS if key in config}
    if not sizes:
        return
    if dtype != "bfloat16":
        raise ConfigError(
            "vLLM computes gated delta rules on the CPU in bfloat16 alone",
            value=dtype,
            limit="bfloat16",
            remedy="set --model.dtype bfloat16, or use --engine.name transformers",
        )
    if len(sizes) > 1 or not sizes <= set(_HEAD_SIZES):
        raise ConfigError(
            "vLLM has no CPU kernel for gated delta rules of this head size",
            value=", ".join(str(size) for size in sorted(sizes)),
            limit=f"{' or '.join(map(str, _HEAD_SIZES))}, keys and values alike",
            remedy="use --engine.name transformers, or a GPU",
        )


def shortest_prompt(folder: Path | str, device: str) -> int:
    """Tokens that a request without any context computes at least.

    vLLM 0.32.0's CPU kernel for gated delta rules takes a prompt of one token for one that lies
    wrongly in memory.
    """
    has_deltas = any(key in _text_config(folder) for key in _HEAD_KEYS)
    return 2 if device == "cpu" and has_deltas else 1


def check_prompt(cursor: Cursor, shortest: int, *, is_scored: bool) -> None:
    """Refuse a first prompt that the engine process would die of.

    Args:
        cursor: What is to be computed.
        shortest: From `shortest_prompt`.
        is_scored: Whether its last token is only predicted.

    Raises:
        InvalidRequest: It is too short.
    """
    num_computed = len(cursor.token_ids) - is_scored
    if cursor.parent is None and 0 < num_computed < shortest:
        raise InvalidRequest(
            "vLLM computes no prompt of one token with gated delta rules on the CPU",
            value=f"{len(cursor.token_ids)} tokens",
            limit=f"{shortest + is_scored} or more",
            remedy="append more tokens at once, or use --engine.name transformers",
        )


def _text_config(folder: Path | str) -> dict[str, Any]:
    """The language model's part of config.json; empty where the file is not there."""
    try:
        config = json.loads((Path(folder) / "config.json").read_bytes())
    except (OSError, ValueError):
        # Whoever loads the model says what is wrong with it.
        return {}
    return config.get("text_config") or config
