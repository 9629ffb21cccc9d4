"""Rows of all runs as one JSON list, their last quarters as a table, their curves as a picture."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One comparison: a line for each run of its variants."""

    title: str
    variants: tuple[str, ...]
    field: str = "generated_tokens"
    """What runs to the right."""
    unit: float = 1000.0
    """What it is divided by."""
    label: str = "thousand generated tokens"
    height: str = "reward"
    """What goes up, from 0 to 1."""


PRIMITIVES = ("octopus", "no_mounts", "no_rewind", "no_fork", "single")
ENDINGS = ("prompt", "strict", "fallback")
MOSTLY_PLAIN = ("prompt_90", "strict_90")
PANELS = (
    Panel(title="reward: primitives", variants=PRIMITIVES),
    Panel(title="reward: what is trained on", variants=("octopus", "longest_path")),
    Panel(
        title="reward: generation and training",
        variants=("octopus", "asynchronous"),
        field="seconds",
        unit=1.0,
        label="seconds since the warm-up",
    ),
    Panel(title="roots that fork (half reply without a call)", variants=ENDINGS, height="forked"),
    Panel(title="roots that fork (9 of 10 do)", variants=MOSTLY_PLAIN, height="forked"),
    Panel(title="roots that reply without a call", variants=ENDINGS, height="plain_reply"),
)

REWARDS = (0.5, 0.6, 0.7, 0.8, 0.9)
"""How far a race goes."""

COMMAND = "python -m benchmarks.learning run VARIANT SEED --model BASE --out FOLDER --rows ROWS"

_SHARES = ("forked", "rewound", "read", "plain_reply")
_WINDOW = 5
"""Steps that a point is the mean of."""


def write_report(sources: Iterable[Path], out: Path, *, hardware: str) -> None:
    """Write `out`, its details and its picture beside it, and a table to stdout.

    Args:
        sources: Files of JSON lines.
        out: JSON list of points: means over some steps, by variant, seed and tokens.
        hardware: What the runs ran on.
    """
    steps = [json.loads(line) for path in sources for line in path.read_text("utf-8").splitlines()]
    steps.sort(key=lambda row: (row["variant"], row["seed"], row["step"]))
    points = [point for run in runs(steps).values() for point in _points(run)]
    text = ",\n".join(json.dumps(point) for point in points)
    out.write_text(f"[\n{text}\n]\n", "utf-8")
    detail = {"hardware": hardware, "command": COMMAND}
    out.with_name(f"{out.stem}_detail.json").write_text(
        json.dumps(detail, indent=1) + "\n", "utf-8"
    )
    sys.stdout.write("\n".join((table(steps), equal_tokens(steps), race(steps))))
    draw(points, out.with_suffix(".svg"))


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


def equal_tokens(rows: Sequence[Row]) -> str:
    """Markdown: reward of each variant once it had generated what the shortest of all runs did.

    Means of the five steps before, over the variant's seeds and of each.
    """
    by_run = runs(rows)
    tokens = min(run[-1]["generated_tokens"] for run in by_run.values())
    lines = [f"| variant | reward at {tokens:,} tokens | of seeds |", "|---|---|---|"]
    for variant in dict.fromkeys(name for name, _ in by_run):
        found = [reward_at(run, tokens) for (name, _), run in by_run.items() if name == variant]
        seeds = ", ".join(f"{reward:.3f}" for reward in found)
        lines.append(f"| {variant} | {fmean(found):.3f} | {seeds} |")
    return "\n".join(lines) + "\n"


def reward_at(run: Sequence[Row], tokens: int) -> float:
    """Mean of the last five steps that end within `tokens`; of the first step where none does."""
    within = [row["reward"] for row in run if row["generated_tokens"] <= tokens]
    return fmean(within[-_WINDOW:] or [run[0]["reward"]])


def race(rows: Sequence[Row]) -> str:
    """Markdown: seconds after which octopus and asynchronous first had a reward, by seed.

    A reward is had once a step's mean with the four before it has reached it.
    """
    by_run = runs(rows)
    seeds = sorted(seed for name, seed in by_run if name == "octopus")
    head = ("seed", "reward", "taking turns, s", "overlapping, s", "ratio")
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for seed, reward in product(seeds, REWARDS):
        turns = seconds_to(by_run["octopus", seed], reward)
        overlapping = seconds_to(by_run.get(("asynchronous", seed), ()), reward)
        if turns is not None and overlapping is not None:
            ratio = f"{turns / overlapping:.2f}"
            cells = (seed, reward, f"{turns:.0f}", f"{overlapping:.0f}", ratio)
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def seconds_to(run: Sequence[Row], reward: float) -> float | None:
    """Seconds until the mean of some five steps in a row was `reward`; None if none was."""
    for end in range(_WINDOW, len(run) + 1):
        if fmean(row["reward"] for row in run[end - _WINDOW : end]) >= reward:
            return float(run[end - 1]["seconds"])
    return None


def runs(rows: Iterable[Row]) -> dict[tuple[str, int], list[Row]]:
    """The rows of each variant and seed."""
    found: defaultdict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in rows:
        found[row["variant"], row["seed"]].append(row)
    return dict(found)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Reward over tokens or seconds, a panel for each comparison that was run, a line a seed."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    by_run = runs(rows)
    names = {variant for variant, _ in by_run}
    panels = [panel for panel in PANELS if len(names.intersection(panel.variants)) > 1]
    if not panels:
        return
    columns = min(len(panels), 3)
    size = (4.5 * columns, 3.6 * -(-len(panels) // columns))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(-(-len(panels) // columns), columns, squeeze=False).flat
    for axes, panel in zip_longest(grid, panels):
        if panel is None:
            axes.set_axis_off()
        else:
            _draw_panel(axes, panel, by_run)
    with matplotlib.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "learning",
            "font.sans-serif": ["DejaVu Sans"],
        }
    ):
        FigureCanvasSVG(figure).print_svg(str(path), metadata={"Date": None})


def _draw_panel(axes: Any, panel: Panel, by_run: Mapping[tuple[str, int], list[Row]]) -> None:
    for number, variant in enumerate(panel.variants):
        curves = [run for (name, _), run in sorted(by_run.items()) if name == variant]
        for place, run in enumerate(curves):
            axes.plot(
                [row[panel.field] / panel.unit for row in run],
                [row[panel.height] for row in run],
                color=f"C{number}",
                linewidth=1.2,
                label=variant if place == 0 else None,
            )
    axes.set_title(panel.title, fontsize=10)
    axes.set_xlabel(panel.label)
    axes.set_ylim(0, 1)
    axes.legend(fontsize=8)


def _points(run: Sequence[Row]) -> Iterator[Row]:
    """Means over windows of steps, the last of what is left; tokens and seconds are those at the
    window's end."""
    for begin in range(0, len(run), _WINDOW):
        window = run[begin : begin + _WINDOW]
        last = window[-1]
        yield {
            **{name: last[name] for name in ("task", "variant", "seed", "generated_tokens")},
            **{name: round(fmean(row[name] for row in window), 3) for name in ("reward", *_SHARES)},
            "seconds": last["seconds"],
        }
