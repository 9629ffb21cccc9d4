"""Sinks of a step's figures: what is missing is said, what fails costs no run."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import types
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from harness_sdk.errors import ConfigError
from harness_sdk.exposition import exposed, metric_name
from trainer_service.config import TrainerConfig
from trainer_service.sections import RedisOptions
from trainer_service.sinks import open_sinks, opened_sinks


def _config(folder: Path, **report: Any) -> TrainerConfig:
    config = TrainerConfig.model_validate(
        {"run": "r", "run_folder": folder, "model": {"path": "m"}, "report": report}
    )
    config.folder.mkdir(parents=True)
    return config


def _scraped(address: str) -> list[str]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as reply:
        return [line for line in reply.read().decode().splitlines() if line[0] != "#"]


def test_prometheus_reads_the_newest_of_every_figure(tmp_path: Path) -> None:
    config = _config(tmp_path, prometheus_port=0)
    with open_sinks(config) as (sink,):
        address = (config.folder / "metrics.address").read_text()
        assert _scraped(address) == []
        sink(1, {"reward/mean": 0.25, "publish/behind": 1.0, "optim/steps": 1.0})
        sink(2, {"reward/mean": 0.5, "optim/steps": 1.0})
        assert _scraped(address) == [
            'octopus_trainer_optim_steps{run="r"} 1.0',
            'octopus_trainer_publish_behind{run="r"} 1.0',
            'octopus_trainer_reward_mean{run="r"} 0.5',
        ]
    with pytest.raises(OSError):
        _scraped(address)


def test_figures_by_cause_are_one_counter() -> None:
    read = {"tokens/recomputed_eviction": 7.0, "tokens/recomputed_refresh": 0.0, "kv_use": 0.5}
    counters = {"tokens/recomputed_": "cause"}
    with exposed(
        "rollout", lambda: read, host="127.0.0.1", port=0, labels={"run": "r"}, counters=counters
    ) as address:
        assert _scraped(address) == [
            'octopus_rollout_tokens_recomputed_total{cause="eviction",run="r"} 7.0',
            'octopus_rollout_tokens_recomputed_total{cause="refresh",run="r"} 0.0',
            'octopus_rollout_kv_use{run="r"} 0.5',
        ]


def test_address_that_is_taken_is_refused() -> None:
    with exposed("trainer", dict, host="127.0.0.1", port=0, labels={}) as address:
        port = int(address.rpartition(":")[2])
        with (
            pytest.raises(ConfigError, match="take another port"),
            exposed("trainer", dict, host="127.0.0.1", port=port, labels={}),
        ):
            pass


def test_names_are_those_of_prometheus() -> None:
    assert metric_name("rollout", "tokens/recomputed_evicted-2") == (
        "octopus_rollout_tokens_recomputed_evicted_2"
    )


@pytest.mark.parametrize(
    ("package", "report"),
    [("torch.utils.tensorboard", {"tensorboard": True}), ("wandb", {"wandb_project": "p"})],
)
def test_package_that_is_missing_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, report: dict[str, Any]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with (
        pytest.raises(ConfigError, match=r"octopus-agents\[metrics\]"),
        open_sinks(_config(tmp_path, **report)),
    ):
        pass


def test_tensorboard_has_every_figure_at_its_step(tmp_path: Path) -> None:
    config = _config(tmp_path, tensorboard=True)
    with open_sinks(config) as (sink,):
        sink(1, {"reward/mean": 0.25})
        sink(2, {"reward/mean": 0.5})
    reader: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(config.folder / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]


def test_wandb_goes_on_with_the_run_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[tuple[int, dict[str, float]]] = []
    ended: list[bool] = []
    given: dict[str, Any] = {}

    class Run:
        def log(self, values: dict[str, float], *, step: int) -> None:
            logged.append((step, values))

        def finish(self) -> None:
            ended.append(True)

    def init(**options: Any) -> Run:
        given.update(options)
        return Run()

    fake = types.ModuleType("wandb")
    fake.__dict__["init"] = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    url = RedisOptions(url="redis://u:no-ones-business@h")
    config = _config(tmp_path, wandb_project="p").model_copy(update={"redis": url})
    with open_sinks(config) as (sink,):
        sink(3, {"reward/mean": 0.5})
    assert (given["project"], given["id"], given["resume"]) == ("p", "r", "allow")
    assert given["config"]["batch"]["group_size"] == 8
    assert given["config"]["redis"]["url"] == "redis://u:**********@h"
    assert "no-ones-business" not in str(given)
    assert (logged, ended) == ([(3, {"reward/mean": 0.5})], [True])


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package whose `init` is the test's to set."""
    fake: Any = types.ModuleType("wandb")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_that_refuses_the_run_is_named_with_its_remedy(tmp_path: Path, wandb: Any) -> None:
    def init(**_: Any) -> None:
        raise RuntimeError("no API key configured")

    wandb.init = init
    with (
        pytest.raises(ConfigError, match=r"RuntimeError: no API key.*WANDB_MODE=offline"),
        open_sinks(_config(tmp_path, wandb_project="p")),
    ):
        pass


async def test_sinks_open_and_close_beside_the_event_loop(tmp_path: Path, wandb: Any) -> None:
    threads: list[threading.Thread] = []

    class Run:
        def finish(self) -> None:
            threads.append(threading.current_thread())

    def init(**_: Any) -> Run:
        threads.append(threading.current_thread())
        return Run()

    wandb.init = init
    async with contextlib.AsyncExitStack() as stack:
        assert len(await opened_sinks(_config(tmp_path, wandb_project="p"), stack)) == 1
    assert len(threads) == 2
    assert threading.main_thread() not in threads
