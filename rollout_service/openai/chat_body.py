"""The body of `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from harness_sdk.types import Role
from rollout_service.openai.ask import Ask
from rollout_service.openai.bodies import (
    Body,
    Text,
    sampling_options,
    session_names,
    structured_output,
    tools_json,
)
from rollout_service.openai.messages import ChatMessage, FunctionCall
from rollout_service.sessions import SessionOptions

_MAX_CHOICES = 64


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore")


class _CalledFunction(_Model):
    name: str
    arguments: str = "{}"


class _Call(_Model):
    id: str = ""
    type: Literal["function"] = "function"
    function: _CalledFunction


class _ChatMessage(_Model):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text = ""
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None


class _Function(_Model):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(_Model):
    type: Literal["function"]
    function: _Function


class _StreamOptions(_Model):
    include_usage: bool = False


class ChatBody(Body):
    """A request for a chat completion."""

    messages: list[_ChatMessage] = Field(min_length=1)
    tools: list[_Tool] | None = None
    n: int = Field(default=1, ge=1, le=_MAX_CHOICES)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    logprobs: bool | None = None
    stream_options: _StreamOptions | None = None
    response_format: dict[str, Any] | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def to_ask(self, headers: Mapping[str, str], options: SessionOptions) -> Ask:
        """What is asked for.

        Raises:
            ParameterError: A parameter cannot be served.
        """
        tools = [tool.function.model_dump(exclude_none=True) for tool in self.tools or ()]
        old = self.max_completion_tokens is None
        return Ask(
            messages=tuple(_message(message) for message in self.messages),
            tools_json=tools_json(tools),
            calls_allowed=bool(tools) and self.tool_choice != "none",
            parallel_calls=self.parallel_tool_calls is not False,
            streams=bool(self.stream),
            sampling=sampling_options(
                self,
                options,
                max_tokens=self.max_tokens if old else self.max_completion_tokens,
                max_name="max_tokens" if old else "max_completion_tokens",
                stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
                seed=self.seed,
                structured=structured_output(self.response_format, "response_format"),
            ),
            names=session_names(self, headers),
        )


def _message(message: _ChatMessage) -> ChatMessage:
    role: Role = "system" if message.role == "developer" else message.role
    calls = (
        FunctionCall(call_id=c.id, name=c.function.name, arguments=c.function.arguments)
        for c in message.tool_calls or ()
    )
    return ChatMessage(
        role=role,
        content=message.content,
        tool_calls=tuple(calls),
        tool_call_id=message.tool_call_id or "",
    )
