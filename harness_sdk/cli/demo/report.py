"""`report.html`: the demo's figures, its curves, and an episode from before and after.

Self-contained: nothing is fetched, no script runs, and episode text is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from harness_sdk.cli.demo.config import MODEL, DemoConfig
from harness_sdk.cli.demo.figures import MAX_KL, MIN_REWARD_LAST, Figures
from harness_sdk.cli.demo.gallery import Gallery
from harness_sdk.cli.step_columns import COLUMNS, step_cells
from harness_sdk.record import EpisodeRecord
from harness_sdk.trajectories.tokenizers import load_tokenizer
from harness_sdk.view import episode_html, episode_svg
from harness_sdk.view.charts import curve, linear_axis, log_axis
from harness_sdk.view.svg import STYLE

REPORT_FILE = "report.html"

Decode = Callable[[Sequence[int]], str]


def write_report(
    config: DemoConfig, figures: Figures, steps: Sequence[Mapping[str, Any]], gallery: Gallery
) -> Path:
    """Write the report and the page of each episode that it shows; return the report's path."""
    decode = load_tokenizer(MODEL).decode
    config.out.mkdir(parents=True, exist_ok=True)
    shown: list[str] = []
    for name, title, record in (
        ("episode_early", "An early episode", gallery.early()),
        ("episode_late", "A late episode", gallery.late()),
    ):
        if record is None:
            continue
        page = config.out / f"{name}.html"
        page.write_text(episode_html(record, decode), "utf-8")
        shown.append(_episode(title, record, decode, page.name))
    path = config.out / REPORT_FILE
    path.write_text(report_html(config, figures, steps, shown), "utf-8")
    return path


def report_html(
    config: DemoConfig,
    figures: Figures,
    steps: Sequence[Mapping[str, Any]],
    episodes: Sequence[str],
) -> str:
    """The page.

    Args:
        config: Of the run.
        figures: Its figures.
        steps: Lines of the trainer's metrics, both phases.
        episodes: Sections about single episodes, as HTML.
    """
    online = [step for step in steps if step["objective"] != "sft"]
    rewards = [step["reward/mean"] for step in online]
    kl = [step["divergence/kl_mean"] for step in online]
    reward_curve = curve(rewards, linear_axis(0, 1, 4), name="mean reward", limit=MIN_REWARD_LAST)
    kl_curve = curve(kl, log_axis(kl, MAX_KL), name="KL per token", limit=MAX_KL)
    return _PAGE.format(
        style=files("harness_sdk.cli.demo").joinpath("report.css").read_text("utf-8") + STYLE,
        seed=config.seed,
        warmup_steps=config.warmup_steps,
        num_groups=config.groups_per_step,
        group_size=config.group_size,
        missed="".join(
            f'<p class="missed">Missed: {escape(text)}</p>'
            for text in (figures.missed() if config.is_full else ())
        ),
        figures=_table(("", "this run"), figures.rows()),
        reward_curve=reward_curve,
        kl_curve=kl_curve,
        episodes="\n".join(episodes),
        steps=_table(
            ("objective", *COLUMNS), [(step["objective"], *step_cells(step)) for step in steps]
        ),
    )


def transcript(record: EpisodeRecord, decode: Decode) -> list[tuple[str, str]]:
    """What each thread holds of its own, as thread id and text, in order of first appearance."""
    order = {thread.thread_id: place for place, thread in enumerate(record.threads)}
    nodes = sorted(record.nodes, key=lambda node: order[node.thread_id])
    return [
        (thread_id, decode([token for node in own for token in node.token_ids]))
        for thread_id, own in groupby(nodes, key=lambda node: node.thread_id)
    ]


def _episode(title: str, record: EpisodeRecord, decode: Decode, page: str) -> str:
    versions = sorted({node.policy_version for node in record.nodes if any(node.sampled)})
    reward = "none" if record.reward is None else f"{record.reward:g}"
    texts = "\n".join(
        f"<h3>{escape(thread_id)}</h3>\n<pre>{escape(text, quote=False)}</pre>"
        for thread_id, text in transcript(record, decode)
    )
    return (
        f"<h2>{escape(title)}: reward {reward}</h2>\n"
        f"<p>Policy version {', '.join(map(str, versions))}; answer "
        f"{escape(record.answer or 'none')}; token by token in "
        f'<a href="{escape(page)}">{escape(page)}</a>.</p>\n'
        f'<div class="scroll">{episode_svg(record, standalone=False)}</div>\n{texts}'
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{cells}</tr></thead>\n<tbody>{body}</tbody></table>"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>octopus demo</title>
<style>{style}</style>
</head>
<body>
<h1>octopus demo</h1>
<p>A root forks a finder and an opener. The opener can know the code only by reading the finder;
only the root's answer counts. Seed {seed}: {warmup_steps} steps of tree SFT on a script that is
right part of the time, then online RL on {num_groups} groups of {group_size} episodes a step.</p>
{missed}
<h2>Figures</h2>
{figures}
<h2>Curves</h2>
<div class="charts">
<figure><figcaption>Mean reward</figcaption>{reward_curve}</figure>
<figure><figcaption>KL(rollout || trainer) per sampled token, nats</figcaption>{kl_curve}</figure>
</div>
{episodes}
<details><summary>Every step</summary>
<div class="scroll">{steps}</div>
</details>
</body>
</html>
"""
