"""The Responses API through OpenAI's own client: text, calls, streams, previous responses."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.service.openai_service import Endpoint, endpoint
from tests.service.sdk_service import calls

TOOL: Any = {
    "type": "function", "name": "lookup", "description": "Look a key up.", "strict": False,
    "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
}  # fmt: skip
NAMED = {"X-Octopus-Session": "s"}


def searcher(text: str) -> str:
    """A model that looks up twice, then answers."""
    count = text.count("<tool_response>")
    if count == 2:
        return "<think>enough</think>It is 2."
    return f"<think>step {count}</think>Looking.\n" + calls(("lookup", {"key": str(count)}))


def outputs(response: Any) -> list[Any]:
    """What a client answers to the calls of a response."""
    return [
        {
            "type": "function_call_output",
            "call_id": item.call_id,
            "output": f"value {json.loads(item.arguments)['key']}",
        }
        for item in response.output
        if item.type == "function_call"
    ]


async def one_path(service: Endpoint, num_nodes: int) -> None:
    """The session is one path."""
    await service.close("s", 1.0)
    (record,) = service.records.written
    assert [node.parent for node in record.nodes] == list(range(-1, num_nodes - 1))
    assert [thread.thread_id for thread in record.threads] == ["root"]


async def test_previous_response_is_continued() -> None:
    async with endpoint(searcher) as service:
        create = service.client.responses.create
        options: Any = {"model": "m", "tools": [TOOL], "instructions": "Be brief."}
        response = await create(**options, input="Find it.", extra_headers=NAMED)
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
        assert response.output_text == "Looking."
        while said := outputs(response):
            response = await create(**options, input=said, previous_response_id=response.id)
        assert (response.output_text, response.status) == ("It is 2.", "completed")
        assert response.usage is not None
        assert response.usage.input_tokens_details.cached_tokens > 0
        assert service.scripted.seen[-1].count("Be brief.") == 1
        await one_path(service, 6)


async def test_whole_input_is_found_again() -> None:
    async with endpoint(searcher) as service:
        history: list[Any] = [{"role": "user", "content": "Find it."}]
        while True:
            response = await service.client.responses.create(
                model="m", tools=[TOOL], input=history, extra_headers=NAMED
            )
            history += [item.model_dump(exclude_none=True) for item in response.output]
            said = outputs(response)
            if not said:
                break
            history += said
        await one_path(service, 6)


async def test_two_continuations_of_a_response_are_branches() -> None:
    async with endpoint(lambda text: "fine") as service:
        create = service.client.responses.create
        first = await create(model="m", input="q", extra_headers=NAMED)
        for way in ("left", "right"):
            await create(model="m", input=way, previous_response_id=first.id)
        await service.close("s", 1.0)
    (record,) = service.records.written
    assert [node.parent for node in record.nodes] == [-1, 0, 1, 2, 1, 4]


@pytest.mark.parametrize(
    "reply", ["Plain words.", "<think>why</think>So.", calls(("lookup", {"key": "a"})), "", "<thi"]
)
async def test_streaming_equals_waiting(reply: str) -> None:
    async with endpoint(lambda text: reply) as service:
        options: Any = {"model": "m", "input": "q", "tools": [TOOL]}
        whole = await service.client.responses.create(**options)
        async with service.client.responses.stream(**options) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == final.output_text
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.type for item in done] == [item.type for item in whole.output]
    for item, expected in zip(final.output, whole.output, strict=True):
        assert item.type == expected.type
        if item.type == "function_call" and expected.type == "function_call":
            assert (item.name, item.arguments) == (expected.name, expected.arguments)


async def test_response_that_is_cut_says_so() -> None:
    async with endpoint(lambda text: "a long reply") as service:
        response = await service.client.responses.create(model="m", input="q", max_output_tokens=4)
    assert (response.status, response.output_text) == ("incomplete", "a lo")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"previous_response_id": "resp_unknown"}, "previous_response_id"),
        ({"instructions": "other"}, "instructions"),
        ({"tools": [TOOL]}, "tools"),
        ({"input": []}, ""),
        ({"input": [{"type": "computer_call_output"}]}, "input.0"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"conversation": "c"}, "conversation"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
    ],
)
async def test_what_cannot_be_continued_or_served_is_named(
    options: dict[str, Any], param: str
) -> None:
    async with endpoint(lambda text: "fine") as service:
        create = service.client.responses.create
        first = await create(model="m", input="q", instructions="own")
        asked: Any = {"model": "m", "input": "r", "previous_response_id": first.id, **options}
        if not param:
            # Nothing new is fine behind a response, and refused without one.
            await create(**asked)
            asked.pop("previous_response_id")
            param = "input"
        with pytest.raises(openai.BadRequestError) as caught:
            await create(**asked)
    assert caught.value.param == param
