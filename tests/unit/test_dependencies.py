"""Imports point one way: services to the SDK's contracts, the trainer to the kernels."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTRACTS = (
    "harness_sdk.rpc",
    "harness_sdk.types",
    "harness_sdk.deltas",
    "harness_sdk.errors",
    "harness_sdk.fingerprints",
    "harness_sdk.record",
    "harness_sdk.records_file",
    "harness_sdk.control",
    "harness_sdk.broker_address",
    "harness_sdk.redis_client",
    "harness_sdk.web_origin",
    "harness_sdk.exposition",
    "harness_sdk.interpreter",
    "harness_sdk.log_ids",
    "harness_sdk.masking",
    "harness_sdk.tracing",
    "harness_sdk.measures",
    "harness_sdk.model_cost",
    "harness_sdk._status",
    "harness_sdk._wire",
    "harness_sdk._cancellation",
)
OURS = ("harness_sdk", "rollout_service", "trainer_service", "tree_kernels")
ALLOWED = {
    "harness_sdk": ("harness_sdk",),
    "rollout_service": ("rollout_service", *CONTRACTS),
    "trainer_service": ("trainer_service", "tree_kernels", *CONTRACTS),
    "kernels/tree_kernels": ("tree_kernels",),
}
# Entry points read their configuration the way every command does.
ENTRY_POINTS = ("__main__.py", "service.py")


def _imported(path: Path) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in found if name.split(".")[0] in OURS]


@pytest.mark.parametrize("package", list(ALLOWED))
def test_package_imports_only_what_it_may(package: str) -> None:
    allowed = ALLOWED[package]
    wrong = []
    for path in (ROOT / package).rglob("*.py"):
        if path.name in ENTRY_POINTS or "rpc" in path.parts or "cli" in path.parts:
            continue
        for name in _imported(path):
            if not any(name == root or name.startswith(root + ".") for root in allowed):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []
