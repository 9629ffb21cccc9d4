"""A client that floods the service, over real gRPC and real HTTP; and the health check."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any

import grpc
import openai
import pytest

from harness_sdk import OctopusClient
from harness_sdk.errors import TooManyCalls
from harness_sdk.rpc.v1 import rollout_pb2 as pb
from rollout_service.client_limits import ClientLimits
from tests.service.openai_service import endpoint
from tests.service.served import failure, served
from tests.service.test_access import ACCESS, TOKENS, bearer, calls, opened
from tests.session_cases import LOOK, ScriptedEngine


async def test_a_flood_is_refused_by_type_and_keeps_nobody_waiting() -> None:
    now_s, refusals = 0.0, list[None]()
    limits = ClientLimits(8, 20, on_refused=lambda: refusals.append(None), now_s=lambda: now_s)
    # Room for all of them, whose size nobody knows.
    engine = ScriptedEngine(max_tokens=1 << 40)
    async with (
        asyncio.timeout(60),
        served(engine, access=ACCESS, limits=limits) as running,
    ):
        held = [await opened(running, "alice") for _ in range(8)]
        request = pb.OpenEpisodeRequest()
        status, error = await failure(running.stub.OpenEpisode(request, metadata=bearer("alice")))
        assert status is grpc.StatusCode.RESOURCE_EXHAUSTED and isinstance(error, TooManyCalls)
        assert (error.value, error.limit) == ("8 running", "8 calls at a time")

        flooding = [
            asyncio.ensure_future(
                failure(running.stub.OpenEpisode(pb.OpenEpisodeRequest(), metadata=bearer("alice")))
            )
            for _ in range(300)
        ]
        # Another client does not notice, and is served before the flood has been answered.
        episode = await opened(running, "bob", primitives=["fork"])
        for name in ("Generate", "Fork", "CloseEpisode"):
            rpc = calls(running.stub, episode.call())[name](metadata=bearer("bob"))
            _ = [event async for event in rpc] if name == "Generate" else await rpc
        errors = [error for _, error in await asyncio.gather(*flooding)]
        assert {type(error) for error in errors} == {TooManyCalls}
        # The first nine were 8 episodes and one refusal.
        told = Counter(error.limit for error in errors)
        assert told == {"8 calls at a time": 11, "20 calls a second": 289}
        assert len(refusals) == 301

        # It is served again, first where it gives something back.
        now_s = 1.0
        closing = calls(running.stub, held[0].call())["CloseEpisode"]
        await closing(metadata=bearer("alice"))
        assert (await held[0].stream.read()).HasField("closed")
        assert await held[0].stream.code() is grpc.StatusCode.OK
        await opened(running, "alice")


async def test_the_sdk_pauses_until_it_may_call_again() -> None:
    limits = ClientLimits(max_calls_per_s=20)
    async with (
        served(ScriptedEngine(), access=ACCESS, limits=limits) as running,
        OctopusClient.connect(running.server.address, token=TOKENS["alice"]) as client,
    ):
        statuses = await asyncio.gather(*(client.status() for _ in range(30)))
        assert len(statuses) == 30


async def test_requests_over_http_are_limited_too() -> None:
    limits = ClientLimits(max_calls_per_s=2)
    async with endpoint(lambda text: LOOK, limits=limits) as served_http:
        client: Any = served_http.client
        for _ in range(2):
            await client.models.list()
        with pytest.raises(openai.RateLimitError, match="2 calls a second") as caught:
            await client.models.list()
        assert caught.value.status_code == 429


async def test_the_health_check_tells_whether_calls_are_served_and_asks_for_no_token() -> None:
    engine = ScriptedEngine()
    async with served(engine, access=ACCESS) as running:
        check = running.channel.unary_unary("/grpc.health.v1.Health/Check")
        watch = running.channel.unary_stream("/grpc.health.v1.Health/Watch")
        serving, not_serving = b"\x08\x01", b"\x08\x02"
        assert await check(b"") == serving
        told = aiter(watch(b"\x0a\x03any"))
        assert await anext(told) == serving
        engine.is_serving = False
        async with asyncio.timeout(5):
            assert await anext(told) == not_serving
        assert await check(b"") == not_serving
        engine.is_serving = True
        assert await check(b"") == serving
        # Nothing else of that name, and nothing that only begins like it.
        for path in ("/grpc.health.v1.Health/List", "/grpc.health.v1.HealthOfOthers/Check"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await running.channel.unary_unary(path)(b"")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await running.sessions.drain()
        assert await check(b"") == not_serving


async def test_watches_of_the_health_check_are_bounded_and_given_back() -> None:
    async with served(ScriptedEngine(), access=ACCESS) as running, asyncio.timeout(20):
        watch = running.channel.unary_stream("/grpc.health.v1.Health/Watch")
        calls = [watch(b"") for _ in range(64)]
        for call in calls:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError, match="64 Watch streams are open") as caught:
            await watch(b"").read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        calls.pop().cancel()
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                calls.append(again := watch(b""))
                await again.read()
                break
            await asyncio.sleep(0.01)
        for call in calls:
            call.cancel()
