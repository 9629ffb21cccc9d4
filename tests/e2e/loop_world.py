"""One replica with its servers, agents on it, and a trainer behind the stream, in one process."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis.asyncio

from harness_sdk import OctopusClient, SamplingOptions, control
from harness_sdk.cli.embedded import embedded_broker
from harness_sdk.permits import redis_permits
from harness_sdk.record import EpisodeRecord, NodeKind, record_from_bytes
from rollout_service.config import RolloutConfig
from rollout_service.service import RolloutService
from tests.chat_tokenizers import save_chat_tokenizer
from tests.valkey import embedded_valkey
from trainer_service.config import TrainerConfig
from trainer_service.loop import train
from trainer_service.metrics import read_metrics

RUN, GROUP_SIZE = "once-round", 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopWorld:
    """One replica with its servers."""

    folder: Path
    model: Path
    redis_url: str
    mqtt_url: str
    service: RolloutService
    dtype: str = "float32"
    """Of replica and trainer."""

    def config(self, **fields: Any) -> TrainerConfig:
        """A trainer of one group a step, on policy."""
        return TrainerConfig.model_validate(
            {
                "run": RUN,
                "run_folder": self.folder / "runs",
                "model": {"path": self.model, "dtype": self.dtype},
                "lora": {"rank": 4, "alpha": 8.0},
                "optim": {"lr": 1e-2},
                "batch": {"groups_per_step": 1, "group_size": GROUP_SIZE, "max_policy_lag": 0},
                "redis": {"url": self.redis_url},
                "mqtt": {"url": self.mqtt_url},
                "publish": {"min_replicas": 1, "ack_timeout_s": 20.0},
                **fields,
            }
        )

    async def figures(self) -> list[dict[str, Any]]:
        """What the trainer sent of its steps."""
        async with redis.asyncio.Redis.from_url(self.redis_url) as client:
            entries: Any = await client.xrange(control.steps_key(RUN))
        return [json.loads(fields[b"figures"]) for _, fields in entries]

    async def records(self) -> list[EpisodeRecord]:
        """Everything the replica wrote that is still in the stream."""
        async with redis.asyncio.Redis.from_url(self.redis_url) as client:
            entries: Any = await client.xrange(control.episodes_key(RUN))
        return [record_from_bytes(fields[b"record"]) for _, fields in entries]


@contextlib.asynccontextmanager
async def loop_world(
    folder: Path, model: Path, *, dtype: str = "float32", **fields: Any
) -> AsyncIterator[LoopWorld]:
    """The servers and the replica, in `folder`.

    Args:
        folder: Holds all that is written.
        model: The checkpoint's folder; the chat tokenizer is written to it.
        dtype: Of replica and trainer.
        fields: Sections of the replica's configuration.
    """
    save_chat_tokenizer(model)
    async with contextlib.AsyncExitStack() as stack:
        redis_url = await stack.enter_async_context(embedded_valkey(folder / "valkey"))
        mqtt_url = await stack.enter_async_context(embedded_broker())
        config = RolloutConfig.model_validate(
            {
                "run": RUN,
                "replica_id": "replica-0",
                "run_folder": folder / "runs",
                "model": {"path": model, "dtype": dtype},
                "server": {"port": 0, "grace_s": 1.0},
                # The tiny Llama has 2,048 positions.
                "limits": {"thread_budget": 1024, "answer_reserve": 64},
                "redis": {"url": redis_url},
                "mqtt": {"url": mqtt_url},
                **fields,
            }
        )
        service = await stack.enter_async_context(RolloutService(config))
        applying = asyncio.create_task(service.run())
        try:
            yield LoopWorld(
                folder=folder,
                model=model,
                redis_url=redis_url,
                mqtt_url=mqtt_url,
                service=service,
                dtype=dtype,
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


async def _run_groups(world: LoopWorld, num_groups: int) -> None:
    """What `octopus run` does: a permit for each group, then its episodes."""
    async with (
        OctopusClient.connect(world.service.address) as client,
        redis_permits(world.redis_url, RUN) as permits,
    ):
        for group in range(num_groups):
            await permits.take(f"group-{group}")
            await asyncio.gather(*(_episode(client, group, i) for i in range(GROUP_SIZE)))
            await permits.end(f"group-{group}")


async def train_and_run(
    world: LoopWorld, config: TrainerConfig, num_groups: int, *, timeout_s: float = 90.0
) -> None:
    """Both at once; the first failure of either ends both."""
    tasks = [
        asyncio.create_task(train(config, asyncio.Event())),
        asyncio.create_task(_run_groups(world, num_groups)),
    ]
    done, running = await asyncio.wait(
        tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION
    )
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    for task in done:
        task.result()
    assert not running, "neither failed nor ended"


async def check_two_steps(world: LoopWorld, *, max_dlogp: float, max_kl: float = 1e-8) -> None:
    """Two groups of branching episodes become two versions that serve, and trainer and replica
    agree on every sampled token within `max_dlogp` nats."""
    config = world.config(max_steps=2)
    await train_and_run(world, config, 2)
    async with OctopusClient.connect(world.service.address) as client:
        assert (await client.status()).policy_versions == (0, 1, 2)
    records = await world.records()
    lines = read_metrics(config.folder / "metrics.jsonl")
    assert [line["policy/version"] for line in lines] == [1.0, 2.0]
    assert await world.figures() == lines
    for number, line in enumerate(lines):
        group = [record for record in records if record.group_id == f"group-{number}"]
        assert line["divergence/num_tokens"] == sum(record.num_sampled for record in group)
        assert line["divergence/kl_mean"] < max_kl
        assert line["divergence/dlogp_max"] <= max_dlogp
        assert line["divergence_current/num_tokens"] == line["divergence/num_tokens"]
        assert line["publish/acknowledged"] == 1.0
        assert line["publish/probe_delta_max"] <= max_dlogp
        assert line["policy/lag_max"] == 0.0
        assert line["tokens/packed"] < line["tokens/flat"]
        assert abs(line["reward/mean"] - 0.5) < 1e-6
        assert line["optim/grad_norm"] > 0.0
        assert line["dropped/total"] == 0.0
    sampled_by = [{n.policy_version for n in r.nodes if any(n.sampled)} for r in records]
    assert sampled_by == [{0}] * GROUP_SIZE + [{1}] * GROUP_SIZE
    for record in records:
        assert any(node.mounts for node in record.nodes)
        assert any(node.rewound for node in record.nodes)
        assert {NodeKind.TURN, NodeKind.STUB, NodeKind.NOTE} <= {n.kind for n in record.nodes}
