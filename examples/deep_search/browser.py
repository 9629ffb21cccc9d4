"""`search` and `open_page`, what one episode reached with them, and the loop around them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness_sdk import Message, Thread, ToolLoop, ToolLoopOptions

from .corpus import NUM_HITS, Corpus, Passage, shipped_corpus
from .scoring import golds, normalise

HIT_WORDS = 336
"""Up to 512 tokens, at the 1.51 tokens a word that SmolLM2's tokenizer takes for these passages."""
PAGE_WORDS = 256
"""The passages are short; of a corpus of documents, 5,400 words are a page of 8K tokens."""


class Browser:
    """The tools of one episode, shared by its threads.

    Args:
        corpus: What is searched.
        num_hits: Passages that a search lists.
        hit_words: Words that it shows of each.
        page_words: Words of a page.

    Example:
        `await browser.search("birthplace of Corey Taylor")` lists ten ids, titles and texts;
        `await browser.open_page("d04012")` shows the first 256 words of one.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        num_hits: int = NUM_HITS,
        hit_words: int = HIT_WORDS,
        page_words: int = PAGE_WORDS,
    ) -> None:
        self.searched: set[str] = set()
        """Ids that searches have listed."""
        self.opened: set[str] = set()
        """Ids of which a page was opened."""
        self._corpus = corpus
        self._num_hits = num_hits
        self._hit_words = hit_words
        self._page_words = page_words

    async def search(self, query: str) -> str:
        """Search Wikipedia passages by words.

        Args:
            query: What to look for.
        """
        hits = self.hits(query, self._num_hits)
        lines = [f"{hit.passage_id}: {hit.title} - {self.beginning(hit)}" for hit in hits]
        return "\n".join(lines) or "no hits: try other words"

    async def open_page(self, passage_id: str, page: int = 1) -> str:
        """Read a passage found by search.

        Args:
            passage_id: The id at the beginning of a hit.
            page: Page number, from 1.
        """
        passage = self._corpus.passages.get(passage_id)
        if passage is None:
            return f"no passage {passage_id!r}: ids look like {next(iter(self._corpus.passages))}"
        words = passage.text.split()
        num_pages = max(-(-len(words) // self._page_words), 1)
        if not 1 <= page <= num_pages:
            return f"no page {page}: {passage_id} has pages 1 to {num_pages}"
        self.opened.add(passage_id)
        text = " ".join(words[(page - 1) * self._page_words : page * self._page_words])
        return f"{passage.title} (page {page} of {num_pages})\n{text}"

    def hits(self, query: str, count: int) -> list[Passage]:
        """The best passages, remembered as searched."""
        found = self._corpus.best(query, count)
        self.searched |= {passage.passage_id for passage in found}
        return found

    def beginning(self, passage: Passage) -> str:
        """What a search shows of `passage`."""
        words = passage.text.split()
        more = " ..." if len(words) > self._hit_words else ""
        return " ".join(words[: self._hit_words]) + more

    def recall(self, task: Mapping[str, Any], cited: str) -> dict[str, float]:
        """Shares of a task's passages that were searched, opened and cited (Octopus Table 3).

        Evidence is every supporting passage, gold those of them that contain the answer; yes and
        no stand in none, and such a task has no gold figures.

        Args:
            task: A shipped question.
            cited: Text that names what the answer rests on, by id or title; what was neither
                searched nor opened does not count.
        """
        evidence = {name: self._corpus.passages[name] for name in task["supporting"]}
        answers = [normalise(answer) for answer in golds(task)]
        closed = {"yes", "no"} & set(answers)
        gold = {
            name
            for name, passage in evidence.items()
            if not closed and any(answer in normalise(passage.text) for answer in answers)
        }
        named = {
            name
            for name in evidence.keys() & (self.searched | self.opened)
            if name in cited or evidence[name].title in cited
        }
        reached = {"searched": self.searched, "opened": self.opened, "cited": named}
        return {
            f"{kind}_{how}": len(wanted & found) / len(wanted)
            for kind, wanted in (("evidence", set(evidence)), ("gold", gold))
            for how, found in reached.items()
            if wanted
        }


async def browse(
    thread: Thread,
    task: Mapping[str, Any],
    system: str,
    browser: Browser | None = None,
    options: ToolLoopOptions | None = None,
) -> None:
    """Let the model answer `task` on `thread` with the two tools; report what it reached."""
    browser = browser or Browser(shipped_corpus())
    messages = [
        Message(role="system", content=system),
        Message(role="user", content=task["question"]),
    ]
    try:
        await ToolLoop([browser.search, browser.open_page], options).run(thread, messages)
    finally:
        thread.report(**browser.recall(task, thread.evidence))
