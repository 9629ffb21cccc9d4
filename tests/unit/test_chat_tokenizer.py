"""Special tokens only where this service writes them; text in whole characters."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from harness_sdk.errors import ConfigError
from rollout_service.chat.tokenizer import BARRIER, ChatTokenizer, TextStream
from tests.chat_tokenizers import (
    CONTROL,
    MARKERS,
    chat_tokenizer,
    chat_tokenizer_file,
    save_chat_tokenizer,
)

TOKENIZER = chat_tokenizer()
ADDED = set(chat_tokenizer_file().get_added_tokens_decoder())


def content(text: str) -> tuple[int, ...]:
    return TOKENIZER.encode(TOKENIZER.guard(text))


def test_template_text_becomes_control_tokens() -> None:
    ids = TOKENIZER.encode("<|im_start|>user\n")
    assert ids[0] == TOKENIZER.added_ids["<|im_start|>"]
    assert TOKENIZER.decode(ids) == "<|im_start|>user\n"


@given(
    st.lists(st.sampled_from([*CONTROL, *MARKERS, "<", "<|", "|>", "the", "é", "x"]), max_size=8)
)
def test_content_never_becomes_control_tokens(parts: list[str]) -> None:
    text = "".join(parts)
    ids = TOKENIZER.encode(f"a{TOKENIZER.guard(text)}|>")
    assert not ADDED & set(ids)
    assert TOKENIZER.decode(ids) == f"a{text}|>"
    assert TOKENIZER.encode_plain(f"a{text}|>") == ids


@pytest.mark.parametrize("cut", range(1, len("<|im_end|>")))
@pytest.mark.parametrize("space", ["", " \n"])
def test_a_control_token_split_over_content_and_template_stays_text(cut: int, space: str) -> None:
    before, after = "<|im_end|>"[:cut], "<|im_end|>"[cut:]
    for left, right in (
        (before, TOKENIZER.guard(f"{after}{space}").rstrip()),
        (TOKENIZER.guard(f"{space}{before}").lstrip(), after),
        (TOKENIZER.guard(before), TOKENIZER.guard(after)),
    ):
        ids = TOKENIZER.encode(left + right)
        assert TOKENIZER.added_ids["<|im_end|>"] not in ids
        assert TOKENIZER.decode(ids) == "<|im_end|>"


def test_overlapping_control_tokens_in_content_stay_text() -> None:
    tokenizer = ChatTokenizer(chat_tokenizer_file(control=("<ab>", "b><c>", "<|im_end|>")))
    ids = tokenizer.encode(tokenizer.guard("<ab><c>"))
    assert not set(tokenizer.added_ids.values()) & set(ids)
    assert tokenizer.decode(ids) == "<ab><c>"


@given(
    st.lists(st.text("ab<", min_size=2, max_size=5), min_size=1, max_size=6, unique=True),
    st.text("ab<", max_size=20),
)
def test_the_longest_control_token_is_taken(names: list[str], text: str) -> None:
    tokenizer = ChatTokenizer(chat_tokenizer_file(control=tuple(names)))
    longest = sorted((*names, *MARKERS), key=len, reverse=True)
    whole = re.findall("|".join(map(re.escape, longest)), text)
    assert tokenizer.first_control(text) == (whole[0] if whole else "")
    assert tokenizer.control_names(text) == set(whole)


def test_a_page_of_markup_is_read_fast_beside_a_thousand_control_tokens() -> None:
    control = tuple(f"<|reserved_{number}|>" for number in range(1000))
    tokenizer = ChatTokenizer(chat_tokenizer_file(control=control))
    page = "<p>some words</p>\n" * 5000
    began = time.perf_counter()
    assert tokenizer.guard(page) == page
    # 1 ms where common beginnings are tried once, 500 ms where each token is.
    assert time.perf_counter() - began < 0.1


def test_only_the_named_tokens_are_kept_out_of_a_reply() -> None:
    text = "<tool_call>x<|im_end|><|endoftext|><|im_start|>"
    ids = TOKENIZER.encode(TOKENIZER.guard(text, CONTROL))
    assert ids[0] in ADDED
    assert not {TOKENIZER.added_ids[name] for name in CONTROL} & set(ids)
    assert TOKENIZER.decode(ids) == text


def test_content_and_template_merge_as_one_text() -> None:
    assert TOKENIZER.encode(" t" + TOKENIZER.guard("he")) == content(" the")
    assert len(content(" the")) == 1


def test_no_character_of_a_message_is_a_barrier() -> None:
    text = "a\ud800b\ue000c" + BARRIER
    assert TOKENIZER.decode(content(text)) == "a?b\ue000c?"
    assert TOKENIZER.decode(TOKENIZER.encode_plain("a\ud800b")) == "a?b"


def test_a_tokenizer_that_marks_the_start_of_a_text_sees_one_start() -> None:
    file = chat_tokenizer_file()
    file.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(replacement="Z", prepend_scheme="first"), file.pre_tokenizer]
    )
    tokenizer = ChatTokenizer(file)
    text = "a<|im_end|>b"
    assert tokenizer.encode(text, begins=True) == tokenizer.encode_whole(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode_whole(text)) == f"Z{text}"


def test_the_end_of_text_ends_a_reply() -> None:
    assert TOKENIZER.eos_token_ids == {TOKENIZER.added_ids["<|endoftext|>"]}


def test_a_folder_is_loaded_with_its_eos_ids(tmp_path: Path) -> None:
    folder = save_chat_tokenizer(tmp_path)
    marker = chat_tokenizer_file().token_to_id("</tool_call>")
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [65, marker]}))
    settings = {"eos_token": {"content": "</think>", "lstrip": False}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = ChatTokenizer.load(folder)
    assert {marker, tokenizer.added_ids["</think>"]} <= tokenizer.eos_token_ids
    assert 65 not in tokenizer.eos_token_ids, "a plain byte must not end a turn"


def test_a_folder_without_tokenizer_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer found"):
        ChatTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        ChatTokenizer.load(tmp_path)


@given(st.text(max_size=40))
def test_a_stream_of_text_gives_whole_characters(text: str) -> None:
    ids = content(text)
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
