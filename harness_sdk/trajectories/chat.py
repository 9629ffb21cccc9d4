"""Runs kept as chat messages: SWE-agent's .traj files and plain message lists (mini-swe-agent)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness_sdk.json_values import is_array, is_object, within
from harness_sdk.trajectories.runs import Run, RunMessage, task_key, tool_call_text, tool_reply


def matches_swe_agent(value: Any) -> bool:
    """Whether `value` is an SWE-agent trajectory."""
    return is_object(value) and is_array(value.get("history"))


def read_swe_agent(value: Any, place: str) -> Run:
    """The trajectory's message history as a run."""
    messages = _messages(value["history"])
    info = within(value, "info")
    return Run(
        run_id=place,
        task_id=_task(messages),
        messages=tuple(messages),
        status="done" if str(info.get("exit_status", "")).startswith("submitted") else "no_done",
        answer=str(info.get("submission") or ""),
    )


def matches_chat(value: Any) -> bool:
    """Whether `value` is a list of messages, or an object that holds one as `messages`."""
    messages = value.get("messages") if is_object(value) else value
    return (
        is_array(messages)
        and len(messages) > 0
        and all(is_object(m) and "role" in m and "content" in m for m in messages)
    )


def read_chat(value: Any, place: str) -> Run:
    """The messages as a run; a `reward` beside them is kept."""
    whole: dict[str, Any] = value if is_object(value) else {"messages": value}
    messages = _messages(whole["messages"])
    reward = whole.get("reward")
    return Run(
        run_id=place,
        task_id=_task(messages),
        messages=tuple(messages),
        reward=None if reward is None else min(max(float(reward), 0.0), 1.0),
    )


def _messages(history: Sequence[dict[str, Any]]) -> list[RunMessage]:
    messages: list[RunMessage] = []
    results: list[str] = []
    for message in history:
        text = _text(message["content"])
        if message["role"] == "tool":
            results.append(text)
            continue
        if results:
            messages.append(tool_reply(results))
            results = []
        for call in message.get("tool_calls") or ():
            function = call["function"]
            text += "\n" + tool_call_text(function["name"], function["arguments"])
        messages.append(RunMessage(role=message["role"], content=text.lstrip("\n")))
    if results:
        messages.append(tool_reply(results))
    return messages


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.get("text", "") for part in content)


def _task(messages: Sequence[RunMessage]) -> str:
    """The issue that the last message before the first turn states.

    A demonstration may stand before it, and tool formats change the instructions after it.
    """
    opening: list[str] = []
    for message in messages:
        if message.role == "assistant":
            break
        opening.append(message.content)
    if not opening:
        raise ValueError("the conversation begins with a reply: its task is unknown")
    _, found, issue = opening[-1].rpartition("ISSUE:")
    return task_key(issue.partition("INSTRUCTIONS:")[0] if found else opening[-1])
