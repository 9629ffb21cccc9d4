"""The learning study: which vaults each variant's scripts open, and what the longest path is."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.learning.longest_path import path_weights
from benchmarks.learning.report import equal_tokens, race, write_report
from benchmarks.learning.study import Plan, online_settings, warmup_settings
from benchmarks.learning.teacher import Script, play
from benchmarks.learning.variants import VARIANTS, Variant
from benchmarks.learning.world import LIMITS, VaultTask, World, draw_tasks, score
from benchmarks.pretrain_demo.dry_episodes import DryService
from harness_sdk.cli.demo.config import MODEL
from harness_sdk.cli.stack_config import StackConfig
from harness_sdk.cli.stack_layout import trainer_plan
from harness_sdk.record import EpisodeRecord
from trainer_service.dag import pack_episodes

Kind = tuple[bool, bool, bool]
"""Detour, long shelf, long inside."""

KINDS: list[Kind] = list(product((False, True), (False, True), (False, True)))

OPENED_IN_BRANCHES = {
    "octopus": lambda detour, shelf, inside: True,
    "no_mounts": lambda detour, shelf, inside: not (shelf and inside),
    "no_rewind": lambda detour, shelf, inside: not (detour and shelf),
}
OPENED_ALONE = {
    "no_fork": lambda detour, shelf, inside: not detour or not (shelf or inside),
    "single": lambda detour, shelf, inside: (
        not (shelf or inside) if detour else not (shelf and inside)
    ),
}


@pytest.fixture(scope="module")
def service() -> DryService:
    return DryService(MODEL)


@pytest.fixture(scope="module")
def tasks() -> dict[Kind, VaultTask]:
    """One of each kind."""
    found: dict[Kind, VaultTask] = {}
    drawn = draw_tasks(0)
    while len(found) < len(KINDS):
        task = next(drawn)
        found[task.detour, task.shelf_is_long, task.inside_is_long] = task
    return found


async def _played(
    service: DryService, task: VaultTask, variant: Variant, **script: Any
) -> tuple[EpisodeRecord, float]:
    """The best script there is, but for `script`."""
    best: dict[str, Any] = {
        "forks": variant.forks,
        "guesses": False,
        "goes_back": variant.rewinds,
        "replies_plainly": False,
        "guess": "000",
    }
    async with service.episode(
        task.task_id, primitives=variant.primitives, limits=LIMITS
    ) as episode:
        answer = await play(episode, task, Script(**best | script), variant)
    return service.last_record, score(task, answer)


@pytest.mark.parametrize("name", [*OPENED_IN_BRANCHES, *OPENED_ALONE])
async def test_the_best_script_opens_the_vaults_that_the_primitives_allow(
    service: DryService, tasks: dict[Kind, VaultTask], name: str
) -> None:
    opens = (OPENED_IN_BRANCHES | OPENED_ALONE)[name]
    found = {
        kind: (await _played(service, task, VARIANTS[name]))[1] for kind, task in tasks.items()
    }
    assert found == {kind: float(opens(*kind)) for kind in KINDS}


@pytest.mark.parametrize("ending", ["prompt", "strict", "fallback"])
async def test_a_root_that_replies_plainly_is_scored_by_the_variants_ending(
    service: DryService, tasks: dict[Kind, VaultTask], ending: str
) -> None:
    task = tasks[False, False, False]
    record, reward = await _played(service, task, VARIANTS[ending], replies_plainly=True)
    assert reward == (0.0 if ending == "strict" else 1.0)
    prompts = [node for node in record.nodes if node.kind.name == "TERMINATION"]
    assert len(prompts) == (1 if ending == "prompt" else 0)


async def test_the_longest_path_alone_has_weight(
    service: DryService, tasks: dict[Kind, VaultTask]
) -> None:
    records = [
        (await _played(service, tasks[kind], VARIANTS["octopus"]))[0]
        for kind in ((False, False, False), (True, True, True))
    ]
    strip = pack_episodes(records)
    weights = path_weights(strip)
    for episode, record in enumerate(records):
        # The opener's path: the root's fork, then look, read_thread, open and done.
        own = [
            n for n in record.nodes if n.thread_id == "b" or (n.thread_id, n.step) == ("root", 1)
        ]
        length = sum(sum(node.sampled) for node in own)
        here = weights[strip.action_episode == episode]
        assert (here > 0).sum() == length
        torch.testing.assert_close(here[here > 0], here.new_full((length,), 1 / length))


async def test_a_copy_holds_the_surviving_pages_of_the_steps(
    tasks: dict[Kind, VaultTask],
) -> None:
    task = tasks[True, False, False]
    world = World(task, lambda: ("root", "a", "b"))
    assert await world.look("a") == task.detour_page
    assert await world.look("a") == task.shelf
    assert world.copy("a", (1, 2)) == f"{task.detour_page}, {task.shelf}"
    assert world.copy("a", (2, 9)) == task.shelf
    world.rewound("a")
    assert await world.look("a") == task.shelf
    assert world.copy("a", (1, 2)) == task.shelf


@pytest.mark.parametrize("name", VARIANTS)
def test_the_trainer_takes_each_variants_settings(tmp_path: Path, name: str) -> None:
    plan = Plan(variant=name, seed=1)
    stack = StackConfig(model=MODEL, folder=tmp_path)
    for settings in (warmup_settings(plan), online_settings(plan)):
        trainer_plan(stack, settings)


def test_report_averages_steps_and_draws_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shares = {"forked": 1.0, "rewound": 0.0, "read": 0.5, "plain_reply": 0.0}
    rows = [
        {"task": "vault", "variant": variant, "seed": 1, "step": step, "seconds": 1.0 * step}
        | {"generated_tokens": 100 * step, "reward": step / 10, **shares}
        for variant in ("single", "octopus")
        for step in reversed(range(1, 8 if variant == "single" else 11))
    ]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_report([source], tmp_path / "learning.json", hardware="two cores")
    found = json.loads((tmp_path / "learning.json").read_text())
    keys = ("variant", "generated_tokens", "reward")
    assert [tuple(row[key] for key in keys) for row in found] == [
        ("octopus", 500, 0.3), ("octopus", 1000, 0.8), ("single", 500, 0.3), ("single", 700, 0.65),
    ]  # fmt: skip
    assert "| octopus | 1 | 10 | 1,000 | 0.150 | 0.950 | 1.00 | 0.00 | 0.50 |" in (
        capsys.readouterr().out
    )
    assert "octopus" in (tmp_path / "learning.svg").read_text()
    assert json.loads((tmp_path / "learning_detail.json").read_text())["hardware"] == "two cores"


def test_a_race_compares_when_the_mean_of_five_steps_first_had_a_reward() -> None:
    rows = [
        {"variant": variant, "seed": 1, "step": step, "seconds": pace * step, "reward": step / 10}
        for variant, pace in (("octopus", 12.0), ("asynchronous", 8.0), ("single", 1.0))
        for step in range(1, 9)
    ]
    # Steps 3 to 7 have a mean of 0.5, steps 4 to 8 one of 0.6; nobody had 0.7.
    assert race(rows).splitlines()[2:] == [
        "| 1 | 0.5 | 84 | 56 | 1.50 |",
        "| 1 | 0.6 | 96 | 64 | 1.50 |",
    ]


def test_variants_are_compared_at_the_tokens_that_all_of_them_generated() -> None:
    rows = [
        {"variant": variant, "seed": seed, "step": step, "generated_tokens": pace * step}
        | {"reward": step / 10}
        for variant, seed, pace in (("octopus", 1, 200), ("octopus", 2, 100), ("single", 1, 100))
        for step in range(1, 9)
    ]
    # 800 tokens are 4 steps of the first run and 8 of the others; five at most count.
    assert equal_tokens(rows).splitlines() == [
        "| variant | reward at 800 tokens | of seeds |",
        "|---|---|---|",
        "| octopus | 0.425 | 0.250, 0.600 |",
        "| single | 0.600 | 0.600 |",
    ]
