"""A client's messages: compared by what they say, chained into digests, and given to sessions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from harness_sdk.types import Message, Role, ToolCall
from rollout_service.chat import WrittenTurn
from rollout_service.chat.nesting import MAX_DEPTH, is_too_deep
from rollout_service.openai.errors import ParameterError


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """A tool call as a client has it."""

    call_id: str
    name: str
    arguments: str
    """JSON text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """A message of a client's history; reasoning is no part of it."""

    role: Role
    content: str = ""
    tool_calls: tuple[FunctionCall, ...] = ()
    tool_call_id: str = ""

    @property
    def identity(self) -> str:
        """Equal for two messages that say the same, however their JSON is laid out."""
        calls = [[call.name, _canonical_json(call.arguments)] for call in self.tool_calls]
        return json.dumps([self.role, self.content, calls, self.tool_call_id])


def chain(history: bytes, message: ChatMessage) -> bytes:
    """Digest of a history with one more message."""
    return hashlib.sha256(history + message.identity.encode("utf-8", "surrogatepass")).digest()


def digests(start: bytes, messages: Iterable[ChatMessage]) -> list[bytes]:
    """Digest of `start` with none of `messages`, with the first, and so on up to all."""
    found = [start]
    for message in messages:
        found.append(chain(found[-1], message))
    return found


def to_message(message: ChatMessage, calls: Mapping[str, tuple[str, str]]) -> Message:
    """The message for a session.

    Args:
        message: The client's.
        calls: Of each call id that the client knows, the session's own id and the tool's name.

    Raises:
        ParameterError: A call's arguments are nested too deeply.
    """
    if message.role == "tool":
        call_id, name = calls.get(message.tool_call_id, (message.tool_call_id, ""))
        return Message(role="tool", content=message.content, name=name, tool_call_id=call_id)
    if not message.tool_calls:
        return Message(role=message.role, content=message.content)
    made = (
        ToolCall(call_id=call.call_id, name=call.name, arguments=_arguments(call.arguments))
        for call in message.tool_calls
    )
    return WrittenTurn(role="assistant", content=message.content, tool_calls=tuple(made))


def _arguments(text: str) -> dict[str, Any]:
    try:
        value: object = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = text
    if is_too_deep(value):
        raise ParameterError(
            "a call's arguments are nested too deeply",
            param="arguments",
            value=text[:80],
            limit=f"{MAX_DEPTH} levels",
            remedy="flatten them",
        )
    return value if isinstance(value, dict) else {"arguments": value}


def _canonical_json(text: str) -> str:
    try:
        return json.dumps(json.loads(text or "{}"), sort_keys=True)
    except (ValueError, RecursionError):
        return text
