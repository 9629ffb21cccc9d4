"""The board as the page shows it: every figure a cell of text, so that the page only places it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from harness_sdk.cli.step_columns import COLUMNS, MISSING, step_cells
from harness_sdk.cli.watch.board import Board, Replica
from harness_sdk.cli.watch.episodes import EpisodeRow
from harness_sdk.view.charts import Axis, curve, linear_axis, log_axis

MAX_GROUPS, MAX_STEP_ROWS, MAX_POINTS = 50, 100, 200

EPISODE_COLUMNS = (
    "closed", "task", "reward", "ended", "threads", "rewinds", "mounted", "tokens",
    "path by path", "sampled", "version", "s", "group", "replica", "answer",
)  # fmt: skip
GROUP_COLUMNS = ("group", "task", "episodes", "reward", "lowest", "highest", "unscored", "version")
REPLICA_COLUMNS = (
    "replica", "state", "versions", "KV use", "tokens held", "episodes open", "queued", "threads",
    "sampled/s", "engine", "model", "says",
)  # fmt: skip
STEP_COLUMNS = ("objective", *COLUMNS)

_REWARD, _KL = "reward/mean", "divergence/kl_mean"
_CURVES = (
    ("Mean reward", _REWARD),
    ("KL(rollout || trainer) per token, nats", _KL),
    ("Largest policy lag, versions", "policy/lag_max"),
    ("Trained tokens per second", "tokens/per_s"),
)
# What float32 may show: the axis ends here at least.
_KL_TOP = 1e-8

Row = dict[str, Any]
"""`key`, `cells` of text, `mark`: "failed" for what went wrong, else empty."""


def panes(board: Board) -> dict[str, Any]:
    """Everything but the episodes' rows, by the name of its pane."""
    return {
        "sources": [
            {
                "name": source.name,
                "address": source.address,
                "state": "away" if source.error else "connected" if source.heard_s else "not yet",
                "error": source.error,
            }
            for source in board.sources.values()
        ],
        "ages": _ages(board),
        "tiles": tiles(board),
        "replicas": replica_rows(board),
        "groups": group_rows(board.episodes.rows()),
        "steps": step_rows(board),
        "curves": curves(board),
        "kept": _kept(board),
    }


def tiles(board: Board) -> list[tuple[str, str]]:
    """The figures at the head: name and value."""
    last = dict(zip(COLUMNS, step_cells(board.steps[-1] if board.steps else {}), strict=True))
    statuses = [r.shown["status"] for r in board.replicas.values() if r.shown["status"]]
    speeds = [r.sampled_per_s for r in board.replicas.values() if r.sampled_per_s is not None]
    policy = board.bus.policy if board.bus is not None else None
    stream = board.stream
    permits = board.permits
    return [
        ("mean reward", last["mean reward"]),
        ("KL", last["KL"]),
        ("policy lag", last["lag"]),
        ("step", last["step"]),
        ("announced version", str(policy.version) if policy is not None else MISSING),
        ("KV use", f"{max(s['kv_use'] for s in statuses):.1%}" if statuses else MISSING),
        ("sampled tokens/s", f"{sum(speeds):,.0f}" if speeds else MISSING),
        ("trained tokens/s", last["tokens/s"]),
        ("packed / flat", f"{last['packed']} / {last['flat']}"),
        ("groups begun / permitted", f"{permits['taken']:,} / {permits['granted']:,}")
        if {"taken", "granted"} <= set(permits)
        else ("groups begun / permitted", MISSING),
        ("episodes waiting", f"{stream.undelivered:,}" if stream is not None else MISSING),
        ("episodes pending", f"{stream.pending:,}" if stream is not None else MISSING),
        ("dead records", f"{stream.dead + stream.dead_trimmed:,}" if stream else MISSING),
    ]


def episode_rows(rows: Iterable[EpisodeRow]) -> list[Row]:
    """Cells of `EPISODE_COLUMNS`."""
    return [
        _row(
            row.entry_id,
            [
                _clock(row.closed_at_s),
                row.task_id or row.episode_id or row.entry_id,
                _reward(row.reward),
                row.problem or row.stop_reason,
                f"{row.num_threads:,}",
                f"{row.num_rewinds:,}",
                f"{row.num_mounted:,}",
                f"{row.num_tokens:,}",
                f"{row.num_flat:,}",
                f"{row.num_sampled:,}",
                _versions(row.versions),
                f"{row.closed_at_s - row.opened_at_s:.1f}",
                row.group_id,
                row.replica_id,
                row.answer,
            ],
            failed=bool(row.problem),
        )
        for row in rows
    ]


def group_rows(rows: Sequence[EpisodeRow]) -> list[Row]:
    """Cells of `GROUP_COLUMNS`: the newest groups among `rows`, the newest first."""
    groups: dict[str, list[EpisodeRow]] = {}
    for row in rows:
        if row.group_id:
            groups.setdefault(row.group_id, []).append(row)
    shown: list[Row] = []
    for group_id, episodes in list(groups.items())[:MAX_GROUPS]:
        rewards = [row.reward for row in episodes if row.reward is not None]
        versions = sorted({version for row in episodes for version in row.versions})
        cells = [
            group_id,
            episodes[0].task_id,
            str(len(episodes)),
            *(_reward(each(rewards) if rewards else None) for each in (fmean, min, max)),
            str(len(episodes) - len(rewards)),
            _versions(versions),
        ]
        shown.append(_row(group_id, cells, failed=not rewards))
    return shown


def replica_rows(board: Board) -> list[Row]:
    """Cells of `REPLICA_COLUMNS`, in the order of their ids."""
    states = board.bus.replicas if board.bus is not None else ()
    shown: list[Row] = []
    for state in states:
        replica = board.replicas.get(state.replica_id) if state.alive else None
        status = replica.shown["status"] if replica is not None else None
        problems = [state.error, replica.shown["unreachable"] if replica is not None else ""]
        says = [text for text in problems if text]
        if state.waiting_version:
            says.append(
                f"version {state.waiting_version} waits for a slot, for {state.waiting_s:.0f} s "
                f"and more: {state.waiting_for}"
            )
        cells = [
            state.replica_id,
            "there" if state.alive else "gone",
            _versions(state.versions) if state.versions else MISSING,
            *_status_cells(status, replica),
            "; ".join(says),
        ]
        shown.append(_row(state.replica_id, cells, failed=bool(any(problems) or not state.alive)))
    return shown


def step_rows(board: Board) -> list[Row]:
    """Cells of `STEP_COLUMNS`, the newest first."""
    return [
        _row(str(step["step"]), [str(step.get("objective", MISSING)), *step_cells(step)])
        for step in reversed(board.steps[-MAX_STEP_ROWS:])
    ]


def curves(board: Board) -> list[dict[str, str]]:
    """Name, value of the newest step and SVG of each curve; steps without a figure are left out."""
    shown: list[dict[str, str]] = []
    for name, key in _CURVES:
        points = [
            (int(step["step"]), float(step[key]))
            for step in board.steps[-MAX_POINTS:]
            if isinstance(step.get(key), int | float) and math.isfinite(step[key])
        ]
        if not points:
            continue
        numbers, values = zip(*points, strict=True)
        drawn = curve(values, _axis(values, key), name=name, steps=numbers)
        last = f"{values[-1]:,.0f}" if values[-1] >= 1000 else f"{values[-1]:.3g}"
        shown.append({"name": name, "last": last, "svg": drawn})
    return shown


def _axis(values: Sequence[float], key: str) -> Axis:
    if key == _KL:
        return log_axis(values, _KL_TOP) if any(values) else linear_axis(0, _KL_TOP, 4)
    if key == _REWARD:
        return linear_axis(0, 1, 4)
    highest = max(*values, 1.0)
    # The next of 1, 2, 5, 10, ...
    power = 10.0 ** math.floor(math.log10(highest))
    top = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= highest)
    return linear_axis(0, top, 4)


def _status_cells(status: Any, replica: Replica | None) -> list[str]:
    if status is None or replica is None:
        return [MISSING] * 8
    speed = replica.sampled_per_s
    return [
        f"{status['kv_use']:.1%}",
        f"{status['tokens_resident']:,} of {status['tokens_capacity']:,}",
        f"{status['open_episodes']:,}",
        f"{status['queued_episodes']:,}",
        f"{status['live_threads']:,}",
        f"{speed:,.0f}" if speed is not None else MISSING,
        status["engine"],
        status["model"],
    ]


def _ages(board: Board) -> list[tuple[str, float | None]]:
    """What came last, and when by the clock of whoever sent it."""
    step = board.steps[-1].get("time_s") if board.steps else None
    newest = max((row.closed_at_s for row in board.episodes.rows()), default=None)
    return [
        (name, at_s if isinstance(at_s, int | float) and math.isfinite(at_s) else None)
        for name, at_s in (("step", step), ("episode", newest))
    ]


def _kept(board: Board) -> str:
    kept, episodes = len(board.episodes), board.episodes
    return (
        f"{kept:,} episodes here, of {episodes.num_seen:,} seen; the newest {episodes.max_rows:,} "
        f"are kept, their records as far as 64 MiB go ({episodes.num_bytes / 2**20:.1f} MiB now)."
    )


def _row(key: str, cells: list[str], *, failed: bool = False) -> Row:
    return {"key": key, "cells": cells, "mark": "failed" if failed else ""}


def _reward(reward: float | None) -> str:
    return MISSING if reward is None else f"{reward:.3f}"


def _versions(versions: Sequence[int]) -> str:
    return ", ".join(map(str, versions)) or MISSING


def _clock(at_s: float) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(at_s))
    except (ValueError, OverflowError, OSError):
        return MISSING
