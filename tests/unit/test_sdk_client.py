"""The client itself against a scripted gRPC server: handshake, retries, limits, closing."""

from __future__ import annotations

import asyncio

import pytest

from harness_sdk import OctopusClient, Timeouts
from harness_sdk.errors import (
    AuthError,
    BudgetExhausted,
    ClientClosed,
    ConfigError,
    DeadlineExceeded,
    ProtocolError,
    ResourceExhausted,
    Unavailable,
)
from tests.unit.scripted_server import FAST, Hang, ScriptedServer, reply, until


async def test_handshake_tells_what_the_replica_is(client: OctopusClient) -> None:
    assert client.info.replica_id == "scripted"
    assert client.info.limits.thread_budget == 1000
    assert (await client.status()).open_episodes == 0


async def test_other_protocol_version_is_refused(server: ScriptedServer, address: str) -> None:
    server.protocol_version = 99
    with pytest.raises(ProtocolError, match="got 99; allowed: 1"):
        async with OctopusClient.connect(address):
            pass


async def test_token_is_sent_and_a_wrong_one_refused(server: ScriptedServer, address: str) -> None:
    server.token = "right"
    async with OctopusClient.connect(address, token="right") as client:
        await client.status()
    with pytest.raises(AuthError):
        async with OctopusClient.connect(address, token="left"):
            pass


async def test_unreachable_service_is_unavailable_after_the_retries() -> None:
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1: .*octopus up"):
        async with OctopusClient.connect("127.0.0.1:1", retry=FAST):
            pass


@pytest.mark.parametrize(
    "wrong", ["", "localhost", "localhost:", ":7040", "127.0.0.1:99999", "http://127.0.0.1:7040"]
)
async def test_address_that_is_no_host_and_port_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        async with OctopusClient.connect(wrong):
            pass


async def test_closed_or_unopened_client_says_what_to_do(address: str) -> None:
    client = OctopusClient.connect(address)
    with pytest.raises(ClientClosed, match="async with"):
        await client.status()
    async with client:
        pass
    with pytest.raises(ClientClosed, match="async with"):
        await client.status()
    with pytest.raises(ClientClosed, match="async with"):
        client.episode()


async def test_retry_repeats_with_the_same_idempotency_key(
    server: ScriptedServer, client: OctopusClient
) -> None:
    server.failures["Done"] = [Unavailable("restarting"), Unavailable("restarting")]
    async with client.episode() as episode:
        await episode.root.done("42")
    keys = [request.call.idempotency_key for request in server.of("Done")]
    assert len(keys) == 3
    assert len(set(keys)) == 1


async def test_every_call_has_a_key_of_its_own(
    server: ScriptedServer, client: OctopusClient
) -> None:
    server.turns["root"] = [reply(), reply()]
    async with client.episode() as episode:
        await episode.root.generate("a")
        await episode.root.generate("b")
        await episode.root.rewind(1)
        await episode.root.done("42")
    keys = [
        request.call.idempotency_key
        for name, request in server.requests
        if name in ("Generate", "Rewind", "Done")
    ]
    assert len(set(keys)) == len(keys) == 4


async def test_error_that_is_not_retryable_is_raised_at_once(
    server: ScriptedServer, client: OctopusClient
) -> None:
    server.failures["Fork"] = [
        BudgetExhausted("no thread left", value=11, limit=10, remedy="wait", episode_id="e1")
    ]
    async with client.episode() as episode:
        with pytest.raises(BudgetExhausted) as caught:
            await episode.root.fork({"a": "do a"})
        assert caught.value.context() == {
            "value": "11",
            "limit": "10",
            "remedy": "wait",
            "episode_id": "e1",
            "thread_id": "",
        }
        await episode.root.done("still open")
    assert len(server.of("Fork")) == 1


async def test_deadline_of_a_call_is_an_error(server: ScriptedServer, address: str) -> None:
    server.turns["root"] = [Hang()]
    timeouts = Timeouts(generate_s=0.2)
    async with (
        OctopusClient.connect(address, timeouts=timeouts) as client,
        client.episode() as episode,
    ):
        with pytest.raises(DeadlineExceeded):
            await episode.root.generate("a")
        await until(lambda: server.cancelled_calls == ["Generate root"])


async def test_message_over_the_service_limit_names_side_size_and_limit(
    server: ScriptedServer, client: OctopusClient
) -> None:
    async with client.episode() as episode:
        with pytest.raises(ResourceExhausted) as caught:
            await episode.root.generate("x" * (2 << 20))
        assert "server" in caught.value.message
        assert caught.value.limit == f"{1 << 20} bytes"
        assert int(caught.value.value.split()[0]) > 2 << 20
        server.turns["root"] = [reply()]
        await episode.root.generate("x" * (1 << 19))
    assert len(server.of("Generate")) == 1


async def test_message_over_the_client_limit_names_the_client(address: str) -> None:
    async with (
        OctopusClient.connect(address, max_message_bytes=4096) as client,
        client.episode() as episode,
    ):
        with pytest.raises(ResourceExhausted, match="client"):
            await episode.root.generate("x" * 8192)


async def test_closing_the_client_stops_calls_with_a_clear_error(
    server: ScriptedServer, address: str
) -> None:
    server.turns["root"] = [Hang()]
    client = OctopusClient.connect(address)

    async def agent() -> None:
        async with client.episode() as episode:
            await episode.root.generate("x")

    async with client:
        task = asyncio.create_task(agent())
        await until(lambda: server.of("Generate"))
    with pytest.raises(ClientClosed):
        await task
    await until(lambda: not server.open_episodes)


async def test_two_clients_of_one_process_do_not_disturb_each_other(
    server: ScriptedServer, address: str
) -> None:
    server.turns["root"] = [reply(text="still here")]
    async with OctopusClient.connect(address) as first, first.episode() as episode:
        async with OctopusClient.connect(address) as second:
            await second.status()
        turn = await episode.root.generate("x")
        assert turn.text == "still here"
