"""Rollouts in the form of the OpenAI Responses API (NeMo Gym), with or without token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from harness_sdk.json_values import is_array, is_object, within
from harness_sdk.trajectories.runs import (
    RecordedTurn,
    Run,
    RunMessage,
    task_key,
    tool_call_text,
    tool_reply,
    tools_text,
)


def matches(value: Any) -> bool:
    """Whether `value` is a rollout: request parameters and a response."""
    return (
        is_object(value)
        and is_object(value.get("responses_create_params"))
        and is_object(value.get("response"))
    )


def read(value: Any, place: str) -> Run:
    """The rollout as a run."""
    params, items = value["responses_create_params"], value["response"]["output"]
    metadata = within(params, "metadata")
    prompt = _prompt(value, params, metadata)
    reward = value.get("reward")
    messages = prompt + _messages(items)
    return Run(
        run_id=place,
        task_id=metadata.get("instance_id")
        or task_key(prompt[-1].content, context="\n".join(m.content for m in prompt[:-1])),
        messages=tuple(messages),
        # Some environments reward below 0 or a rounding error above 1.
        reward=None if reward is None else min(max(float(reward), 0.0), 1.0),
        status="budget" if value.get("agent_timed_out") else "done",
        answer=messages[-1].content[-2000:] if messages[-1].role == "assistant" else "",
        recorded_turns=_recorded_turns(items),
        recorded_model=str(value["response"].get("model") or ""),
    )


def matches_ids(value: Any) -> bool:
    """Whether `value` is a response with token ids, beside its chat form."""
    return (
        is_object(value)
        and is_object(value.get("input"))
        and is_array(value["input"].get("output"))
        and "expected_output" in value
    )


def read_ids(value: Any, place: str) -> Run:
    """The response as a run whose tokens are the recorded ones."""
    response = value["input"]
    turns = _recorded_turns(response["output"])
    if not turns:
        raise ValueError("no model turn carries generation_token_ids")
    return Run(
        run_id=place,
        task_id=str(response.get("id") or place),
        messages=tuple(_messages(response["output"])),
        recorded_turns=turns,
        recorded_model=str(response.get("model") or ""),
    )


def _prompt(
    value: dict[str, Any], params: dict[str, Any], metadata: dict[str, Any]
) -> list[RunMessage]:
    """System message, tool list and task.

    Harnesses that hold the prompt themselves leave `input` empty: then the issue is in the
    metadata and the system prompt in the agent's configuration.
    """
    given: Any = params.get("input") or []
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    harness = within(value, "instance_config", "agent_kwargs")
    system: list[Any] = [
        params.get("instructions") or (harness.get("system_prompt") if not given else "")
    ]
    system += [_text(item["content"]) for item in given if item["role"] in ("system", "developer")]
    tools: list[Any] = params.get("tools") or []
    schemas = [json.dumps(tool, sort_keys=True) for tool in tools]
    if schemas:
        system.append(tools_text(schemas))
    messages = [
        RunMessage(role="user", content=_text(item["content"]))
        for item in given
        if item["role"] == "user"
    ]
    if not messages and metadata.get("problem_statement"):
        messages = [RunMessage(role="user", content=metadata["problem_statement"])]
    text = "\n\n".join(part for part in system if part)
    return [RunMessage(role="system", content=text), *messages] if text else messages


def _messages(items: Sequence[dict[str, Any]]) -> list[RunMessage]:
    """Neighbouring items of the model are one turn, neighbouring outputs one observation."""
    messages: list[RunMessage] = []
    at = 0
    while at < len(items):
        end = at
        while end < len(items) and _author(items[end]) == _author(items[at]):
            end += 1
        block, author = items[at:end], _author(items[at])
        if author == "assistant":
            text = "\n".join(part for item in block if (part := _model_text(item)))
            messages.append(RunMessage(role="assistant", content=text))
        elif author == "tool":
            messages.append(tool_reply(_text(item["output"]) for item in block))
        else:
            text = "\n".join(_text(item["content"]) for item in block)
            messages.append(RunMessage(role="user", content=text))
        at = end
    return messages


def _author(item: dict[str, Any]) -> str:
    if item["type"] == "function_call_output":
        return "tool"
    if item["type"] == "message" and item.get("role") != "assistant":
        return "user"
    return "assistant"


def _model_text(item: dict[str, Any]) -> str:
    if item["type"] == "reasoning":
        text = "\n".join(part["text"] for part in item["summary"])
        return f"<think>\n{text}\n</think>"
    if item["type"] == "function_call":
        return tool_call_text(item["name"], item["arguments"])
    return _text(item["content"])


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if "text" in part)


def _recorded_turns(items: Sequence[dict[str, Any]]) -> tuple[RecordedTurn, ...]:
    """The model turns that carry ids; the ids stand on the last item of their turn."""
    return tuple(
        RecordedTurn(
            prompt_token_ids=tuple(item["prompt_token_ids"]),
            token_ids=tuple(item["generation_token_ids"]),
            sampled_logprobs=tuple(item["generation_log_probs"]),
        )
        for item in items
        if item.get("generation_token_ids")
    )
