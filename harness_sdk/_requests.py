"""What an agent gives to a thread's calls, checked before it becomes a request."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from harness_sdk.errors import InvalidRequest
from harness_sdk.tools import Tool, tool_schema
from harness_sdk.types import Message, ToolSchema


def as_messages(messages: str | Message | Sequence[str | Message]) -> list[Message]:
    """`messages` as a list, text as user messages.

    Raises:
        InvalidRequest: One is neither text nor a `Message`.
    """
    given: Sequence[object] = [messages] if isinstance(messages, str | Message) else messages
    return [_as_message(message) for message in given]


def sub_tasks(branches: object) -> dict[str, str]:
    """The branches of a fork, name -> prompt.

    Raises:
        InvalidRequest: They are no mapping of text to text.
    """
    if not isinstance(branches, Mapping):
        raise InvalidRequest(
            "fork takes a name and a prompt for each branch",
            value=_shown(branches),
            limit='a dict, as {"a": "Find the date."}',
        )
    given = cast("Mapping[object, object]", branches)
    return {text("branch name", name): text("prompt", prompt) for name, prompt in given.items()}


def tools_json(tools: Sequence[Tool | ToolSchema | Callable[..., Any]] | None) -> str:
    """The schemas of an agent's tools; empty where it has none."""
    if not tools:
        return ""
    schemas: list[ToolSchema] = [
        cast(ToolSchema, tool) if isinstance(tool, Mapping) else tool_schema(tool) for tool in tools
    ]
    return json.dumps(schemas, ensure_ascii=False)


def step_range(steps: object) -> tuple[int, int]:
    """First and last step of a read.

    Raises:
        InvalidRequest: They are no pair of steps.
    """
    match steps:
        case [int(first), int(last)]:
            return step_number("first step", first), step_number("last step", last)
        case _:
            raise InvalidRequest(
                "steps are a pair",
                value=_shown(steps),
                limit="(first, last), as (1, 1) for one step",
            )


def step_number(name: str, value: int) -> int:
    """A step of a thread.

    Raises:
        InvalidRequest: It is negative.
    """
    if value < 0:
        raise InvalidRequest(f"the {name} is negative", value=value, limit="0 or more")
    return value


def text(name: str, value: object) -> str:
    """A string.

    Raises:
        InvalidRequest: It is something else.
    """
    if not isinstance(value, str):
        raise InvalidRequest(f"the {name} is not text", value=_shown(value), limit="a str")
    return value


def _as_message(given: object) -> Message:
    if isinstance(given, Message):
        return given
    if isinstance(given, str):
        return Message(role="user", content=given)
    raise InvalidRequest(
        "a message is neither text nor a Message",
        value=_shown(given),
        limit="str for a user message, or harness_sdk.Message",
        remedy='as Message(role="system", content="...")',
    )


def _shown(given: object) -> str:
    return f"{type(given).__name__} {given!r:.100}"
