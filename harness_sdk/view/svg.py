"""An episode's DAG as SVG; the colours are CSS variables, so that a page can set a theme."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from harness_sdk.record import EpisodeRecord, NodeKind
from harness_sdk.view.layout import BOX_HEIGHT, GUTTER, MARGIN, Box, Edge, Lane, Layout, lay_out
from harness_sdk.view.shading import stripes, token_shades

KIND_NAMES: dict[NodeKind, str] = {
    NodeKind.CONTEXT: "context",
    NodeKind.TURN: "turn",
    NodeKind.DEMONSTRATION: "demonstration",
    NodeKind.NOTE: "note",
    NodeKind.STUB: "stub",
    NodeKind.TERMINATION: "termination",
}

# Widths of a character in the label's font, for cutting text that does not fit.
_CHAR = 6.3

STYLE = """.oct{--oct-ink:#1b2330;--oct-soft:#667085;--oct-lane:#f3f5f8;--oct-line:#98a2b3;
--oct-context:#cdd5df;--oct-turn:#bfe6dd;--oct-demonstration:#d9d2f3;--oct-note:#f8dfa6;
--oct-stub:#f4c2d4;--oct-termination:#d5d0c8;--oct-calm:#1d9e86;--oct-wild:#d9480f;
--oct-mount:#c2255c;--oct-rewind:#b54708;--oct-focus:#1264d8;
font:11px ui-sans-serif,system-ui,"Segoe UI",Roboto,sans-serif}
@media(prefers-color-scheme:dark){.oct:not([data-theme=light] *){--oct-ink:#e6eaf0;
--oct-soft:#98a2b3;--oct-lane:#1a212c;--oct-line:#5b6778;--oct-context:#3b4656;--oct-turn:#1d4a43;
--oct-demonstration:#40386b;--oct-note:#5f4a16;--oct-stub:#63263f;--oct-termination:#48443d;
--oct-calm:#3ecdb0;--oct-wild:#ff8a4c;--oct-mount:#ff7aa8;--oct-rewind:#f7a35c;--oct-focus:#6cb0ff}}
[data-theme=dark] .oct{--oct-ink:#e6eaf0;--oct-soft:#98a2b3;--oct-lane:#1a212c;--oct-line:#5b6778;
--oct-context:#3b4656;--oct-turn:#1d4a43;--oct-demonstration:#40386b;--oct-note:#5f4a16;
--oct-stub:#63263f;--oct-termination:#48443d;--oct-calm:#3ecdb0;--oct-wild:#ff8a4c;
--oct-mount:#ff7aa8;--oct-rewind:#f7a35c;--oct-focus:#6cb0ff}
.oct text{fill:var(--oct-ink)}.oct .soft{fill:var(--oct-soft)}
.oct .lane{fill:var(--oct-lane)}.oct .name{font-weight:600;font-size:12px}
.oct .box{stroke:var(--oct-line);stroke-width:1}
.oct .context .box{fill:var(--oct-context)}.oct .turn .box{fill:var(--oct-turn)}
.oct .demonstration .box{fill:var(--oct-demonstration)}.oct .note .box{fill:var(--oct-note)}
.oct .stub .box{fill:var(--oct-stub)}.oct .termination .box{fill:var(--oct-termination)}
.oct .rewound .box{stroke-dasharray:4 3;stroke:var(--oct-rewind)}.oct .rewound{opacity:.72}
.oct .calm{fill:var(--oct-calm)}.oct .wild{fill:var(--oct-wild)}
.oct path{fill:none;stroke:var(--oct-line);stroke-width:1.5}
.oct path.rewind{stroke:var(--oct-rewind);stroke-dasharray:5 4}
.oct path.mount{stroke:var(--oct-mount);stroke-width:1.8}
.oct .tip{fill:var(--oct-mount);stroke:none}.oct .span{fill:var(--oct-mount)}
.oct .node{cursor:pointer;outline:none}
.oct .node:hover .box,.oct .node:focus .box,.oct .node.on .box{stroke:var(--oct-focus);
stroke-width:2.5;stroke-dasharray:none}
"""


def episode_svg(
    record: EpisodeRecord,
    *,
    policy_logprobs: Mapping[int, Sequence[float]] | None = None,
    standalone: bool = True,
) -> str:
    """The DAG of `record`: threads as lanes, nodes by tokens, mounts as curves.

    Args:
        record: The episode.
        policy_logprobs: The trainer's log-probabilities by node id; shades then show the KL.
        standalone: Whether the text is a file of its own; else it goes into an HTML page, which
            needs no namespace and has `STYLE` among its own.
    """
    layout = lay_out(record)
    namespace = ' xmlns="http://www.w3.org/2000/svg"' if standalone else ""
    style = [f"<style>{STYLE}</style>"] if standalone else []
    parts = [
        f'<svg{namespace} class="oct" role="group" aria-label="Episode DAG" '
        f'width="{layout.width:.0f}" height="{layout.height:.0f}" '
        f'viewBox="0 0 {layout.width:.0f} {layout.height:.0f}">',
        *style,
        *(_lane(lane, layout) for lane in layout.lanes),
        *(_edge(edge) for edge in layout.edges),
        *(
            f'<rect class="span" x="{s.x:.1f}" y="{s.y:.1f}" width="{s.width:.1f}" height="3" '
            'rx="1.5"/>'
            for s in layout.spans
        ),
        *(_box(box, policy_logprobs) for box in layout.boxes.values()),
        "</svg>",
    ]
    return "\n".join(parts)


def cut(text: str, width: float) -> str:
    """`text`, ended with an ellipsis where it is wider than `width` pixels."""
    text = " ".join(text.split())
    limit = max(int(width / _CHAR), 1)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _lane(lane: Lane, layout: Layout) -> str:
    thread = lane.thread
    indent = MARGIN + 10.0 * min(thread.depth, 4)
    room = GUTTER - indent - 12
    status = thread.status + (", orphan" if thread.orphan else "")
    if thread.answer:
        status += f": {thread.answer}"
    middle = lane.y + lane.height / 2
    told = cut(status, 40 * room)
    title = f"{thread.thread_id} ({told}), {thread.num_turns} turns, {thread.num_tokens} tokens"
    return (
        f'<g><title>{escape(title)}</title><rect class="lane" x="6" y="{lane.y:.1f}" '
        f'width="{layout.width - 12:.1f}" height="{lane.height:.1f}" rx="8"/>'
        f'<text class="name" x="{indent:.1f}" y="{middle - 2:.1f}">'
        f"{escape(cut(thread.thread_id, room))}</text>"
        f'<text class="soft" x="{indent:.1f}" y="{middle + 12:.1f}">'
        f"{escape(cut(status, room))}</text></g>"
    )


def _edge(edge: Edge) -> str:
    (x1, y1), (x2, y2) = edge.begin, edge.end
    if edge.kind == "mount":
        bend = max(abs(y2 - y1) * 0.55, 18.0) * (1 if y2 >= y1 else -1)
        point = 1 if y2 >= y1 else -1
        return (
            f'<path class="mount" d="M{x1:.1f} {y1:.1f}C{x1:.1f} {y1 + bend:.1f} {x2:.1f} '
            f'{y2 - bend:.1f} {x2:.1f} {y2 - 5 * point:.1f}"/>'
            f'<path class="tip" d="M{x2 - 4:.1f} {y2 - 7 * point:.1f}H{x2 + 4:.1f}L{x2:.1f} '
            f'{y2:.1f}Z"/>'
        )
    return (
        f'<path class="{edge.kind}" d="M{x1:.1f} {y1:.1f}C{x1:.1f} {y2:.1f} {x1:.1f} {y2:.1f} '
        f'{x2:.1f} {y2:.1f}"/>'
    )


def _box(box: Box, policy_logprobs: Mapping[int, Sequence[float]] | None) -> str:
    node = box.node
    kind = KIND_NAMES[node.kind]
    count = len(node.token_ids)
    label = (
        f"{kind}, thread {node.thread_id}, step {node.step}, {count} tokens, "
        f"position {node.position_start}, version {node.policy_version}"
        + (", rewound" if node.rewound else "")
    )
    shades = stripes(token_shades(node, policy_logprobs))
    stripe_y = box.y + BOX_HEIGHT - 8
    bars = "".join(
        f'<rect class="{name}" opacity="{opacity:.2f}" x="{box.x + begin * box.width:.1f}" '
        f'y="{stripe_y:.1f}" width="{max((end - begin) * box.width, 0.6):.1f}" height="7"/>'
        for begin, end, shade in shades
        for name, opacity in (("calm", 0.85 * (1 - shade)), ("wild", shade))
        if opacity > 0.02
    )
    text = f"{count}" if box.width >= 9 + _CHAR * len(str(count)) else ""
    return (
        f'<g class="node {kind}{" rewound" if node.rewound else ""}" tabindex="0" role="button" '
        f'data-node="{node.node_id}" aria-label="{escape(label)}"><title>{escape(label)}</title>'
        f'<rect class="box" x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" '
        f'height="{BOX_HEIGHT:.0f}" rx="5"/>{bars}'
        f'<text x="{box.x + box.width / 2:.1f}" y="{box.y + 16:.1f}" text-anchor="middle">'
        f"{text}</text></g>"
    )
