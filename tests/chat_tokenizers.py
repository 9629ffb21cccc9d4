"""Byte-level tokenizers with a family's added tokens and a few merges; Qwen's kinds by default."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rollout_service.chat import ChatRenderer, ChatTokenizer, Template

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>",
           "</think>")  # fmt: skip
# As byte-level BPE writes them: Ġ is a space.
_MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("<", "|")]
TEMPLATES = Path(__file__).parent / "data" / "chat_templates"
"""Chat templates as models ship them; SOURCES.md says where each is from."""
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
_CONTROL_TEXT = re.compile(
    r"<[|\uff5c][^<>\s'\"]+[|\uff5c]>|\[/?[A-Z_]{3,}\]|\[gMASK\]|<sop>"
    r"|</?(?:think|tool_call|tool_response|arg_key|arg_value)>"
)
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


def chat_template(name: str) -> Template:
    """One of the templates under tests/data."""
    return Template((TEMPLATES / f"{name}.jinja").read_text("utf-8"), SPECIAL_TOKENS)


def family_tokenizer(template: Template) -> ChatTokenizer:
    """A tokenizer whose control tokens are those that the template writes."""
    control = dict.fromkeys((*SPECIAL_TOKENS.values(), *_CONTROL_TEXT.findall(template.source)))
    return ChatTokenizer(chat_tokenizer_file(control=tuple(control)))


def new_renderer(name: str) -> tuple[Template, ChatRenderer]:
    """One of the templates under tests/data, and its renderer."""
    template = chat_template(name)
    return template, ChatRenderer(family_tokenizer(template), template)


renderer = functools.cache(new_renderer)


def save_chat_tokenizer(folder: Path) -> Path:
    """Write `tokenizer.json` to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    chat_tokenizer_file().save(str(folder / "tokenizer.json"))
    return folder
