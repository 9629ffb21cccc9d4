"""A client that dies mid-generation leaves nothing behind on the service."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from harness_sdk import OctopusClient
from harness_sdk.types import ServerStatus
from rollout_service.chat import ChatRenderer, ChatTokenizer
from rollout_service.engine.transformers import TransformersEngine
from tests.chat_tokenizers import save_chat_tokenizer
from tests.service.sdk_service import running
from tests.unit.scripted_server import until

CLIENT = """
import asyncio, sys
from harness_sdk import OctopusClient, SamplingOptions

async def main(address):
    endless = SamplingOptions(max_tokens=100_000, temperature=1.0)
    async with (
        OctopusClient.connect(address) as client,
        client.episode(primitives=(), sampling=endless) as episode,
    ):
        await episode.root.generate("begin", demonstration="one")
        for child in (await episode.root.fork({"a": "go", "b": "go"})).values():
            child.spawn(child.generate())
        # A random model may end a turn at any token.
        while True:
            async for event in episode.root.stream("go on"):
                sys.stdout.write("x")
                sys.stdout.flush()

asyncio.run(main(sys.argv[1]))
"""


async def test_killed_client_returns_threads_pages_and_slots_within_five_seconds(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    tokenizer = ChatTokenizer.load(save_chat_tokenizer(tmp_path / "tokenizer"))
    engine = TransformersEngine(str(model_folder("qwen3_5")), detokenize=tokenizer.decode)
    async with (
        running(engine, ChatRenderer(tokenizer, preamble="compact")) as service,
        OctopusClient.connect(service.address) as client,
    ):
        baseline = await client.status()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CLIENT, service.address, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        async with asyncio.timeout(60):
            await process.stdout.readexactly(5)
        busy = await client.status()
        assert (busy.open_episodes, busy.live_threads) == (1, 3)
        assert busy.tokens_resident > baseline.tokens_resident
        assert busy.recurrent_slots > baseline.recurrent_slots
        process.send_signal(signal.SIGKILL)
        killed_s = time.monotonic()
        await process.wait()
        await until(lambda: service.records.written, timeout_s=5)
        after = await client.status()
        assert time.monotonic() - killed_s < 5
        assert _held(after) == _held(baseline)
        assert service.engine.stats().running == 0
    (record,) = service.records.written
    assert record.stop_reason == "client_lost"


def _held(status: ServerStatus) -> tuple[int, ...]:
    return (
        status.open_episodes,
        status.live_threads,
        status.resident_cursors,
        status.recurrent_slots,
        status.tokens_resident,
    )
