"""The demo's figures, targets, curves and report, from steps and records made here."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness_sdk.cli.demo.config import FULL_STEPS, MODEL, DemoConfig
from harness_sdk.cli.demo.figures import Figures
from harness_sdk.cli.demo.gallery import Gallery
from harness_sdk.cli.demo.progress import Progress, step_line
from harness_sdk.cli.demo.report import transcript, write_report
from harness_sdk.cli.settings import load_config
from harness_sdk.errors import ConfigError
from harness_sdk.record import EpisodeRecord, record_to_bytes
from harness_sdk.trajectories.tokenizers import load_tokenizer
from harness_sdk.view.charts import curve, linear_axis, log_axis
from tests.random_records import random_record


def _step(number: int, reward: float, objective: str = "dag_grpo", **fields: Any) -> dict[str, Any]:
    return {
        "step": number,
        "objective": objective,
        "reward/mean": reward,
        "policy/version": float(number),
        "policy/lag_max": 0.0,
        "divergence/kl_mean": 1e-13 * number,
        "divergence/dlogp_max": 1e-6,
        "tokens/packed": 10.0,
        "tokens/flat": 15.0,
        "seconds/wait": 1.25,
        "seconds/step": 0.5,
        "publish/acknowledged": 1.0,
        **fields,
    }


STEPS = [
    _step(1, 0.9, "sft"),
    *(_step(2 + i, reward) for i, reward in enumerate([0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])),
]


def _figures(steps: list[dict[str, Any]]) -> Figures:
    return Figures.of(steps, restarts=0, seconds=12.34, engine="transformers")


def test_figures_are_quarters_of_the_rl_steps_and_sums_of_both_phases() -> None:
    figures = _figures(STEPS)
    assert figures.as_dict() == {
        "reward_first_quarter": pytest.approx(0.3),
        "reward_last_quarter": pytest.approx(0.95),
        "kl_max": pytest.approx(9e-13),
        "tokens_packed": 90,
        "tokens_flat": 135,
        "adapter_versions_served": 9,
        "rollout_restarts": 0,
        "rl_steps": 8,
        "seconds": 12.3,
        "engine": "transformers",
    }
    assert figures.missed() == []


def test_version_that_no_replica_acknowledged_was_not_served() -> None:
    silent = {**STEPS[-1], "publish/acknowledged": 0.0}
    assert _figures([*STEPS[:-1], silent]).adapter_versions_served == 8


def test_figures_without_rl_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="no RL step"):
        _figures(STEPS[:1])


@pytest.mark.parametrize(
    ("fields", "missed"),
    [
        ({"reward_last_quarter": 0.79}, "reward of the last quarter 0.790, wanted at least 0.8"),
        ({"reward_first_quarter": 0.7}, "reward rose by 0.250, wanted at least 0.3"),
        ({"kl_max": 2e-8}, "largest KL 2.00e-08, wanted below 1e-08"),
    ],
)
def test_missed_targets_are_named_with_value_and_limit(
    fields: dict[str, float], missed: str
) -> None:
    assert replace(_figures(STEPS), **fields).missed() == [missed]


def test_vllm_engine_is_refused_for_what_its_kernels_lack() -> None:
    with pytest.raises(ConfigError, match=r"no CPU kernel .* head size; got 32; allowed: 64 or 12"):
        load_config(DemoConfig, overrides=["--engine", "vllm"])


def test_targets_hold_for_full_runs_alone() -> None:
    assert DemoConfig().is_full
    assert not DemoConfig(steps=FULL_STEPS - 1).is_full


def test_line_of_a_step_shows_its_figures() -> None:
    words = step_line(3, STEPS[3]).split()
    assert words == ["3", "4", "0.500", "█" * 10, "4.0e-13", "0", "10", "/", "15", "1.8"]


async def test_progress_shows_whole_lines_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:

    progress, path = Progress(), tmp_path / "metrics.jsonl"
    lines = [json.dumps(step) for step in STEPS[:3]]
    async with progress.following(tmp_path):
        path.write_text(f"{lines[0]}\n{lines[1][:9]}")
    assert [step["step"] for step in progress.steps] == [1]
    async with progress.following(tmp_path):
        path.write_text("\n".join(lines) + "\n")
    assert [step["step"] for step in progress.steps] == [1, 2, 3]
    # A heading for each objective, which counts its own steps.
    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["step", "1", "step", "1", "2"]


def test_curve_spans_its_axis() -> None:
    drawn = curve([0.0, 1.0], linear_axis(0, 1, 2), name="reward", limit=0.5)
    (x1, y1), (x2, y2) = re.findall(r'circle cx="([\d.]+)" cy="([\d.]+)"', drawn)
    assert (float(x1), float(x2)) == (62.0, 666.0)
    assert (float(y1), float(y2)) == (210.0, 14.0)
    assert f"M62 {(210 + 14) / 2:.1f}H" in drawn


def test_log_axis_takes_zeros_at_its_foot() -> None:
    axis = log_axis([0.0, 1e-13, 3e-12], limit=1e-8)
    assert (axis.low, axis.high) == (pytest.approx(1e-13), pytest.approx(1e-8))
    assert axis.share(0.0) == pytest.approx(0.0)
    assert axis.share(1e-8) == pytest.approx(1.0)


def _gallery(*records: EpisodeRecord) -> Gallery:
    gallery = Gallery()
    for record in records:
        gallery.keep(record_to_bytes(record))
    return gallery


def test_gallery_picks_an_early_failure_and_a_late_success() -> None:
    record = random_record(np.random.default_rng(0), 300, reward=0.0)
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    records = [replace(record, episode_id=f"e{i}", reward=y) for i, y in enumerate(rewards)]
    cancelled = replace(record, episode_id="c", reward=None, stop_reason="cancelled")
    # More cut short at the end of the run than the gallery keeps.
    gallery = _gallery(cancelled, *records, *[cancelled] * 100)
    early, late = gallery.early(), gallery.late()
    assert early is not None and late is not None
    assert (early.episode_id, late.episode_id) == ("e1", "e4")
    assert _gallery(cancelled).early() is None


def test_report_is_self_contained_and_escapes_what_the_model_said(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(MODEL)
    record = random_record(np.random.default_rng(0), 300, reward=0.0)
    said = tuple(tokenizer.encode("<script>alert(1)</script>"))
    first = replace(
        record.nodes[0], token_ids=said, sampled=(False,) * len(said), sampled_logprobs=()
    )
    record = replace(record, nodes=(first, *record.nodes[1:]), reward=0.0, answer="<b>9</b>")
    config = DemoConfig(out=tmp_path, steps=FULL_STEPS)
    figures = replace(_figures(STEPS), reward_last_quarter=0.5)
    path = write_report(config, figures, STEPS, _gallery(record))
    page = path.read_text("utf-8")
    assert "<script" not in page and "<b>9" not in page
    assert not re.search(r"(src|href)=\"(?!episode_\w+\.html)", page)
    assert "alert(1)" in unescape(page)
    assert "Missed: reward of the last quarter 0.500" in page
    assert page.count('class="chart"') == 2 and page.count('class="oct"') == 2
    assert (tmp_path / "episode_early.html").is_file()
    # Each step is a row, and no figure is missing from the table.
    assert all(value in page for _, value in figures.rows())
    assert page.count("<td>dag_grpo</td>") == 8


def test_transcript_gathers_each_threads_own_tokens() -> None:
    record = random_record(np.random.default_rng(0), 300, reward=0.0)
    texts = transcript(record, lambda ids: " ".join(map(str, ids)))
    assert [name for name, _ in texts] == [thread.thread_id for thread in record.threads]
    joined = " ".join(text for _, text in texts).split()
    assert sorted(joined) == sorted(str(i) for node in record.nodes for i in node.token_ids)
