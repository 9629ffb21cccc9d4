"""Turns whose calls are bad, of every family: the thread goes on, and the record keeps what was
sampled."""

from __future__ import annotations

import pytest

from harness_sdk.types import Message
from rollout_service.chat import ChatRenderer, Template
from rollout_service.sessions import offshoots
from tests import session_cases
from tests.call_cases import BROKEN, WRITERS
from tests.chat_tokenizers import chat_tokenizer, renderer
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


def kimi_call(name: str, index: int) -> str:
    return (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:{index}"
        '<|tool_call_argument_begin|>{"q": "7"}<|tool_call_end|><|tool_calls_section_end|>'
    )


@pytest.mark.parametrize("name", ["kimi-k2", "kimi-k2-instruct"])
async def test_calls_numbered_over_the_conversation_keep_their_ids(name: str) -> None:
    chat = renderer(name)[1]
    bench = Bench(chat=chat)
    episode = await bench.open(primitives=())
    said, ids = USER, list[str]()
    for index in (0, 1, 1, 2):
        turn = await bench.sessions.turn(
            bench.call(), said, tools_json=TOOLS, demonstration=kimi_call("look", index)
        )
        (call,) = turn.tool_calls
        ids.append(call.call_id)
        said = [Message(role="tool", content="hit", name="look", tool_call_id=call.call_id)]
    # Answers are told apart by their ids: the one that was there before is not taken twice.
    assert ids == ["functions.look:0", "functions.look:1", "call_3_0", "functions.look:2"]
    record = await bench.close()
    answers = [chat.tokenizer.decode(node.token_ids) for node in record.nodes if node.step]
    shown = [text for text in answers if "## Return of" in text]
    assert len(shown) == 3
    assert "## Return of functions.look:0" in shown[0]
    assert "## Return of functions.look:1" in shown[1]
    assert episode.root.call_ids() == set(ids)


async def test_branches_do_not_share_the_ids_behind_their_fork() -> None:
    chat = renderer("kimi-k2")[1]
    bench = Bench(chat=chat)
    episode = await bench.open(primitives=())
    await bench.sessions.turn(bench.call(), USER, demonstration=kimi_call("look", 0))
    thread = offshoots.branch(episode, episode.root, 1)
    told = [Message(role="tool", content="hit", tool_call_id="functions.look:0")]
    for each, renamed in (("root", "call_3_0"), (thread.thread_id, "call_2_0")):
        calls = (kimi_call("look", index) for index in (1, 0))
        turns = [
            await bench.sessions.turn(bench.call(each), told, demonstration=call) for call in calls
        ]
        ids = [call.call_id for turn in turns for call in turn.tool_calls]
        assert ids == ["functions.look:1", renamed]
    # One that shares what the first turn answers, and not the turn, may use its id.
    before = offshoots.branch(episode, episode.root, 1, answered="user")
    turn = await bench.sessions.turn(
        bench.call(before.thread_id), demonstration=kimi_call("look", 0)
    )
    assert [call.call_id for call in turn.tool_calls] == ["functions.look:0"]
