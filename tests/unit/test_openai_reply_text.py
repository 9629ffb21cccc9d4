"""However a reply is cut into tokens, what is shown adds up to what the whole turn says."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from harness_sdk.types import TokenDelta
from rollout_service.chat.calls import ReplyStream, parse_reply
from rollout_service.openai.reply_text import ReplyText

_PIECES = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f"}', "[", "<", "<to", " ",
     "\n", "word", "STOP", "ST", "O", "{", "é"]
)  # fmt: skip


def delta(text: str) -> TokenDelta:
    return TokenDelta(token_ids=(1,), sampled_logprobs=(-0.5,), text=text)


@given(st.lists(_PIECES, max_size=12), st.booleans())
def test_shown_text_is_that_of_the_whole_turn(pieces: list[str], opened: bool) -> None:
    raw = "".join(pieces).partition("STOP")[0]
    parsed = parse_reply(raw, family="hermes", step=1, in_reasoning=opened)
    text = ReplyText(ReplyStream("hermes", 1, in_reasoning=opened), ("STOP",))
    said = [text.push(delta(piece)) for piece in pieces]
    said.append(text.finish(parsed.text, parsed.reasoning))
    assert "".join(each.content for each in said) == text.content
    assert "".join(each.reasoning for each in said) == text.reasoning
    assert [token for each in said for token in each.tokens] == [(p, -0.5) for p in pieces]
    assert "STOP" not in text.content
    if "</think>" not in raw or opened:
        assert (text.content, text.reasoning) == (parsed.text, parsed.reasoning)
    else:
        # Reasoning that nothing opened may have been shown as text before.
        assert text.content.endswith(parsed.text)


def test_text_is_shown_as_soon_as_no_stop_can_begin_in_it() -> None:
    text = ReplyText(ReplyStream("hermes", 1), ("STOP",))
    steps = [
        ("<think>why", "", "why"), (" so</think>", "", " so"), ("I go", "I go", ""),
        (" ST", "", ""), ("AR", " STAR", ""), ("S", "", ""), ("TOP", "", ""), ("on", "", ""),
    ]  # fmt: skip
    for piece, content, reasoning in steps:
        said = text.push(delta(piece))
        assert (said.content, said.reasoning) == (content, reasoning), piece


def test_thought_that_was_shown_as_text_stays_and_the_answer_goes_on_below() -> None:
    text = ReplyText(ReplyStream("hermes", 1), ())
    for piece in ("I think so.", "</think>", "Yes", "."):
        text.push(delta(piece))
    text.finish("Yes.", "I think so.")
    assert (text.content, text.reasoning) == ("I think so.\nYes.", "I think so.")


def test_nothing_is_shown_before_the_end_without_a_reader() -> None:
    text = ReplyText(None, ())
    assert text.push(delta("word")).content == ""
    assert text.finish("word", "why").content == "word"
