"""ReAct runs: thought, action and observation, one run a line (the Reflexion HotpotQA logs)."""

from __future__ import annotations

from typing import Any

from harness_sdk.json_values import is_array, is_object
from harness_sdk.trajectories.runs import Run, RunMessage

_SYSTEM = (
    "Answer the question in steps. Each step is a Thought and an Action; the Action is "
    "Search[title], Lookup[words] or Finish[answer]."
)
# status of the log -> (reward, status of the thread)
_OUTCOMES = {
    "correct": (1.0, "done"),
    "incorrect": (0.0, "done"),
    "halted": (0.0, "max_turns"),
}


def matches(value: Any) -> bool:
    """Whether `value` is one run of a ReAct log."""
    return is_object(value) and is_array(value.get("steps")) and "question" in value


def read(value: Any, place: str) -> Run:
    """The run, with the literal text of its steps."""
    reward, status = _OUTCOMES.get(value.get("status"), (None, "done"))
    user = f"Question: {value['question']}"
    if value.get("reflections"):
        user += f"\nReflections: {value['reflections']}"
    messages = [
        RunMessage(role="system", content=_SYSTEM),
        RunMessage(role="user", content=user),
    ]
    answer = ""
    for step in value["steps"]:
        reply = f"Thought: {step['thought']}\nAction: {step['action']}"
        messages.append(RunMessage(role="assistant", content=reply))
        messages.append(RunMessage(role="user", content=f"Observation: {step['observation']}"))
        if step.get("tool") == "finish":
            answer = step["argument"]
    return Run(
        run_id=place,
        task_id=" ".join(value["question"].split()),
        messages=tuple(messages),
        reward=reward,
        status=status,
        answer=answer,
    )
