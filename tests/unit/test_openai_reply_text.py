"""However a reply is cut into tokens, what is shown adds up to what the whole turn says."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from harness_sdk.deltas import ReplyEvent, TokenDelta
from rollout_service.chat.calls import ReplyStream, parse_reply
from rollout_service.openai.ask import Said
from rollout_service.openai.reply_text import ReplyText
from rollout_service.sessions.reading import ReplyReader

_PIECES = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f"}', "[", "<", "<to", " ",
     "\n", "word", "STOP", "ST", "O", "{", "é"]
)  # fmt: skip


class Shown:
    """Shows a client what a reader makes of text."""

    def __init__(self, stops: tuple[str, ...] = (), *, in_reasoning: bool = False) -> None:
        self.text = ReplyText()
        self._reader = ReplyReader(ReplyStream("hermes", 1, in_reasoning=in_reasoning), stops)

    def push(self, text: str) -> Said:
        """One token more."""
        return self.text.push(_delta(text, self._reader.push(text)))

    def finish(self) -> Said:
        """The end, before the whole is known."""
        return self.text.push(_delta("", self._reader.finish()))


def _delta(text: str, events: tuple[ReplyEvent, ...] = ()) -> TokenDelta:
    token_ids, logprobs = ((1,), (-0.5,)) if text else ((), ())
    return TokenDelta(token_ids=token_ids, sampled_logprobs=logprobs, text=text, events=events)


@given(st.lists(_PIECES, max_size=12), st.booleans())
def test_shown_text_is_that_of_the_whole_turn(pieces: list[str], opened: bool) -> None:
    raw = "".join(pieces).partition("STOP")[0]
    parsed = parse_reply(raw, family="hermes", step=1, in_reasoning=opened)
    shown = Shown(("STOP",), in_reasoning=opened)
    text = shown.text
    said = [*(shown.push(piece) for piece in pieces), shown.finish()]
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
    shown = Shown(("STOP",))
    steps = [
        ("<think>why", "", "why"), (" so</think>", "", " so"), ("I go", "I go", ""),
        (" ST", "", ""), ("AR", " STAR", ""), ("S", "", ""), ("TOP", "", ""), ("on", "", ""),
    ]  # fmt: skip
    for piece, content, reasoning in steps:
        said = shown.push(piece)
        assert (said.content, said.reasoning) == (content, reasoning), piece


def test_thought_that_was_shown_as_text_stays_and_the_answer_goes_on_below() -> None:
    shown = Shown()
    for piece in ("I think so.", "</think>", "Yes", "."):
        shown.push(piece)
    text = shown.text
    text.finish("Yes.", "I think so.")
    assert (text.content, text.reasoning) == ("I think so.\nYes.", "I think so.")


def test_nothing_is_shown_before_the_end_without_events() -> None:
    text = ReplyText()
    assert text.push(_delta("word")).content == ""
    assert text.finish("word", "why").content == "word"
