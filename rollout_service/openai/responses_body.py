"""The body of `POST /v1/responses`: text and function calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

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
from rollout_service.openai.errors import ParameterError
from rollout_service.openai.messages import ChatMessage, FunctionCall
from rollout_service.sessions import SessionOptions


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore")


class _Message(_Model):
    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: Text = ""


class _FunctionCall(_Model):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = "{}"


class _FunctionOutput(_Model):
    type: Literal["function_call_output"]
    call_id: str
    output: Text = ""


class _Reasoning(_Model):
    type: Literal["reasoning"]


def _typed(item: Any) -> Any:
    """A message may leave its type out."""
    if isinstance(item, dict) and "type" not in item and "role" in item:
        return {**item, "type": "message"}
    return item


_Item = Annotated[
    Annotated[_Message | _FunctionCall | _FunctionOutput | _Reasoning, Field(discriminator="type")],
    BeforeValidator(_typed),
]


def _items(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class _Tool(_Model):
    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _TextOptions(_Model):
    format: dict[str, Any] | None = None


class ResponsesBody(Body):
    """A request for a response."""

    input: Annotated[list[_Item], BeforeValidator(_items)] = Field(default_factory=list)
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[_Tool] | None = None
    max_output_tokens: int | None = None
    text: _TextOptions | None = None

    def to_ask(self, headers: Mapping[str, str], options: SessionOptions) -> Ask:
        """What is asked for.

        Raises:
            ParameterError: A parameter cannot be served.
        """
        tools = [tool.model_dump(exclude={"type"}, exclude_none=True) for tool in self.tools or ()]
        messages = _messages(self.input)
        if self.instructions and not self.previous_response_id:
            messages.insert(0, ChatMessage(role="system", content=self.instructions))
        if not messages and not self.previous_response_id:
            raise ParameterError(
                "the input is empty", param="input", value=0, limit="1 item or more"
            )
        form = self.text.format if self.text is not None else None
        return Ask(
            messages=tuple(messages),
            tools_json=tools_json(tools),
            calls_allowed=bool(tools) and self.tool_choice != "none",
            parallel_calls=self.parallel_tool_calls is not False,
            streams=bool(self.stream),
            sampling=sampling_options(
                self,
                options,
                max_tokens=self.max_output_tokens,
                max_name="max_output_tokens",
                structured=structured_output(form, "text.format"),
            ),
            names=session_names(self, headers),
            previous=self.previous_response_id or "",
            instructions=self.instructions,
        )


def _messages(items: list[Any]) -> list[ChatMessage]:
    """Items as messages: calls belong to the assistant's message right before them."""
    messages: list[ChatMessage] = []
    for item in items:
        if isinstance(item, _FunctionCall):
            call = FunctionCall(call_id=item.call_id, name=item.name, arguments=item.arguments)
            open_ = bool(messages) and messages[-1].role == "assistant"
            before = messages.pop() if open_ else ChatMessage(role="assistant")
            messages.append(
                ChatMessage(
                    role="assistant",
                    content=before.content,
                    tool_calls=(*before.tool_calls, call),
                )
            )
        elif isinstance(item, _FunctionOutput):
            messages.append(
                ChatMessage(role="tool", content=item.output, tool_call_id=item.call_id)
            )
        elif isinstance(item, _Message):
            role: Role = "system" if item.role == "developer" else item.role
            messages.append(ChatMessage(role=role, content=item.content))
    return messages
