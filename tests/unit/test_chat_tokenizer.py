"""Special tokens only where this service writes them; text in whole characters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness_sdk.errors import ConfigError
from rollout_service.chat.tokenizer import ChatTokenizer, TextStream, Trust
from tests.chat_tokenizers import (
    CONTROL,
    MARKERS,
    chat_tokenizer,
    chat_tokenizer_file,
    save_chat_tokenizer,
)

TOKENIZER = chat_tokenizer()
ADDED = set(chat_tokenizer_file().get_added_tokens_decoder())


def test_template_text_becomes_control_tokens() -> None:
    ids = TOKENIZER.encode([("<|im_start|>user\n", Trust.TEMPLATE)])
    assert ids[0] == TOKENIZER.im_start
    assert TOKENIZER.decode(ids) == "<|im_start|>user\n"


@given(
    st.lists(st.sampled_from([*CONTROL, *MARKERS, "<", "<|", "|>", "the", "é", "x"]), max_size=8)
)
def test_content_never_becomes_control_tokens(parts: list[str]) -> None:
    text = "".join(parts)
    ids = TOKENIZER.encode([("a", Trust.TEMPLATE), (text, Trust.CONTENT), ("|>", Trust.TEMPLATE)])
    assert not ADDED & set(ids)
    assert TOKENIZER.decode(ids) == f"a{text}|>"


def test_a_control_token_split_over_fragments_stays_text() -> None:
    ids = TOKENIZER.encode([("<|im", Trust.TEMPLATE), ("_end|>", Trust.CONTENT)])
    assert TOKENIZER.im_end not in ids


def test_a_reply_keeps_markers_but_no_turn_end() -> None:
    ids = TOKENIZER.encode([("<tool_call>x<|im_end|><|endoftext|><|im_start|>", Trust.REPLY)])
    assert ids[0] in ADDED
    assert not {TOKENIZER.im_start, *TOKENIZER.stop_token_ids} & set(ids)
    assert TOKENIZER.decode(ids) == "<tool_call>x<|im_end|><|endoftext|><|im_start|>"


def test_neighbouring_fragments_merge_as_one_text() -> None:
    whole = TOKENIZER.encode([(" the", Trust.CONTENT)])
    assert TOKENIZER.encode([(" t", Trust.TEMPLATE), ("he", Trust.CONTENT)]) == whole
    assert len(whole) == 1


def test_a_lone_surrogate_is_encoded_as_a_replacement() -> None:
    assert TOKENIZER.decode(TOKENIZER.encode([("a\ud800b", Trust.CONTENT)])) == "a?b"


def test_stop_ids_are_the_turn_end_and_the_text_end() -> None:
    names = chat_tokenizer_file().get_added_tokens_decoder()
    assert {names[i].content for i in TOKENIZER.stop_token_ids} == {"<|im_end|>", "<|endoftext|>"}


def test_a_tokenizer_without_chatml_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"missing <\|im_end\|>.*ChatML"):
        ChatTokenizer(chat_tokenizer_file(control=("<|im_start|>",)))


def test_a_folder_is_loaded_with_its_eos_ids(tmp_path: Path) -> None:
    folder = save_chat_tokenizer(tmp_path)
    marker = chat_tokenizer_file().token_to_id("</tool_call>")
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [65, marker]}))
    tokenizer = ChatTokenizer.load(folder)
    assert marker in tokenizer.stop_token_ids
    assert 65 not in tokenizer.stop_token_ids, "a plain byte must not end a turn"


def test_a_folder_without_tokenizer_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer found"):
        ChatTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        ChatTokenizer.load(tmp_path)


@given(st.text(max_size=40))
def test_a_stream_of_text_gives_whole_characters(text: str) -> None:
    ids = TOKENIZER.encode([(text, Trust.CONTENT)])
    stream = TextStream(TOKENIZER)
    deltas = [stream.push(token) for token in ids]
    assert "".join(deltas) + stream.finish() == TOKENIZER.decode(ids)
    if "\ufffd" not in text:
        assert all("\ufffd" not in delta for delta in deltas)


@settings(max_examples=200)
@given(st.lists(st.integers(0, 255), max_size=40))
def test_a_stream_of_any_bytes_adds_up(ids: list[int]) -> None:
    stream = TextStream(TOKENIZER)
    text = "".join(stream.push(token) for token in ids) + stream.finish()
    assert text == TOKENIZER.decode(ids)
