"""Once round: an agent on the rollout service, episodes through Redis, steps, versions go live."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from harness_sdk import OctopusClient, SamplingOptions, control
from harness_sdk.cli.embedded import embedded_broker, embedded_valkey
from harness_sdk.errors import AdapterError
from harness_sdk.permits import redis_permits
from harness_sdk.record import EpisodeRecord, NodeKind, record_from_bytes
from rollout_service.config import RolloutConfig
from rollout_service.service import RolloutService
from tests.chat_tokenizers import save_chat_tokenizer
from tests.engine_cases import sharp_model
from tests.tiny_models import FAMILIES
from trainer_service.config import TrainerConfig
from trainer_service.loop import train
from trainer_service.metrics import read_metrics

RUN, GROUP_SIZE = "once-round", 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _World:
    """One replica with its servers."""

    folder: Path
    model: Path
    redis_url: str
    mqtt_url: str
    service: RolloutService

    def config(self, **fields: Any) -> TrainerConfig:
        """A trainer of one group a step, on policy."""
        return TrainerConfig.model_validate(
            {
                "run": RUN,
                "run_folder": self.folder / "runs",
                "model": {"path": self.model},
                "lora": {"rank": 4, "alpha": 8.0},
                "optim": {"lr": 1e-2},
                "batch": {"groups_per_step": 1, "group_size": GROUP_SIZE, "max_policy_lag": 0},
                "redis": {"url": self.redis_url},
                "mqtt": {"url": self.mqtt_url},
                "publish": {"min_replicas": 1, "ack_timeout_s": 20.0},
                **fields,
            }
        )

    async def records(self) -> list[EpisodeRecord]:
        """Everything the replica wrote that is still in the stream."""
        async with redis.asyncio.Redis.from_url(self.redis_url) as client:
            entries: Any = await client.xrange(control.episodes_key(RUN))
        return [record_from_bytes(fields[b"record"]) for _, fields in entries]


@contextlib.asynccontextmanager
async def _world(folder: Path, family: str) -> AsyncIterator[_World]:
    model = folder / "model"
    # Nearly uniform models would agree whatever they saw.
    (await asyncio.to_thread(sharp_model, family)).save_pretrained(model)
    save_chat_tokenizer(model)
    async with contextlib.AsyncExitStack() as stack:
        redis_url = await stack.enter_async_context(embedded_valkey(folder / "valkey"))
        mqtt_url = await stack.enter_async_context(embedded_broker())
        config = RolloutConfig.model_validate(
            {
                "run": RUN,
                "replica_id": "replica-0",
                "run_folder": folder / "runs",
                "model": {"path": model},
                "server": {"port": 0, "grace_s": 1.0},
                # The tiny Llama has 2,048 positions.
                "limits": {"thread_budget": 1024, "answer_reserve": 64},
                "redis": {"url": redis_url},
                "mqtt": {"url": mqtt_url},
            }
        )
        service = await stack.enter_async_context(RolloutService(config))
        applying = asyncio.create_task(service.run())
        try:
            yield _World(
                folder=folder,
                model=model,
                redis_url=redis_url,
                mqtt_url=mqtt_url,
                service=service,
            )
        finally:
            applying.cancel()
            await asyncio.gather(applying, return_exceptions=True)


async def _episode(client: OctopusClient, group: int, index: int) -> None:
    """Forks, rewinds and reads a sibling; the reward tells the episodes apart."""
    sampling = SamplingOptions(max_tokens=5, seed=100 * group + index, temperature=1.3)
    # The agent calls the primitives itself: no list of tools in the prompt.
    async with client.episode(task_id="t", group_id=f"group-{group}", primitives=()) as episode:
        root = episode.root
        await root.generate("What is six times seven?", sampling=sampling)
        children = await root.fork({"left": "Think of six.", "right": "Think of seven."})
        await children["left"].generate("Go on.", sampling=sampling)
        await children["left"].done("six")
        right = children["right"]
        await right.generate("Go on.", sampling=sampling)
        await right.rewind(0, note="that led nowhere")
        await right.read_thread(children["left"], (1, 1))
        await right.generate("What did it say?", sampling=sampling)
        await root.done("42")
        await episode.close(reward=index / (GROUP_SIZE - 1))


async def _run_groups(world: _World, num_groups: int) -> None:
    """What `octopus run` does: a permit for each group, then its episodes."""
    async with (
        OctopusClient.connect(world.service.address) as client,
        redis_permits(world.redis_url, RUN) as permits,
    ):
        for group in range(num_groups):
            await permits.take()
            await asyncio.gather(*(_episode(client, group, i) for i in range(GROUP_SIZE)))


async def _train_and_run(world: _World, config: TrainerConfig, num_groups: int) -> None:
    """Both at once; the first failure of either ends both."""
    tasks = [
        asyncio.create_task(train(config, asyncio.Event())),
        asyncio.create_task(_run_groups(world, num_groups)),
    ]
    done, running = await asyncio.wait(tasks, timeout=90, return_when=asyncio.FIRST_EXCEPTION)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    for task in done:
        task.result()
    assert not running, "neither failed nor ended"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
async def test_two_rl_steps_go_live_without_a_restart(family: str, tmp_path: Path) -> None:
    async with _world(tmp_path, family) as world:
        config = world.config(max_steps=2)
        await _train_and_run(world, config, 2)
        async with OctopusClient.connect(world.service.address) as client:
            assert (await client.status()).policy_versions == (0, 1, 2)
        records = await world.records()
    lines = read_metrics(config.folder / "metrics.jsonl")
    assert [line["policy/version"] for line in lines] == [1.0, 2.0]
    for number, line in enumerate(lines):
        group = [record for record in records if record.group_id == f"group-{number}"]
        assert line["divergence/num_tokens"] == sum(record.num_sampled for record in group)
        assert line["divergence/kl_mean"] < 1e-8
        assert line["divergence/dlogp_max"] <= 5e-5
        assert line["divergence_current/num_tokens"] == line["divergence/num_tokens"]
        assert line["publish/acknowledged"] == 1.0
        assert line["publish/probe_delta_max"] <= 5e-5
        assert line["policy/lag_max"] == 0.0
        assert line["tokens/packed"] < line["tokens/flat"]
        assert line["reward/mean"] == pytest.approx(0.5)
        assert line["optim/grad_norm"] > 0.0
        assert line["dropped/total"] == 0.0
    sampled_by = [{n.policy_version for n in r.nodes if any(n.sampled)} for r in records]
    assert sampled_by == [{0}] * GROUP_SIZE + [{1}] * GROUP_SIZE
    for record in records:
        assert any(node.mounts for node in record.nodes)
        assert any(node.rewound for node in record.nodes)
        assert {NodeKind.TURN, NodeKind.STUB, NodeKind.NOTE} <= {n.kind for n in record.nodes}


@pytest.mark.slow
async def test_replica_that_keeps_old_weights_is_caught_within_one_step(tmp_path: Path) -> None:
    """It loads what it is told to, forgets it, and acknowledges all the same."""
    async with _world(tmp_path, "qwen3_5") as world:
        engine: Any = world.service.adapters._engine
        load = engine.load_adapter

        async def load_the_first(version: int, path: str) -> None:
            first = world.folder / "runs" / RUN / "adapters" / "1"
            await load(version, str(first) if version > 1 else path)

        engine.load_adapter = load_the_first
        with pytest.raises(AdapterError, match=r"replica-0, version 2.*differs") as caught:
            await _train_and_run(world, world.config(max_steps=5), 5)
    assert "lora_B" in caught.value.value
    lines = read_metrics(world.config().folder / "metrics.jsonl")
    assert [line["policy/version"] for line in lines] == [1.0, 2.0]


@pytest.mark.slow
async def test_demonstrations_through_the_stream_teach(tmp_path: Path) -> None:
    async with _world(tmp_path, "qwen3_5") as world:
        async with OctopusClient.connect(world.service.address) as client:
            for _ in range(16):
                async with client.episode(task_id="t", primitives=()) as episode:
                    await episode.root.generate("Say it.", demonstration="forty-two")
                    await episode.root.done("forty-two")
                    await episode.close(reward=1.0)
        config = world.config(
            objective="sft", batch={"episodes_per_step": 4}, max_steps=4, optim={"lr": 3e-2}
        )
        await train(config, asyncio.Event())
        assert world.service.adapters.newest() == 4
    losses = [line["loss/total"] for line in read_metrics(config.folder / "metrics.jsonl")]
    assert losses[-1] < losses[0] - 0.5
