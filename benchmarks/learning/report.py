"""Rows of all runs as one JSON list, their last quarters as a table, their curves as a picture."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

Row = dict[str, Any]

PANELS = (
    ("primitives", ("octopus", "no_mounts", "no_rewind", "no_fork", "single")),
    ("what is trained on", ("octopus", "longest_path")),
    ("roots that reply without a call", ("prompt", "strict", "fallback")),
)
"""Title of each panel and the variants in it."""

_SHARES = ("forked", "rewound", "read", "plain_reply")
_WINDOW = 3
"""Steps that a curve's points are averaged over."""


def write_report(sources: Iterable[Path], out: Path) -> None:
    """Write `out`, its picture beside it, and a table to stdout.

    Args:
        sources: Files of JSON lines.
        out: JSON list of all rows, in order of variant, seed and step.
    """
    rows = [json.loads(line) for path in sources for line in path.read_text("utf-8").splitlines()]
    rows.sort(key=lambda row: (row["variant"], row["seed"], row["step"]))
    text = ",\n".join(json.dumps(row) for row in rows)
    out.write_text(f"[\n{text}\n]\n", "utf-8")
    sys.stdout.write(table(rows))
    draw(rows, out.with_suffix(".svg"))


def table(rows: Sequence[Row]) -> str:
    """Markdown, a line for each run: the reward of first and last quarter, and what was used."""
    head = ("variant", "seed", "steps", "tokens", "first quarter", "last quarter", *_SHARES, "s")
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for (variant, seed), run in runs(rows).items():
        quarter = max(len(run) // 4, 1)
        last = run[-quarter:]
        cells = [
            variant,
            seed,
            len(run),
            f"{run[-1]['generated_tokens']:,}",
            f"{fmean(row['reward'] for row in run[:quarter]):.3f}",
            f"{fmean(row['reward'] for row in last):.3f}",
            *(f"{fmean(row[name] for row in last):.2f}" for name in _SHARES),
            f"{run[-1]['seconds']:.0f}",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def runs(rows: Iterable[Row]) -> dict[tuple[str, int], list[Row]]:
    """The rows of each variant and seed."""
    found: defaultdict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in rows:
        found[row["variant"], row["seed"]].append(row)
    return dict(found)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Reward over generated tokens, a panel for each comparison, a line for each seed."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    by_run = runs(rows)
    for axes, (title, variants) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        for number, variant in enumerate(variants):
            curves = [run for (name, _), run in sorted(by_run.items()) if name == variant]
            for place, run in enumerate(curves):
                axes.plot(
                    [row["generated_tokens"] / 1000 for row in run],
                    _smooth([row["reward"] for row in run]),
                    color=f"C{number}",
                    linewidth=1.2,
                    label=variant if place == 0 else None,
                )
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("thousand generated tokens")
        axes.set_ylim(0, 1)
        if axes.lines:
            axes.legend(fontsize=8)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "learning"}):
        FigureCanvasSVG(figure).print_svg(str(path), metadata={"Date": None})


def _smooth(values: Sequence[float]) -> list[float]:
    """The mean of each value and those just before it."""
    return [fmean(values[max(i - _WINDOW + 1, 0) : i + 1]) for i in range(len(values))]
