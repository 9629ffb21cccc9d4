"""The benchmarks' figures, read from the files that the benchmarks wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from handbook.tables import code, table

_HEAD = """# Figures

Each table is a file of `docs/benchmarks/`, as its benchmark wrote it. What a figure means and what
it does not say stands in the page of its benchmark. A figure that was not measured is shown as -.
Files in `benchmarks/` make them; every file names its command.
"""

_ABOUT = ("hardware", "versions", "command")
"""Keys that say where and how, in a file of figures or in its file of details."""


def figure_files(folder: Path) -> list[Path]:
    """The files of figures, those of details aside."""
    return [path for path in sorted(folder.glob("*.json")) if not path.stem.endswith("_detail")]


def figures_page(folder: Path) -> str:
    """The page.

    Args:
        folder: Of the benchmarks' results.
    """
    lines = [_HEAD]
    for path in figure_files(folder):
        detail = path.with_name(f"{path.stem}_detail.json")
        figures = json.loads(path.read_text("utf-8"))
        details = json.loads(detail.read_text("utf-8")) if detail.is_file() else {}
        lines += _section(path, figures, details if isinstance(details, dict) else {})
        files = [path, detail] if detail.is_file() else [path]
        pictures = sorted(folder.glob(f"{path.stem}*.svg"))
        lines += [f"![{picture.stem}]({picture.name})\n" for picture in pictures]
        lines += ["Files: " + ", ".join(f"[{each.name}]({each.name})" for each in files) + ".", ""]
    logs = sorted(folder.glob("*.txt"))
    if logs:
        lines += ["## Logs", "", *(f"- [{log.name}]({log.name})" for log in logs), ""]
    return "\n".join(lines) + "\n"


def _section(path: Path, figures: Any, details: Mapping[str, Any]) -> Iterator[str]:
    yield f"## {path.stem.replace('_', ' ')}"
    yield ""
    about = {**_about(details), **(_about(figures) if isinstance(figures, dict) else {})}
    for name, value in about.items():
        yield f"- {name}: {code(value) if name == 'command' else value}"
    yield ""
    if isinstance(figures, dict):
        rows = [(key, value) for key, value in figures.items() if key not in _ABOUT]
        yield from table(["figure", "measured"], [(code(k), _shown(v)) for k, v in rows])
    else:
        yield from _rows(figures)


def _rows(figures: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    names = list(dict.fromkeys(name for row in figures for name in row))
    rows = [[_shown(row.get(name)) for name in names] for row in figures]
    yield from table([name.replace("_", " ") for name in names], rows)


def _about(data: Mapping[str, Any]) -> dict[str, str]:
    return {name: _shown(data[name]) for name in _ABOUT if data.get(name)}


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(each)}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
