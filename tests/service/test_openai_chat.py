"""OpenAI's own client holds conversations with the endpoint; each is recorded as one tree."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from harness_sdk.record import NodeKind
from rollout_service.engine.transformers import TransformersEngine
from tests.chat_tokenizers import chat_tokenizer
from tests.service.openai_service import TOOL, Endpoint, endpoint
from tests.service.sdk_service import calls

NAMED = {"X-Octopus-Session": "s"}
NUM_TURNS = 10


def searcher(text: str) -> str:
    """A model that thinks, speaks and looks up, nine times, then answers."""
    count = text.count("<tool_response>")
    if count == NUM_TURNS - 1:
        return "<think>enough</think>\n\nIt is 9."
    call = calls(("lookup", {"key": str(count), "deep": {"b": 1, "a": "é"}}))
    return f"<think>\nstep {count} of <many>\n</think>\n\nI look up {count}.\n{call}"


async def converse(service: Endpoint, messages: list[Any], **options: Any) -> list[Any]:
    """A plain agent's loop: whole history in, calls carried out, until there are none."""
    replies = []
    while True:
        completion = await service.client.chat.completions.create(
            model="any",
            messages=messages,
            tools=[TOOL],
            **options,
        )
        replies.append(completion)
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            key = json.loads(call.function.arguments)["key"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"value {key}"})
        if not message.tool_calls:
            return replies


async def test_ten_turns_with_tools_are_one_path_with_each_token_once() -> None:
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Find it."}]},
    ]
    async with endpoint(searcher) as service:
        replies = await converse(service, messages, extra_headers=NAMED)
        closed = await service.close("s", 0.5)
        computed = service.engine.stats().tokens_computed
    (record,) = service.records.written
    assert (record.reward, closed["num_tokens"]) == (0.5, record.num_tokens)
    assert [node.kind for node in record.nodes] == [NodeKind.CONTEXT, NodeKind.TURN] * NUM_TURNS
    assert [node.parent for node in record.nodes] == list(range(-1, len(record.nodes) - 1))
    assert [thread.thread_id for thread in record.threads] == ["root"]
    whole = service.path(record, record.nodes[-1])
    assert whole.count("Be brief.") == whole.count("Find it.") == 1
    assert [whole.count(f"value {n}") for n in range(NUM_TURNS)] == [1] * (NUM_TURNS - 1) + [0]
    # The reasoning that the client stripped is still what the model sampled and sees.
    assert "step 8 of <many>" in service.scripted.seen[-1]
    turns = record.nodes[1::2]
    assert sum(sum(node.sampled) for node in turns) == sum(
        reply.usage.completion_tokens for reply in replies
    )
    # Every prompt token was appended once, whatever the client sent again.
    assert computed == sum(len(node.token_ids) for node in record.nodes[::2])
    last = replies[-1]
    assert (last.choices[0].finish_reason, last.choices[0].message.content) == ("stop", "It is 9.")
    assert last.choices[0].message.reasoning_content == "enough"
    assert replies[0].choices[0].message.content == "I look up 0."
    assert replies[0].choices[0].finish_reason == "tool_calls"
    assert len({reply.choices[0].message.tool_calls[0].id for reply in replies[:-1]}) == 9
    for before, after in itertools.pairwise(replies):
        details = after.usage.prompt_tokens_details
        assert details.cached_tokens == before.usage.total_tokens


async def streamed(service: Endpoint, **options: Any) -> tuple[Any, list[Any]]:
    """A completion put together from its chunks by the client itself, and the chunks."""
    chunks = []
    async with service.client.chat.completions.stream(**options) as stream:
        async for event in stream:
            if event.type == "chunk":
                chunks.append(event.chunk)
        return await stream.get_final_completion(), chunks


REPLIES = [
    "Plain words, <b>bold</b> and 1 < 2.",
    "<think>why</think> So.  ",
    "  <think>never ends",
    "Let me see.\n" + calls(("lookup", {"key": "a"}), ("lookup", {"key": "b"})),
    '{"json": [1, 2]}',
    "é€😀 wide",
    "before STOP after",
    "<tool_call>\nno json\n</tool_call>",
    "",
    "<thi",
]


@pytest.mark.parametrize("reply", REPLIES)
async def test_streaming_equals_waiting(reply: str) -> None:
    options: dict[str, Any] = {
        "model": "m", "messages": [{"role": "user", "content": "q"}], "tools": [TOOL],
        "logprobs": True, "stop": ["STOP"],
    }  # fmt: skip
    async with endpoint(lambda text: reply) as service:
        whole = await service.client.chat.completions.create(**options)
        final, chunks = await streamed(service, **options, stream_options={"include_usage": True})
    (choice,), (expected,) = final.choices, whole.choices
    assert (choice.message.content or "") == (expected.message.content or "")
    assert choice.finish_reason == expected.finish_reason
    given = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]
    assert given == [
        (c.function.name, c.function.arguments) for c in expected.message.tool_calls or ()
    ]
    thoughts = [getattr(c.choices[0].delta, "reasoning_content", "") for c in chunks if c.choices]
    assert "".join(thoughts) == getattr(expected.message, "reasoning_content", "")
    assert [t.token for t in choice.logprobs.content] == [
        t.token for t in expected.logprobs.content
    ]
    assert "".join(t.token for t in choice.logprobs.content) == reply
    assert (
        len(choice.logprobs.content)
        == whole.usage.completion_tokens
        == (final.usage.completion_tokens)
    )


async def test_text_streams_before_the_turn_ends() -> None:
    async with endpoint(lambda text: "one two three four") as service:
        stream = await service.client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "q"}], stream=True
        )
        deltas = [chunk.choices[0].delta.content async for chunk in stream]
    assert len([delta for delta in deltas if delta]) > 5


async def test_call_that_cannot_be_carried_out_is_text_and_says_why() -> None:
    bad = '<tool_call>\n{"name": "lookup", "arguments": [}\n</tool_call>'
    async with endpoint(lambda text: bad) as service:
        completion = await service.client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "q"}],
            tools=[TOOL],
        )
    assert completion.choices[0].message.content == bad
    assert completion.choices[0].finish_reason == "stop"
    extra: Any = completion.model_extra
    (fault,) = extra["octopus"]["bad_tool_calls"]
    assert "no valid JSON" in fault["error"]


async def test_without_a_choice_of_tools_calls_stay_text() -> None:
    call = calls(("lookup", {"key": "a"}))
    question: list[Any] = [{"role": "user", "content": "q"}]
    async with endpoint(lambda text: call) as service:
        create = service.client.chat.completions.create
        for options in ({"tools": [TOOL], "tool_choice": "none"}, {}):
            completion = await create(model="m", messages=question, **options)
            assert completion.choices[0].message.content == call
            assert not completion.choices[0].message.tool_calls


async def test_parallel_calls_can_be_declined() -> None:
    two = calls(("lookup", {"key": "a"}), ("lookup", {"key": "b"}))
    async with endpoint(lambda text: two) as service:
        completion = await service.client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "q"}], tools=[TOOL],
            parallel_tool_calls=False,
        )  # fmt: skip
    assert len(completion.choices[0].message.tool_calls or ()) == 1


async def test_length_and_stop_are_told_apart() -> None:
    async with endpoint(lambda text: "a long reply") as service:
        create = service.client.chat.completions.create
        question: Any = [{"role": "user", "content": "q"}]
        cut = await create(model="m", messages=question, max_tokens=4)
        assert cut.choices[0].finish_reason == "length"
        assert cut.usage is not None
        assert cut.usage.completion_tokens == 4
        cut = await create(model="m", messages=question, max_completion_tokens=4)
        assert cut.choices[0].message.content == "a lo"


async def test_computed_tokens_are_the_new_ones(chat_folder: Path) -> None:
    engine = TransformersEngine(
        str(chat_folder), max_tokens=20_000, detokenize=chat_tokenizer().decode
    )
    messages: list[Any] = [{"role": "user", "content": "A question of some length."}]
    async with endpoint(engine=engine) as service:
        computed = []
        for turn in range(4):
            completion = await service.client.chat.completions.create(
                model="m", messages=messages, max_tokens=5, seed=turn, extra_headers=NAMED
            )
            messages.append(completion.choices[0].message.model_dump(exclude_none=True))
            messages.append({"role": "user", "content": f"And {turn}?"})
            computed.append(engine.stats().tokens_computed)
        record = service.sessions.build_record(next(iter(service.sessions._episodes)))
        assert sum(engine.stats().tokens_recomputed.values()) == 0
    # All but the last sampled token, which nothing was predicted from.
    assert computed[-1] in (record.num_tokens, record.num_tokens - 1)
    assert len(record.threads) == 1
    assert [node.kind for node in record.nodes][:2] == [NodeKind.CONTEXT, NodeKind.TURN]


async def test_conversations_without_a_name_are_told_apart_by_what_was_said() -> None:
    def model(text: str) -> str:
        return "blue" if "sky" in text.rsplit("user\n", 1)[1] else "green"

    async with endpoint(model) as service:

        async def talk(first: str) -> str:
            messages: list[Any] = [{"role": "user", "content": first}]
            session = ""
            for _ in range(3):
                raw = await service.client.chat.completions.with_raw_response.create(
                    model="m", messages=messages
                )
                message = raw.parse().choices[0].message
                messages += [message.model_dump(exclude_none=True)]
                messages += [{"role": "user", "content": first}]
                session = raw.headers["X-Octopus-Session"]
            return session

        names = await asyncio.gather(talk("sky"), talk("grass"))
        assert len(set(names)) == 2
        for name in names:
            await service.close(name, 1.0)
    for record in service.records.written:
        assert len(record.nodes) == 6
        assert len(record.threads) == 1


async def test_same_words_of_two_conversations_do_not_mix() -> None:
    """Two agents begin alike and get one reply; each goes on in its own episode."""
    async with endpoint(lambda text: "same") as service:
        create = service.client.chat.completions.create
        first: list[Any] = [{"role": "user", "content": "q"}]
        replies = [await create(model="m", messages=first) for _ in range(2)]
        again = [*first, {"role": "assistant", "content": "same"}]
        for name in ("left", "right"):
            said = [*again, {"role": "user", "content": name}]
            replies.append(await create(model="m", messages=said))
        await service.sessions.shutdown()
    assert len(replies) == 4
    assert [len(record.nodes) for record in service.records.written] == [4, 4]
    assert [len(record.threads) for record in service.records.written] == [1, 1]
