"""Token ids into text, loaded when the first episode is opened, and the episode as JSON."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness_sdk.errors import ConfigError, InvalidRequest
from harness_sdk.record import BYTES_HASH, EpisodeRecord, Node
from harness_sdk.trajectories.tokenizers import ByteTokenizer, load_decoder, tokenizer_file
from harness_sdk.view.nodes import node_facts, node_tokens
from harness_sdk.view.page import episode_facts
from harness_sdk.view.svg import episode_svg

MAX_TOKENS = 4096
"""Tokens of one answer."""
_NODES = 4
_MAX_TEXT = 4000

Decode = Callable[[Sequence[int]], str]


class Texts:
    """The tokenizer of the run, and the tokens of the nodes that were read last.

    Args:
        tokenizer: A `tokenizer.json` or a folder that holds one; None shows ids.

    Raises:
        ConfigError: There is no tokenizer.
    """

    def __init__(self, tokenizer: Path | None) -> None:
        self._file = tokenizer_file(tokenizer) if tokenizer is not None else None
        self._digest = ""
        self._decode: Decode | None = None
        self._problem = ""
        self._nodes: OrderedDict[tuple[str, int], dict[str, Any]] = OrderedDict()

    def episode(self, record: EpisodeRecord) -> dict[str, Any]:
        """All of an episode but its tokens; call it off the event loop."""
        return {
            "title": f"Episode {record.episode_id}",
            "task": cut_text(record.task_id),
            "answer": cut_text(record.answer) or "no answer",
            "failure": cut_text(f"{record.error_kind}: {record.error_message}")
            if record.error_kind
            else "",
            "note": self._note(record),
            "facts": episode_facts(record),
            "nodes": [node_facts(node) for node in record.nodes],
            "svg": episode_svg(record, standalone=False),
        }

    def tokens(
        self, entry_id: str, record: EpisodeRecord, node_id: int, begin: int, end: int
    ) -> dict[str, Any]:
        """Tokens `[begin, end)` of a node; call it off the event loop.

        Raises:
            InvalidRequest: No such node, or more tokens than one answer takes.
        """
        node = next((each for each in record.nodes if each.node_id == node_id), None)
        count = len(node.token_ids) if node is not None else 0
        if node is None or not 0 <= begin <= end <= count or end - begin > MAX_TOKENS:
            raise InvalidRequest(
                "no such tokens",
                value=f"[{begin}, {end}) of node {node_id}",
                limit=f"{MAX_TOKENS} at once of the {count} there are",
            )
        whole = self._whole(entry_id, record, node)
        return {name: part and part[begin:end] for name, part in whole.items()}

    def _whole(self, entry_id: str, record: EpisodeRecord, node: Node) -> dict[str, Any]:
        """A character may span the ends of what is asked for, so nodes are decoded whole."""
        key = (entry_id, node.node_id)
        if key not in self._nodes:
            self._nodes[key] = node_tokens(node, self._decoder(record))
            while len(self._nodes) > _NODES:
                self._nodes.popitem(last=False)
        return self._nodes[key]

    def _decoder(self, record: EpisodeRecord) -> Decode | None:
        if record.tokenizer_hash == BYTES_HASH:
            return ByteTokenizer().decode
        if self._decode is None and self._file is not None and not self._problem:
            try:
                self._digest = hashlib.sha256(self._file.read_bytes()).hexdigest()
                self._decode = load_decoder(self._file)
            except (ConfigError, OSError) as error:
                self._problem = str(error)
        return self._decode

    def _note(self, record: EpisodeRecord) -> str:
        """Why there is no text, or why it may be wrong."""
        decode = self._decoder(record)
        if decode is None:
            return self._problem or "Ids are shown: start the page with --tokenizer to read text."
        if record.tokenizer_hash not in (BYTES_HASH, self._digest):
            return "The episode was written with another tokenizer: its text may be wrong."
        return ""


def cut_text(text: str) -> str:
    """The beginning of a text that is longer than a page bears, and how long it was."""
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}… ({len(text):,} characters)"
