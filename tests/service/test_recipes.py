"""The recipes of CONTRIBUTING.md, followed as they are written in a copy of the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT, blocks

_CHECKS_S = 240
_PACKAGES = ("harness_sdk", "kernels", "rollout_service", "tests", "trainer_service")

_CHECKS = """
from pathlib import Path

import torch
import transformers

from rollout_service.chat.calls import family_of, parse_reply
from tests.packed import assert_equal_to_paths, load_policy, records_for
from tests.unit.test_objectives import ADVANTAGES, near_policy, random_records
from trainer_service.advantages import estimate
from trainer_service.config import TrainerConfig
from trainer_service.dag import pack_episodes
from trainer_service.objectives import OBJECTIVES, ObjectiveOptions

options = {"objective": "half", "batch": {"advantages": "half_mean"}}
assert TrainerConfig.model_validate({"model": {"path": "x"}, **options}).objective == "half"

strip = pack_episodes(random_records(0))
half, whole = (
    OBJECTIVES[name](near_policy(strip, 0), strip, ADVANTAGES, ObjectiveOptions()).loss
    for name in ("half", "token_unique")
)
assert whole != 0 and torch.equal(half, whole / 2)

assert estimate("half_mean", [1.0, 0.0], ["a", "a"]).tolist() == [0.5, -0.5]

template = 'Call as <<call NAME|{"key": "value"}>>.'
assert family_of(template) == "angle"
reply = parse_reply('Well. <<call look|{"q": ">>"}>><<call look|{>>', family="angle", step=1)
assert reply.text == "Well."
good, bad = reply.tool_calls
assert (good.name, dict(good.arguments), good.error) == ("look", {"q": ">>"}, "")
assert "<<call NAME|{...}>>" in bad.error

torch.manual_seed(0)
config = transformers.Olmo2Config(
    vocab_size=300, hidden_size=48, intermediate_size=80, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2,
)
transformers.Olmo2ForCausalLM(config).float().eval().save_pretrained("model")
policy = load_policy(Path("model"))
assert_equal_to_paths(
    policy, records_for(policy, 0)[:1], Path("model"), Path("lora"), dtype="float32", family="olmo2"
)
"""


def _code(title: str) -> str:
    """The block of CONTRIBUTING.md in the section of that title."""
    page = ROOT / "CONTRIBUTING.md"
    lines = page.read_text("utf-8").splitlines()
    begin = lines.index(f"## {title}") + 1
    end = next(n for n, line in enumerate([*lines, "## "], 1) if n > begin and line[:3] == "## ")
    return next(block.text for block in blocks(page) if begin < block.line < end)


def _put(path: Path, behind: str, text: str) -> None:
    """Write `text` behind the one place where `behind` stands."""
    before = path.read_text("utf-8")
    assert before.count(behind) == 1, f"{path.name} holds {behind!r} {before.count(behind)} times"
    path.write_text(before.replace(behind, behind + text), "utf-8")


def _name(folder: Path, name: str, table: str) -> None:
    """Name a new file's function in the package's table."""
    init = folder / "__init__.py"
    function = "loss" if folder.name == "objectives" else "advantages"
    entry = f'    "{name}": {name}.{function},\n'
    text, found = re.subn(
        rf"^{table}: .* = {{\n",
        lambda opening: f"from trainer_service.{folder.name} import {name}\n{opening[0]}{entry}",
        init.read_text("utf-8"),
        flags=re.MULTILINE,
    )
    assert found == 1, f"{init} has no table {table}"
    init.write_text(text, "utf-8")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in _PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__", "model", "data")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    return tmp_path


def test_recipes_work_as_they_are_written(copy: Path) -> None:
    trainer, calls = copy / "trainer_service", copy / "rollout_service" / "chat" / "calls"
    (trainer / "objectives" / "half.py").write_text(_code("Add an objective"))
    _name(trainer / "objectives", "half", "OBJECTIVES")
    _put(trainer / "config.py", "GROUP_OBJECTIVES = (", '"half", ')
    (trainer / "advantages" / "half_mean.py").write_text(_code("Add an advantage"))
    _name(trainer / "advantages", "half_mean", "ESTIMATORS")
    _put(trainer / "config.py", "ADVANTAGE_NAMES = (", '"half_mean", ')
    registry = trainer / "models" / "registry.py"
    _put(registry, "_MODELS: dict[str, ModelHooks] = {\n", _code("Add an architecture"))
    (calls / "angle.py").write_text(_code("Add a template family"))
    _put(calls / "families.py", "from __future__ import annotations\n",
         "from rollout_service.chat.calls.angle import ANGLE\n")  # fmt: skip
    _put(calls / "families.py", "_ORDER = (\n", "    ANGLE,\n")
    done = subprocess.run(
        [sys.executable, "-c", _CHECKS],
        cwd=copy, capture_output=True, text=True, timeout=_CHECKS_S, check=False,
        env={**os.environ, "PYTHONPATH": f"{copy}{os.pathsep}{copy / 'kernels'}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
