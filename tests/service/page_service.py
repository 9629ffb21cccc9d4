"""One rollout service for all pages: real gRPC, HTTP and Valkey around turns written here.

It runs on a thread of its own, so that a page's code may run an event loop as a reader's does.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

from harness_sdk.record import EpisodeRecord
from rollout_service.chat import ChatRenderer
from rollout_service.openai import serve_openai
from rollout_service.rpc import serve
from rollout_service.sessions import SessionOptions, Sessions
from rollout_service.stream import EpisodeStream
from tests.chat_tokenizers import chat_tokenizer
from tests.service.sdk_service import ScriptedEngine, calls
from tests.valkey import embedded_valkey

RUN = "local"


def reply(text: str) -> str:
    """What the model says on every page.

    Args:
        text: What it sees, mounts aside.
    """
    for branch, words in _BRANCHES.items():
        if f"[branch {branch}]" in text:
            return words
    last = text.rsplit("user", 1)[-1]
    for number in re.findall(r"What is (\d+)\+\1\?", last):
        return str(2 * int(number))
    if "How high is the tower?" in text:
        return "77 m high" if "77 m" in text else calls(("lookup", {"key": "tower"}))
    return "take the bus" if "Decide." in text or "Choose one" in text else "cars, buses, bikes"


_BRANCHES = {
    "bold": "ban all cars",
    "safe": "more buses",
    "cost": "a bus is cheap",
    "risk": "a bus is safe",
    "ann": "416",
    "bob": "415",
}


class _Sink:
    """Keeps the records and sends them into the stream."""

    def __init__(self, stream: EpisodeStream) -> None:
        self.records: list[EpisodeRecord] = []
        self._stream = stream

    async def write(self, record: EpisodeRecord) -> str:
        self.records.append(record)
        return await self._stream.write(record)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageService:
    """Where it runs, and what it saw."""

    address: str
    openai_url: str
    redis_url: str
    engine: ScriptedEngine
    records: list[EpisodeRecord]

    def here(self, text: str) -> str:
        """A page's text with this service in place of the addresses that pages name."""
        return (
            text.replace("http://127.0.0.1:8000/v1", self.openai_url)
            .replace("127.0.0.1:7040", self.address)
            .replace("redis://127.0.0.1:6379", self.redis_url.removesuffix("/0"))
        )


@contextlib.contextmanager
def page_service(folder: Path) -> Iterator[PageService]:
    """The service, on a thread, until the block ends.

    Args:
        folder: Takes Valkey's data and the tokenizer.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    serving = _serving(folder)

    def run(coroutine: object) -> PageService:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)  # type: ignore[arg-type]

    try:
        yield run(serving.__aenter__())
    finally:
        run(serving.__aexit__(None, None, None))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextlib.asynccontextmanager
async def _serving(folder: Path) -> AsyncIterator[PageService]:
    chat = ChatRenderer(chat_tokenizer(), preamble="compact")
    engine = ScriptedEngine(chat, reply)
    await engine.start()
    async with (
        embedded_valkey(folder / "valkey") as redis_url,
        EpisodeStream(redis_url, RUN) as stream,
    ):
        sink = _Sink(stream)
        sessions = Sessions(engine, chat, sink, SessionOptions(run=RUN))
        grpc, http = await serve(sessions), await serve_openai(sessions, grace_s=0.2)
        yield PageService(
            address=grpc.address,
            openai_url=http.url,
            redis_url=redis_url,
            engine=engine,
            records=sink.records,
        )
        await http.stop()
        await grpc.stop(0.2)
    await engine.close()
