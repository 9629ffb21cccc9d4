"""A byte-level ChatML tokenizer with Qwen's kinds of added tokens and a few merges."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rollout_service.chat import ChatTokenizer

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>",
           "</think>")  # fmt: skip
# As byte-level BPE writes them: Ġ is a space.
_MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("<", "|")]
VOCAB_SIZE = 256 + len(_MERGES) + len(CONTROL) + len(MARKERS)


def chat_tokenizer_file(*, control: tuple[str, ...] = CONTROL) -> Tokenizer:
    """The tokenizer as `tokenizers` knows it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    for left, right in _MERGES:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=_MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in control])
    tokenizer.add_tokens([AddedToken(name, special=False) for name in MARKERS])
    return tokenizer


def chat_tokenizer() -> ChatTokenizer:
    """The same, ready for chat."""
    return ChatTokenizer(chat_tokenizer_file())


def save_chat_tokenizer(folder: Path) -> Path:
    """Write `tokenizer.json` to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    chat_tokenizer_file().save(str(folder / "tokenizer.json"))
    return folder
