"""Every generated page by its name under docs/; needs no MkDocs, so that a test can make them."""

from __future__ import annotations

import re
from pathlib import Path

from handbook.commands import commands_page
from handbook.configuration import configuration_page
from handbook.figures import figure_files, figures_page
from handbook.wire import wire_page

ROOT_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
"""Pages at the root of the repository that the site shows too."""


def generated_pages(root: Path) -> dict[str, str]:
    """Markdown by page name, as `reference/wire.md`.

    Args:
        root: The repository.
    """
    pages = {
        name.lower(): _moved_into_docs((root / name).read_text("utf-8")) for name in ROOT_PAGES
    }
    return {
        **pages,
        "reference/commands.md": commands_page(),
        "reference/configuration.md": configuration_page(),
        "reference/wire.md": wire_page(root / "proto"),
        "benchmarks/index.md": figures_page(root / "docs" / "benchmarks"),
    }


def benchmark_navigation(root: Path) -> list[dict[str, str]]:
    """The entries of the section Benchmarks."""
    folder = root / "docs" / "benchmarks"
    pages = [{"Figures": "benchmarks/index.md"}]
    for path in sorted(folder.glob("*.md")):
        pages.append({_heading(path): f"benchmarks/{path.name}"})
    assert figure_files(folder), f"no figures in {folder}"
    return pages


def _heading(path: Path) -> str:
    found = re.search(r"^# (.+)$", path.read_text("utf-8"), re.MULTILINE)
    return found.group(1).replace("`", "") if found else path.stem


def _moved_into_docs(text: str) -> str:
    """A root page's links as they are from docs/."""
    for name in ROOT_PAGES:
        text = text.replace(f"]({name}", f"]({name.lower()}")
    return text.replace("](docs/", "](")
