"""Histories that part become branches of one tree, from the last cursor that they share."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from harness_sdk.record import EpisodeRecord, NodeKind
from harness_sdk.types import Role
from rollout_service.chat import ChatRenderer
from rollout_service.sessions import SessionOptions
from tests.chat_tokenizers import chat_tokenizer
from tests.service.openai_service import TOOL, Endpoint, endpoint
from tests.service.sdk_service import calls
from tests.unit.scripted_server import until
from trainer_service.dag import pack_episodes

NAMED = {"X-Octopus-Session": "s"}


def counter(text: str) -> str:
    """A model that says how many turns it sees, after some reasoning."""
    return f"<think>hm</think>turn {text.count('<|im_start|>assistant')}"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def ask(service: Endpoint, messages: list[Any], **options: Any) -> dict[str, Any]:
    """One more reply, as the message that the client keeps."""
    completion = await service.client.chat.completions.create(
        model="m", messages=messages, **{"extra_headers": NAMED, **options}
    )
    return completion.choices[0].message.model_dump(exclude_none=True)


async def recorded(service: Endpoint) -> EpisodeRecord:
    """The session's record; it packs, and no text in it stands twice on one path."""
    await service.close("s", 1.0)
    (record,) = service.records.written
    pack_episodes([record])
    return record


def turns_below(record: EpisodeRecord, parent: int) -> list[int]:
    return [node.node_id for node in record.nodes if node.parent == parent]


async def test_two_continuations_of_one_response_are_two_branches() -> None:
    async with endpoint(counter) as service:
        prompt = [user("origin")]
        first = await ask(service, prompt)
        left = [*prompt, first, user("left")]
        right = [*prompt, first, user("right")]
        left.append(await ask(service, left))
        right.append(await ask(service, right))
        for history in (left, right):
            assert (await ask(service, [*history, user("on")]))["content"] == "turn 2"
        record = await recorded(service)
    assert [thread.thread_id for thread in record.threads] == ["root", "branch-1"]
    assert record.threads[1].parent == "root"
    assert len(turns_below(record, 1)) == 2
    texts = [service.text(node) for node in record.nodes]
    for said in ("origin", "left", "right"):
        assert sum(said in text for text in texts) == 1
    # Each holds the rest of the shared turn's terminator.
    for said in ("left", "right"):
        assert f"\n<|im_start|>user\n{said}<|im_end|>\n" in texts
    assert sum(node.kind is NodeKind.TURN for node in record.nodes) == 5


async def test_continuations_at_once_are_branches_too() -> None:
    def model(text: str) -> str | None:
        return None if text.endswith("slow<|im_end|>\n") else counter(text)

    async with endpoint(model) as service:
        prompt = [user("origin")]
        first = await ask(service, prompt)
        slow = asyncio.create_task(ask(service, [*prompt, first, user("slow")]))
        await until(lambda: service.scripted.running_turns == 1)
        said = [[*prompt, first, user(f"way {index}")] for index in range(3)]
        await asyncio.gather(*(ask(service, history) for history in said))
        assert service.scripted.running_turns == 1
        slow.cancel()
        await until(lambda: service.scripted.running_turns == 0)
        record = await recorded(service)
    assert len(record.threads) == 4
    assert len(turns_below(record, 1)) == 3


async def test_same_request_again_branches_from_the_prompt() -> None:
    async with endpoint(counter) as service:
        prompt = [user("origin")]
        await ask(service, prompt)
        await ask(service, prompt)
        record = await recorded(service)
    assert [node.kind for node in record.nodes] == [NodeKind.CONTEXT, *[NodeKind.TURN] * 2]
    assert [node.parent for node in record.nodes] == [-1, 0, 0]


class AskedRenderer(ChatRenderer):
    """Notes after which role a turn is opened: some templates open turns in several ways."""

    def opening(self, after: Role) -> tuple[int, ...]:
        """As without the note."""
        self.asked = [*getattr(self, "asked", []), after]
        return super().opening(after)


async def test_branch_from_a_prompt_opens_its_turn_as_the_prompt_asks() -> None:
    chat = AskedRenderer(chat_tokenizer(), preamble="compact")
    async with endpoint(counter, chat=chat) as service:
        prompt = [user("origin")]
        reply = await ask(service, prompt)
        await ask(service, prompt)
        # Another turn behind the reply, in place and as a branch.
        await ask(service, [*prompt, reply])
        await ask(service, [*prompt, reply])
    assert chat.asked == ["user", "user", "assistant", "assistant"]


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_are_branches_of_one_prompt(stream: bool) -> None:
    async with endpoint(counter) as service:
        options: dict[str, Any] = {
            "model": "m", "messages": [user("origin")], "n": 3, "extra_headers": NAMED
        }  # fmt: skip
        if stream:
            found: dict[int, str] = {}
            async for chunk in await service.client.chat.completions.create(**options, stream=True):
                for choice in chunk.choices:
                    found[choice.index] = found.get(choice.index, "") + (choice.delta.content or "")
            contents = [found[index] for index in range(3)]
        else:
            completion = await service.client.chat.completions.create(**options)
            contents = [choice.message.content for choice in completion.choices]
        assert contents == ["turn 0"] * 3
        record = await recorded(service)
    assert [node.parent for node in record.nodes] == [-1, 0, 0, 0]


async def test_edited_reply_forks_before_it_and_is_not_trained() -> None:
    async with endpoint(counter) as service:
        history = [user("origin")]
        history.append(await ask(service, history))
        history.append(user("second"))
        history.append(await ask(service, history))
        edited = [history[0], {"role": "assistant", "content": "my words"}, *history[2:3]]
        await ask(service, edited)
        record = await recorded(service)
    (forked,) = [node for node in record.nodes if "my words" in service.text(node)]
    assert (forked.parent, forked.kind) == (0, NodeKind.CONTEXT)
    assert not any(forked.sampled)
    assert service.text(forked) == (
        "<|im_start|>assistant\nmy words<|im_end|>\n<|im_start|>user\nsecond<|im_end|>\n"
    )
    assert len(record.threads) == 2


async def test_edited_call_is_written_as_the_model_writes_calls() -> None:
    def model(text: str) -> str:
        return "done" if "<tool_response>" in text else calls(("lookup", {"key": "a"}))

    async with endpoint(model) as service:
        prompt = [user("origin")]
        first = await ask(service, prompt, tools=[TOOL])
        (call,) = first["tool_calls"]
        call["function"]["arguments"] = '{"key": "b"}'
        answer = {"role": "tool", "tool_call_id": call["id"], "content": "found"}
        await ask(service, [*prompt, first, answer], tools=[TOOL])
        record = await recorded(service)
    (written,) = [node for node in record.nodes if '"b"' in service.text(node)]
    assert written.parent == 0
    own, marker = record.nodes[1], service.chat.tokenizer.added_ids["<tool_call>"]
    assert marker in own.token_ids
    assert written.token_ids[: len(own.token_ids)] == tuple(
        service.chat.tokenizer.encode(service.text(own).replace('"a"', '"b"'))
    )


async def test_edited_observation_forks_behind_the_reply_that_it_answers() -> None:
    def model(text: str) -> str:
        return "done" if "<tool_response>" in text else calls(("lookup", {"key": "a"}))

    async with endpoint(model) as service:
        prompt = [{"role": "system", "content": "sys"}, user("origin")]
        first = await ask(service, prompt, tools=[TOOL])
        call_id = first["tool_calls"][0]["id"]
        for content in ("long output", "short"):
            answer = {"role": "tool", "tool_call_id": call_id, "content": content}
            await ask(service, [*prompt, first, answer], tools=[TOOL])
        record = await recorded(service)
    assert len(turns_below(record, 1)) == 2
    assert len(record.threads) == 2


async def test_history_that_drops_reasoning_or_reformats_arguments_goes_on() -> None:
    def model(text: str) -> str:
        return "<think>deep</think>ok\n" + calls(("lookup", {"a": 1, "b": [2]}))

    async with endpoint(model) as service:
        prompt = [user("origin")]
        first = await ask(service, prompt, tools=[TOOL])
        call = first["tool_calls"][0]
        call["function"]["arguments"] = '{ "b":[2],\n"a":1 }'
        first.pop("reasoning_content")
        first["content"] = [{"type": "text", "text": "ok"}]
        answer = {"role": "tool", "tool_call_id": call["id"], "content": "found"}
        await ask(service, [*prompt, first, answer], tools=[TOOL])
        record = await recorded(service)
    assert len(record.threads) == 1
    assert "deep" in service.scripted.seen[-1]


async def test_one_tool_answer_more_is_not_cut_from_its_neighbour() -> None:
    """Answers of one turn share a turn of the template, so the fork is before both."""

    def model(text: str) -> str:
        return "ok" if "<tool_response>" in text else calls(*[("lookup", {"key": "a"})] * 2)

    async with endpoint(model) as service:
        prompt = [user("origin")]
        first = await ask(service, prompt, tools=[TOOL])
        answers = [
            {"role": "tool", "tool_call_id": call["id"], "content": f"answer {index}"}
            for index, call in enumerate(first["tool_calls"])
        ]
        await ask(service, [*prompt, first, *answers[:1]], tools=[TOOL])
        await ask(service, [*prompt, first, *answers], tools=[TOOL])
        record = await recorded(service)
    assert len(turns_below(record, 1)) == 2
    both = "answer 0\n</tool_response>\n<tool_response>\nanswer 1"
    assert both in service.scripted.seen[-1]


async def test_other_tools_are_a_root_of_their_own() -> None:
    other = {"type": "function", "function": {"name": "other"}}
    async with endpoint(counter) as service:
        history = [user("origin")]
        history.append(await ask(service, history, tools=[TOOL]))
        history.append(user("more"))
        # Without a list the root's own holds; with another one everything is appended anew.
        history.append(await ask(service, history))
        history.append(user("other"))
        history.append(await ask(service, history, tools=[other]))
        history.append(user("last"))
        await ask(service, history, tools=[other])
        record = await recorded(service)
    roots = [node for node in record.nodes if node.parent < 0]
    assert [node.thread_id for node in roots] == ["root", "root-1"]
    assert ["other(" in service.text(node) for node in roots] == [False, True]
    assert not any(roots[1].sampled)
    assert "turn 1" in service.text(roots[1])
    turns = [node for node in record.nodes if node.thread_id == "root-1"]
    assert [node.kind for node in turns].count(NodeKind.TURN) == 2


async def test_failed_request_leaves_no_branch_behind() -> None:
    options = SessionOptions(thread_budget=200, answer_reserve=0)
    async with endpoint(counter, options=options) as service:
        prompt = [user("origin")]
        first = await ask(service, prompt)
        second = await ask(service, [*prompt, first, user("go on")])
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(service, [*prompt, first, user("long " * 100)])
        assert caught.value.code == "context_length_exceeded"
        assert second["content"] == "turn 1"
        record = await recorded(service)
    assert [thread.thread_id for thread in record.threads] == ["root"]
    # The limit was another branch's: the agent ended, not the budget.
    assert record.stop_reason == "agent_ended"


async def test_agent_that_shortens_its_history_is_not_ended_by_the_budget() -> None:
    options = SessionOptions(thread_budget=200, answer_reserve=0)
    async with endpoint(counter, options=options) as service:
        history = [user("origin")]
        history.append(await ask(service, history))
        with pytest.raises(openai.BadRequestError, match="200 tokens"):
            await ask(service, [*history, user("long " * 100)])
        await ask(service, [user("a summary of origin")])
        record = await recorded(service)
    assert [thread.thread_id for thread in record.threads] == ["root", "root-1"]
    assert (record.reward, record.stop_reason) == (1.0, "agent_ended")


async def test_branches_are_limited_and_the_error_says_how() -> None:
    async with endpoint(counter, max_threads=1) as service:
        prompt = [user("origin")]
        for _ in range(2):
            await ask(service, prompt)
        with pytest.raises(openai.BadRequestError, match="too many threads") as caught:
            await ask(service, prompt)
        assert caught.value.code == "budget_exhausted"
        await recorded(service)


async def test_session_and_group_come_from_headers_metadata_or_user() -> None:
    async with endpoint(counter) as service:
        create = service.client.chat.completions.create
        prompt: list[Any] = [user("q")]
        meta = {"session": "m", "task": "t1", "group": "g1"}
        await create(model="m", messages=prompt, metadata=meta, user="u")
        await create(model="m", messages=prompt, user="u")
        named = {**NAMED, "X-Octopus-Task": "t2", "X-Octopus-Group": "g2"}
        await create(model="m", messages=prompt, metadata=meta, extra_headers=named)
        for session in ("m", "u", "s"):
            await service.close(session, 0.0)
    found = [(record.task_id, record.group_id) for record in service.records.written]
    assert found == [("t1", "g1"), ("", ""), ("t2", "g2")]
