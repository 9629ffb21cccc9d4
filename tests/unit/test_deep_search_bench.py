"""Deep search before and after training: its statistics, its warm-up, and when it gives up."""

from __future__ import annotations

import asyncio
import json
import math
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.deep_search.plan import (
    GPU_ARGUMENTS,
    Plan,
    stack_config,
    train_settings,
    warm_up_settings,
)
from benchmarks.deep_search.report import (
    STEP_KEYS,
    Report,
    comparison,
    markdown,
    mean_and_error,
    step_table,
)
from benchmarks.deep_search.serving import while_serving
from benchmarks.deep_search.teacher import taught
from examples.deep_search import agent as example
from harness_sdk.agents import load_agent
from harness_sdk.cli.settings import render_toml
from harness_sdk.cli.stack import LocalStack
from harness_sdk.cli.stack_layout import replica_plans, rollout_config, trainer_plan
from harness_sdk.errors import ConfigError, ServiceError, Unavailable
from harness_sdk.runner import EpisodeOutcome, GroupOutcome


def _group(question: str, *scores: float | None) -> GroupOutcome:
    """Episodes with these F1; None failed. Right is what has an F1 of 1."""
    episodes = [
        EpisodeOutcome(
            task_id=question,
            group_id="",
            episode_id=f"{question}-{number}",
            reward=score,
            answer="no idea",
            metrics={} if score is None else {"f1": score, "exact_match": float(score == 1.0)},
        )
        for number, score in enumerate(scores)
    ]
    return GroupOutcome(task_id=question, group_id="", size=len(scores), episodes=episodes)


def _scores(*groups: GroupOutcome) -> dict[str, list[EpisodeOutcome]]:
    return {group.task_id: group.episodes for group in groups}


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([], (None, None)),
        ([0.5], (0.5, None)),
        ([0.0, 1.0], (0.5, 0.5)),
        # Their deviation is 1: over the root of 3.
        ([1.0, 2.0, 3.0], (2.0, 3**-0.5)),
    ],
)
def test_a_mean_comes_with_its_standard_error(
    values: list[float], found: tuple[float | None, float | None]
) -> None:
    assert mean_and_error(values) == pytest.approx(found)


def test_episodes_of_a_question_count_as_one_and_are_compared_with_their_own_question() -> None:
    before = _scores(_group("a", 0.0, 0.5), _group("b", 0.0, 0.0), _group("gone", 1.0))
    after = _scores(_group("b", 1.0, 0.5), _group("a", 0.25, 0.75))
    found = comparison(before, after)["f1"]
    assert found["before"][0] == pytest.approx((0.25 + 0.0 + 1.0) / 3)
    assert found["after"][0] == pytest.approx((0.75 + 0.5) / 2)
    # a: 0.25 more, b: 0.75 more; their deviation is 0.5 / sqrt 2.
    assert found["difference"] == pytest.approx((0.5, 0.25))
    assert found["questions"] == 2
    lines = markdown(comparison(before, after)).splitlines()
    assert lines[3] == "| f1 | 0.417 +- 0.300 | 0.625 +- 0.125 | +0.500 +- 0.250 | 2 |"
    assert lines[4] == "| evidence searched | - | - | - | 0 |"


def test_a_step_that_was_skipped_has_its_line_too() -> None:
    step = dict.fromkeys(STEP_KEYS) | {"step": 2, "version": 3.0, "kl": 0.25, "grad_norm": math.nan}
    line = step_table([step]).splitlines()[-1]
    assert [cell for cell in line.split(" ") if cell not in "|-"] == ["2", "0.25", "3", "nan"]


def test_a_run_that_was_cut_short_leaves_what_it_had(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    report = Report(tmp_path / "out", Plan(), metrics)
    row = report.add_pass("before", 1, 0, [_group("a", 1.0), _group("b", None), _group("c", 0.5)])
    assert (row["questions"], row["scored"]) == (3, 2)
    assert (row["f1"], row["exact_match"]) == (0.75, 0.5)
    steps = [
        {"step": 1, "objective": "sft", "objective/nll": 2.0},
        {"step": 2, "objective": "dag_grpo", "reward/mean": 0.25, "divergence/kl_mean": 1e-4},
    ]
    metrics.write_text("".join(json.dumps(step) + "\n" for step in steps) + '{"step": 3, "ob')
    assert report.num_steps() == 1
    report.write()
    figures = json.loads((tmp_path / "out" / "report.json").read_text())
    assert figures["rows"] == [row]
    assert [step["nll"] for step in figures["steps"]] == [2.0, None]
    assert [step["reward"] for step in figures["steps"]] == [None, 0.25]
    assert {each["question"]: len(each["before"]) for each in figures["questions"]} == {
        "a": 1,
        "c": 1,
    }
    assert figures["compared"]["f1"]["after"] == [None, None]
    assert "| 2 | dag_grpo | 0.25 |" in (tmp_path / "out" / "report.md").read_text()


class _Recorded:
    """A thread that answers `said` and notes what it was told to say."""

    def __init__(self, thread_id: str, told: dict[str, list[str | None]]) -> None:
        self.thread_id = thread_id
        self.step = 0
        self.answer = ""
        self.read: list[object] = []
        self._told = told
        self._children: dict[str, _Recorded] = {}

    async def generate(self, messages: Any = (), **options: Any) -> Any:
        self.step += 1
        self._told.setdefault(self.thread_id, []).append(options["demonstration"])
        return SimpleNamespace(
            text=options["demonstration"] or "said",
            tool_calls=(),
            budget=SimpleNamespace(threads_left=6),
        )

    async def fork(self, branches: dict[str, str]) -> dict[str, _Recorded]:
        self._children = {name: _Recorded(name, self._told) for name in branches}
        return self._children

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        return asyncio.create_task(work)

    async def wait(self) -> list[Any]:
        while not all(child.answer for child in self._children.values()):
            await asyncio.sleep(0)
        return [SimpleNamespace(evidence=name) for name in self._children]

    async def read_thread(self, branch: object, steps: tuple[int, int]) -> None:
        self.read.append((branch, steps))

    async def done(self, answer: str, evidence: str = "") -> None:
        self.answer = answer

    def report(self, **figures: float) -> None:
        pass


async def test_the_warm_up_says_what_is_known_and_samples_the_rest() -> None:
    agent = taught(load_agent(Path(example.__file__).parent))
    assert agent.sampling is not None
    assert agent.sampling.temperature == 1.0
    hops = next(task for task in example.tasks() if len(task.get("decomposition", ())) == 2)
    told: dict[str, list[str | None]] = {}
    root = _Recorded("root", told)
    await agent.run(cast(Any, root), hops)
    answers = [hop["answer"] for hop in hops["decomposition"]]
    assert told == {
        "root": [None, hops["answer"]],
        "hop1": [None, answers[0]],
        "hop2": [None, answers[1]],
    }
    assert root.answer == hops["answer"]
    # The second hop reads the first by its name: the service knows no taught threads.
    assert root._children["hop2"].read == [("hop1", (1, 2))]
    plain = next(task for task in example.tasks() if not task.get("decomposition"))
    told.clear()
    await agent.run(cast(Any, _Recorded("root", told)), plain)
    assert told == {"root": [None, plain["answer"]], "hop1": [None, None], "hop2": [None, None]}


class _Ending:
    """A stack whose rollout service ends after `after_s`."""

    def __init__(self, after_s: float, error: Exception | None = None) -> None:
        self._after_s = after_s
        self._error = error

    async def until_ended(self, name: str) -> None:
        assert name == "rollout"
        await asyncio.sleep(self._after_s)
        if self._error is not None:
            raise self._error

    def log_path(self, name: str) -> Path:
        return Path(f"{name}.log")


async def _fails() -> None:
    raise Unavailable("connection refused")


async def _serve_while(stack: _Ending, *work: Any) -> Any:
    return await while_serving(cast(LocalStack, stack), *work)


async def test_work_ends_with_the_service_whose_log_says_why() -> None:
    died = ServiceError("the rollout service ended", remedy="see rollout.log: out of memory")
    with pytest.raises(ServiceError, match="out of memory"):
        await _serve_while(_Ending(0.05, died), asyncio.sleep(60))
    with pytest.raises(ServiceError, match="out of memory"):
        await _serve_while(_Ending(0.05, died), _fails())
    with pytest.raises(ServiceError, match="before its time"):
        await _serve_while(_Ending(0.05), asyncio.sleep(60))


async def test_the_first_work_to_end_ends_the_others() -> None:
    others: list[str] = []

    async def other() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            others.append("ended")

    async with asyncio.timeout(10):
        assert await _serve_while(_Ending(60), asyncio.sleep(0.05, "first"), other()) == "first"
    assert others == ["ended"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seconds", math.nan),
        ("seconds", math.inf),
        ("passes", 0),
        ("questions", -1),
        ("concurrency", 0),
        ("warm_up", -1),
        ("lr", -1e-4),
        ("group_size", 1),
        ("temperature", 0.0),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"--{field.replace('_', '-')} cannot be used; got"):
        Plan(**{field: value})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_services_take_the_settings_of_a_plan(device: str, tmp_path: Path) -> None:
    plan = Plan(model="demo", device=device, warm_up=2, steps=3, rank=8)
    config = stack_config(plan, tmp_path, "0123456789abcdef")
    (rollout,) = replica_plans(config)
    wanted = {"cpu": {}, "cuda": GPU_ARGUMENTS}[device]
    assert rollout_config(rollout).engine.vllm.arguments == wanted
    # The service reads them from a file.
    written = tomllib.loads(render_toml(rollout.settings))
    assert written["engine"]["vllm"].get("arguments", {}) == wanted
    assert rollout.settings["engine"]["name"] == {"cpu": "transformers", "cuda": "vllm"}[device]
    assert trainer_plan(config, warm_up_settings(plan, 56)).settings["max_steps"] == 2
    trained = trainer_plan(config, train_settings(plan)).settings
    assert trained["max_steps"] == 5
    assert trained["lora"] == {"rank": 8, "alpha": 16.0}
    assert trained["model"]["dtype"] == rollout.settings["model"]["dtype"]
