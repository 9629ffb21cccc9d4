"""The whole loop over vLLM: an agent, a trainer, versions that go live; and its command."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from harness_sdk.cli.processes import free_port, spawn, stop
from harness_sdk.client import OctopusClient
from tests.chat_tokenizers import save_chat_tokenizer
from tests.e2e.loop_world import check_two_steps, loop_world
from tests.e2e.rollout_process import (
    ROLLOUT,
    descendants,
    play_episode,
    until_gone,
    until_listening,
)
from tests.valkey import embedded_valkey
from tests.vllm.models import save_servable_model

pytestmark = [
    pytest.mark.slow,
    # PEFT 0.21 reads a property that transformers has renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]


@pytest.mark.parametrize("family", ["llama", "granitemoehybrid"])
async def test_two_rl_steps_go_live_without_a_restart(family: str, tmp_path: Path) -> None:
    model = save_servable_model(tmp_path / "model", family)
    engine = {"name": "vllm", "max_tokens": 4096, "vllm": {"max_states": 64, "max_lora_rank": 8}}
    async with loop_world(tmp_path, model, engine=engine) as world:
        await check_two_steps(world, max_dlogp=5e-5)


async def test_command_serves_a_client_and_leaves_no_process_behind(
    tmp_path: Path,
) -> None:
    model = save_chat_tokenizer(save_servable_model(tmp_path / "model", "llama"))
    port, log = free_port(), tmp_path / "rollout.log"
    async with embedded_valkey(tmp_path / "valkey") as redis_url:
        process = await spawn(
            [*ROLLOUT, "--model.path", str(model), "--run-folder", str(tmp_path / "runs"),
             "--server.port", str(port), "--engine.name", "vllm", "--engine.max-tokens", "4096",
             "--limits.thread-budget", "1024", "--limits.answer-reserve", "64",
             "--model.preamble", "compact"],
            log_path=log,
            environment={"OCTOPUS_REDIS_URL": redis_url},
        )  # fmt: skip
        try:
            await until_listening(process, port, log)
            async with OctopusClient.connect(f"127.0.0.1:{port}") as client:
                assert client.info.engine == "vllm"
                assert await play_episode(client, "episode-1")
            children = descendants(process.pid)
            assert children, "the engine core is a process of its own"
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 30) == 0
            await until_gone(children)
        finally:
            await stop(process, 0)
    assert "Traceback" not in log.read_text(), log.read_text()
