"""Where everything of an episode's picture stands: lanes, boxes, edges. No drawing here.

Time runs to the right: a node begins after its parent and after every span that it mounts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from harness_sdk.measures import new_mounts
from harness_sdk.record import EpisodeRecord, MountSpan, Node, ThreadSummary

GUTTER = 172.0
"""Width of the lane titles, in pixels."""
MARGIN = 18.0
BOX_HEIGHT = 30.0
ROW_HEIGHT = 44.0
LANE_GAP = 22.0
_NODE_GAP = 3.0
_BRANCH_GAP = 30.0
# sqrt keeps a 30,000-token context beside a 15-token stub readable.
_PIXELS_PER_ROOT_TOKEN = 5.6
_MIN_WIDTH, _MAX_WIDTH = 13.0, 460.0
# Small episodes are stretched, up to twice, towards a screen's width.
_SCREEN_WIDTH, _MAX_STRETCH = 1280.0, 2.0

EdgeKind = Literal["fork", "rewind", "mount"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A node as a rectangle; `x`, `y` is its upper left corner."""

    node: Node
    x: float
    y: float
    width: float

    @property
    def right(self) -> float:
        """x of the right side."""
        return self.x + self.width

    @property
    def middle(self) -> float:
        """y half way down."""
        return self.y + BOX_HEIGHT / 2

    def x_at(self, token: int) -> float:
        """x of the boundary before token `token`."""
        return self.x + self.width * token / max(len(self.node.token_ids), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A thread's horizontal band."""

    thread: ThreadSummary
    y: float
    height: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A curve from one box to another; ends are `(x, y)`."""

    kind: EdgeKind
    source: int
    """Node id."""
    target: int
    """Node id."""
    begin: tuple[float, float]
    end: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MountedSpan:
    """The part of a box that some reader mounted."""

    node_id: int
    x: float
    y: float
    width: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The whole picture, in pixels."""

    width: float
    height: float
    lanes: tuple[Lane, ...]
    boxes: dict[int, Box]
    """By node id."""
    edges: tuple[Edge, ...]
    spans: tuple[MountedSpan, ...]


@dataclass(slots=True)
class _Rows:
    """Rows of one lane: where each ends, and which row each node is in."""

    ends: list[float] = field(default_factory=list[float])
    of_node: dict[int, int] = field(default_factory=dict[int, int])


def lay_out(record: EpisodeRecord) -> Layout:
    """Place the nodes of `record`."""
    nodes = {node.node_id: node for node in record.nodes}
    mounts = mounts_made(record)
    xs = _columns(record.nodes, nodes, mounts)
    extent = max((xs[node.node_id] + _width(node) for node in record.nodes), default=0.0)
    stretch = min(max((_SCREEN_WIDTH - GUTTER) / max(extent, 1.0), 1.0), _MAX_STRETCH)
    order = _thread_order(record)
    rows = _place_rows(record.nodes, nodes, xs)
    lanes: list[Lane] = []
    y = MARGIN
    for thread in order:
        count = max(len(rows[thread.thread_id].ends), 1) if thread.thread_id in rows else 1
        lanes.append(Lane(thread=thread, y=y, height=count * ROW_HEIGHT))
        y += count * ROW_HEIGHT + LANE_GAP
    tops = {lane.thread.thread_id: lane.y for lane in lanes}
    boxes = {
        node.node_id: Box(
            node=node,
            x=GUTTER + xs[node.node_id] * stretch,
            y=tops[node.thread_id]
            + rows[node.thread_id].of_node[node.node_id] * ROW_HEIGHT
            + (ROW_HEIGHT - BOX_HEIGHT) / 2,
            width=_width(node) * stretch,
        )
        for node in record.nodes
    }
    return Layout(
        width=max(GUTTER + extent * stretch, _SCREEN_WIDTH) + MARGIN,
        height=y - LANE_GAP + MARGIN,
        lanes=tuple(lanes),
        boxes=boxes,
        edges=(*_branch_edges(record.nodes, boxes), *_mount_edges(boxes, mounts)),
        spans=_mounted_spans(boxes, mounts),
    )


def mounts_made(record: EpisodeRecord) -> dict[int, tuple[MountSpan, ...]]:
    """By node id, the spans that the node sees and its parent does not."""
    nodes = {node.node_id: node for node in record.nodes}
    return {
        node.node_id: tuple(
            span for span in new_mounts(node, nodes.get(node.parent)) if span.node_id in nodes
        )
        for node in record.nodes
    }


def _width(node: Node) -> float:
    width = 6.0 + _PIXELS_PER_ROOT_TOKEN * math.sqrt(len(node.token_ids))
    return min(max(width, _MIN_WIDTH), _MAX_WIDTH)


def _columns(
    order: Sequence[Node], nodes: dict[int, Node], mounts: dict[int, tuple[MountSpan, ...]]
) -> dict[int, float]:
    """x of each node's left side, from 0 at the roots."""
    xs: dict[int, float] = {}
    for node in order:
        parent = nodes.get(node.parent)
        x = 0.0
        if parent is not None:
            branches = parent.thread_id != node.thread_id or parent.rewound != node.rewound
            gap = _BRANCH_GAP if branches else _NODE_GAP
            x = xs[parent.node_id] + _width(parent) + gap
        for mount in mounts[node.node_id]:
            source = nodes[mount.node_id]
            x = max(x, xs[source.node_id] + _width(source) + _BRANCH_GAP)
        xs[node.node_id] = x
    return xs


def _thread_order(record: EpisodeRecord) -> list[ThreadSummary]:
    """Each thread, then its children, in the order of their first nodes."""
    known = {thread.thread_id: thread for thread in record.threads}
    named = dict.fromkeys([node.thread_id for node in record.nodes] + list(known))
    children: dict[str, list[ThreadSummary]] = {}
    for name in named:
        thread = known.get(name) or ThreadSummary(
            thread_id=name, parent="", depth=0, status="unknown"
        )
        parent = thread.parent if thread.parent in named and thread.parent != name else ""
        children.setdefault(parent, []).append(thread)
    order: list[ThreadSummary] = []
    stack = list(reversed(children.get("", [])))
    while stack:
        thread = stack.pop()
        order.append(thread)
        stack += reversed(children.pop(thread.thread_id, []))
    # Threads whose parents form a ring would be lost above.
    placed = {thread.thread_id for thread in order}
    order += [t for group in children.values() for t in group if t.thread_id not in placed]
    return order


def _place_rows(
    order: Sequence[Node], nodes: dict[int, Node], xs: dict[int, float]
) -> dict[str, _Rows]:
    """The surviving path of a thread takes its first row, each rewound stretch the next free."""
    lanes: dict[str, _Rows] = {}
    for node in sorted(order, key=lambda node: node.rewound):
        rows = lanes.setdefault(node.thread_id, _Rows())
        parent = nodes.get(node.parent)
        row = 0
        if parent is not None and parent.thread_id == node.thread_id:
            row = rows.of_node.get(parent.node_id, 0)
        x = xs[node.node_id]
        while row < len(rows.ends) and rows.ends[row] > x:
            row += 1
        rows.ends += [0.0] * (row + 1 - len(rows.ends))
        rows.ends[row] = x + _width(node)
        rows.of_node[node.node_id] = row
    return lanes


def _branch_edges(order: Sequence[Node], boxes: dict[int, Box]) -> list[Edge]:
    edges: list[Edge] = []
    for node in order:
        source, target = boxes.get(node.parent), boxes[node.node_id]
        if source is None or (source.y == target.y and target.x - source.right < _BRANCH_GAP / 2):
            continue
        begin = (source.right, source.middle)
        if target.y != source.y:
            down = target.y > source.y
            begin = (source.right - 6.0, source.y + (BOX_HEIGHT if down else 0.0))
        edges.append(
            Edge(
                kind="rewind" if node.rewound and not source.node.rewound else "fork",
                source=node.parent,
                target=node.node_id,
                begin=begin,
                end=(target.x, target.middle),
            )
        )
    return edges


def _mount_edges(boxes: dict[int, Box], mounts: dict[int, tuple[MountSpan, ...]]) -> list[Edge]:
    """One curve for each thread that a node mounts from, from the end of the last span."""
    edges: list[Edge] = []
    for node_id, spans in mounts.items():
        last: dict[str, MountSpan] = {}
        for span in spans:
            last[boxes[span.node_id].node.thread_id] = span
        for span in last.values():
            source, target = boxes[span.node_id], boxes[node_id]
            above = source.y < target.y
            edges.append(
                Edge(
                    kind="mount",
                    source=span.node_id,
                    target=node_id,
                    begin=(
                        (source.x_at(span.begin) + source.x_at(span.end)) / 2,
                        source.y + (BOX_HEIGHT + 5 if above else -5),
                    ),
                    end=(
                        target.x + min(target.width, 12) / 2,
                        target.y + (0 if above else BOX_HEIGHT),
                    ),
                )
            )
    return edges


def _mounted_spans(
    boxes: dict[int, Box], mounts: dict[int, tuple[MountSpan, ...]]
) -> tuple[MountedSpan, ...]:
    found: dict[tuple[int, int, int, bool], MountedSpan] = {}
    for node_id, spans in mounts.items():
        for span in spans:
            source = boxes[span.node_id]
            above = source.y < boxes[node_id].y
            found[span.node_id, span.begin, span.end, above] = MountedSpan(
                node_id=span.node_id,
                x=source.x_at(span.begin),
                y=source.y + (BOX_HEIGHT + 2 if above else -5),
                width=max(source.x_at(span.end) - source.x_at(span.begin), 2.0),
            )
    return tuple(found.values())
