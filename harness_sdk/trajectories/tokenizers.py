"""Text to token ids and back: a byte-level tokenizer without files, or any Hugging Face one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from harness_sdk.errors import ConfigError
from harness_sdk.record import BYTES_HASH

TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"


class Tokenizer(Protocol):
    """What rendering needs of a tokenizer."""

    @property
    def name(self) -> str:
        """Where it came from."""
        ...

    @property
    def turn_start(self) -> int:
        """Id of `<|im_start|>`."""
        ...

    @property
    def turn_end(self) -> int:
        """Id of `<|im_end|>`."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hash that two equal vocabularies share."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of plain text: what looks like a turn marker inside it stays text."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, turn markers included."""
        ...


class ByteTokenizer:
    """The 256 bytes, then the ChatML markers.

    Example:
        `ByteTokenizer().encode("é") == [195, 169]`
    """

    name = "bytes"
    turn_start = 256
    turn_end = 257
    vocab_size = 258
    fingerprint = BYTES_HASH

    def encode(self, text: str) -> list[int]:
        """UTF-8 bytes; a lone surrogate becomes `?`."""
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`; ids above the markers are shown as `<|id|>`."""
        parts: list[bytes] = []
        for token_id in token_ids:
            if 0 <= token_id < 256:
                parts.append(bytes((token_id,)))
            else:
                parts.append(_MARKERS.get(token_id, f"<|{token_id}|>").encode())
        return b"".join(parts).decode("utf-8", errors="replace")


_MARKERS = {ByteTokenizer.turn_start: TURN_START, ByteTokenizer.turn_end: TURN_END}


class FileTokenizer:
    """A `tokenizer.json`, or a model folder that holds a fast tokenizer."""

    def __init__(self, path: Path) -> None:
        """Load the tokenizer.

        Raises:
            ConfigError: No tokenizer there, or one without the ChatML markers.
        """
        self.name = path.name
        self._tokenizer = _load(path)
        self.fingerprint = hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()
        # Recorded text may quote the markers; only rendering may write them.
        self._tokenizer.encode_special_tokens = True
        self.turn_start = self._marker(TURN_START)
        self.turn_end = self._marker(TURN_END)

    def encode(self, text: str) -> list[int]:
        """Ids of `text` without special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, special tokens included."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def _marker(self, text: str) -> int:
        token_id = self._tokenizer.token_to_id(text)
        if token_id is None:
            raise ConfigError(
                f"the tokenizer has no {text} token",
                value=self.name,
                limit="a vocabulary with ChatML markers",
                remedy="leave --tokenizer out to use bytes",
            )
        return token_id


def load_tokenizer(path: Path | None) -> Tokenizer:
    """The tokenizer at `path`; bytes where there is none.

    Raises:
        ConfigError: No tokenizer there, or one without the ChatML markers.
    """
    return ByteTokenizer() if path is None else FileTokenizer(path)


def load_decoder(path: Path) -> Callable[[Sequence[int]], str]:
    """What turns ids into text, special tokens included; any vocabulary will do.

    Raises:
        ConfigError: No tokenizer there.
    """
    tokenizer = _load(path)
    return lambda token_ids: tokenizer.decode(list(token_ids), skip_special_tokens=False)


def tokenizer_file(path: Path) -> Path:
    """The `tokenizer.json` that `path` is, or holds.

    Raises:
        ConfigError: There is none.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            "no tokenizer there", value=path, limit="a tokenizer.json or a folder that holds one"
        )
    return file


def _load(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer as FastTokenizer
    except ImportError as error:
        raise ConfigError(
            "reading a tokenizer needs the `tokenizers` package",
            value=path,
            remedy="pip install tokenizers",
        ) from error
    file = tokenizer_file(path)
    try:
        return FastTokenizer.from_file(str(file))
    # The Rust side raises a bare Exception for a file that it cannot parse.
    except Exception as error:
        raise ConfigError("not a tokenizer file", value=f"{file}: {error}") from error
