"""The endpoint inside the wired replica: one process, one token, one set of certificates."""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from harness_sdk import OctopusClient
from harness_sdk.cli.settings import validate_config
from harness_sdk.cli.stack_config import StackConfig
from harness_sdk.cli.stack_layout import replica_plans
from rollout_service.access import Access
from rollout_service.config import RolloutConfig
from rollout_service.service import RolloutService
from tests.service.openai_service import endpoint
from tests.service.sdk_service import calls
from tests.service.test_server import certificate
from tests.unit.scripted_server import until

DOCS = Path(__file__).parents[2] / "docs" / "howto" / "openai.md"


def settings(chat_folder: Path, tmp_path: Path, **server: Any) -> dict[str, Any]:
    return {
        "run_folder": str(tmp_path / "runs"), "replica_id": "r",
        "model": {"path": str(chat_folder)}, "openai": {"port": 0},
        "server": {"port": 0, "grace_s": 1, **server},
    }  # fmt: skip


async def test_both_servers_share_sessions_and_token_and_stop_at_once(
    chat_folder: Path, tmp_path: Path
) -> None:
    config = validate_config(RolloutConfig, settings(chat_folder, tmp_path, token="secret"))
    async with RolloutService(config) as service:
        url = f"http://{service.openai_address}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="secret", max_retries=0) as client:
            create = client.chat.completions.create
            question: Any = [{"role": "user", "content": "q"}]
            first = await create(model="m", messages=question, max_tokens=3, user="s")
            assert first.model == chat_folder.name
            async with OctopusClient.connect(service.address, token="secret") as sdk:
                assert (await sdk.status()).open_episodes == 1
            endless = create(model="m", messages=question, user="s", temperature=0)
            running = asyncio.create_task(endless)
            (episode,) = service.sessions._episodes.values()
            await until(lambda: any(thread.busy for thread in episode.threads.values()))
            began = time.monotonic()
            await service.__aexit__(None, None, None)
            assert time.monotonic() - began < 5
            # Another replica may serve it: clients repeat it.
            with pytest.raises(openai.APIStatusError) as caught:
                await running
            assert caught.value.status_code == 503


async def test_certificates_are_those_of_the_server(chat_folder: Path, tmp_path: Path) -> None:
    certificate(tmp_path, "localhost")
    cert, key = tmp_path / "localhost.pem", tmp_path / "localhost.key"
    tls = {"tls_cert": str(cert), "tls_key": str(key)}
    config = validate_config(RolloutConfig, settings(chat_folder, tmp_path, **tls))
    async with RolloutService(config) as service:
        trusting = ssl.create_default_context(cafile=str(cert))
        port = service.openai_address.rpartition(":")[2]
        url = f"https://localhost:{port}/v1/models"
        async with aiohttp.ClientSession() as http, http.get(url, ssl=trusting) as reply:
            assert (await reply.json())["data"][0]["id"] == chat_folder.name


async def test_agent_of_the_documentation_earns_its_reward() -> None:
    block, _ = re.findall(r"```python\n(.*?)```", DOCS.read_text("utf-8"), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, "openai.md", "exec"), names)

    def model(text: str) -> str:
        return "It is 77 m high." if "77 m" in text else calls(("lookup", {"key": "tower"}))

    async with endpoint(model, access=Access("key")) as service:
        assert await names["episode"](service.url, "key", "tower-1") == 1.0
    (record,) = service.records.written
    assert (record.reward, len(record.nodes), len(record.threads)) == (1.0, 4, 1)


def test_up_hands_its_port_on() -> None:
    config = StackConfig(model=Path("model"), openai_port=8123)
    assert replica_plans(config)[0].settings["openai"]["port"] == 8123
    assert replica_plans(StackConfig(model=Path("model")))[0].settings["openai"]["port"] is None
