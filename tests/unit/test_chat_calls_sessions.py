"""Turns whose calls are bad, of every family: the thread goes on, and the record keeps what was
sampled."""

from __future__ import annotations

import pytest

from harness_sdk.types import Message
from rollout_service.chat import ChatRenderer, Template
from tests import session_cases
from tests.call_cases import BROKEN, WRITERS
from tests.chat_tokenizers import chat_tokenizer
from tests.session_cases import CHAT, Bench, ScriptedEngine

TOOLS = (
    '[{"type": "function", "function": {"name": "look", "parameters": {"type": "object", '
    '"properties": {"q": {"type": "string"}}}}}]'
)
# Teaches calls in Qwen3.5's form, and opens reasoning in the prompt.
THINKING = """{#- <function=name> <parameter=key> -#}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
<think>
{% endif -%}"""
USER = [Message(role="user", content="hi")]
SHORT = [case for case in BROKEN if len(case[1]) < 1000]


@pytest.mark.parametrize(("family", "raw", "fault"), SHORT)
async def test_a_bad_call_is_told_and_the_thread_goes_on(
    family: str, raw: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CHAT, "call_format", family)
    bench = Bench()
    engine = bench.engine
    assert isinstance(engine, ScriptedEngine)
    await bench.open()
    good = next(write for known, write in WRITERS.values() if known == family)("look", {"q": "1"})
    bad_ids = (*CHAT.reply(raw)[:-1], CHAT.reply("")[-1])
    engine.scripts += [bad_ids, CHAT.reply(good)]
    turn = await bench.sessions.turn(bench.call(), USER, tools_json=TOOLS)
    (call,) = turn.tool_calls
    assert fault in call.error and turn.thread_ended is None
    assert (turn.raw_text, turn.token_ids) == (CHAT.tokenizer.decode(bad_ids[:-1]), bad_ids)
    told = Message(role="tool", content=f"error: {call.error}", tool_call_id=call.call_id)
    after = await bench.sessions.turn(bench.call(), [told])
    assert [(c.name, c.arguments, c.error) for c in after.tool_calls] == [("look", {"q": "1"}, "")]
    record = await bench.close()
    sampled = [
        tuple(i for i, is_sampled in zip(node.token_ids, node.sampled, strict=True) if is_sampled)
        for node in record.nodes
    ]
    assert [ids for ids in sampled if ids] == [bad_ids, CHAT.reply(good)]


@pytest.mark.parametrize("family", ["qwen_xml", "glm"])
async def test_untyped_arguments_take_the_types_of_tools_and_primitives(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CHAT, "call_format", family)
    bench = Bench()
    await bench.open()
    _, write = WRITERS[family]
    reply = write("look", {"q": "7"}) + write("rewind", {"step": 0, "note": "7"})
    turn = await bench.sessions.turn(bench.call(), USER, tools_json=TOOLS, demonstration=reply)
    assert [call.arguments for call in turn.tool_calls] == [{"q": "7"}, {"step": 0, "note": "7"}]


async def test_family_and_open_reasoning_are_those_of_the_template(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chat = ChatRenderer(chat_tokenizer(), Template(THINKING))
    assert chat.call_format == "qwen_xml"
    monkeypatch.setattr(session_cases, "CHAT", chat)
    bench = Bench()
    await bench.open()
    call = WRITERS["qwen_xml"][1]("look", {"q": "7"})
    demonstration = f"hm {call}</think>{call}"
    turn = await bench.sessions.turn(
        bench.call(), USER, tools_json=TOOLS, demonstration=demonstration
    )
    assert turn.reasoning == f"hm {call}"
    assert [(c.call_id, c.arguments) for c in turn.tool_calls] == [("call_1_0", {"q": "7"})]
    unfinished = await bench.sessions.turn(bench.call(), USER, demonstration=f"hm {call}")
    assert (unfinished.reasoning, unfinished.tool_calls) == (f"hm {call}", ())
