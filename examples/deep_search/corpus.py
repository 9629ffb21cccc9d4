"""The passages, their BM25 index, and the questions."""

from __future__ import annotations

import functools
import gzip
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
DATA_VARIABLE = "DEEP_SEARCH_DATA"
"""Names a folder with the files of `DATA` that takes its place."""
NUM_HITS = 10
_PARTS, _HELD_OUT_PARTS = 5, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """One paragraph of Wikipedia."""

    passage_id: str
    title: str
    text: str


class Corpus:
    """Passages and their index."""

    def __init__(self, passages: list[Passage]) -> None:
        # Imported here: numpy and numba-free BM25 cost half a second that `--help` must not pay.
        # It starts JAX where that is installed, and JAX would take three quarters of a GPU.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        import bm25s

        self.passages = {passage.passage_id: passage for passage in passages}
        self._order = passages
        self._bm25s: Any = bm25s
        self._index: Any = bm25s.BM25()
        texts = [f"{passage.title}. {passage.text}" for passage in passages]
        self._index.index(self._words(texts), show_progress=False)

    def best(self, query: str, count: int = NUM_HITS) -> list[Passage]:
        """The `count` passages that fit `query` best, best first; fewer where words are rare."""
        rows, scores = self._index.retrieve(
            self._words([query]),
            k=min(count, len(self._order)),
            show_progress=False,
            # Or the order of equals depends on what is installed.
            backend_selection="numpy",
        )
        found = zip(rows[0], scores[0], strict=True)
        return [self._order[int(row)] for row, score in found if score > 0]

    def _words(self, texts: list[str]) -> Any:
        return self._bm25s.tokenize(texts, stopwords="en", show_progress=False)


@functools.cache
def shipped_corpus() -> Corpus:
    """The corpus beside this file; see data/ATTRIBUTION.md."""
    return Corpus(shipped_passages())


def shipped_passages() -> list[Passage]:
    """The corpus's passages, without an index."""
    rows = _rows("passages.jsonl.gz")
    return [Passage(passage_id=r["id"], title=r["title"], text=r["text"]) for r in rows]


@functools.cache
def shipped_questions() -> tuple[dict[str, Any], ...]:
    """The questions beside this file."""
    return tuple(_rows("questions.jsonl.gz"))


def is_held_out(question_id: str) -> bool:
    """Whether a question is kept out of training: two of five, whatever others there are."""
    return zlib.crc32(question_id.encode()) % _PARTS < _HELD_OUT_PARTS


def _rows(name: str) -> list[dict[str, Any]]:
    folder = Path(os.environ.get(DATA_VARIABLE, DATA))
    with gzip.open(folder / name, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
