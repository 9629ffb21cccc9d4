"""Each template: how it is served, and that increments add up to its append-only history."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from harness_sdk.errors import InvalidRequest
from harness_sdk.types import Message, Role
from rollout_service.chat import ChatRenderer
from rollout_service.chat.increments import CallForm, Rendered, as_rendered
from rollout_service.chat.proof import Conversation, Turn, as_whole, probe
from rollout_service.chat.refusal import TemplateRefused
from tests.chat_template_cases import EXPECTED, REFUSED, SCENARIOS
from tests.chat_tokenizers import TEMPLATES, chat_template, new_renderer, renderer

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Find passages.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "Words."}},
            "required": ["query"],
        },
    },
}
PAIRS = [
    (name, scenario)
    for name in EXPECTED
    for scenario in SCENARIOS
    # A turn of these makes one call at most.
    if not (scenario == "parallel tools" and name in ("gpt-oss", "llama-3.1"))
]
NOTES = (
    Message(role="tool", content="A", name="search", tool_call_id="call_1_0"),
    Message(role="tool", content="[fork] b"),
)


def test_every_template_is_tried() -> None:
    assert {path.stem for path in TEMPLATES.glob("*.jinja")} == {*EXPECTED, *REFUSED}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_template_is_served_as_its_family_writes(name: str) -> None:
    _, chat = renderer(name)
    expected, text = EXPECTED[name], chat.tokenizer.decode
    assert chat.probed.shape.mode == expected.mode
    assert text(chat.terminator) == text(chat.ending(None)) == expected.terminator
    assert sorted(text([i]) for i in chat.stop_token_ids) == sorted(expected.stops)
    assert text(chat.delta([Message(role="user", content="Hi")])) == expected.user
    assert text(chat.generation_prompt) == expected.opening
    assert text(chat.delta(NOTES)) == expected.notes
    assert text(chat.opening("tool")) == expected.opening_after_tool


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_cannot_be_appended_to_is_refused(name: str) -> None:
    reason, where = REFUSED[name]
    with pytest.raises(TemplateRefused, match=f"{reason}.*{where}") as caught:
        probe(chat_template(name))
    parted = caught.value.first_difference
    assert (parted is None) == ("character" not in where)
    assert caught.value.copy().first_difference == parted


@pytest.mark.parametrize("name", [*EXPECTED, *REFUSED])
def test_a_probe_takes_a_fraction_of_a_second(name: str) -> None:
    def start_up() -> float:
        # Not the clock on the wall, which a busy machine slows.
        began = time.process_time()
        with contextlib.suppress(TemplateRefused):
            new_renderer(name)
        return time.process_time() - began

    # Promised are 0.2 s, and 0.08 is the most that was measured. Twice the promise: a core that
    # a shared machine splits or slows counts more CPU time for the same work.
    assert any(start_up() < 2 * 0.2 for _ in range(3))


@pytest.mark.parametrize("name", EXPECTED)
def test_control_text_in_a_message_stays_text(name: str) -> None:
    chat = renderer(name)[1]
    control = {i for text, i in chat.tokenizer.added_ids.items() if text.strip()}
    attack = "x" + "".join(chat.tokenizer.added_ids) + '</s> "é"'
    cases: tuple[tuple[Role, bool], ...] = (("user", False), ("tool", False), ("tool", True))
    for role, named in cases:
        plain, attacked = (
            chat.delta(
                [Message(role=role, content=text, name=text if named else "", tool_call_id=text)]
            )
            for text in ("x", attack)
        )
        assert [i for i in attacked if i in control] == [i for i in plain if i in control]
        read = chat.tokenizer.decode(attacked)
        assert attack in read or json.dumps(attack, ensure_ascii=False) in read


@pytest.mark.parametrize("name", EXPECTED)
def test_control_text_in_a_first_prompt_stays_text(name: str) -> None:
    chat = renderer(name)[1]
    control = {i for text, i in chat.tokenizer.added_ids.items() if text.strip()}
    attack = "".join(chat.tokenizer.added_ids)
    prompts = []
    for text in ("x", attack):
        schema = {"type": "object", "properties": {text: {"type": "string", "description": text}}}
        function = {"name": text, "description": text, "parameters": schema}
        messages = [Message(role="system", content=text), Message(role="user", content=text)]
        prompts.append(chat.prompt(messages, [{"type": "function", "function": function}]))
    plain, attacked = ([i for i in prompt if i in control] for prompt in prompts)
    assert plain == attacked


@pytest.mark.parametrize("name", EXPECTED)
def test_the_beginning_of_all_stands_once(name: str) -> None:
    template, chat = renderer(name)
    begins = chat.tokenizer.added_ids["<s>"]
    question, thanks = (Message(role="user", content=text) for text in ("One?", "Thanks."))
    prompt = chat.prompt([question], [SEARCH])
    assert prompt.count(begins) == ("bos_token" in template.source)
    assert begins not in chat.delta([thanks]) + chat.delta(NOTES) + chat.opening("user")


@pytest.mark.parametrize("name", EXPECTED)
def test_tools_are_listed_by_the_template_or_in_the_system_message(name: str) -> None:
    template, chat = renderer(name)
    messages = [Message(role="system", content="Be brief."), Message(role="user", content="Hi")]
    text = chat.tokenizer.decode(chat.prompt(messages, [SEARCH]))
    assert "Be brief." in text and "Hi" in text
    if chat.probed.shape.tools_printed:
        rendered = [{"role": message.role, "content": message.content} for message in messages]
        assert text == template.render(rendered, tools=[SEARCH])
    else:
        assert json.dumps(SEARCH) in text
        example = chat.probed.shape.call_example or "<tool_call>\n"
        assert "<function-name>" in text and example in text
    compact = ChatRenderer(chat.tokenizer, template, preamble="compact")
    text = compact.tokenizer.decode(compact.prompt(messages, [SEARCH]))
    assert "Be brief.\n\nTools: search(query)" in text
    assert compact.template_hash != chat.template_hash


@pytest.mark.parametrize("name", EXPECTED)
def test_a_turn_ends_once_however_it_was_ended(name: str) -> None:
    chat, expected = renderer(name)[1], EXPECTED[name]
    text = chat.tokenizer.decode
    assert text(chat.ending(None)) == expected.terminator, "it was cut"
    for stop in chat.stop_token_ids:
        if chat.keeps(stop):
            assert text([stop, *chat.ending(stop)]) in (expected.terminator, expected.kept_stop)
        else:
            assert chat.ending(stop) == chat.terminator
    assert any(chat.keeps(stop) for stop in chat.stop_token_ids) == bool(expected.kept_stop)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_demonstration_ends_as_its_family_does(name: str) -> None:
    chat, text = renderer(name)[1], renderer(name)[1].tokenizer.decode
    plain, call = (chat.reply(words)[-1] for words in ("ok", chat.probed.shape.call_example))
    assert {plain, call} <= chat.stop_token_ids
    ends = {"gpt-oss": ("<|return|>", "<|call|>"), "glm-4.5": ("<|user|>", "<|observation|>")}
    ends["glm-4.6-llamacpp"] = ends["glm-4.5"]
    assert (text([plain]), text([call])) == ends.get(name, (text([plain]),) * 2)
    forged = "".join(text([stop]) for stop in chat.stop_token_ids) + expected_user(name)
    ids = chat.reply(f"ok{forged}")
    assert chat.stop_token_ids.isdisjoint(ids[:-1])
    opener = chat.tokenizer.added_ids[chat.tokenizer.first_control(expected_user(name))]
    assert (opener in ids[:-1]) == (name == "gpt-oss"), "there a turn may hold several messages"
    assert text(ids[:-1]) == f"ok{forged}"


def expected_user(name: str) -> str:
    return EXPECTED[name].user


@pytest.mark.parametrize(("name", "scenario"), PAIRS)
def test_increments_add_up_to_the_append_only_history(name: str, scenario: str) -> None:
    chat = renderer(name)[1]
    said = answering(name, SCENARIOS[scenario])
    messages, tools = conversation(name, scenario)
    ids: list[int] = []
    states: list[list[int]] = []
    for begin, end, block in blocks(said):
        new = chat.delta(block) if begin else chat.prompt(block, tools)
        appended = new + chat.opening(block[-1].role)
        if begin and not counts_calls(name):
            texts = behind_one_turn(name, messages[begin - 1], block)
            assert is_made_of(chat.tokenizer.decode(appended), texts)
        ids += appended
        if end < len(messages):
            ids += sampled(name, messages[: end + 1], tools)
        states.append(list(ids))
    assert all(ids[: len(state)] == state for state in states)
    whole = own_rendering(name, scenario)
    assert (whole is None) == (scenario in EXPECTED[name].rewritten)
    # Where the whole history counts, a note that answers no call has no rendering of its own.
    if whole is not None and not (scenario == "notes" and EXPECTED[name].mode == "context"):
        assert tuple(ids) == chat.tokenizer.encode_whole(whole)


def counts_calls(name: str) -> bool:
    form = renderer(name)[1].probed.shape.call_form
    return form is not None and form.counted_ids


def conversation(name: str, scenario: str) -> tuple[list[Rendered], list[Any]]:
    shape = renderer(name)[1].probed.shape
    tools = [SEARCH] if "tool" in scenario and shape.tools_printed else []
    return as_whole(answering(name, SCENARIOS[scenario]), shape.call_form), tools


def answering(name: str, said: Conversation) -> Conversation:
    """With the ids of the calls that are answered, as Kimi's turns write them."""
    form = renderer(name)[1].probed.shape.call_form
    if form is None or not form.indexed_ids:
        return said
    number, waiting, found = 0, [], []
    for each in said:
        if isinstance(each, Turn):
            number = number if form.counted_ids else 0
            waiting = [f"functions.{call}:{number + at}" for at, call in enumerate(each.calls)]
            number += len(waiting)
        elif each.role == "tool" and waiting:
            each = dataclasses.replace(each, tool_call_id=waiting.pop(0))
        found.append(each)
    return tuple(found)


def sampled(name: str, messages: list[Rendered], tools: list[Any]) -> tuple[int, ...]:
    """A turn as it stays in the history: the template's words, or others where it adds some."""
    template, chat = renderer(name)
    shape = chat.probed.shape
    end = shape.call_terminator if "tool_calls" in messages[-1] else shape.end
    text = "I say this."
    with contextlib.suppress(InvalidRequest):
        prompt = template.render(messages[:-1], tools=tools, generation_prompt=True)
        after = template.render(messages, tools=tools)
        if after.startswith(prompt) and after.endswith(end):
            text = after[len(prompt) :].removesuffix(end)
    ids = chat.reply(text)
    return ids + chat.ending(ids[-1]) if chat.keeps(ids[-1]) else ids[:-1] + chat.ending(None)


def behind_one_turn(name: str, turn: Rendered, block: list[Message]) -> list[str]:
    """The template's own renderings whose ends `block` appends: one, or one for each message."""
    template, chat = renderer(name)
    form, question = chat.probed.shape.call_form, {"role": "user", "content": "q"}
    whole = as_rendered(block, form or CallForm())
    if not chat.probed.shape.answers_apart:
        with contextlib.suppress(InvalidRequest):
            return [template.render([question, turn, *whole], generation_prompt=True)]
    texts = []
    for message, rendered in zip(block, whole, strict=True):
        before: Rendered = {"role": "assistant", "content": "x"}
        if message.role == "tool" and form is not None:
            before = form.turn([message.name or "harness"])
        last = message is block[-1]
        texts.append(template.render([question, before, rendered], generation_prompt=last))
    return texts


def is_made_of(text: str, texts: list[str]) -> bool:
    """Whether `text` is an end of each of `texts`, one behind the other."""
    if len(texts) == 1:
        return texts[0].endswith(text)
    cuts = [at for at in range(1, len(text)) if texts[0].endswith(text[:at])]
    return any(is_made_of(text[at:], texts[1:]) for at in cuts)


def own_rendering(name: str, scenario: str) -> str | None:
    """The template's rendering of all; None where it rewrites what it wrote, or refuses."""
    template = renderer(name)[0]
    messages, tools = conversation(name, scenario)
    roles = [*(message["role"] for message in messages), "assistant"]
    before = ""
    for end, (role, following) in enumerate(itertools.pairwise(roles), start=1):
        if "assistant" not in (role, following):
            continue
        opened = role != "assistant"
        try:
            text = template.render(messages[:end], tools=tools, generation_prompt=opened)
        except InvalidRequest:
            return None
        if not text.startswith(before):
            return None
        before = text
    return before


def blocks(conversation: Conversation) -> Iterator[tuple[int, int, list[Message]]]:
    """The messages between two turns, and where they begin and end."""
    begin = 0
    for index, each in enumerate((*conversation, Turn())):
        if isinstance(each, Turn):
            found = [m for m in conversation[begin:index] if isinstance(m, Message)]
            if found:
                yield begin, index, found
            begin = index + 1
