"""Speed-up over flattened paths beside its bounds, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(rows: list[dict[str, Any]], detail: dict[str, Any], path: Path) -> None:
    """Write bars of the rows that have a speed-up to `path`; nothing where none has."""
    shown = [row for row in rows if row["speedup"] is not None]
    if not shown:
        return
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.45 * len(shown) + 1.2), layout="constrained")
    axes = figure.subplots()
    places = list(range(len(shown)))[::-1]
    axes.barh(places, [row["speedup"] for row in shown], color="#4c72b0", label="measured")
    for key, marker, label in (
        ("bound_flops", "|", "bound by operations"),
        ("bound_tokens", "x", "bound by tokens"),
    ):
        axes.scatter(
            [row[key] for row in shown], places, marker=marker, s=90, color="black", label=label
        )
    axes.set_yticks(places, [f"{row['tree'][:34]} ({row['tokens_unique']:,})" for row in shown])
    axes.set_xlabel(f"times faster than flattened paths, same kernels ({detail['hardware']})")
    axes.legend(loc="best", fontsize=8)
    with matplotlib.rc_context({"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}):
        FigureCanvasSVG(figure).print_svg(str(path))
