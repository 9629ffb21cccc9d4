"""Groups: who enters, who waits, who is dropped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness_sdk.record import EpisodeRecord
from harness_sdk.types import StopReason
from tests.records import small_record
from trainer_service.groups import Group, GroupAssembler


def _record(episode_id: str, *, version: int = 0, **fields: Any) -> EpisodeRecord:
    return small_record(episode_id, policy_version=version, **fields)


def _assembler(*, lag: int | None = 1, closed: tuple[str, ...] = ()) -> GroupAssembler:
    return GroupAssembler(
        group_size=3, min_group=2, deadline_s=10.0, max_policy_lag=lag, closed=closed
    )


def _take(assembler: GroupAssembler, count: int = 1, version: int = 0) -> list[Group]:
    return assembler.take(count, version) or []


def test_group_is_complete_at_its_size() -> None:
    assembler = _assembler()
    for name in "ab":
        assembler.add(name, _record(name), now_s=0.0)
    assert assembler.take(1, version=0) is None
    assembler.add("c", _record("c"), now_s=0.0)
    (group,) = _take(assembler)
    assert [episode.entry_id for episode in group.episodes] == ["a", "b", "c"]
    assert assembler.take(1, version=0) is None


def test_groups_are_taken_in_the_order_they_completed() -> None:
    assembler = _assembler()
    for name in ("a1", "b1", "b2", "b3", "a2", "a3"):
        assembler.add(name, _record(name, group_id=name[0]), now_s=0.0)
    assert [group.group_id for group in _take(assembler, 2)] == ["b", "a"]


def test_group_at_its_deadline_goes_on_with_min_group() -> None:
    assembler = _assembler()
    assembler.add("a", _record("a"), now_s=0.0)
    assembler.add("b", _record("b"), now_s=9.0)
    assembler.expire(now_s=9.9)
    assert assembler.take(1, version=0) is None
    assembler.expire(now_s=10.0)
    (group,) = _take(assembler)
    assert len(group.episodes) == 2


def test_group_at_its_deadline_below_min_group_is_dropped_and_counted() -> None:
    assembler = _assembler()
    assembler.add("a", _record("a"), now_s=0.0)
    assembler.expire(now_s=10.0)
    assert assembler.take(1, version=0) is None
    assert assembler.dropped_groups == {"too_few_finished": 1}
    assert assembler.dropped_episodes == {"too_few_finished": 1}
    assert assembler.pop_finished_entries() == ["a"]


@pytest.mark.parametrize("reason", [r for r in StopReason if r.is_infrastructure])
def test_infrastructure_failure_carries_neither_loss_nor_baseline(reason: StopReason) -> None:
    assembler = _assembler()
    assembler.add("a", _record("a"), now_s=0.0)
    assembler.add("x", _record("x", stop_reason=reason.value, reward=None), now_s=0.0)
    assembler.add("b", _record("b"), now_s=0.0)
    # Until its group is taken it stays with it: a restart must find the group whole.
    assert assembler.pop_finished_entries() == []
    (group,) = _take(assembler)
    assert [episode.entry_id for episode in group.episodes] == ["a", "b"]
    assert assembler.pop_finished_entries() == ["x"]
    assert assembler.dropped_episodes == {reason.value: 1}


@pytest.mark.parametrize("reason", ["no_done", "budget", "max_turns"])
@pytest.mark.parametrize("reward", [None, 0.7])
def test_policy_failure_scores_zero_and_enters(reason: str, reward: float | None) -> None:
    assembler = _assembler()
    for name in "ab":
        assembler.add(name, _record(name), now_s=0.0)
    assembler.add("c", _record("c", stop_reason=reason, reward=reward), now_s=0.0)
    (group,) = _take(assembler)
    assert [episode.reward for episode in group.episodes] == [1.0, 1.0, 0.0]


def test_episode_without_a_score_is_left_out() -> None:
    assembler = _assembler()
    for name, reward in (("a", 1.0), ("b", None), ("c", 0.0)):
        assembler.add(name, _record(name, reward=reward), now_s=0.0)
    (group,) = _take(assembler)
    assert [episode.entry_id for episode in group.episodes] == ["a", "c"]
    assert assembler.dropped_episodes == {"unscored": 1}


def test_late_episode_does_not_open_its_group_anew() -> None:
    assembler = _assembler(closed=("old",))
    for name in "abcd":
        assembler.add(name, _record(name), now_s=0.0)
    assembler.add("e", _record("e", group_id="old"), now_s=0.0)
    assert assembler.num_open == 0
    assert assembler.dropped_episodes == {"late": 2}
    _take(assembler)
    assert assembler.closed == ("old", "g")


def test_group_that_waits_for_its_step_is_not_closed_yet() -> None:
    assembler = _assembler()
    for name in ("a1", "a2", "a3", "b1", "b2", "b3", "b4"):
        assembler.add(name, _record(name, group_id=name[0]), now_s=0.0)
    assert assembler.closed == ()
    assert _take(assembler)[0].group_id == "a"
    assert assembler.closed == ("a",)
    assert assembler.dropped_episodes == {"late": 1}


def test_stale_episode_stays_with_a_group_that_is_not_taken() -> None:
    assembler = _assembler(lag=0)
    for name, version in (("a", 1), ("b", 2), ("c", 2)):
        assembler.add(name, _record(name, version=version), now_s=0.0)
    assert assembler.take(2, version=2) is None
    assert assembler.pop_finished_entries() == []
    assert len(_take(assembler, version=2)[0].episodes) == 2
    assert assembler.pop_finished_entries() == ["a"]


def test_episode_without_a_group_is_dropped() -> None:
    assembler = _assembler()
    assembler.add("a", _record("a", group_id=""), now_s=0.0)
    assert assembler.dropped_episodes == {"ungrouped": 1}


def test_stale_episode_leaves_its_group() -> None:
    assembler = _assembler(lag=1)
    for name, version in (("a", 3), ("b", 1), ("c", 2)):
        assembler.add(name, _record(name, version=version), now_s=0.0)
    (group,) = _take(assembler, version=3)
    assert [episode.entry_id for episode in group.episodes] == ["a", "c"]
    assert assembler.dropped_episodes == {"stale": 1}


def test_group_that_became_too_old_is_dropped() -> None:
    assembler = _assembler(lag=0)
    for name in "abc":
        assembler.add(name, _record(name, version=1), now_s=0.0)
    assert assembler.take(1, version=2) is None
    assert assembler.dropped_groups == {"stale": 1}
    assert assembler.num_ready == 0
    assert sorted(assembler.pop_finished_entries()) == ["a", "b", "c"]


def test_staleness_counts_the_oldest_sampled_token_only() -> None:
    record = _record("a", version=5)
    prompt = replace(
        record.nodes[0], node_id=1, parent=0, sampled=(False, False), sampled_logprobs=(),
        policy_version=0,
    )  # fmt: skip
    assembler = _assembler(lag=0)
    for name in "abc":
        with_prompt = replace(record, episode_id=name, nodes=(*record.nodes, prompt))
        assembler.add(name, with_prompt, now_s=0.0)
    assert len(_take(assembler, version=5)[0].episodes) == 3


def _refilling() -> GroupAssembler:
    return GroupAssembler(
        group_size=2, min_group=2, deadline_s=10.0, max_policy_lag=None, refills=2
    )


def test_failed_episode_that_is_replaced_does_not_fill_its_group() -> None:
    assembler = _refilling()
    assembler.add("a", _record("a"), now_s=0.0)
    assembler.add("x", _record("x", stop_reason="engine_error", reward=None), now_s=0.0)
    assert assembler.take(1, version=0) is None
    assembler.add("b", _record("b"), now_s=0.0)
    (group,) = _take(assembler)
    assert [episode.entry_id for episode in group.episodes] == ["a", "b"]
    # The failure is consumed with its group and stays out of its baseline.
    assert assembler.pop_finished_entries() == ["x"]
    assert assembler.dropped_episodes == {"engine_error": 1}


def test_group_whose_replacements_are_used_up_waits_for_nothing() -> None:
    assembler = _refilling()
    assembler.add("a", _record("a"), now_s=0.0)
    for name in "xyz":
        failed = _record(name, stop_reason="tool_error", reward=None)
        assembler.add(name, failed, now_s=0.0)
    assert assembler.num_open == 0
    assert assembler.dropped_groups == {"too_few_finished": 1}
    assert assembler.dropped_episodes == {"too_few_finished": 1, "tool_error": 3}


def test_group_that_must_be_whole_is_dropped_where_it_is_not() -> None:
    assembler = GroupAssembler(
        group_size=3, min_group=2, deadline_s=10.0, max_policy_lag=None, drops_incomplete=True
    )
    for name, group in (("a", "late"), ("b", "late"), ("c", "failed"), ("d", "failed")):
        assembler.add(name, _record(name, group_id=group), now_s=0.0)
    failed = _record("x", group_id="failed", stop_reason="engine_error", reward=None)
    assembler.add("x", failed, now_s=0.0)
    assert assembler.dropped_groups == {"incomplete": 1}
    assembler.expire(now_s=10.0)
    assert assembler.dropped_groups == {"incomplete": 2}
    assert assembler.dropped_episodes == {"incomplete": 4, "engine_error": 1}
    assert assembler.take(1, version=0) is None


def test_tasks_take_turns_and_none_waits_for_ever() -> None:
    assembler = _assembler()

    def complete(group_id: str, task_id: str) -> None:
        for number in range(3):
            name = f"{group_id}-{number}"
            record = replace(_record(name, group_id=group_id), task_id=task_id)
            assembler.add(name, record, now_s=0.0)

    for number in range(3):
        complete(f"quick-{number}", "quick")
    complete("slow-0", "slow")
    assert [g.group_id for g in _take(assembler, 2)] == ["quick-0", "slow-0"]
    # What waits longest is its task's first now, whatever comes after it.
    complete("other-0", "other")
    assert [g.group_id for g in _take(assembler, 2)] == ["quick-1", "other-0"]
    assert [g.group_id for g in _take(assembler, 1)] == ["quick-2"]
    assert assembler.num_waiting == 0
