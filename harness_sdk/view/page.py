"""An episode as one HTML page: figures, the DAG, and every token of the node chosen.

Nothing is fetched, and no text of the episode becomes markup: it travels as JSON and is shown
through `textContent`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from harness_sdk.measures import path_lengths
from harness_sdk.record import EpisodeRecord
from harness_sdk.view.layout import mounts_made
from harness_sdk.view.nodes import Detokenize, node_facts, node_tokens
from harness_sdk.view.shading import k3
from harness_sdk.view.svg import STYLE, episode_svg


def episode_html(
    record: EpisodeRecord,
    detokenize: Detokenize | None = None,
    *,
    policy_logprobs: Mapping[int, Sequence[float]] | None = None,
) -> str:
    """A self-contained page about `record`.

    Args:
        record: The episode.
        detokenize: Turns token ids into text; None shows ids.
        policy_logprobs: The trainer's log-probabilities of each node's sampled tokens, by node
            id; shades then show the KL instead of the log-probability.
    """
    assets = files("harness_sdk.view")
    title = f"Episode {record.episode_id}"
    nodes = [
        {**node_facts(node), **node_tokens(node, detokenize, policy_logprobs)}
        for node in record.nodes
    ]
    shade = "KL(rollout || trainer)" if policy_logprobs is not None else "surprise"
    facts = "".join(
        f'<div class="fact"><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>'
        for name, value in episode_facts(record, policy_logprobs)
    )
    return _PAGE.format(
        title=escape(title),
        style=(assets / "page.css").read_text(encoding="utf-8") + STYLE,
        facts=facts,
        task=escape(record.task_id),
        answer=escape(record.answer or "no answer"),
        failure=_failure(record),
        svg=episode_svg(record, policy_logprobs=policy_logprobs, standalone=False),
        data=_json({"nodes": nodes}),
        legend=LEGEND.format(shade=shade),
        keys=KEYS,
        script="".join((assets / name).read_text(encoding="utf-8") for name in SCRIPTS),
    )


def episode_facts(
    record: EpisodeRecord, policy_logprobs: Mapping[int, Sequence[float]] | None = None
) -> list[tuple[str, str]]:
    """The figures that head the page, as names and values."""
    versions = sorted({node.policy_version for node in record.nodes if any(node.sampled)})
    # Recorded runs whose log-probabilities nobody kept hold zeros.
    logprobs = [lp for node in record.nodes for lp in node.sampled_logprobs if lp]
    flat = sum(path_lengths(record))
    mounted = sum(m.end - m.begin for spans in mounts_made(record).values() for m in spans)
    facts = [
        ("reward", "none" if record.reward is None else f"{record.reward:g}"),
        ("stop reason", record.stop_reason),
        ("threads", str(len(record.threads))),
        ("tokens", f"{record.num_tokens:,}"),
        ("path by path", f"{flat:,}"),
        ("overlap", f"{1 - record.num_tokens / flat:.1%}" if flat else "0.0%"),
        ("sampled", f"{record.num_sampled:,}"),
        (
            "mean log-probability",
            f"{sum(logprobs) / record.num_sampled:.3f}" if logprobs else "none",
        ),
        ("policy version", ", ".join(map(str, versions)) or "none"),
        ("mounted tokens", f"{mounted:,}"),
        ("engine", record.engine),
    ]
    if policy_logprobs is not None:
        facts.append(("KL", f"{_mean_kl(record, policy_logprobs):.3g}"))
    return facts


def _mean_kl(record: EpisodeRecord, policy_logprobs: Mapping[int, Sequence[float]]) -> float:
    values = [
        k3(ours, theirs)
        for node in record.nodes
        for ours, theirs in zip(
            node.sampled_logprobs, policy_logprobs.get(node.node_id, ()), strict=False
        )
    ]
    return sum(values) / len(values) if values else 0.0


def _json(data: dict[str, Any]) -> str:
    """JSON that no HTML parser can leave early: markup characters are escaped."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _failure(record: EpisodeRecord) -> str:
    if not record.error_kind:
        return ""
    text = escape(f"{record.error_kind}: {record.error_message}")
    return f'<p class="failure">{text}</p>'


LEGEND = """<ul class="legend" aria-label="Legend">
<li class="context">context</li><li class="turn">turn</li>
<li class="demonstration">demonstration</li><li class="note">note</li><li class="stub">stub</li>
<li class="termination">termination</li><li class="line rewind">rewound</li>
<li class="line mount">mount</li><li class="scale">{shade}</li>
</ul>"""

KEYS = (
    "Arrow keys walk the tree: left to the parent, right to the next node, up and down between "
    "branches. Enter opens a node, Escape closes it."
)

SCRIPTS = ("episode.js", "page.js")
"""Of the page, in their order; the first is shared with the live page of a run."""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<button id="theme" type="button">Theme</button>
<p class="task">{task}</p>
<p class="answer">Answer: <strong>{answer}</strong></p>
{failure}
<dl>{facts}</dl>
</header>
<main>
{legend}
<div id="dag" class="dag">{svg}</div>
<p class="keys">{keys}</p>
<section id="detail" aria-live="polite" hidden></section>
</main>
<script id="episode" type="application/json">{data}</script>
<script>{script}</script>
</body>
</html>
"""
