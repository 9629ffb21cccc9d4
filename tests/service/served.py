"""A real grpc.aio server over sessions, and a bare stub that talks to it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc

from harness_sdk._status import error_from_rpc
from harness_sdk.errors import HarnessError
from harness_sdk.rpc.v1 import rollout_pb2 as pb
from harness_sdk.rpc.v1.rollout_pb2_grpc import RolloutStub
from rollout_service.access import Access
from rollout_service.engine.base import Engine
from rollout_service.rpc import RunningServer, serve
from rollout_service.sessions import SessionOptions, Sessions
from tests.session_cases import CHAT, MemorySink

_LARGE = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A running server and everything around it."""

    sessions: Sessions
    sink: MemorySink
    engine: Engine
    server: RunningServer
    channel: grpc.aio.Channel

    @property
    def stub(self) -> Any:
        """Calls without any SDK."""
        return RolloutStub(self.channel)  # type: ignore[no-untyped-call]

    async def open(self, **fields: Any) -> OpenedEpisode:
        """Open an episode; its stream stays open until cancelled."""
        stream = self.stub.OpenEpisode(pb.OpenEpisodeRequest(**fields))
        event = await stream.read()
        assert event.HasField("opened"), event
        return OpenedEpisode(served=self, stream=stream, opened=event.opened)


@dataclass(slots=True, kw_only=True)
class OpenedEpisode:
    """An open episode as a client without SDK holds it."""

    served: Served
    stream: Any
    opened: pb.EpisodeOpened

    def call(self, thread: str = "root", head: int | None = None, key: str = "") -> pb.CallContext:
        """The address of a call; the current head where none is given."""
        episode = self.served.sessions.episode(self.opened.episode_id)
        current = episode.threads[thread].head_id if thread in episode.threads else 1
        return pb.CallContext(
            episode_id=self.opened.episode_id,
            thread_id=thread,
            expected_head=current if head is None else head,
            idempotency_key=key,
        )

    async def generate(self, content: str = "go", **fields: Any) -> list[pb.GenerateEvent]:
        """All events of a turn."""
        messages = [pb.Message(role="user", content=content)] if content else []
        fields.setdefault("call", self.call())
        request = pb.GenerateRequest(messages=messages, **fields)
        return [event async for event in self.served.stub.Generate(request)]


@contextlib.asynccontextmanager
async def served(
    engine: Engine,
    *,
    access: Access | None = None,
    options: SessionOptions | None = None,
    credentials: grpc.ChannelCredentials | None = None,
    **serving: Any,
) -> AsyncIterator[Served]:
    """Serve `engine` on a free port of the loopback."""
    sink = MemorySink()
    await engine.start()
    sessions = Sessions(engine, CHAT, sink, options or SessionOptions(run="r"))
    server = await serve(sessions, access=access, **serving)
    address = server.address.replace("127.0.0.1", "localhost") if credentials else server.address
    channel = (
        grpc.aio.insecure_channel(address, options=_LARGE)
        if credentials is None
        else grpc.aio.secure_channel(address, credentials, options=_LARGE)
    )
    try:
        yield Served(sessions=sessions, sink=sink, engine=engine, server=server, channel=channel)
    finally:
        await channel.close()
        await server.stop(0.5)
        await engine.close()


async def failure(call: Any) -> tuple[grpc.StatusCode, HarnessError]:
    """The status and the typed error of a call that must fail."""
    try:
        if hasattr(call, "__aiter__"):
            _ = [event async for event in call]
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code(), error_from_rpc(error)
    raise AssertionError("the call succeeded")
