"""What each template under tests/data appends, and conversations to try them on."""

from __future__ import annotations

import json
from dataclasses import dataclass

from harness_sdk.types import Message
from rollout_service.chat.proof import Conversation, Turn
from tests.chat_tokenizers import TEMPLATES


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """How a template is served."""

    mode: str
    terminator: str
    stops: list[str]
    user: str
    """What the user message `Hi` appends."""
    opening: str
    """What opens the model's turn after a user message."""
    opening_after_tool: str
    notes: str
    """What a tool response `A` of `search` and the note `[fork] b` append."""
    kept_stop: str
    """The stop that stays in the history after a turn with a call; empty if none does."""
    rewritten: list[str]
    """Scenarios in which the template's own rendering changes what it wrote, or refuses."""


def _expected() -> dict[str, Expected]:
    found = json.loads((TEMPLATES / "expected.json").read_text("utf-8"))
    return {name: Expected(**fields) for name, fields in found.items()}


EXPECTED = _expected()
"""Every template that is served."""
REFUSED = {
    "deepseek-r1-llamacpp": ("fails on a list of tools", "not JSON serializable"),
    "deepseek-v3-vllm": ("takes back what it has written", "character 60: "),
}
"""What the refusal of each other template says."""


def _user(text: str) -> Message:
    return Message(role="user", content=text)


def _found(text: str, name: str = "search") -> Message:
    return Message(role="tool", content=text, name=name)


_SYSTEM = Message(role="system", content="Be brief.")
_SEARCH = Turn(calls=("search",))

SCENARIOS: dict[str, Conversation] = {
    "chat": (
        _SYSTEM, _user("Who wrote the\nIliad?"), Turn(text="Homer, they say."), _user("When?"),
        Turn(text="Long ago."), _user("Où ça ?"),
    ),
    "reasoning": (
        _user("2 + 2?"), Turn(reasoning="Two and two.", text="4"), _user("3 + 3?"),
        Turn(reasoning="Three and three.", text="6"), _user("4 + 4?"),
    ),
    "tools": (
        _SYSTEM, _user("Find a."), _SEARCH, _found("1 hit"), Turn(text="There is one."),
        _user("Find b."), _SEARCH, _found('{"hits": 2}'), Turn(text="There are two."), _user("c?"),
    ),
    "parallel tools": (
        _user("Find a and b."), Turn(calls=("search", "search")), _found("1 hit"),
        _found("2 hits"), Turn(text="Three."), _user("Sure?"),
    ),
    "tool after tool": (
        _user("Find a."), _SEARCH, _found("0 hits"), _SEARCH, _found("1 hit"), Turn(text="One."),
        _user("Good."),
    ),
    "user turn after tools": (
        _user("Find a."), _SEARCH, _found("1 hit"), _user("And b?"), _SEARCH, _found("2 hits"),
        Turn(text="Both."), _user("Good."),
    ),
    "notes": (
        _user("Find a."), _SEARCH, _found("1 hit"), Message(role="tool", content="[fork] a, b"),
        _SEARCH, Message(role="tool", content="[rewind 1] not there"), Turn(text="Done."),
        Message(role="tool", content="[end] call done"), Turn(text="Really."),
    ),
    "nothing said": (
        _user("Find a."), _SEARCH, _found(""), Turn(text=""), _user("Well?"), Turn(text=""),
        _user("Hello?"),
    ),
    "twenty turns": (
        _SYSTEM,
        *(
            each
            for i in range(10)
            for each in (
                _user(f"Find {i}."), _SEARCH, _found(f"the {i} hits"), Turn(text=f"There are {i}."),
            )
        ),
        _user("Thanks."),
    ),
}  # fmt: skip
