"""Requests that no good client sends: each gets an error that helps, and nothing hangs or leaks."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest

from rollout_service.chat.nesting import MAX_DEPTH
from tests.service.openai_service import Endpoint, endpoint
from tests.unit.scripted_server import until

QUESTION: Any = [{"role": "user", "content": "q"}]


def talker(text: str) -> str:
    """A model whose answer to `long` no socket's buffers hold."""
    return "many words " * 2_500 if "long" in text else "fine"


async def post(
    service: Endpoint, body: Any, path: str = "/chat/completions", **options: Any
) -> tuple[int, dict[str, Any]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with (
        aiohttp.ClientSession() as http,
        http.post(service.url + path, data=data, **options) as response,
    ):
        return response.status, await response.json()


def nested(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


def deep_tool(levels: int) -> bytes:
    schema = nested(levels)
    tool = f'{{"type":"function","function":{{"name":"f","parameters":{schema}}}}}'
    return f'{{"messages":[{{"role":"user","content":"q"}}],"tools":[{tool}]}}'.encode()


def deep_arguments(levels: int) -> dict[str, Any]:
    call = {"id": "1", "function": {"name": "f", "arguments": nested(levels)}}
    answer = {"role": "tool", "tool_call_id": "1", "content": "x"}
    return {"messages": [*QUESTION, {"role": "assistant", "tool_calls": [call]}, answer]}


@pytest.mark.parametrize("levels", [MAX_DEPTH + 1, 300, 900, 960, 970, 980, 990, 1000, 100_000])
@pytest.mark.parametrize("body", [deep_tool, deep_arguments])
async def test_json_nested_too_deeply_is_refused(body: Any, levels: int) -> None:
    async with endpoint(talker) as service:
        status, _ = await post(service, body(20))
        assert status == 200
        status, answer = await post(service, body(levels))
        if body is deep_arguments and levels >= 960 and status == 200:
            # What no JSON parser reads is an argument's text.
            return
        assert status == 400
        assert answer["error"]["code"] == "context_length_exceeded" or (
            any(word in answer["error"]["message"] for word in ("too deeply", "recursion depth"))
        )


@pytest.mark.parametrize(
    "name", ["a\r\nX-Evil: 1", "a\0", "\ud800", "u" * 257, "..", "tab\t"], ids=range(6)
)
@pytest.mark.parametrize("where", ["user", "session", "group", "task"])
async def test_name_that_no_header_path_or_record_can_carry_is_refused(
    name: str, where: str
) -> None:
    given = {"user": name} if where == "user" else {"metadata": {where: name}}
    async with endpoint(talker) as service:
        status, answer = await post(service, {"messages": QUESTION, **given})
        assert status == 400
        assert answer["error"]["param"] == ("session" if where == "user" else where)
        assert "256 printable characters" in answer["error"]["limit"]
        assert service.sessions.status().open_episodes == 0


async def test_name_of_any_other_characters_is_served_and_closed() -> None:
    async with endpoint(talker) as service:
        name = "a/b c?d#e%2F é漢" + "u" * 200
        status, answer = await post(service, {"messages": QUESTION, "user": name})
        assert (status, answer["octopus"]["session"]) == (200, name)
        closed, _ = await post(service, {}, f"/octopus/sessions/{quote(name, safe='')}/close")
        assert closed == 200 and service.sessions.status().open_episodes == 0


async def test_body_in_another_encoding_than_it_says_is_refused() -> None:
    async with endpoint(talker) as service:
        status, answer = await post(
            service, {"messages": QUESTION}, headers={"Content-Encoding": "gzip"}
        )
        assert status == 400 and "cannot be decoded" in answer["error"]["message"]


@pytest.mark.parametrize(
    "seed", [2**63, -(2**63) - 1, 10**300], ids=["2^63", "negative", "300 digits"]
)
async def test_seed_that_no_engine_takes_is_refused(seed: int) -> None:
    async with endpoint(talker) as service:
        status, answer = await post(service, {"messages": QUESTION, "seed": seed})
        assert (status, answer["error"]["param"]) == (400, "seed")


async def test_body_that_never_ends_is_given_up() -> None:
    async with endpoint(talker, stall_s=0.2) as service:
        reader, writer = await begin(service, b'{"mess', length=1000)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n"), 10)
        assert b"504" in head
        assert b'"limit": "0.2 s"' in await asyncio.wait_for(reader.readuntil(b"}}"), 10)
        writer.close()


async def test_client_that_stops_reading_is_cut_off_and_its_turn_cancelled() -> None:
    async with endpoint(talker, stall_s=0.3, idle_s=0.5) as service:
        body = {"messages": [{"role": "user", "content": "long"}], "stream": True, "logprobs": True}
        data = json.dumps({**body, "user": "s"}).encode()
        _, writer = await begin(service, data, length=len(data), limit=1)
        await until(lambda: service.sessions.status().open_episodes == 1)
        # Its session is idle then, and ends as any other.
        await until(lambda: service.sessions.status().open_episodes == 0)
        writer.close()


async def begin(
    service: Endpoint, data: bytes, *, length: int, limit: int = 2**16
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send the beginning of a request by hand."""
    host, port = service.url.removeprefix("http://").removesuffix("/v1").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=limit)
    lines = (
        "POST /v1/chat/completions HTTP/1.1",
        f"Host: {host}:{port}",
        f"Content-Length: {length}",
    )
    writer.write("\r\n".join((*lines, "", "")).encode() + data)
    await writer.drain()
    return reader, writer


async def test_no_page_of_another_site_speaks_to_the_endpoint() -> None:
    async with endpoint(talker) as service:
        body = {"messages": QUESTION}
        for headers in (
            {"Host": "evil.example"},
            {"Origin": "http://evil.example"},
            {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
        ):
            status, _ = await post(service, body, headers=headers)
            assert status == 403
        assert not service.sessions.status().open_episodes
        status, _ = await post(service, body, headers={"Host": "localhost:7"})
        assert status == 200
