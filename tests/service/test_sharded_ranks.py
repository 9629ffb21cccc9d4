"""Steps of several processes, base weights divided among them: each number is that of one alone."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness_sdk.errors import ConfigError
from harness_sdk.record import EpisodeRecord
from tests.random_records import random_record
from tests.rank_processes import Stepped, step_once
from tests.tiny_models import save_tiny_model
from tests.trainer_runs import run_config
from trainer_service.config import TrainerConfig
from trainer_service.pieces import num_pieces
from trainer_service.ranks import Ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen3_5")


def _records(count: int) -> list[EpisodeRecord]:
    """Episodes of one group, each of more events than the one before."""
    return [
        random_record(
            np.random.default_rng(index),
            300,
            episode_id=f"episode-{index}",
            group_id="group",
            num_events=4 + 2 * index,
            mount_layers=(2, 5),
            reward=float(index == 0),
        )
        for index in range(count)
    ]


def _config(folder: Path, model: Path, sharding: str, **fields: Any) -> TrainerConfig:
    own = {
        "path": model,
        "dtype": fields.pop("dtype", "float32"),
        "activation_checkpointing": fields.pop("checkpointing", False),
    }
    size = fields.pop("piece", None)
    return run_config(
        folder, model, sharding,
        model=own,
        # Each episode is a strip.
        batch={
            "groups_per_step": 1, "group_size": 2, "max_policy_lag": 9, "max_strip_tokens": 1,
            "max_piece_tokens": size,
        },
        ranks={"sharding": sharding},
        **fields,
    )  # fmt: skip


def _steps(
    folder: Path, model: Path, records: list[EpisodeRecord], *, size: int = 2, **fields: Any
) -> tuple[Stepped, list[Stepped]]:
    """Of one process with all weights, and of `size` that divide them."""
    found = []
    for sharding, num_ranks in (("none", 1), ("fsdp", size)):
        config = _config(folder, model, sharding, **fields)
        config.folder.mkdir(parents=True)
        ended = step_once(config, records, num_ranks, folder / f"left-{sharding}")
        assert [each.exit_code for each in ended] == [0] * num_ranks, ended
        found.append([each.stepped for each in ended if each.stepped is not None])
    return found[0][0], found[1]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_strip_each_gives_the_bits_of_one_process(
    tmp_path: Path, model: Path, checkpointing: bool
) -> None:
    alone, together = _steps(tmp_path, model, _records(2), checkpointing=checkpointing)
    assert together[0].loss == alone.loss
    assert together[0].probe == alone.probe
    for stepped in together:
        assert 0 < stepped.num_weights < 0.7 * alone.num_weights
        for name, wanted in alone.gradients.items():
            assert wanted.any(), name
            assert torch.equal(stepped.gradients[name], wanted), name
        assert stepped.adapter.keys() == alone.adapter.keys()
        for name, wanted in alone.adapter.items():
            assert torch.equal(stepped.adapter[name], wanted), name


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_ranks_with_fewer_strips_keep_pace(tmp_path: Path, model: Path, size: int) -> None:
    # Five strips, and a second pass for the KL.
    alone, together = _steps(tmp_path, model, _records(5), size=size, loss={"kl_coef": 0.1})
    assert len(together) == size
    assert together[0].loss == pytest.approx(alone.loss, rel=1e-6)
    for name, wanted in alone.gradients.items():
        for stepped in together:
            assert float((stepped.gradients[name] - wanted).abs().max()) <= 1e-6, name


def test_more_ranks_than_strips_and_a_step_that_teaches_nothing(
    tmp_path: Path, model: Path
) -> None:
    records = _records(1) * 2
    alone, together = _steps(tmp_path, model, records)
    assert together[0].loss == alone.loss == 0.0
    for stepped in together:
        assert not any(gradient.any() for gradient in stepped.gradients.values())


@pytest.mark.parametrize(("piece", "wanted"), [(40, [2, 1]), (20, [3, 2, 4, 4, 5])])
def test_ranks_with_fewer_pieces_keep_pace(
    tmp_path: Path, model: Path, piece: int, wanted: list[int]
) -> None:
    records = _records(len(wanted))
    assert [num_pieces(record.num_tokens, piece) for record in records] == wanted
    alone, together = _steps(tmp_path, model, records, piece=piece, loss={"kl_coef": 0.1})
    assert together[0].loss == pytest.approx(alone.loss, rel=1e-6)
    for stepped in together:
        for name, gradient in alone.gradients.items():
            assert gradient.any(), name
            assert float((stepped.gradients[name] - gradient).abs().max()) <= 1e-6, name
        for name, value in alone.adapter.items():
            assert torch.equal(stepped.adapter[name], together[0].adapter[name]), name
            assert float((stepped.adapter[name] - value).abs().max()) <= 1e-6, name


def test_a_rank_without_an_episode_keeps_pace_with_pieces(tmp_path: Path, model: Path) -> None:
    alone, together = _steps(tmp_path, model, _records(1), piece=20, loss={"kl_coef": 0.1})
    assert together[0].loss == alone.loss
    for stepped in together:
        for name, wanted in alone.gradients.items():
            assert wanted.any(), name
            assert torch.equal(stepped.gradients[name], wanted), name
        for name, wanted in alone.adapter.items():
            assert torch.equal(stepped.adapter[name], wanted), name


@pytest.mark.parametrize("fields", [{}, {"piece": 20}, {"checkpointing": True}])
def test_a_rank_holds_whole_the_layer_alone_that_computes(
    tmp_path: Path, model: Path, fields: dict[str, Any]
) -> None:
    alone, together = _steps(tmp_path, model, _records(2), **fields)
    for stepped in together:
        # The layers are 8, and two whole ones are less than half of the weights divided.
        divided = alone.num_weights - stepped.num_weights
        assert stepped.num_weights < stepped.most_weights < stepped.num_weights + 0.5 * divided


def _overflowing(record: EpisodeRecord, by: float) -> EpisodeRecord:
    """Without reward, and as if sampled where each token was e^`by` times less likely."""
    nodes = [
        replace(node, sampled_logprobs=tuple(each - by for each in node.sampled_logprobs))
        for node in record.nodes
    ]
    return replace(record, reward=0.0, nodes=tuple(nodes))


@pytest.mark.parametrize(
    ("sharding", "loud", "by", "num_skipped"),
    [("fsdp", 0, 4.0, 0), ("none", 1, 20.0, 1)],
)
def test_ranks_agree_on_a_float16_step_where_one_alone_overflows(
    tmp_path: Path, model: Path, sharding: str, loud: int, by: float, num_skipped: int
) -> None:
    records = _records(2)
    records = [replace(record, reward=1.0) for record in records]
    records[loud] = _overflowing(records[loud], by)
    config = _config(tmp_path, model, sharding, dtype="float16")
    config.folder.mkdir(parents=True)
    ended = step_once(config, records, 2, tmp_path / "left")
    assert [each.exit_code for each in ended] == [0, 0], ended
    # The longer episode is the leader's.
    leads = records[loud].num_tokens > records[1 - loud].num_tokens
    one, other = (each.stepped for each in (ended if leads else ended[::-1]))
    assert one is not None and other is not None
    assert one.finite[0] is False and all(other.finite)
    assert len(one.finite) == len(other.finite) > 1
    assert one.finite[-1] is (num_skipped == 0)
    assert one.num_skipped == other.num_skipped == num_skipped
    assert one.loss_scale == other.loss_scale < 65536.0
    for name, value in one.adapter.items():
        assert torch.equal(other.adapter[name], value), name


def test_a_rank_that_dies_in_a_pass_ends_the_other_which_names_it(
    tmp_path: Path, model: Path
) -> None:
    config = _config(tmp_path, model, "fsdp")
    config.folder.mkdir(parents=True)
    leader, follower = step_once(config, _records(2), 2, tmp_path / "left", dies=1)
    assert follower.exit_code == -signal.SIGKILL
    assert leader.exit_code == 1
    assert "another process of this trainer is gone; got process 1 of 2" in leader.error


def test_a_single_process_has_nobody_to_share_with() -> None:
    with pytest.raises(ConfigError, match=r"ranks\.sharding fsdp.*a single process.*torchrun"):
        Ranks().mesh("fsdp")
