"""Every recorded format becomes runs; unknown ones are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness_sdk.errors import InvalidRequest
from harness_sdk.trajectories.formats import FORMATS, read_runs
from harness_sdk.trajectories.runs import Run

DATA = Path(__file__).parents[1] / "data" / "trajectories"


def _runs(*names: str) -> list[Run]:
    return read_runs([DATA / name for name in names])


def test_react_keeps_steps_status_and_answer() -> None:
    lines = [json.loads(line) for line in (DATA / "react.jsonl").read_text().splitlines()]
    runs = _runs("react.jsonl")
    assert len(runs) == len(lines)
    assert {run.task_id for run in runs} == {" ".join(line["question"].split()) for line in lines}
    for run, line in zip(runs, lines, strict=True):
        assert run.reward == (1.0 if line["status"] == "correct" else 0.0)
        assert run.status == ("max_turns" if line["status"] == "halted" else "done")
        replies = [m.content for m in run.messages if m.role == "assistant"]
        assert len(replies) == len(line["steps"])
        assert replies[0].endswith(line["steps"][0]["action"])


def test_responses_of_one_task_share_it_and_carry_prompt_and_calls() -> None:
    runs = _runs("responses_swe.jsonl")
    assert {run.task_id for run in runs} == {"astropy__astropy-12907"}
    assert {run.reward for run in runs} <= {0.0, 1.0}
    roles = [message.role for message in runs[0].messages]
    assert roles[:4] == ["system", "user", "assistant", "tool"]
    assert "separability_matrix" in runs[0].messages[1].content
    assert '<tool_call>\n{"name": "terminal", "arguments": {' in runs[0].messages[2].content
    assert runs[0].messages[3].content.startswith("<tool_response>\n")


def test_responses_reward_is_clamped_and_reasoning_kept() -> None:
    (run,) = _runs("responses_reasoning.jsonl")
    assert run.reward == 0.0
    assert run.messages[0].role == "system"
    assert "<tools>" in run.messages[0].content
    assert run.messages[2].content.startswith("<think>\n")


def test_two_parallel_calls_are_one_turn_and_one_observation() -> None:
    run = _runs("responses_tools.jsonl")[0]
    turn, observation = run.messages[2:4]
    assert (turn.role, observation.role) == ("assistant", "tool")
    assert turn.content.count("<tool_call>") == 2
    assert observation.content.count("<tool_response>") == 2


def test_recorded_token_ids_are_kept() -> None:
    (run,) = _runs("responses_ids.json")
    assert [(len(t.prompt_token_ids), len(t.token_ids)) for t in run.recorded_turns] == [
        (3088, 495),
        (3637, 207),
    ]
    assert run.recorded_model == "Qwen/Qwen3-0.6B"
    assert all(len(t.token_ids) == len(t.sampled_logprobs) for t in run.recorded_turns)


def test_swe_agent_tool_formats_are_one_task() -> None:
    plain, calls = _runs(
        "marshmallow-1867__default_sys-env_window100.traj",
        "marshmallow-1867__function_calling.traj",
    )
    assert plain.task_id == calls.task_id
    assert plain.task_id.startswith("TimeDelta serialization precision")
    assert "<tool_call>" in calls.messages[2].content
    assert calls.messages[3].role == "tool"
    assert plain.status == "done"


def test_atif_reads_its_subagents_and_splits_at_the_summary() -> None:
    runs = _runs("hello-world.trajectory.json")
    assert [run.run_id.removeprefix("hello-world.trajectory") for run in runs] == [
        ".json",
        ".json#2",
        ".summarization-1-summary.json",
        ".summarization-1-questions.json",
        ".summarization-1-answers.json",
    ]
    assert len({run.task_id for run in runs}) == 1
    assert runs[1].messages[0] == runs[0].messages[0]
    assert sum(m.role == "assistant" for m in runs[0].messages) == 3
    assert [m.copied for m in runs[4].messages if m.role == "assistant"] == [
        True,
        True,
        True,
        False,
    ]


def test_a_file_given_twice_is_read_once() -> None:
    assert len(_runs("mini_local.traj.json", "mini_local.traj.json")) == 1


@pytest.mark.parametrize("text", ['{"a": 1}', "[1, 2]", "not json", '{"steps": 3}\n{"x": 1}', "[]"])
def test_unknown_format_is_refused_with_the_known_ones(tmp_path: Path, text: str) -> None:
    file = tmp_path / "runs.jsonl"
    file.write_text(text)
    with pytest.raises(InvalidRequest) as caught:
        read_runs([file])
    assert "runs.jsonl" in caught.value.value
    assert all(form.name in caught.value.limit for form in FORMATS)


def test_broken_run_of_a_known_format_names_its_line(tmp_path: Path) -> None:
    good = (DATA / "react.jsonl").read_text().splitlines()[0]
    file = tmp_path / "react.jsonl"
    file.write_text(good + '\n{"question": "Who?", "steps": [{"thought": "?"}]}\n')
    with pytest.raises(InvalidRequest, match=r"ReAct.*react\.jsonl:2"):
        read_runs([file])


def test_missing_path_and_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no such file"):
        read_runs([tmp_path / "nowhere"])
    with pytest.raises(InvalidRequest, match="no recorded runs"):
        read_runs([tmp_path])
