"""deploy/presets: each says its command at its head, which takes it and says what it would run."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from harness_sdk.cli.__main__ import main
from harness_sdk.cli.settings import load_config
from harness_sdk.cli.stack_config import StackConfig
from harness_sdk.cli.stack_layout import replica_plans, rollout_config, trainer_plan
from trainer_service.config import TrainerConfig

ROOT = Path(__file__).parents[2]
PRESETS = {path.stem: path for path in sorted((ROOT / "deploy" / "presets").glob("*.toml"))}


def _command(path: Path) -> list[str]:
    """Of the preset's first line, as words behind `octopus`."""
    line = path.read_text().splitlines()[0].removeprefix("# ").replace("FOLDER", "/m")
    line = re.sub(r"^torchrun .*trainer_service", "octopus trainer", line)
    program, *words = shlex.split(line)
    assert program == "octopus" and f"deploy/presets/{path.name}" in words
    return words


def test_there_is_a_preset_for_each_size() -> None:
    assert set(PRESETS) == {"demo", "one_gpu", "node_of_8", "nodes_rollout", "nodes_trainer"}


@pytest.mark.parametrize("name", list(PRESETS))
def test_its_command_takes_it(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OCTOPUS_TOKEN", "sesame")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    model = ["--model.path", "/m"] if name.startswith("nodes") else []
    assert main([*_command(PRESETS[name]), *model, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "sesame" not in shown
    for key, value in tomllib.loads(PRESETS[name].read_text()).items():
        if isinstance(value, str | int):
            assert f"{key} = {value!r}".replace("'", '"') in shown


@pytest.mark.parametrize("name", ["one_gpu", "node_of_8"])
def test_its_services_keep_in_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = load_config(StackConfig, PRESETS[name], ("--model", "/m"))
    plans = replica_plans(config)
    trainer = TrainerConfig.model_validate(trainer_plan(config).settings)
    assert trainer.publish.min_replicas <= len(plans)
    for plan in plans:
        assert rollout_config(plan).adapters.max_versions > trainer.max_policy_lag
    if config.gpus is not None:
        seen = [gpu for plan in (*plans, trainer_plan(config)) for gpu in plan.gpus or ()]
        assert sorted(seen) == [str(number) for number in range(config.gpus)]


def test_unknown_key_of_a_preset_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = PRESETS["node_of_8"].read_text().replace("sharding =", "shardin =")
    (tmp_path / "p.toml").write_text(changed)
    assert main(["up", "--config", str(tmp_path / "p.toml"), "--model", "/m", "--dry-run"]) == 1
    assert "did you mean ranks.sharding?" in capsys.readouterr().err
