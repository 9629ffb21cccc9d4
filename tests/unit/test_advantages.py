"""Estimators against their formulas, written out group by group."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from trainer_service.advantages import ESTIMATORS, estimate
from trainer_service.config import ADVANTAGE_NAMES


def test_every_estimator_can_be_configured() -> None:
    assert set(ESTIMATORS) == set(ADVANTAGE_NAMES)


def _formula(name: str, rewards: list[float], groups: list[str]) -> list[float]:
    by_group: dict[str, list[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        by_group.setdefault(group, []).append(reward)
    centred = [r - statistics.fmean(by_group[g]) for r, g in zip(rewards, groups, strict=True)]
    found = []
    for index, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        own = by_group[group]
        if name == "leave_one_out":
            others = (sum(own) - reward) / (len(own) - 1) if len(own) > 1 else reward
            found.append(reward - others)
        elif name == "group_mean":
            found.append(centred[index])
        elif name == "group_zscore":
            spread = statistics.stdev(own) if len(own) > 1 else 0.0
            found.append(centred[index] / (spread + 1e-6))
        elif name == "reinforce_plus_plus":
            spread = statistics.stdev(rewards)
            found.append((reward - statistics.fmean(rewards)) / (spread + 1e-6))
        else:
            found.append(centred[index] / (statistics.stdev(centred) + 1e-6))
    return found


@pytest.mark.parametrize("name", ADVANTAGE_NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_estimator_equals_its_formula(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    # Groups of several sizes, one of them alone, interleaved.
    groups = [str(g) for g in rng.permutation([0] * 5 + [1] * 3 + [2] + [3] * 4)]
    outcomes = rng.choice([0.0, 0.25, 1.0], len(groups)).tolist()
    found = estimate(name, outcomes, groups)
    wanted = _formula(name, [2 * y - 1 for y in outcomes], groups)
    assert found.tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", ADVANTAGE_NAMES)
@pytest.mark.parametrize("outcome", [0.0, 0.1, 1 / 3, 0.7])
def test_equal_outcomes_have_advantages_of_exactly_zero(name: str, outcome: float) -> None:
    assert estimate(name, [outcome] * 7, ["a"] * 3 + ["b"] * 4).tolist() == [0.0] * 7


def test_a_group_of_equals_teaches_by_the_batch_alone() -> None:
    outcomes, groups = [1.0, 1.0, 0.0, 1.0], ["a", "a", "b", "b"]
    for name in ADVANTAGE_NAMES:
        taught = bool(estimate(name, outcomes, groups)[:2].any())
        assert taught == (name == "reinforce_plus_plus")


def test_one_episode_alone_has_no_advantage_but_over_a_batch() -> None:
    for name in ADVANTAGE_NAMES:
        assert estimate(name, [1.0], ["a"]).tolist() == [0.0]


def test_outcomes_outside_the_unit_interval_are_refused() -> None:
    with pytest.raises(ValueError, match=r"outcome 1\.5"):
        estimate("leave_one_out", [1.5], [0])
    with pytest.raises(ValueError, match="2 outcomes but 1"):
        estimate("leave_one_out", [1.0, 0.0], [0])
