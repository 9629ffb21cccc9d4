"""SECURITY.md: every claim has a test that exists, and the claims that no other file tests."""

from __future__ import annotations

import ast
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harness_sdk.cli.settings import validate_config
from harness_sdk.cli.stack_config import StackConfig
from harness_sdk.cli.watch import add_arguments
from harness_sdk.errors import ConfigError
from harness_sdk.web_origin import is_loopback
from rollout_service.config import RolloutConfig
from tests.pages import ROOT
from trainer_service.checkpoint import CheckpointStore
from trainer_service.config import TrainerConfig

PACKAGES = ("harness_sdk", "rollout_service", "trainer_service", "kernels")
MODEL = {"model": {"path": "m"}}


def claims() -> list[list[str]]:
    """Cells of each row of the table of what holds."""
    text = (ROOT / "SECURITY.md").read_text("utf-8").partition("\n## What holds")[2]
    rows = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("| ").split(" | ")] for row in rows[1:]]


def test_every_claim_is_shown_by_a_test_that_exists() -> None:
    rows = claims()
    assert len(rows) > 20
    for name, _, tests in rows:
        found = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", tests)
        assert found and len(found) == tests.count("`") // 2, name
        for path, test in found:
            tree = ast.parse((ROOT / path).read_text("utf-8"))
            defined = {
                each.name
                for each in tree.body
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            assert test in defined, f"{name}: {path}::{test}"


def test_every_server_binds_the_loopback() -> None:
    import argparse

    rollout = validate_config(RolloutConfig, MODEL)
    trainer = validate_config(TrainerConfig, MODEL)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    hosts = [
        rollout.server.host, rollout.metrics.host, trainer.report.prometheus_host,
        parser.parse_args([]).host,
    ]  # fmt: skip
    assert all(map(is_loopback, hosts))


def _calls() -> Iterator[tuple[str, str, ast.Call]]:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Call):
                    yield str(path.relative_to(ROOT)), ast.unparse(node.func), node


def test_nothing_reaches_a_shell_or_an_interpreter() -> None:
    forbidden = {
        "eval", "exec", "os.system", "os.popen", "subprocess.getoutput",
        "subprocess.getstatusoutput", "asyncio.create_subprocess_shell", "pickle.load",
        "pickle.loads", "yaml.load", "yaml.unsafe_load", "marshal.loads",
    }  # fmt: skip
    # vLLM's engine process takes a function of this one, over a pipe of theirs.
    known = {("rollout_service/engine/vllm/stops.py", "pickle.loads")}
    found = set()
    for path, name, node in _calls():
        values = {each.arg: ast.unparse(each.value) for each in node.keywords}
        assert values.get("shell", "False") == "False", path
        assert name != "torch.load" or values.get("weights_only") == "True", path
        assert values.get("trust_remote_code", "False") == "False", path
        if name in forbidden:
            found.add((path, name))
    assert found <= known


@pytest.mark.parametrize("name", ["a/b", "../a", "", "a b", "a\nb", "a+", "#", "a:b*", "a\x00"])
def test_names_that_become_paths_keys_and_topics_are_bounded(name: str) -> None:
    for model, key in (
        (RolloutConfig, "run"),
        (RolloutConfig, "replica_id"),
        (TrainerConfig, "run"),
        (StackConfig, "run"),
    ):
        rest: dict[str, Any] = {"model": "m"} if model is StackConfig else MODEL
        with pytest.raises(ConfigError, match=key):
            validate_config(model, {**rest, key: name})


@pytest.mark.parametrize("name", [".", ".."])
def test_a_name_is_no_folder_above(name: str) -> None:
    for model in (RolloutConfig, TrainerConfig):
        with pytest.raises(ConfigError, match="run"):
            validate_config(model, {**MODEL, "run": name})


class Malicious:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self._path,)


def test_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "store", keep=2)
    store.save(1, save_adapter=Path.mkdir, state={}, optimizer={"moment": torch.zeros(1)})
    (path,) = [each for each in (tmp_path / "store").rglob("*.pt") if each.is_file()]
    made = tmp_path / "made"
    torch.save({"moment": Malicious(made)}, path)
    found = CheckpointStore(tmp_path / "store", keep=2).newest()
    assert found is not None
    with pytest.raises((ConfigError, pickle.UnpicklingError)):
        found.tensors()
    assert not made.exists()
