"""The trainer's configuration: defaults, refusals, and what goes together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness_sdk.cli.settings import load_config, render_config
from harness_sdk.errors import ConfigError
from trainer_service.config import OBJECTIVE_NAMES, TrainerConfig

MODEL = ("--model.path", "somewhere")


def test_trainer_config_imports_nothing_heavy() -> None:
    code = (
        "import sys, trainer_service.config;"
        "heavy = ('torch', 'transformers', 'redis', 'vllm', 'numpy', 'aiomqtt');"
        "print([m for m in heavy if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


@pytest.mark.parametrize("objective", OBJECTIVE_NAMES)
def test_trainer_config_takes_every_objective(objective: str) -> None:
    config = load_config(TrainerConfig, None, ("--objective", objective, *MODEL))
    assert config.needs_groups == (objective != "sft")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--objective", "ppo"), "dag_grpo, path_average, token_unique, sft"),
        (("--objective", "sft", "--batch.max-policy-lag", "1"), "max_policy_lag .* objective sft"),
        (("--objective", "sft", "--batch.group-size", "4"), "group_size .* objective sft"),
        (("--objective", "sft", "--loss.clip-low", "0.1"), "loss.* objective sft"),
        (("--objective", "sft", "--batch.epochs", "2"), "batch.records"),
        (("--batch.records", "x"), "records .* objective dag_grpo"),
        (("--batch.min-group", "9"), "got 9; allowed: 2..8"),
        (("--publish.probe-tokens", "1025"), "probe_tokens .* got '?1025'?; allowed: .*1024"),
        (("--batch.staleness", "correct"), "importance_cap"),
        (("--batch.advantages", "mean"), "got mean; allowed: leave_one_out, group_mean"),
        (("--loss.importance", "mask"), "no loss.importance_cap"),
        (("--loss.importance-level", "sequence"), "no loss.importance_cap"),
        (("--loss.importance-cap", "2", "--loss.importance-floor", "0.5"), "use mask"),
        (
            (
                "--loss.importance-cap",
                "2",
                "--loss.importance",
                "mask",
                "--loss.importance-floor",
                "2",
            ),
            "below loss.importance_cap, 2",
        ),
        (
            ("--objective", "token_unique", "--loss.constant-length", "9"),
            "constant_length .* objective token_unique",
        ),
        (("--optim.schedule", "cosine"), "no end"),
        (("--optim.decay-steps", "9"), "constant"),
        (
            ("--optim.schedule", "linear", "--max-steps", "5", "--optim.warmup-steps", "5"),
            "below 5",
        ),
        *(
            ((f"--{key}", "inf"), f"{key} is not valid; got 'inf'; allowed: a finite number")
            for key in ("optim.lr", "optim.eps", "lora.alpha", "loss.kl_coef")
        ),
        (("--ranks.sharding", "ddp"), "'none' or 'fsdp'"),
        (("--batch.groups-per-stp", "1"), "did you mean batch.groups_per_step"),
    ],
)
def test_trainer_config_refuses_with_a_remedy(flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(TrainerConfig, None, (*flags, *MODEL))


@pytest.mark.parametrize("objective", OBJECTIVE_NAMES)
def test_resolved_trainer_config_loads_again(objective: str, tmp_path: Path) -> None:
    config = load_config(TrainerConfig, None, ("--objective", objective, *MODEL))
    (tmp_path / "resolved.toml").write_text(render_config(config))
    assert load_config(TrainerConfig, tmp_path / "resolved.toml") == config


def test_trainer_config_without_a_model_says_which_flag() -> None:
    with pytest.raises(ConfigError, match=r"--model\.path"):
        load_config(TrainerConfig)


def test_trainer_config_fills_in_the_schedules_end() -> None:
    flags = ("--optim.schedule", "cosine", "--max-steps", "7", *MODEL)
    assert load_config(TrainerConfig, None, flags).optim_options.decay_steps == 7
