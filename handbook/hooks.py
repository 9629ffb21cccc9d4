"""MkDocs hook: adds the generated pages, and lists the benchmarks in the navigation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files  # pyright: ignore[reportMissingImports]

from handbook.pages import benchmark_navigation, generated_pages

ROOT = Path(__file__).parents[1]


def on_config(config: Any) -> Any:
    """Fill the section Benchmarks, whose files come and go."""
    for section in config.nav:
        if "Benchmarks" in section:
            section["Benchmarks"] = benchmark_navigation(ROOT)
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    for name, text in generated_pages(ROOT).items():
        files.append(File.generated(config, name, content=text))
    return files
