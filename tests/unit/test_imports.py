"""Importing the SDK or a configuration stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "vllm", "triton", "transformers", "redis", "numpy", "matplotlib", "opentelemetry")
LIGHT = (
    "harness_sdk",
    "harness_sdk.types",
    "harness_sdk.errors",
    "harness_sdk.record",
    "harness_sdk.control",
    "harness_sdk.redis_client",
    "harness_sdk.tracing",
    "harness_sdk.cli.__main__",
    "harness_sdk.cli.settings",
    "rollout_service.config",
    "rollout_service.cursors",
)


@pytest.mark.parametrize("module", LIGHT)
def test_light_module_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_every_folder_says_what_lives_there() -> None:
    root = Path(__file__).parents[2]
    listed = subprocess.run(
        ["git", "ls-files", "*__init__.py"], cwd=root, capture_output=True, text=True, check=True
    )
    files = [root / line for line in listed.stdout.splitlines()]
    silent = [str(path) for path in files if ast.get_docstring(ast.parse(path.read_text())) is None]
    assert files and not silent
