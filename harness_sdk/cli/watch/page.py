"""The markup of the page: empty tables with their heads; everything else comes as events."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from harness_sdk.cli.watch.panes import (
    EPISODE_COLUMNS,
    GROUP_COLUMNS,
    REPLICA_COLUMNS,
    STEP_COLUMNS,
)
from harness_sdk.view.page import KEYS, LEGEND


def page_html(run: str) -> str:
    """The page of `run`."""
    return _PAGE.format(
        run=escape(run),
        replicas=_table("replicas", "Replicas", REPLICA_COLUMNS),
        groups=_table("groups", "Groups", GROUP_COLUMNS),
        episodes=_table("episodes", "Episodes", EPISODE_COLUMNS),
        steps=_table("steps", "Steps", STEP_COLUMNS),
        legend=LEGEND.format(shade="surprise"),
        keys=KEYS,
    )


def _table(name: str, caption: str, columns: Sequence[str]) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    return (
        f'<div class="scroll" role="region" aria-label="{caption}" tabindex="0">'
        f'<table><thead><tr>{head}</tr></thead><tbody id="{name}"></tbody></table>'
        f'<p id="no-{name}" class="none">none yet</p></div>'
    )


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<title>{run} - octopus</title>
<link rel="icon" href="icon.svg">
<link rel="stylesheet" href="watch.css">
<script src="watch.js" defer></script>
</head>
<body>
<a class="skip" href="#run">Skip to the run</a>
<header>
<h1>Run {run}</h1>
<button id="theme" type="button">Theme</button>
<p id="link" class="task" role="status">connecting</p>
<ul id="sources" class="sources" aria-label="Sources"></ul>
</header>
<main id="run">
<dl id="tiles" aria-label="Figures"></dl>
<div id="curves" class="curves"></div>
<h2>Replicas</h2>
{replicas}
<h2>Groups</h2>
{groups}
<h2>Episodes</h2>
<p id="kept" class="task"></p>
<label class="filter">Filter <input id="filter" type="search" autocomplete="off" spellcheck="false"
 placeholder="task, group, end, replica"> <kbd>/</kbd></label>
<span id="matches" class="task" role="status"></span>
{episodes}
<h2>Steps</h2>
{steps}
</main>
<section id="episode" aria-label="Episode" hidden>
<button id="back" type="button">Back to the run</button>
<h2 id="title" tabindex="-1"></h2>
<p id="task" class="task"></p>
<p class="answer">Answer: <strong id="answer"></strong></p>
<p id="failure" class="failure" hidden></p>
<p id="note" class="task" hidden></p>
<dl id="facts"></dl>
{legend}
<div id="dag" class="dag"></div>
<p class="keys">{keys}</p>
<div id="detail" aria-live="polite" hidden></div>
</section>
</body>
</html>
"""
