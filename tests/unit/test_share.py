"""A step's episodes divided among ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from harness_sdk.errors import ConfigError
from harness_sdk.measures import episode_flops
from harness_sdk.model_cost import ModelCost
from tests.records import small_record
from trainer_service.config import TrainerConfig
from trainer_service.feed import Batch
from trainer_service.groups import Group, Scored
from trainer_service.ranks import Ranks
from trainer_service.share import balance, divide


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_episode_has_one_rank_and_none_has_much_more_than_it_must(
    seed: int, num_ranks: int
) -> None:
    rng = np.random.default_rng(seed)
    costs = rng.exponential(size=7).tolist()
    ranks = balance(costs, num_ranks)
    assert sorted(index for own in ranks for index in own) == list(range(7))
    best = min(
        max(sum(c for c, r in zip(costs, places, strict=True) if r == rank) for rank in range(3))
        for places in itertools.product(range(num_ranks), repeat=7)
    )
    assert max(sum(costs[index] for index in own) for own in ranks) <= 4 / 3 * best + 1e-9


def test_more_ranks_than_episodes_leave_some_without() -> None:
    assert balance([2.0], 3) == [[0], [], []]


def _batch(sizes: list[int], rewards: list[float]) -> Batch:
    records = [
        small_record(f"e{index}", token_ids=tuple(range(size)), reward=reward)
        for index, (size, reward) in enumerate(zip(sizes, rewards, strict=True))
    ]
    scored = tuple(Scored.of(record.episode_id, record) for record in records)
    return Batch(groups=(Group(group_id="g", episodes=scored),))


def _config() -> TrainerConfig:
    return TrainerConfig.model_validate({"model": {"path": "m"}, "batch": {"max_strip_tokens": 9}})


def test_long_episodes_weigh_by_their_operations() -> None:
    sizes, rewards = [100, 40, 40, 40], [1.0, 0.0, 0.0, 1.0]
    batch = _batch(sizes, rewards)
    by_tokens = divide(batch, _config(), version=3, num_ranks=2)
    assert [[r.num_tokens for r in share.records] for share in by_tokens] == [[100], [40, 40, 40]]
    # Attention alone: the long one costs as much as six of the others.
    cost = ModelCost(weights=0, head_weights=0, attention_layers=1, attention_width=8)
    four = _batch([100, 40, 40, 40, 70], [*rewards, 1.0])
    shares = divide(four, _config(), version=3, num_ranks=2, cost=cost)
    loads = [sum(episode_flops(r, cost) for r in share.records) for share in shares]
    assert [[r.num_tokens for r in share.records] for share in shares] == [[100], [40, 40, 40, 70]]
    assert min(loads) / max(loads) > 0.9
    for share in shares:
        assert (share.num_episodes, share.version, share.teaches) == (5, 3, True)
    found = {
        r.episode_id: float(a) for s in shares for r, a in zip(s.records, s.advantages, strict=True)
    }
    assert found["e0"] == pytest.approx(1.0) and found["e1"] == pytest.approx(-1.5)


def test_a_step_that_teaches_nothing_is_one_strip_of_one_rank() -> None:
    shares = divide(_batch([4, 4, 4], [1.0] * 3), _config(), version=0, num_ranks=2)
    assert sum(len(share.records) for share in shares) == 2
    assert not any(share.teaches for share in shares)


def test_a_numbered_device_is_refused_for_several_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match=r"cuda:1, process 0.*nproc-per-node"):
        Ranks.join("cuda:1")
