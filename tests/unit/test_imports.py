"""Importing the SDK or a configuration stays light."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "vllm", "triton", "transformers", "redis", "numpy", "matplotlib", "opentelemetry")
LIGHT = (
    "harness_sdk",
    "harness_sdk.types",
    "harness_sdk.errors",
    "harness_sdk.record",
    "harness_sdk.control",
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
