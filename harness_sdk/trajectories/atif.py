"""ATIF trajectories, with sub-agents and context resets.

Rendered from their text: token ids that the metrics may carry are not used.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness_sdk.json_values import is_object, within
from harness_sdk.trajectories.runs import Run, RunMessage, tool_call_text


def matches(value: Any) -> bool:
    """Whether `value` is an ATIF document."""
    return is_object(value) and str(value.get("schema_version", "")).startswith("ATIF")


def read(value: Any, place: str) -> list[Run]:
    """The trajectory as runs: one, and one more for each time that its context was summarised.

    After a summary the agent goes on from the task's prompt and what it was handed. Sub-agents
    belong to the task of the session that called them.
    """
    contexts: list[list[RunMessage]] = [[]]
    prompt: list[RunMessage] = []
    for step in value["steps"]:
        if any(result.get("subagent_trajectory_ref") for result in _results(step)):
            contexts.append(list(prompt))
            continue
        messages = _messages(step)
        contexts[-1] += messages
        if len(contexts) == 1 and all(m.role != "assistant" for m in contexts[0]):
            prompt += messages
    extra = within(value, "agent", "extra")
    return [
        Run(
            run_id=place if number == 1 else f"{place}#{number}",
            task_id=str(extra.get("parent_session_id") or value["session_id"]),
            messages=tuple(messages),
        )
        for number, messages in enumerate(contexts, start=1)
        if any(message.role == "assistant" for message in messages)
    ]


def references(value: Any, file: Path) -> list[Path]:
    """Files of the sub-agents that `value`, read from `file`, refers to and that exist."""
    if not matches(value):
        return []
    found: list[Path] = []
    for step in value["steps"]:
        for result in _results(step):
            for reference in result.get("subagent_trajectory_ref") or ():
                name = str(reference.get("trajectory_path") or "")
                # Collections put the run's name in front of every file of the run.
                prefix = file.name.partition("trajectory")[0]
                candidates = (file.parent / name, file.parent / f"{prefix}{name}")
                found += [path for path in candidates if name and path.is_file()][:1]
    return found


def _messages(step: dict[str, Any]) -> list[RunMessage]:
    text = step.get("message") or ""
    copied = bool(step.get("is_copied_context"))
    messages: list[RunMessage] = []
    if step["source"] == "agent":
        for call in step.get("tool_calls") or ():
            arguments = json.dumps(call.get("arguments") or {})
            text += "\n" + tool_call_text(call["function_name"], arguments)
        messages.append(RunMessage(role="assistant", content=text.lstrip("\n"), copied=copied))
    elif text:
        role = "system" if step["source"] == "system" else "user"
        messages.append(RunMessage(role=role, content=text))
    observation = "\n".join(
        str(result["content"]) for result in _results(step) if result.get("content")
    )
    if observation:
        messages.append(RunMessage(role="user", content=observation))
    return messages


def _results(step: dict[str, Any]) -> list[dict[str, Any]]:
    return within(step, "observation").get("results") or []
