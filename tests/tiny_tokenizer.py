"""A byte-level ChatML tokenizer of 259 ids, to go with the tiny models."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def save_tiny_tokenizer(folder: Path) -> Path:
    """Write `tokenizer.json`: ids 0 to 255 are bytes, then the control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in CONTROL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
