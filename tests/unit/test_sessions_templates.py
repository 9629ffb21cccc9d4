"""Episodes under every family's template: sampled ids stay, everything else is appended."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer

from harness_sdk.record import EpisodeRecord
from harness_sdk.types import Message, SamplingOptions
from rollout_service.chat import ChatRenderer, ChatTokenizer
from tests.chat_template_cases import EXPECTED
from tests.chat_tokenizers import TEMPLATES, chat_template, renderer
from tests.session_cases import Bench, ScriptedEngine, path_text

FIRST = [Message(role="system", content="Be brief."), Message(role="user", content="Find a.")]
HIT = Message(role="tool", content="1 hit", name="search", tool_call_id="call_1_0")
AND = Message(role="user", content="And b?")
RECORDED = TEMPLATES.parent / "trajectories" / "responses_ids.json"


def closed(chat: ChatRenderer, reply: tuple[int, ...]) -> str:
    """A turn in the history, its end included."""
    stop = reply[-1]
    kept = reply if chat.keeps(stop) else reply[:-1]
    return chat.tokenizer.decode(kept + chat.ending(stop if chat.keeps(stop) else None))


def sampled(record: EpisodeRecord) -> list[tuple[int, ...]]:
    """Sampled ids in the order of the nodes; a stop that was no part of the turn is a node."""
    rows = [
        tuple(i for i, chosen in zip(node.token_ids, node.sampled, strict=True) if chosen)
        for node in record.nodes
    ]
    return [row for row in rows if row]


@pytest.mark.parametrize("name", EXPECTED)
async def test_an_episode_only_appends(name: str) -> None:
    chat, expected = renderer(name)[1], EXPECTED[name]
    text = chat.tokenizer.decode
    call, words = chat.reply(chat.probed.shape.call_example or "I look."), chat.reply("So it is.")
    bench = Bench(chat=chat)
    assert isinstance(bench.engine, ScriptedEngine)
    episode = await bench.open(primitives=())
    bench.engine.scripts += [call, words, words, words, call]
    turn = await bench.sessions.turn(bench.call(), FIRST)
    assert (turn.token_ids, turn.finish_reason) == (call, "stop")
    start = text(chat.prompt(FIRST)) + expected.opening + closed(chat, call)
    cut = await bench.sessions.turn(bench.call(), [HIT], sampling=SamplingOptions(max_tokens=5))
    assert (cut.token_ids, cut.finish_reason) == (words[:5], "length")
    await bench.sessions.turn(bench.call(), [AND])
    hit = text(chat.delta([HIT]))
    more = text(words[:5]) + expected.terminator + text(chat.delta([AND])) + expected.opening
    seen = path_text(episode)
    whole = start + hit + expected.opening_after_tool + more + closed(chat, words)
    assert whole.startswith(seen) and len(seen) >= len(whole) - len(expected.terminator)

    await bench.sessions.rewind(bench.call(), 1, "again")
    await bench.sessions.turn(bench.call(), [])
    note = text(chat.delta([Message(role="tool", content="[rewind 1] again")]))
    after = start + hit + note + expected.opening_after_tool + closed(chat, words)
    assert after.startswith(path_text(episode))

    await bench.fork("c")
    await bench.sessions.turn(bench.call("c"), [])
    task = text(chat.delta([Message(role="tool", content="[branch c] do c")]))
    child = after + task + expected.opening_after_tool + closed(chat, call)
    assert child.startswith(path_text(episode, "c")) and task in path_text(episode, "c")
    record = await bench.close()
    rows = [row for reply in (call, words[:5], words, words, call) for row in parted(chat, reply)]
    assert sampled(record) == rows


def parted(chat: ChatRenderer, reply: tuple[int, ...]) -> list[tuple[int, ...]]:
    """A reply as nodes: a stop that does not stay is a leaf."""
    if reply[-1] in chat.stop_token_ids and not chat.keeps(reply[-1]):
        return [reply[:-1], reply[-1:]]
    return [reply]


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek-r1"])
async def test_a_turn_without_new_messages_is_opened_behind_the_last(name: str) -> None:
    chat = renderer(name)[1]
    bench = Bench(chat=chat)
    assert isinstance(bench.engine, ScriptedEngine)
    episode = await bench.open(primitives=())
    bench.engine.scripts += [chat.reply("a"), chat.reply("b")]
    await bench.sessions.turn(bench.call(), FIRST)
    await bench.sessions.turn(bench.call(), [])
    opening = chat.tokenizer.decode(chat.opening("assistant"))
    assert opening and (name == "gpt-oss" or chat.opening("tool") == ())
    expected = closed(chat, chat.reply("a")) + opening + closed(chat, chat.reply("b"))
    seen = path_text(episode)
    assert expected.startswith(seen[seen.rindex(f"a{expected[1:9]}") :]) and "b" in seen[-20:]


async def test_a_stop_alone_stays_where_nothing_opens_a_turn() -> None:
    template = chat_template("mistral-7b-v0.3-vllm")
    names = {"<s>", "</s>", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"}
    file = renderer("mistral-7b-v0.3-vllm")[1].tokenizer
    assert names <= set(file.added_ids)
    chat = ChatRenderer(file, template)
    other = file.added_ids["[TOOL_CALLS]"]
    chat.stop_token_ids |= {other}
    bench = Bench(chat=chat)
    assert isinstance(bench.engine, ScriptedEngine)
    episode = await bench.open(primitives=())
    bench.engine.scripts += [(other,), chat.reply("b")]
    turn = await bench.sessions.turn(bench.call(), FIRST)
    assert turn.token_ids == (other,)
    await bench.sessions.turn(bench.call(), [AND])
    assert path_text(episode).endswith("Find a.[/INST][TOOL_CALLS]</s>[INST] And b?[/INST]b</s>")


async def test_a_recorded_qwen3_turn_keeps_its_ids_and_its_reasoning() -> None:
    tokenizer = ChatTokenizer(Tokenizer.from_file(str(TEMPLATES / "qwen3.tokenizer.json")))
    chat = ChatRenderer(tokenizer, chat_template("qwen3"))
    output = json.loads(RECORDED.read_text())["input"]["output"]
    first, second = (each for each in output if "prompt_token_ids" in each)
    prompt, turn = first["prompt_token_ids"], tuple(first["generation_token_ids"])
    answers = [
        Message(role="tool", content=each["output"], tool_call_id=each["call_id"])
        for each in output
        if each["type"] == "function_call_output"
    ]
    assert chat.keeps(turn[-1])
    new = chat.ending(turn[-1]) + chat.delta(answers) + chat.opening("tool")
    # What served the recording rendered anew: the first turn's ids are gone from the second
    # prompt. What lies between the two turns stands there all the same, id for id.
    rendered = tuple(second["prompt_token_ids"])
    assert rendered[: len(prompt)] == tuple(prompt)
    assert rendered[len(prompt) :][: len(turn)] != turn
    assert any(rendered[at : at + len(new)] == new for at in range(len(rendered)))
    bench = Bench(chat=chat)
    assert isinstance(bench.engine, ScriptedEngine)
    episode = await bench.open(primitives=())
    bench.engine.scripts += [turn, tuple(second["generation_token_ids"])]
    long = SamplingOptions(max_tokens=2000)
    await bench.sessions.turn(bench.call(), [AND], sampling=long)
    await bench.sessions.turn(bench.call(), answers, sampling=long)
    head = episode.thread("root").head
    assert head is not None
    ids = tuple(i for cursor in head.path() for i in cursor.token_ids)
    begin = len(chat.prompt([AND]) + chat.generation_prompt)
    # It ended with the end of the text, which is a leaf: the turn's own end is still due.
    assert ids[begin:] == turn + new + tuple(second["generation_token_ids"][:-1])
