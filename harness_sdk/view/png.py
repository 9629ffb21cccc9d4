"""An episode's DAG as a PNG, through matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness_sdk.errors import ConfigError
from harness_sdk.record import EpisodeRecord, NodeKind
from harness_sdk.view.layout import BOX_HEIGHT, GUTTER, MARGIN, Box, Edge, Lane, Layout, lay_out
from harness_sdk.view.page import episode_facts
from harness_sdk.view.shading import stripes, token_shades
from harness_sdk.view.svg import KIND_NAMES, cut

_FILL: dict[NodeKind, str] = {
    NodeKind.CONTEXT: "#cdd5df",
    NodeKind.TURN: "#bfe6dd",
    NodeKind.DEMONSTRATION: "#d9d2f3",
    NodeKind.NOTE: "#f8dfa6",
    NodeKind.STUB: "#f4c2d4",
    NodeKind.TERMINATION: "#d5d0c8",
}
_INK, _SOFT, _LINE, _LANE = "#1b2330", "#667085", "#98a2b3", "#f3f5f8"
_MOUNT, _REWIND, _CALM, _WILD = "#c2255c", "#b54708", "#1d9e86", "#d9480f"
_HEADER, _LEGEND = 46.0, 26.0
_DPI = 100.0
# 2 ** 16 pixels is where common PNG readers stop.
_MAX_PIXELS = 24_000.0
_SCALE = 1.6


def episode_png(record: EpisodeRecord, path: Path) -> None:
    """Draw `record` to the file `path`.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "a PNG needs matplotlib", value=path, remedy="pip install 'octopus-agents[view]'"
        ) from error
    layout = lay_out(record)
    height = layout.height + _HEADER + _LEGEND
    figure: Any = Figure(figsize=(layout.width / _DPI, height / _DPI), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, layout.width)
    axes.set_ylim(layout.height + _LEGEND, -_HEADER)
    axes.axis("off")
    _draw_header(axes, record, layout.width)
    for lane in layout.lanes:
        _draw_lane(axes, lane, layout.width)
    for edge in layout.edges:
        _draw_edge(axes, edge)
    for box in layout.boxes.values():
        _draw_box(axes, box)
    _draw_spans(axes, layout)
    _draw_legend(axes, layout.height)
    scale = min(_SCALE, _MAX_PIXELS / layout.width, _MAX_PIXELS / height)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=_DPI * scale, format="png")


def _draw_header(axes: Any, record: EpisodeRecord, width: float) -> None:
    title = f"Episode {record.episode_id}"
    facts = " · ".join(f"{name} {value}" for name, value in episode_facts(record)[:9])
    for text, y, size, colour in ((title, -28, 10, _INK), (facts, -10, 7, _SOFT)):
        axes.text(MARGIN, y, _plain(cut(text, width - 2 * MARGIN)), fontsize=size, color=colour)


def _draw_lane(axes: Any, lane: Lane, width: float) -> None:
    from matplotlib.patches import FancyBboxPatch

    thread = lane.thread
    axes.add_patch(
        FancyBboxPatch(
            (10, lane.y + 4),
            width - 20,
            lane.height - 8,
            boxstyle="round,pad=4,rounding_size=6",
            facecolor=_LANE,
            edgecolor="none",
        )
    )
    indent = MARGIN + 10.0 * min(thread.depth, 4)
    room = GUTTER - indent - 12
    status = thread.status + (f": {thread.answer}" if thread.answer else "")
    middle = lane.y + lane.height / 2
    axes.text(
        indent, middle - 2, _plain(cut(thread.thread_id, room)), fontsize=8, color=_INK,
        weight="bold",
    )  # fmt: skip
    axes.text(indent, middle + 12, _plain(cut(status, room)), fontsize=7, color=_SOFT)


def _draw_edge(axes: Any, edge: Edge) -> None:
    from matplotlib.patches import FancyArrowPatch, PathPatch
    from matplotlib.path import Path as Curve

    (x1, y1), (x2, y2) = edge.begin, edge.end
    if edge.kind == "mount":
        bend = max(abs(y2 - y1) * 0.55, 18.0) * (1 if y2 >= y1 else -1)
        corners = [(x1, y1), (x1, y1 + bend), (x2, y2 - bend), (x2, y2)]
    else:
        corners = [(x1, y1), (x1, y2), (x1, y2), (x2, y2)]
    curve = Curve(corners, [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4])
    if edge.kind == "mount":
        axes.add_patch(
            FancyArrowPatch(
                path=curve, arrowstyle="-|>", mutation_scale=8, color=_MOUNT, linewidth=1.3,
                zorder=4,
            )
        )  # fmt: skip
        return
    rewind = edge.kind == "rewind"
    axes.add_patch(
        PathPatch(
            curve,
            facecolor="none",
            edgecolor=_REWIND if rewind else _LINE,
            linestyle=(0, (4, 3)) if rewind else "solid",
            linewidth=1.1,
        )
    )


def _draw_box(axes: Any, box: Box) -> None:
    from matplotlib.patches import FancyBboxPatch, Rectangle

    node = box.node
    alpha = 0.6 if node.rewound else 1.0
    axes.add_patch(
        FancyBboxPatch(
            (box.x + 2, box.y + 2),
            box.width - 4,
            BOX_HEIGHT - 4,
            boxstyle="round,pad=2,rounding_size=4",
            facecolor=_FILL[node.kind],
            edgecolor=_REWIND if node.rewound else _LINE,
            linestyle=(0, (4, 3)) if node.rewound else "solid",
            linewidth=0.8,
            alpha=alpha,
            zorder=2,
        )
    )
    for begin, end, shade in stripes(token_shades(node)):
        for colour, opacity in ((_CALM, 0.85 * (1 - shade)), (_WILD, shade)):
            axes.add_patch(
                Rectangle(
                    (box.x + begin * box.width, box.y + BOX_HEIGHT - 8),
                    max((end - begin) * box.width, 0.6),
                    7,
                    facecolor=colour,
                    edgecolor="none",
                    alpha=opacity * alpha,
                    zorder=3,
                )
            )
    count = str(len(node.token_ids))
    if box.width >= 9 + 6.3 * len(count):
        axes.text(
            box.x + box.width / 2, box.y + 15, count, fontsize=7, color=_INK, ha="center", zorder=5
        )


def _draw_spans(axes: Any, layout: Layout) -> None:
    from matplotlib.patches import Rectangle

    for span in layout.spans:
        axes.add_patch(
            Rectangle((span.x, span.y), span.width, 3, facecolor=_MOUNT, edgecolor="none", zorder=4)
        )


def _draw_legend(axes: Any, y: float) -> None:
    from matplotlib.patches import Rectangle

    x = MARGIN
    for kind, colour in _FILL.items():
        axes.add_patch(Rectangle((x, y), 14, 9, facecolor=colour, edgecolor=_LINE, linewidth=0.5))
        axes.text(x + 19, y + 8, KIND_NAMES[kind], fontsize=7, color=_SOFT)
        x += 34 + 6.0 * len(KIND_NAMES[kind])
    for name, colour, style in (("rewound", _REWIND, (0, (3, 2))), ("mount", _MOUNT, "solid")):
        axes.plot([x, x + 18], [y + 5, y + 5], color=colour, linestyle=style, linewidth=1.3)
        axes.text(x + 23, y + 8, name, fontsize=7, color=_SOFT)
        x += 38 + 6.0 * len(name)


def _plain(text: str) -> str:
    """Text as it is: matplotlib would read dollar signs as mathematics."""
    return text.replace("$", r"\$")
