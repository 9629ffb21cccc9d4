"""Text to token ids and back, with control tokens only where the template writes them.

Wraps a `tokenizers` file; knows nothing of roles or turns.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from harness_sdk.errors import ConfigError
from rollout_service.chat.template import json_object, special_tokens

END_OF_TEXT = "<|endoftext|>"
BARRIER = "\udc00"
"""Keeps the text on its two sides from being read as one control token. A lone surrogate: no
message can hold it, and the template's string functions let it pass."""

_SURROGATES = re.compile("[\ud800-\udfff]")
_MAX_REPEATED, _MAX_REPEATED_CHARS = 256, 16


class ChatTokenizer:
    """A tokenizer whose added tokens appear only where they are meant.

    Args:
        tokenizer: The tokenizer; owned by this object from now on.
        eos_token_ids: Ids that end a reply; those that are no added token are ignored, because a
            plain token must not end a turn.
        digest: sha256 of the tokenizer's file; computed where it is empty.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, eos_token_ids: Iterable[int] = (), digest: str = ""
    ) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.added_ids = {token.content: token_id for token_id, token in added.items()}
        """Id of each added token, control tokens among them."""
        self.eos_token_ids = frozenset(i for i in eos_token_ids if i in added) | {
            self.added_ids[name] for name in (END_OF_TEXT,) if name in self.added_ids
        }
        self.digest = digest or hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
        # A whitespace token is no control token: the template's own text uses it too.
        control = [name for name in self.added_ids if len(name) > 1 and name.strip()]
        self._control = _any_of(control)
        self._endings = {name[at:] for name in control for at in range(1, len(name))}
        self._beginnings = {name[:at] for name in control for at in range(1, len(name))}
        self._longest = max(map(len, control), default=0)
        self._repeated: dict[tuple[str, bool], tuple[int, ...]] = {}
        """Ids of short pieces, by text and whether they begin a text."""
        # Stands before each piece, so that no tokenizer takes the piece for the start of a text.
        self._lead = next(
            (token.content for token in added.values() if not (token.lstrip or token.rstrip)), ""
        )

    @classmethod
    def load(cls, folder: str | Path) -> ChatTokenizer:
        """Read a Hugging Face folder's `tokenizer.json`, or that file, and end-of-sequence ids.

        Raises:
            ConfigError: There is no such file, or it cannot be read.
        """
        path = Path(folder)
        path = path / "tokenizer.json" if path.is_dir() else path
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
            raise ConfigError(
                "the tokenizer file cannot be read",
                value=f"{path}: {error}"[:300],
                remedy="save the model's fast tokenizer there as tokenizer.json",
            ) from error
        return cls(
            tokenizer,
            eos_token_ids=_eos_token_ids(path.parent, tokenizer),
            digest=hashlib.sha256(data).hexdigest(),
        )

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def first_control(self, text: str) -> str:
        """The first control token in `text`; empty where there is none."""
        match = self._control.search(text) if self._control is not None else None
        return match.group() if match is not None else ""

    def control_names(self, text: str) -> set[str]:
        """The control tokens in `text`."""
        return set(self._control.findall(text)) if self._control is not None else set()

    def encode_whole(self, text: str) -> tuple[int, ...]:
        """Token ids of `text` as the tokenizer itself gives them; only for text of this package."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def guard(self, text: str, names: Collection[str] | None = None) -> str:
        """`text` with barriers, so that `encode` finds no control token in it or at its ends.

        Args:
            text: What users, tools, agents or a model wrote.
            names: The control tokens to keep out; all without it.
        """
        text = _SURROGATES.sub("?", text)
        if self._control is None:
            return text
        parts: list[str] = []
        start = 0
        # The search goes on behind the barrier: occurrences may overlap.
        while match := self._control.search(text, start):
            cut = match.start() + 1
            parts.append(text[start:cut])
            if names is None or match.group() in names:
                parts.append(BARRIER)
            start = cut
        parts.append(text[start:])
        return self._guard_ends("".join(parts)) if names is None else "".join(parts)

    def encode(self, text: str, *, begins: bool = False) -> tuple[int, ...]:
        """Token ids of a rendering: control tokens wherever no barrier breaks them.

        Args:
            text: The rendering.
            begins: It is the beginning of all; else it goes on behind a control token.
        """
        ids: list[int] = []
        start = 0
        for match in self._control.finditer(text) if self._control is not None else ():
            ids += self._encode_plain(text[start : match.start()], begins=begins and not start)
            ids.append(self.added_ids[match.group()])
            start = match.end()
        ids += self._encode_plain(text[start:], begins=begins and not start)
        return tuple(ids)

    def encode_plain(self, text: str) -> tuple[int, ...]:
        """Token ids of text that holds no control token, whatever it reads like."""
        return tuple(self._encode_plain(text, begins=True))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, added tokens as they read; ids without a token read as nothing."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def _guard_ends(self, text: str) -> str:
        """Barriers where `text` could be part of a control token with what stands beside it.

        Inside its white space, which templates strip.
        """
        core = text.strip()
        if not core:
            return text
        sizes = range(1, min(self._longest, len(core) + 1))
        first = BARRIER if any(core[:size] in self._endings for size in sizes) else ""
        last = BARRIER if any(core[-size:] in self._beginnings for size in sizes) else ""
        return text.replace(core, f"{first}{core}{last}", 1) if first or last else text

    def _encode_plain(self, text: str, *, begins: bool) -> list[int]:
        text = text.replace(BARRIER, "")
        ids: list[int] = []
        start = 0
        # Cut inside whatever reads like an added token, so that no piece holds a whole one. The
        # search goes on behind the cut: occurrences may overlap.
        while self._control is not None and (match := self._control.search(text, start)):
            ids += self._encode_piece(text[start : match.start() + 1], begins=begins and not start)
            start = match.start() + 1
        ids += self._encode_piece(text[start:], begins=begins and not start)
        return ids

    def _encode_piece(self, text: str, *, begins: bool) -> Sequence[int]:
        if not text:
            return ()
        if len(text) > _MAX_REPEATED_CHARS:
            return self._encode_text(text, begins=begins)
        # What templates write around messages comes every turn, and a call costs more than it.
        ids = self._repeated.get((text, begins))
        if ids is None:
            ids = tuple(self._encode_text(text, begins=begins))
            if len(self._repeated) < _MAX_REPEATED:
                self._repeated[text, begins] = ids
        return ids

    def _encode_text(self, text: str, *, begins: bool) -> list[int]:
        # A lone surrogate is no Unicode text; JSON lets one in.
        clean = text.encode("utf-8", "replace").decode("utf-8")
        if begins or not self._lead:
            return self._tokenizer.encode(clean, add_special_tokens=False).ids
        return self._tokenizer.encode(self._lead + clean, add_special_tokens=False).ids[1:]


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


def _any_of(names: Iterable[str]) -> re.Pattern[str] | None:
    pattern = _branches(names)
    return re.compile(pattern) if pattern else None


def _branches(names: Iterable[str]) -> str:
    """A pattern of `names`, the longest first.

    Common beginnings are tried once: some tokenizers have a thousand added tokens, and a page of
    markup as many places where each could begin.
    """
    by_first: dict[str, list[str]] = {}
    for name in names:
        by_first.setdefault(name[:1], []).append(name[1:])
    branches = [f"{re.escape(at)}{_branches(rest)}" for at, rest in by_first.items() if at]
    pattern = f"(?:{'|'.join(branches)})" if len(branches) > 1 else "".join(branches)
    return f"(?:{pattern})?" if branches and "" in by_first else pattern


def _eos_token_ids(folder: Path, tokenizer: Tokenizer) -> set[int]:
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        eos: Any = json_object(folder / name).get("eos_token_id")
        found.update(
            each for each in (eos if isinstance(eos, list) else [eos]) if isinstance(each, int)
        )
    eos_token = special_tokens(json_object(folder / "tokenizer_config.json")).get("eos_token", "")
    eos_id = tokenizer.token_to_id(eos_token)
    return found if eos_id is None else found | {eos_id}
