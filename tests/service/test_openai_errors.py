"""What the endpoint refuses, and how: OpenAI's error JSON with parameter, value and limit."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import aiohttp
import openai
import pytest

from harness_sdk.errors import ConfigError
from rollout_service.access import Access
from rollout_service.openai import serve_openai
from rollout_service.sessions import SessionOptions
from tests.service.openai_service import TOOL, endpoint
from tests.unit.scripted_server import until

QUESTION: Any = [{"role": "user", "content": "q"}]
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}


def plain(text: str) -> str | None:
    """A model that only talks; asked to hang, it does."""
    return None if "hang" in text else "fine"


@pytest.mark.parametrize(
    ("options", "param", "value", "limit"),
    [
        ({"temperature": 3}, "temperature", "3.0", "0 (greedy), or 0.001 to 2"),
        ({"temperature": "hot"}, "temperature", "'hot'", "valid number"),
        ({"top_p": 0.5}, "top_p", "0.5", "1"),
        ({"max_tokens": 0}, "max_tokens", "0", "1 or more"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "-1", "1 or more"),
        ({"n": 1000}, "n", "1000", "less than or equal to 64"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice", "'required'", "'auto' or"),
        ({"tools": [TOOL, TOOL]}, "tools", "lookup", "each name once"),
        ({"presence_penalty": 0.5}, "presence_penalty", "0.5", "0"),
        ({"logprobs": True, "top_logprobs": 5}, "top_logprobs", "5", "0"),
        ({"response_format": {"type": "json_object"}}, "response_format", "json_object", "text,"),
        ({"messages": [IMAGE]}, "messages.0.content.type", "'image_url'", "'text'"),
        (
            {"messages": [{"role": "oracle", "content": ""}]},
            "messages.0.role",
            "'oracle'",
            "'tool'",
        ),
        ({"messages": []}, "messages", "[]", "at least 1"),
        ({"extra_body": {"mirostat": 2}}, "mirostat", "2", ""),
    ],
)
async def test_parameter_that_is_not_served_is_named(
    options: dict[str, Any], param: str, value: str, limit: str
) -> None:
    async with endpoint(plain) as service:
        with pytest.raises(openai.BadRequestError) as caught:
            await service.client.chat.completions.create(
                **{"model": "m", "messages": QUESTION, **options}
            )
        assert service.sessions.status().open_episodes == 0
    error: Any = caught.value.body
    assert caught.value.param == param
    assert error["value"] == value
    assert limit in error["limit"]
    assert error["type"] == "invalid_request_error"
    assert param in error["message"]


async def test_parameters_that_ask_for_nothing_are_taken() -> None:
    async with endpoint(plain) as service:
        completion = await service.client.chat.completions.create(
            model="gpt-4o", messages=QUESTION, frequency_penalty=0, presence_penalty=0.0,
            logit_bias={}, top_p=1, store=False, service_tier="auto", reasoning_effort="low",
            response_format={"type": "text"}, tool_choice="auto", extra_body={"top_k": -1},
        )  # fmt: skip
    assert completion.choices[0].message.content == "fine"


async def test_truncated_sampling_is_served_where_it_is_allowed() -> None:
    options = SessionOptions(allow_truncated_sampling=True)
    async with endpoint(plain, options=options) as service:
        completion = await service.client.chat.completions.create(
            model="m", messages=QUESTION, top_p=0.5, extra_body={"top_k": 4}
        )
    assert completion.choices[0].message.content == "fine"


async def test_bodies_and_paths_that_make_no_sense_get_error_json() -> None:
    async with endpoint(plain, max_body_bytes=1000) as service, aiohttp.ClientSession() as http:

        async def post(path: str, data: bytes) -> tuple[int, str, str]:
            async with http.post(f"{service.url}{path}", data=data) as response:
                error = (await response.json())["error"]
                return response.status, error["code"] or "", error["message"]

        chat = "/chat/completions"
        assert (await post(chat, b"{"))[0] == 400
        assert "no JSON object" in (await post(chat, b"[]"))[2]
        assert (await post("/embeddings", b"{}"))[:2] == (404, "unknown_url")
        status, code, message = await post(chat, b" " * 2000)
        assert (status, code) == (413, "body_too_large")
        assert "1000 bytes" in message
        assert (await post("/octopus/sessions/x/close", b'{"rewrad": 1}'))[0] == 400


async def test_request_without_the_token_is_refused() -> None:
    async with endpoint(plain, api_key="wrong", access=Access("right")) as service:
        with pytest.raises(openai.AuthenticationError) as caught:
            await service.client.models.list()
        assert caught.value.code == "invalid_api_key"
        client = service.client.with_options(api_key="right")
        assert [model.id async for model in await client.models.list()] == ["none"]
        assert (await client.models.retrieve("gpt-4o")).id == "gpt-4o"
        async with aiohttp.ClientSession() as http, http.get(f"{service.url}/models") as response:
            assert response.status == 401


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_goes_away_cancels_the_generation(stream: bool) -> None:
    async with endpoint(plain) as service:
        create = service.client.chat.completions.create
        call: Any = create(
            model="m", messages=[{"role": "user", "content": "hang"}], stream=stream,
            extra_headers={"X-Octopus-Session": "s"},
        )  # fmt: skip
        task = asyncio.create_task(call)
        await until(lambda: service.scripted.running_turns == 1)
        if stream:
            await (await task).close()
        else:
            task.cancel()
        await until(lambda: service.scripted.running_turns == 0)
        # The session is where it was.
        done = await create(model="m", messages=QUESTION, user="s")
        assert done.choices[0].message.content == "fine"
        closed = await service.close("s", 0.0)
    assert closed["num_nodes"] == 2
    (record,) = service.records.written
    assert [thread.thread_id for thread in record.threads] == ["root"]


async def test_first_request_that_fails_leaves_no_session_open() -> None:
    async with endpoint(plain) as service:
        task = asyncio.create_task(
            service.client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hang"}]
            )
        )
        await until(lambda: service.scripted.running_turns == 1)
        task.cancel()
        await until(lambda: bool(service.records.written))
        assert service.sessions.status().open_episodes == 0
    assert service.records.written[0].stop_reason == "cancelled"


async def test_error_in_a_stream_reaches_the_client() -> None:
    async with endpoint(plain) as service:
        stream = await service.client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hang"}], stream=True, user="s"
        )
        await service.close("s")
        with pytest.raises(openai.APIError, match="closed"):
            async for _ in stream:
                pass


async def test_closing_is_once_checked_and_repeatable() -> None:
    async with endpoint(plain) as service:
        with pytest.raises(openai.NotFoundError, match="no such session"):
            await service.close("s", 1.0)
        create = service.client.chat.completions.create
        await create(model="m", messages=QUESTION, user="s")
        with pytest.raises(openai.BadRequestError, match="0 to 1"):
            await service.close("s", 7.0)
        first = await service.close("s", 0.25)
        assert await service.close("s", 1.0) == first
        assert first["stop_reason"] == "agent_ended"
        # The name is free again: another episode.
        await create(model="m", messages=QUESTION, user="s")
        assert (await service.close("s"))["episode_id"] != first["episode_id"]
    assert [record.reward for record in service.records.written] == [0.25, None]


async def test_idle_session_is_closed_without_a_reward() -> None:
    async with endpoint(plain, idle_s=0.2) as service:
        await service.client.chat.completions.create(model="m", messages=QUESTION, user="s")
        await until(lambda: bool(service.records.written))
        with pytest.raises(openai.NotFoundError):
            await service.client.post("/octopus/sessions/t/close", cast_to=dict, body={})
    (record,) = service.records.written
    assert (record.reward, record.stop_reason) == (None, "agent_ended")


async def test_session_without_a_name_gives_way_to_those_that_wait() -> None:
    # Of this budget the pool holds one.
    options = SessionOptions(thread_budget=900_000)
    async with endpoint(plain, options=options, spare_s=0.2) as service:
        create = service.client.chat.completions.create
        await create(model="m", messages=QUESTION)
        async with asyncio.timeout(5):
            await create(model="m", messages=QUESTION, user="s")
        assert len(service.records.written) == 1
        # One with a name is waited for.
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.7):
                await create(model="m", messages=QUESTION)


async def test_session_that_is_used_is_not_idle() -> None:
    async with endpoint(plain, idle_s=0.2) as service:
        create = service.client.chat.completions.create
        task = asyncio.create_task(
            create(model="m", messages=[{"role": "user", "content": "hang"}], user="s")
        )
        await asyncio.sleep(0.6)
        assert not service.records.written
        task.cancel()


async def test_endpoint_leaves_signals_alone_and_says_when_its_port_is_taken() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    async with endpoint(plain) as service:
        after = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        assert after == before
        port = int(service.url.split(":")[2].split("/")[0])
        with pytest.raises(ConfigError, match="cannot bind"):
            await serve_openai(service.sessions, port=port)
