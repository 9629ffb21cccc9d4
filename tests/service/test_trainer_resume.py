"""Killed anywhere, the trainer goes on: every episode once, and bit for bit the same policy."""

from __future__ import annotations

import asyncio
import shutil
import signal
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness_sdk import control
from harness_sdk.cli.embedded import ValkeyServer
from harness_sdk.errors import ConfigError, EngineError
from harness_sdk.record import EpisodeRecord, record_to_bytes
from harness_sdk.records_file import write_records
from tests.chat_tokenizers import save_chat_tokenizer
from tests.records import small_record
from tests.tiny_models import save_tiny_model
from tests.trainer_process import CRASH_POINTS, run_trainer
from tests.trainer_runs import (
    GROUP_SIZE,
    assert_equal,
    episodes,
    fill,
    final,
    run_config,
    stream_config,
)
from tests.valkey import embedded_valkey
from trainer_service import loop
from trainer_service.config import TrainerConfig
from trainer_service.loop import train
from trainer_service.metrics import read_metrics
from trainer_service.policy import Policy
from trainer_service.run_keys import permits
from trainer_service.run_state import RunState
from trainer_service.stream import RedisLink


@pytest.fixture
async def link(valkey: ValkeyServer) -> AsyncIterator[RedisLink]:
    link = RedisLink(valkey.url)
    yield link
    await link.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen3_5")


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, model: Path
) -> tuple[bytes, dict[str, Any], dict[str, Any]]:
    """Where three steps lead that nothing interrupts."""

    async def train_once(folder: Path) -> TrainerConfig:
        async with embedded_valkey(folder / "valkey") as url:
            config = stream_config(folder, model, "r", url)
            link = RedisLink(url)
            await fill(link, "r")
            assert await run_trainer(config) == 0
            await link.close()
        return config

    return final(asyncio.run(train_once(tmp_path_factory.mktemp("undisturbed"))))


@pytest.mark.parametrize("crash_step", [1, 2])
@pytest.mark.parametrize("crash_at", CRASH_POINTS)
async def test_killed_trainer_trains_every_episode_once(
    tmp_path: Path,
    model: Path,
    valkey: ValkeyServer,
    link: RedisLink,
    undisturbed: tuple[bytes, dict[str, Any], dict[str, Any]],
    crash_at: str,
    crash_step: int,
) -> None:
    config = stream_config(tmp_path, model, "r", valkey.url)
    await fill(link, "r")
    code = await run_trainer(config, crash_at=crash_at, crash_step=crash_step)
    assert code == -signal.SIGKILL
    assert (await link.client.xpending(control.episodes_key("r"), "trainer"))["pending"] > 0
    assert await run_trainer(config) == 0
    adapter, tensors, state = final(config)
    assert adapter == undisturbed[0]
    assert_equal(tensors, undisturbed[1])
    assert state["progress"] == undisturbed[2]["progress"]
    assert state["feed"]["dropped_episodes"] == undisturbed[2]["feed"]["dropped_episodes"]
    assert await permits(link, "r") == (3 + 1 + 11, 0)


def test_undisturbed_run_consumed_what_it_should(
    undisturbed: tuple[bytes, dict[str, Any], dict[str, Any]],
) -> None:
    _, _, state = undisturbed
    assert state["progress"]["version"] == 3
    assert state["feed"]["dropped_episodes"] == {
        "engine_error": 1,
        "too_few_finished": 1,
        "late": 1,
    }
    assert state["feed"]["dropped_groups"] == {"too_few_finished": 1}
    assert state["feed"]["dropped_entries"] == {"duplicate": 1}
    assert len(set(state["feed"]["recent"])) == 6 + 3


async def test_model_computes_on_one_thread(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = tmp_path / "r.records"
    write_records(records, episodes())
    batch = {"records": records, "episodes_per_step": 4}
    config = run_config(tmp_path, model, "r", objective="sft", batch=batch, max_steps=2)
    threads: set[int] = set()
    for owner, name in ((loop, "train_step"), (RunState, "save"), (Policy, "from_model")):
        _note_thread(monkeypatch, owner, name, threads)
    barrier = threading.Barrier(4)
    await asyncio.gather(*(asyncio.to_thread(barrier.wait, 10) for _ in range(4)))
    await loop.train(config, asyncio.Event())
    assert len(threads) == 1


def _note_thread(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, threads: set[int]) -> None:
    original = getattr(owner, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        threads.add(threading.get_ident())
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, noted)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
async def test_resume_is_bit_for_bit_the_uninterrupted_run(
    tmp_path: Path, model: Path, dtype: str
) -> None:
    records = tmp_path / "r.records"
    write_records(records, episodes())
    batch = {"records": records, "epochs": 3, "episodes_per_step": 4}
    optim = {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 1, "decay_steps": 6}
    whole, half = (
        run_config(
            tmp_path, model, run, model={"path": model, "dtype": dtype}, objective="sft",
            batch=batch, optim=optim, max_steps=max_steps,
        )
        for run, max_steps in (("whole", 6), ("half", 3))
    )  # fmt: skip
    rest = half.model_copy(update={"max_steps": 6})
    await train(whole, asyncio.Event())
    await train(half, asyncio.Event())
    # Whatever the process draws in between must not matter.
    torch.manual_seed(99)
    progress = await train(rest, asyncio.Event())
    assert progress.version == 6
    adapter, tensors, state = final(whole)
    resumed_adapter, resumed_tensors, resumed_state = final(rest)
    assert adapter == resumed_adapter
    assert_equal(tensors["optimizer"], resumed_tensors["optimizer"])
    # In float16 gradients overflow: the scale falls, and no episode is lost for it.
    scale = tensors["optimizer"]["scaler"].get("scale")
    assert scale is None if dtype == "float32" else scale < 65536
    assert tensors["optimizer"]["num_skipped"] == 0
    assert state["feed"] == resumed_state["feed"]
    losses = [line["loss/total"] for line in read_metrics(whole.folder / "metrics.jsonl")]
    resumed = [line["loss/total"] for line in read_metrics(half.folder / "metrics.jsonl")]
    assert losses == resumed
    assert losses[-1] < losses[0]


async def test_records_end_after_their_epochs_and_another_file_starts_anew(
    tmp_path: Path, model: Path
) -> None:
    records = episodes()
    write_records(tmp_path / "a", records[:3])
    write_records(tmp_path / "b", records[3:5])
    for name, steps in (("a", 3), ("a", 3), ("b", 5)):
        batch = {"records": tmp_path / name, "epochs": 2, "episodes_per_step": 2}
        config = run_config(tmp_path, model, "r", objective="sft", batch=batch, max_steps=9)
        assert (await train(config, asyncio.Event())).version == steps


async def test_another_objective_goes_on_with_versions_and_new_moments(
    valkey: ValkeyServer, link: RedisLink, tmp_path: Path, model: Path
) -> None:
    write_records(tmp_path / "a", episodes()[:4])
    batch = {"records": tmp_path / "a", "episodes_per_step": 2}
    sft = run_config(tmp_path, model, "r", objective="sft", batch=batch, max_steps=2)
    assert (await train(sft, asyncio.Event())).version == 2
    before, tensors, _ = final(sft)
    assert tensors["optimizer"]["adamw"]["state"][0]["step"] == 2
    await fill(link, "r")
    online = stream_config(tmp_path, model, "r", valkey.url)
    assert (await _train_until(online)).version == 3
    after, tensors, state = final(online)
    assert after != before
    # The third step of the run is the first of this objective.
    assert tensors["optimizer"]["num_steps"] == 3
    assert tensors["optimizer"]["adamw"]["state"][0]["step"] == 1
    assert state["objective"] == "dag_grpo"
    lines = read_metrics(online.folder / "metrics.jsonl")
    assert [(line["step"], line["objective"]) for line in lines] == [
        (1, "sft"), (2, "sft"), (3, "dag_grpo")
    ]  # fmt: skip


async def test_resume_refuses_another_base_model(tmp_path: Path, model: Path) -> None:
    write_records(tmp_path / "a", episodes()[:2])
    fields: dict[str, Any] = {"objective": "sft", "batch": {"records": tmp_path / "a"}}
    await train(run_config(tmp_path, model, "r", **fields), asyncio.Event())
    other = save_tiny_model(tmp_path / "other", "qwen3_5", seed=1)
    with pytest.raises(ConfigError, match="another base model"):
        await train(run_config(tmp_path, other, "r", **fields), asyncio.Event())


async def test_records_of_another_tokenizer_than_the_model_folder_s_are_refused(
    tmp_path: Path, model: Path, valkey: ValkeyServer, link: RedisLink
) -> None:
    own = save_chat_tokenizer(Path(shutil.copytree(model, tmp_path / "model")))
    other = [replace(record, tokenizer_hash="b" * 64) for record in episodes()[:2]]
    write_records(tmp_path / "a", other)
    fields: dict[str, Any] = {"objective": "sft", "batch": {"records": tmp_path / "a"}}
    with pytest.raises(ConfigError, match="episode-0 was made with another tokenizer"):
        await train(run_config(tmp_path, own, "file", **fields), asyncio.Event())
    for record in [*other, *(r for r in episodes() if r.group_id == "group-1")]:
        entry = {control.RECORD_FIELD: record_to_bytes(record)}
        await link.client.xadd(control.episodes_key("r"), entry)
    config = stream_config(tmp_path, own, "r", valkey.url).model_copy(update={"max_steps": 1})
    await train(config, asyncio.Event())
    (line,) = read_metrics(config.folder / "metrics.jsonl")
    assert line["dropped/other_tokenizer"] == 2.0
    assert await link.client.xlen(control.dead_key("r")) == 2


async def test_second_trainer_of_a_run_is_refused(tmp_path: Path, model: Path) -> None:
    write_records(tmp_path / "a", episodes()[:2])
    fields: dict[str, Any] = {"objective": "sft", "batch": {"records": tmp_path / "a"}}
    config = run_config(tmp_path, model, "r", **fields)
    first, second = await asyncio.gather(
        train(config, asyncio.Event()), train(config, asyncio.Event()), return_exceptions=True
    )
    assert not isinstance(first, BaseException)
    assert isinstance(second, ConfigError)
    assert "another trainer" in str(second)


async def _train_until(config: TrainerConfig, *, timeout_s: float = 60.0) -> Any:
    return await asyncio.wait_for(train(config, asyncio.Event()), timeout_s)


async def _add(link: RedisLink, *records: EpisodeRecord) -> None:
    for record in records:
        fields = {control.RECORD_FIELD: record_to_bytes(record)}
        await link.client.xadd(control.episodes_key("r"), fields)


async def test_second_folder_of_a_run_is_refused_and_a_moved_one_goes_on(
    tmp_path: Path, model: Path, valkey: ValkeyServer, link: RedisLink
) -> None:
    first = stream_config(tmp_path / "first", model, "r", valkey.url)
    ended = asyncio.Event()
    ended.set()
    await train(first, ended)
    second = stream_config(tmp_path / "second", model, "r", valkey.url)
    with pytest.raises(ConfigError, match=rf"another run folder.*{first.folder}.*new run name"):
        await train(second, asyncio.Event())
    first.run_folder.rename(tmp_path / "moved")
    await train(stream_config(tmp_path / "moved", model, "r", valkey.url), ended)
    await train(stream_config(tmp_path / "second", model, "other", valkey.url), ended)


async def test_redis_restart_between_steps_loses_nothing(
    tmp_path: Path, model: Path, valkey: ValkeyServer, link: RedisLink
) -> None:
    config = stream_config(tmp_path, model, "r", valkey.url)
    records = episodes()
    await _add(link, *records[:6])
    training = asyncio.create_task(_train_until(config))
    metrics = config.folder / "metrics.jsonl"
    while not (metrics.exists() and read_metrics(metrics)):
        await asyncio.sleep(0.05)
        assert not training.done()
    assert valkey.process is not None
    valkey.process.kill()
    await valkey.process.wait()
    await asyncio.sleep(0.3)
    await valkey.start()
    await link.call(lambda: link.client.ping())
    await _add(link, *records[6:])
    assert (await training).version == 3
    lines = read_metrics(metrics)
    assert sum(line["batch/episodes"] for line in lines) == 6
    pending = await link.client.xpending(control.episodes_key("r"), "trainer")
    assert pending["pending"] == 0


async def test_permits_of_lost_groups_return(
    tmp_path: Path, model: Path, valkey: ValkeyServer, link: RedisLink
) -> None:
    config = stream_config(tmp_path, model, "r", valkey.url)
    batch = config.batch.model_copy(update={"group_deadline_s": 0.3})
    stop = asyncio.Event()
    training = asyncio.create_task(train(config.model_copy(update={"batch": batch}), stop))
    async with asyncio.timeout(60):
        while (await permits(link, "r"))[0] != 11:
            await asyncio.sleep(0.05)
        # A runner takes all of them and dies.
        await link.client.hset(control.permits_key("r"), "taken", 11)
        while (await permits(link, "r"))[0] != 22:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.7)
        assert await permits(link, "r") == (22, 11)
        # One of them was only slow: its step grants nothing, for its permit has returned before.
        await _add(link, *(r for r in episodes() if r.group_id == "group-0"))
        metrics = config.folder / "metrics.jsonl"
        while not (metrics.exists() and read_metrics(metrics)):
            await asyncio.sleep(0.05)
    assert await permits(link, "r") == (22, 11)
    stop.set()
    await asyncio.wait_for(training, 20)


async def test_non_finite_steps_are_skipped_and_too_many_stop_the_run(
    tmp_path: Path, model: Path, valkey: ValkeyServer, link: RedisLink
) -> None:
    config = stream_config(tmp_path, model, "r", valkey.url)
    optim = config.optim.model_copy(update={"max_skipped": 2})
    for group in range(3):
        await _add(
            link,
            *(
                small_record(
                    f"{group}-{index}", group_id=f"g{group}", reward=float(index), logprob=-1e30
                )
                for index in range(GROUP_SIZE)
            ),
        )
    with pytest.raises(EngineError, match="2 steps in a row"):
        await _train_until(config.model_copy(update={"optim": optim}))
    lines = read_metrics(config.folder / "metrics.jsonl")
    assert [line["policy/version"] for line in lines] == [0.0, 0.0]
    assert [line["optim/skipped"] for line in lines] == [1.0, 2.0]
    # Each has a number of its own: under that of the last good step it would take its place.
    assert [(line["step"], line["optim/steps"]) for line in lines] == [(1, 0.0), (2, 0.0)]
    # They are consumed, and their permits return: the next run does not meet them again.
    pending = await link.client.xpending(control.episodes_key("r"), "trainer")
    assert pending["pending"] == 2
    assert (await permits(link, "r"))[0] == 2 + 11
