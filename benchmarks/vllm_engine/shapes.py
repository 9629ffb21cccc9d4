"""Model folders made on the spot: a configuration of the real shape and a tokenizer, no weights.

vLLM fills the weights at random (`load_format="dummy"`): speed does not depend on them.
"""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

_ROOT = Path(__file__).parents[2]
_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_VOCAB = 8192

_QWEN3_5_4B: dict[str, Any] = {
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "vocab_size": 248_320,
    "max_position_embeddings": 262_144,
    "tie_word_embeddings": True,
}

_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_5_4b": _QWEN3_5_4B,
    # For what is counted rather than timed: steps cost a quarter.
    "qwen3_5_4b_8_layers": _QWEN3_5_4B | {"num_hidden_layers": 8},
    "tiny_hybrid": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "vocab_size": _VOCAB,
        "max_position_embeddings": 16_384,
        "tie_word_embeddings": True,
    },
}

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
                "in_proj_qkv", "in_proj_z", "out_proj")  # fmt: skip
"""All ten of Qwen3.5 (Octopus Table 8)."""


def save_shape(folder: Path, name: str) -> Path:
    """Write configuration and tokenizer of a shape to `folder`.

    Args:
        folder: Made where it is missing.
        name: A key of the shapes above.
    """
    shape_config(name).save_pretrained(str(folder))
    _tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def shape_config(name: str) -> Any:
    """The Hugging Face configuration of a shape."""
    import transformers as hf

    sizes = _SHAPES[name]
    return hf.Qwen3_5TextConfig(
        **sizes,
        layer_types=(["linear_attention"] * 3 + ["full_attention"])
        * (sizes["num_hidden_layers"] // 4),
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        architectures=["Qwen3_5ForCausalLM"],
        dtype="bfloat16",
    )


class Texts:
    """Text of about a wanted number of tokens, cut from this project's own files."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        """Read with the tokenizer of `folder`."""
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._ids = self._tokenizer.encode("\n".join(_corpus())).ids
        self._rng = random.Random(seed)

    def reseeded(self, seed: int) -> Texts:
        """The same text; what was taken before tells nothing of what comes."""
        texts = copy.copy(self)
        texts._rng = random.Random(seed)
        return texts

    def take(self, num_tokens: int) -> str:
        """A passage; the same calls in the same order give the same passages."""
        start = self._rng.randrange(len(self._ids))
        found: list[int] = []
        while len(found) < num_tokens:
            found += self._ids[start : start + num_tokens - len(found)]
            start = 0
        return self._tokenizer.decode(found)


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB - len(_CONTROL) - len(_MARKERS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in _CONTROL])
    tokenizer.add_tokens([AddedToken(name, special=False) for name in _MARKERS])
    return tokenizer


def _corpus() -> list[str]:
    folders = ("harness_sdk", "rollout_service", "trainer_service", "docs")
    files = [path for name in folders for path in (_ROOT / name).rglob("*") if path.is_file()]
    return [path.read_text("utf-8") for path in sorted(files) if path.suffix in (".py", ".md")]
