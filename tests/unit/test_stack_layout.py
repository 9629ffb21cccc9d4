"""What `octopus up` starts: replicas, trainer processes, and who sees which GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness_sdk.cli.__main__ import main
from harness_sdk.cli.stack_config import StackConfig
from harness_sdk.cli.stack_layout import replica_plans, trainer_plan
from harness_sdk.errors import ConfigError


def _config(**fields: Any) -> StackConfig:
    return StackConfig.model_validate({"model": "/m", "run": "r", **fields})


def test_one_replica_keeps_its_plain_names() -> None:
    (plan,) = replica_plans(_config())
    assert (plan.name, plan.settings["replica_id"], plan.gpus) == ("rollout", "replica-0", None)
    assert trainer_plan(_config()).argv(Path("t.toml"))[1:] == [
        "-m", "trainer_service", "--config", "t.toml",
    ]  # fmt: skip


def test_replicas_have_names_ports_and_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = _config(
        replicas=2, trainer_processes=4, gpus=8, port=7040, openai_port=8000,
        rollout={"engine": {"vllm": {"tensor_parallel_size": "2"}}},
        trainer={"model": {"device": "cuda"}, "ranks": {"sharding": "fsdp"}},
    )  # fmt: skip
    plans = replica_plans(config)
    assert [plan.name for plan in plans] == ["rollout-0", "rollout-1"]
    assert [plan.settings["replica_id"] for plan in plans] == ["replica-0", "replica-1"]
    assert [plan.settings["server"]["port"] for plan in plans] == [7040, 7041]
    assert [plan.settings["openai"]["port"] for plan in plans] == [8000, 8001]
    trainer = trainer_plan(config)
    seen = [plan.environment()["CUDA_VISIBLE_DEVICES"] for plan in (*plans, trainer)]
    assert seen == ["0,1", "2,3", "4,5,6,7"]
    assert trainer.argv(Path("t.toml"))[1:] == [
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4",
        "--shutdown-timeout", "28",
        "-m", "trainer_service", "--config", "t.toml",
    ]  # fmt: skip


def test_gpus_are_those_that_a_scheduler_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, GPU-b,GPU-c")
    config = _config(replicas=2, gpus=3)
    assert [plan.gpus for plan in replica_plans(config)] == [("GPU-a",), ("GPU-b",)]
    assert trainer_plan(config).gpus == ("GPU-c",)
    with pytest.raises(ConfigError, match=r"gpus is more than CUDA_VISIBLE_DEVICES.*got 4.*3: GPU"):
        replica_plans(_config(gpus=4))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"replicas": 3, "gpus": 3}, "replicas and trainer_processes .* than gpus; got 4: 3 rep"),
        (
            {"trainer": {"ranks": {"sharding": "fsdp"}}},
            "trainer.ranks.sharding fsdp does not go with trainer_processes 1",
        ),
        (
            {"trainer_processes": 2, "trainer": {"model": {"device": "cuda:1"}}},
            "trainer.model.device cuda:1 does not go with trainer_processes 2",
        ),
        (
            {"rollout": {"model": {"dtype": "bfloat16"}}},
            "rollout.model.dtype bfloat16 does not go with trainer.model.dtype float32",
        ),
        (
            {
                "rollout": {"model": {"dtype": "float16"}},
                "trainer": {"model": {"dtype": "float16", "head_dtype": "model"}},
            },
            "rollout.model.head_dtype float32 does not go with trainer.model.head_dtype model",
        ),
        (
            {"trainer": {"batch": {"max_policy_lag": 4}}},
            "rollout.adapters.max_versions 4 does not go with trainer.batch.max_policy_lag 4;"
            " allowed: 5 and more",
        ),
        (
            {
                "rollout": {"model": {"mount_layers": [3, 7]}},
                "trainer": {"model": {"mount_layers": [3]}},
            },
            r"rollout.model.mount_layers does not go with trainer.model.mount_layers; got \[3, 7\]"
            r" and \[3\]",
        ),
        (
            {"replicas": 2, "rollout": {"replica_id": "mine"}},
            "rollout.replica_id does not go with replicas 2",
        ),
        (
            {"replicas": 2, "rollout": {"metrics": {"port": 9000}}},
            "rollout.metrics.port does not go with replicas 2",
        ),
    ],
)
def test_pairs_that_do_not_go_together_are_both_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        _ = replica_plans(_config(**fields)), trainer_plan(_config(**fields))


def test_two_types_go_together_where_the_trainer_takes_them() -> None:
    """Imitation compares no log-probabilities; a version's probe is compared all the same."""
    rollout = {"model": {"dtype": "bfloat16"}}
    with pytest.raises(
        ConfigError, match=r"bfloat16 does not pass .* float32; allowed: 0\.001 nat"
    ):
        trainer_plan(_config(rollout=rollout, trainer={"objective": "sft"}))
    for publish in ({"probe_tolerance": 0.1}, {"enabled": False}):
        trainer_plan(_config(rollout=rollout, trainer={"objective": "sft", "publish": publish}))
    trainer_plan(_config(trainer={"objective": "sft", "model": {"dtype": "bfloat16"}}))


def test_as_many_versions_as_the_lag_needs_and_equal_mount_layers_go_together() -> None:
    lag = {"batch": {"max_policy_lag": 4}}
    trainer_plan(_config(trainer=lag, rollout={"adapters": {"max_versions": 5}}))
    trainer_plan(_config(trainer={**lag, "publish": {"enabled": False}}))
    layers = {"model": {"mount_layers": [3, 7]}}
    trainer_plan(_config(trainer=layers, rollout=layers))
    # The family's rule, which is in the model's folder, may say the same.
    trainer_plan(_config(trainer=layers))


def test_logits_of_a_float32_model_are_the_same_either_way() -> None:
    trainer_plan(_config(trainer={"model": {"head_dtype": "model"}}))


def test_dry_run_says_what_would_be_started(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    flags = ("--replicas", "2", "--trainer-processes", "2", "--gpus", "4")
    assert main(["up", "--model", "/m", *flags, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "# runs/local/rollout-1.toml: CUDA_VISIBLE_DEVICES=1 python -m rollout_service" in shown
    assert "CUDA_VISIBLE_DEVICES=2,3 python -m torch.distributed.run --standalone" in shown
