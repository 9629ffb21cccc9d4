"""The documentation's pages and the blocks of code in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

LANGUAGES = ("python", "sh", "toml", "json", "text")
"""Of blocks; what else may run would be skipped silently."""

_FENCE = re.compile(r"^( *)```(.*)$")
_TITLE = re.compile(r'title="([^"]+)"')
_NOT_RUN = re.compile(r"^<!-- not run: (.+) -->$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block."""

    page: str
    """Path from the root of the repository."""
    line: int
    """Of its opening fence, from 1."""
    language: str
    title: str
    """File that it is, or `prints` for what the block before it prints; empty for neither."""
    text: str
    not_run: str
    """Why the tests do not run it; empty where they do."""

    @property
    def place(self) -> str:
        """For errors."""
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """READMEs and everything written under docs/ and examples/; results of benchmarks aside."""
    found = [*ROOT.glob("*.md"), ROOT / "harness_sdk" / "README.md"]
    found += [page for folder in ("docs", "examples") for page in (ROOT / folder).rglob("*.md")]
    return [path for path in sorted(found) if path.parent.name not in ("benchmarks", "data")]


def blocks(path: Path) -> list[Block]:
    """The fenced blocks of a page.

    Raises:
        ValueError: A fence is not closed, its language is not one of `LANGUAGES`, or a block that
            is not run does not say so to its readers.
    """
    return list(_blocks(str(path.relative_to(ROOT)), path.read_text("utf-8").splitlines()))


def _blocks(page: str, lines: list[str]) -> Iterator[Block]:
    opened: tuple[int, str, str] | None = None
    body: list[str] = []
    for number, line in enumerate(lines, 1):
        fence = _FENCE.match(line)
        if fence is None:
            body.append(line)
        elif opened is None:
            opened, body = (number, fence[1], fence[2]), []
        else:
            first, indent, info = opened
            yield _block(page, first, info, [text.removeprefix(indent) for text in body], lines)
            opened = None
    if opened is not None:
        raise ValueError(f"{page}:{opened[0]}: the block is not closed")


def _block(page: str, line: int, info: str, body: list[str], lines: list[str]) -> Block:
    language = info.split(" ")[0]
    if language not in LANGUAGES:
        raise ValueError(f"{page}:{line}: language {language!r}; allowed: {', '.join(LANGUAGES)}")
    title = _TITLE.search(info)
    return Block(
        page=page,
        line=line,
        language=language,
        title=title[1] if title else "",
        text="\n".join(body) + "\n",
        not_run=_reason(page, line, lines),
    )


def _reason(page: str, line: int, lines: list[str]) -> str:
    """Why a block is not run: a comment for the test, and the same words for readers."""
    above = [text.strip() for text in lines[: line - 1] if text.strip()][-2:]
    if len(above) < 2:
        return ""
    comment = _NOT_RUN.match(above[0])
    note = f"*Not run by the tests: {comment[1]}.*" if comment else ""
    if comment and above[1] == note:
        return comment[1]
    if "not run" in " ".join(above).lower():
        raise ValueError(
            f"{page}:{line}: a block that is not run needs two lines above it, "
            "<!-- not run: REASON --> and *Not run by the tests: REASON.*"
        )
    return ""
