"""What the outcomes of many episodes come to."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from harness_sdk.measures import mean_measures
from harness_sdk.runner import EpisodeOutcome, GroupOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Means over the episodes that were scored; failures of the infrastructure are only counted."""

    tasks: int
    """With at least one scored episode."""
    episodes: int
    failed: Mapping[str, int]
    """Episodes without a score, by the class of their error."""
    accuracy: float | None
    """Mean over tasks of the mean y of their episodes; None where nothing was scored."""
    stderr: float | None
    """Standard error of `accuracy` over tasks; None below two tasks."""
    turns: float
    tokens: float
    """Unique tokens of the record."""
    sampled: float
    forks: float
    rewinds: float
    reads: float
    seconds: float
    metrics: Mapping[str, float]
    """The agent's own."""
    measures: Mapping[str, float]
    """Of the episodes whose records were read; see `measures.mean_measures`."""
    measured: int
    """How many those are."""

    def lines(self) -> list[str]:
        """For people."""
        accuracy = "-" if self.accuracy is None else f"{self.accuracy:.4f}"
        stderr = "" if self.stderr is None else f" +- {self.stderr:.4f}"
        failed = ", ".join(f"{count} {name}" for name, count in self.failed.items()) or "none"
        shown = [
            f"accuracy  {accuracy}{stderr} over {self.tasks} tasks, {self.episodes} episodes",
            f"failed    {failed}",
        ]
        for name in ("turns", "tokens", "sampled", "forks", "rewinds", "reads", "seconds"):
            shown.append(f"{name:9} {getattr(self, name):.2f} per episode")
        shown += [f"{name:9} {value:.4f}" for name, value in self.metrics.items()]
        if self.measured:
            shown.append(f"records   {self.measured} measured")
        return shown + [f"{name:19} {_figure(value)}" for name, value in self.measures.items()]


def summarise(groups: Iterable[GroupOutcome]) -> Summary:
    """The summary of `groups`, those that were cut short included."""
    groups = list(groups)
    episodes = [episode for group in groups for episode in group.episodes]
    scored = [episode for episode in episodes if episode.reward is not None]
    rewards: dict[str, list[float]] = {}
    for group in groups:
        if group.rewards:
            rewards.setdefault(group.task_id, []).extend(group.rewards)
    by_task = [fmean(each) for each in rewards.values()]
    failed = Counter(e.error.partition(":")[0] for e in episodes if e.reward is None)
    names = sorted({name for episode in scored for name in episode.metrics})
    measures = [episode.measures for episode in scored if episode.measures is not None]
    return Summary(
        tasks=len(by_task),
        episodes=len(episodes),
        failed=dict(failed),
        accuracy=fmean(by_task) if by_task else None,
        stderr=stdev(by_task) / math.sqrt(len(by_task)) if len(by_task) > 1 else None,
        turns=_mean([e.num_turns for e in scored]),
        tokens=_mean([e.num_tokens for e in scored]),
        sampled=_mean([e.num_sampled for e in scored]),
        forks=_mean([e.num_forks for e in scored]),
        rewinds=_mean([e.num_rewinds for e in scored]),
        reads=_mean([e.num_reads for e in scored]),
        seconds=_mean([e.seconds for e in scored]),
        metrics={name: _mean(_values(scored, name)) for name in names},
        measures=mean_measures(measures),
        measured=len(measures),
    )


def _values(episodes: Sequence[EpisodeOutcome], name: str) -> list[float]:
    return [episode.metrics[name] for episode in episodes if name in episode.metrics]


def _figure(value: float) -> str:
    return f"{value:.3e}" if abs(value) >= 1e6 else f"{value:,.3f}"


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
