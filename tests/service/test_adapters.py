"""Hot LoRA versions on the real engine: proved when served, named when refused."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import resource
import threading
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
import torch
from safetensors.torch import load_file

from harness_sdk import control
from harness_sdk.control import PolicyAnnouncement
from harness_sdk.errors import EngineError
from rollout_service.adapter_files import check_sha256
from rollout_service.stream import EpisodeStream
from tests.adapter_cases import (
    PROBE,
    RANK,
    Replica,
    drop_tensor,
    never,
    new_adapters,
    open_replica,
    reference_logprobs,
)
from tests.valkey import embedded_valkey

# peft 0.21 reads the name that transformers 5.24 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")


@pytest.fixture
async def replica(chat_folder: Path, tmp_path: Path) -> AsyncGenerator[Replica]:
    async with open_replica(chat_folder, tmp_path) as replica:
        yield replica


async def test_good_adapter_serves_with_its_own_bytes_and_peft_s_probe(replica: Replica) -> None:
    folder = replica.adapter(1)
    state = await replica.adapters.apply(replica.announce(1, folder))
    assert (state.versions, state.error, state.error_version) == ((0, 1), "", 0)
    assert replica.adapters.newest() == 1
    tensors = load_file(folder / control.ADAPTER_FILE)
    assert state.checksums == {
        name: hashlib.sha256(tensor.numpy().astype("<f4").tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }
    assert state.probe_logprobs == pytest.approx(reference_logprobs(replica.model, 1), abs=1e-4)
    base = await replica.engine.score(PROBE, policy_version=0)
    assert max(abs(a - b) for a, b in zip(base, state.probe_logprobs, strict=True)) > 0.01
    # A repeat, as brokers send them, changes nothing.
    assert await replica.adapters.apply(replica.announce(1, folder)) is state


def _add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.layers.0.mlp.router.lora_A.weight"] = torch.zeros(RANK, 48)


def _reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"] = torch.zeros(81, RANK)


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (drop_tensor, "layers.0.mlp.up_proj.lora_A.weight"),
        (_add, "layers.0.mlp.router.lora_A.weight"),
        (_reshape, "layers.1.mlp.up_proj.lora_B.weight"),
    ],
    ids=["missing", "unknown", "misshaped"],
)
async def test_bad_tensor_is_refused_by_name_and_the_old_version_serves(
    replica: Replica, edit: Any, named: str
) -> None:
    good = await replica.adapters.apply(replica.announce(1, replica.adapter(1)))
    bad = replica.edited("bad", edit)
    state = await replica.adapters.apply(replica.announce(2, bad))
    assert named in state.error
    assert state.error_version == 2
    assert (state.versions, state.checksums) == (good.versions, good.checksums)
    assert replica.adapters.newest() == 1
    scores = await replica.engine.score(PROBE, policy_version=1)
    assert scores == good.probe_logprobs
    # The next good one clears the error.
    state = await replica.adapters.apply(replica.announce(3, replica.adapter(3)))
    assert (state.versions, state.error) == ((0, 1, 3), "")


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"sha256": "0" * 64}, "sha256 of adapter 2"),
        ({"num_tensors": 3}, "number of tensors of adapter 2"),
        ({"base_model": "another"}, "another base model"),
        ({"rank": RANK + 1}, "rank of adapter 2"),
        ({"alpha": 1.0}, "alpha of adapter 2"),
        ({"version": 1}, "not newer"),
        ({"version": 0}, "not newer"),
        ({"probe_token_ids": (1,)}, "got 1; allowed: 2 to 1024; set the trainer's publish.probe"),
        ({"probe_token_ids": (1,) * 1025}, "got 1025; allowed: 2 to 1024; set the trainer's publi"),
        ({"uri": "https://host/adapter"}, "nowhere that this replica looks"),
        ({"uri": "redis:octopus:other:adapter:2"}, "nowhere that this replica looks"),
        ({"uri": "file:///nowhere"}, "outside of the run's folder"),
    ],
)
async def test_wrong_announcement_is_refused_with_its_reason(
    replica: Replica, changed: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    await replica.adapters.apply(replica.announce(1, replica.adapter(1)))
    announcement = replace(replica.announce(2, replica.adapter(2)), **changed)
    with caplog.at_level(logging.ERROR):
        state = await replica.adapters.apply(announcement)
    assert named in state.error
    assert named in caplog.text
    assert state.versions == (0, 1)
    assert replica.adapters.newest() == 1
    # Nothing of it is left, neither on disk nor in the engine.
    state = await replica.adapters.apply(replica.announce(2, replica.adapter(2)))
    assert (state.versions, state.error) == ((0, 1, 2), "")


async def test_the_file_is_hashed_while_the_engine_loads_it(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashing, loading = threading.Event(), asyncio.Event()
    load, check, loop = replica.engine.load_adapter, check_sha256, asyncio.get_running_loop()

    async def load_beside(version: int, path: str) -> None:
        loading.set()
        assert await asyncio.to_thread(hashing.wait, 5)
        await load(version, path)

    def check_beside(announcement: PolicyAnnouncement, folder: Path) -> None:
        hashing.set()
        asyncio.run_coroutine_threadsafe(loading.wait(), loop).result(5)
        check(announcement, folder)

    monkeypatch.setattr(replica.engine, "load_adapter", load_beside)
    monkeypatch.setattr("rollout_service.adapters.check_sha256", check_beside)
    state = await replica.adapters.apply(replica.announce(1, replica.adapter(1)))
    assert (state.versions, state.error) == ((0, 1), "")


@pytest.mark.parametrize(
    "changed",
    [
        {"lora_alpha": None},
        {"target_modules": "("},
        {"target_modules": [3]},
        {"rank_pattern": [1]},
        {"base_model_name_or_path": 5},
    ],
)
async def test_malformed_config_is_refused_and_the_replica_serves_on(
    replica: Replica, changed: dict[str, Any]
) -> None:
    folder = replica.adapter(1)
    path = folder / control.ADAPTER_CONFIG_FILE
    good = path.read_text()
    path.write_text(json.dumps(json.loads(good) | changed))
    state = await replica.adapters.apply(replica.announce(1, folder))
    assert any(told in state.error for told in ("adapter 1 cannot be served", "not PEFT's"))
    assert (state.error_version, state.versions) == (1, (0,))
    path.write_text(good)
    state = await replica.adapters.apply(replica.announce(1, folder))
    assert (state.versions, state.error) == ((0, 1), "")


async def test_pickled_adapter_is_never_read(replica: Replica) -> None:
    folder = replica.adapter(1)
    announcement = replica.announce(1, folder)
    (folder / control.ADAPTER_FILE).rename(folder / "adapter_model.bin")
    state = await replica.adapters.apply(announcement)
    assert "has no adapter_model.safetensors" in state.error
    (folder / control.ADAPTER_FILE).write_bytes(b"\x80\x04")
    sha256 = hashlib.sha256(b"\x80\x04").hexdigest()
    state = await replica.adapters.apply(replace(announcement, sha256=sha256))
    assert "no safetensors file" in state.error


async def test_oversize_adapter_is_refused(replica: Replica, tmp_path: Path) -> None:
    small = new_adapters(replica.engine, tmp_path / "small", fetch=never, max_bytes=100)
    state = await small.apply(replica.announce(1, replica.adapter(1)))
    assert "too large" in state.error
    assert "100 bytes" in state.error


async def test_adapter_that_the_disk_cannot_take_is_refused_and_the_next_one_serves(
    replica: Replica,
) -> None:
    first = replica.announce(1, replica.adapter(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # What a full disk does to the copy.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, hard))
    try:
        state = await replica.adapters.apply(first)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "adapter 1 cannot be written to this replica's disk; got" in state.error
    assert "File too large; make room there" in state.error
    assert not (replica.folder / "cache" / "version-1").exists()
    state = await replica.adapters.apply(replica.announce(2, replica.adapter(1)))
    assert (state.versions, state.error) == ((0, 2), "")


async def test_version_that_cannot_be_proved_is_unloaded(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = replica.adapter(1)

    async def failing(version: int) -> dict[str, str]:
        raise EngineError(f"cannot read version {version} back")

    monkeypatch.setattr(replica.engine, "adapter_checksums", failing)
    state = await replica.adapters.apply(replica.announce(1, folder))
    assert (state.versions, state.error) == ((0,), "cannot read version 1 back")
    assert not (replica.folder / "cache" / "version-1").exists()
    monkeypatch.undo()
    # The same version, which the engine would refuse if it had it still.
    state = await replica.adapters.apply(replica.announce(1, folder))
    assert (state.versions, state.error) == ((0, 1), "")


async def test_adapter_comes_through_redis(replica: Replica, tmp_path: Path) -> None:
    folder = replica.adapter(1)
    data = (folder / control.ADAPTER_FILE).read_bytes()
    async with (
        embedded_valkey(tmp_path / "valkey") as url,
        EpisodeStream(url, "test") as stream,
        redis.asyncio.Redis.from_url(url) as client,
    ):

        async def fetch(version: int, target: Path) -> None:
            await stream.fetch_adapter(version, target, max_bytes=1 << 20)

        adapters = new_adapters(replica.engine, tmp_path / "through", fetch=fetch)
        uri = f"redis:{control.adapter_key('test', 1)}"
        state = await adapters.apply(replica.announce(1, folder, uri=uri))
        assert "not in Redis" in state.error
        meta: dict[Any, Any] = {
            "num_chunks": 1, "num_bytes": len(data),
            "config": json.dumps(json.loads((folder / control.ADAPTER_CONFIG_FILE).read_text())),
        }  # fmt: skip
        await client.set(control.adapter_chunk_key("test", 1, 0), data)
        await client.hset(control.adapter_meta_key("test", 1), mapping=meta)
        state = await adapters.apply(replica.announce(1, folder, uri=uri))
        assert (state.versions, state.error) == ((0, 1), "")
