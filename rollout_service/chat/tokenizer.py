"""Text to token ids and back, with control tokens only where the template writes them.

Wraps a `tokenizers` file; knows nothing of roles or turns.
"""

from __future__ import annotations

import enum
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from harness_sdk.errors import ConfigError

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"


class Trust(enum.Enum):
    """Who wrote a fragment, and so which added tokens its text may become."""

    TEMPLATE = "template"
    """This service: every added token."""
    REPLY = "reply"
    """A model's turn: added tokens that structure a turn, but none that ends or opens one."""
    CONTENT = "content"
    """Users, tools and agents: none; the text of an added token stays text."""


Fragment = tuple[str, Trust]


class ChatTokenizer:
    """A tokenizer with ChatML's two control tokens.

    Args:
        tokenizer: The tokenizer; owned by this object from now on.
        eos_token_ids: Further ids that end a reply; those that are no added token are ignored,
            because a plain token must not end a turn.
        digest: sha256 of the tokenizer's file; computed where it is empty.

    Raises:
        ConfigError: `<|im_start|>` or `<|im_end|>` is missing.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, eos_token_ids: Iterable[int] = (), digest: str = ""
    ) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._ids = {token.content: token_id for token_id, token in added.items()}
        missing = [name for name in (IM_START, IM_END) if name not in self._ids]
        if missing:
            raise ConfigError(
                "the tokenizer has no ChatML control tokens",
                value=f"missing {', '.join(missing)}",
                limit=f"{IM_START} and {IM_END} as added tokens",
                remedy="serve a model whose template is ChatML (Qwen, SmolLM2)",
            )
        self.im_start, self.im_end = self._ids[IM_START], self._ids[IM_END]
        stops = {self.im_end, *(i for i in eos_token_ids if i in added)}
        if END_OF_TEXT in self._ids:
            stops.add(self._ids[END_OF_TEXT])
        self.stop_token_ids = frozenset(stops)
        self.digest = digest or hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
        self._patterns = self._trust_patterns()
        # A whitespace token is no control token: the template's own text uses it too.
        control = [name for name in self._ids if len(name) > 1 and name.strip()]
        self._control = _any_of(control)

    @classmethod
    def load(cls, folder: str | Path) -> ChatTokenizer:
        """Read `tokenizer.json` of a Hugging Face folder, and its end-of-sequence ids.

        Raises:
            ConfigError: There is no such file, or it is no ChatML tokenizer.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                "no tokenizer found",
                value=path,
                remedy="save the model's fast tokenizer there as tokenizer.json",
            )
        data = path.read_bytes()
        try:
            tokenizer = Tokenizer.from_buffer(data)
        except Exception as error:  # tokenizers raises bare Exception for a bad file
            raise ConfigError("the tokenizer file cannot be read", value=path) from error
        return cls(
            tokenizer,
            eos_token_ids=_eos_token_ids(Path(folder)),
            digest=hashlib.sha256(data).hexdigest(),
        )

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, fragments: Iterable[Fragment]) -> tuple[int, ...]:
        """Token ids of the fragments in a row; neighbouring plain text is encoded as one."""
        ids: list[int] = []
        plain: list[str] = []
        for text, trust in fragments:
            pattern, start = self._patterns[trust], 0
            for match in pattern.finditer(text) if pattern is not None else ():
                plain.append(text[start : match.start()])
                ids += self._encode_plain("".join(plain))
                ids.append(self._ids[match.group()])
                plain, start = [], match.end()
            plain.append(text[start:])
        ids += self._encode_plain("".join(plain))
        return tuple(ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, added tokens as they read; ids without a token read as nothing."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def _encode_plain(self, text: str) -> list[int]:
        ids: list[int] = []
        start = 0
        # Cut inside whatever reads like an added token, so that no piece holds a whole one. The
        # search goes on behind the cut: occurrences may overlap.
        while self._control is not None and (match := self._control.search(text, start)):
            ids += self._encode_piece(text[start : match.start() + 1])
            start = match.start() + 1
        return ids + self._encode_piece(text[start:])

    def _encode_piece(self, text: str) -> list[int]:
        if not text:
            return []
        # A lone surrogate is no Unicode text; JSON lets one in.
        clean = text.encode("utf-8", "replace").decode("utf-8")
        return self._tokenizer.encode(clean, add_special_tokens=False).ids

    def _trust_patterns(self) -> dict[Trust, re.Pattern[str] | None]:
        turn_ends = {name for name, i in self._ids.items() if i in self.stop_token_ids}
        in_reply = [name for name in self._ids if name not in turn_ends and name != IM_START]
        return {
            Trust.TEMPLATE: _any_of(list(self._ids)),
            Trust.REPLY: _any_of(in_reply),
            Trust.CONTENT: None,
        }


class TextStream:
    """Text of a growing token sequence, given out only in whole characters."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that became whole with this token."""
        self._held.append(token_id)
        text = self._tokenizer.decode(self._held)
        # The replacement character at the end: an unfinished character, or a really bad byte.
        if text.endswith("\ufffd") and len(self._held) < _MAX_HELD:
            return ""
        self._held.clear()
        return text

    def finish(self) -> str:
        """The text of what is still held."""
        text = self._tokenizer.decode(self._held) if self._held else ""
        self._held.clear()
        return text


# Far more than the four bytes of a character: a run of bad bytes is given out in the end.
_MAX_HELD = 64


def _any_of(names: list[str]) -> re.Pattern[str] | None:
    if not names:
        return None
    return re.compile("|".join(re.escape(n) for n in sorted(names, key=len, reverse=True)))


def _eos_token_ids(folder: Path) -> set[int]:
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            eos: Any = json.loads(path.read_text()).get("eos_token_id")
            found.update(eos if isinstance(eos, list) else [eos] if isinstance(eos, int) else [])
    return found
