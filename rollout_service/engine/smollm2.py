"""Writes SmolLM2-135M-Instruct from its GGUF file as a Hugging Face folder.

A program of its own, so that the memory it takes (1.1 GiB) goes back with the process.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def convert(gguf: Path, folder: Path) -> None:
    """Dequantise `gguf` and write model (bfloat16) and tokenizer to `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Without `dequantize` the weights are the same, but saving them is refused.
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    # The quantisation is undone: nothing that loads the folder needs to know of it.
    model.config.__dict__.pop("quantization_config", None)
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
