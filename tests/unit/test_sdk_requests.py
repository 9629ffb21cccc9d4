"""What an agent gives by mistake is refused by name before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest

from harness_sdk import Message, Tool, _requests
from harness_sdk.errors import ConfigError, InvalidRequest


def test_text_becomes_a_user_message() -> None:
    system = Message(role="system", content="s")
    assert _requests.as_messages("hi") == [Message(role="user", content="hi")]
    assert _requests.as_messages([system, "hi"]) == [system, Message(role="user", content="hi")]


@pytest.mark.parametrize("wrong", [[{"role": "user", "content": "hi"}], b"hi", [None]])
def test_other_messages_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"harness_sdk\.Message"):
        _requests.as_messages(wrong)


@pytest.mark.parametrize("wrong", [["a", "b"], "a", {"a": 1}, {1: "a"}])
def test_branches_that_are_no_texts_by_name_are_refused(wrong: Any) -> None:
    assert _requests.sub_tasks({"a": "Find it."}) == {"a": "Find it."}
    with pytest.raises(InvalidRequest, match=r"branch|prompt"):
        _requests.sub_tasks(wrong)


@pytest.mark.parametrize("wrong", [1, (1,), (1, 2, 3), (-1, 1), (0, -1)])
def test_steps_that_are_no_range_are_refused(wrong: Any) -> None:
    assert _requests.step_range((1, 2)) == (1, 2)
    with pytest.raises(InvalidRequest, match=r"pair|negative"):
        _requests.step_range(wrong)


def test_answer_that_is_no_text_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="answer is not text; got int 42"):
        _requests.text("answer", 42)


def test_name_of_a_function_is_no_tool() -> None:
    with pytest.raises(ConfigError, match=r"str 'search'.*the function itself"):
        Tool.from_function("search")  # pyright: ignore[reportArgumentType]
