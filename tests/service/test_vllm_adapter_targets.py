"""Which modules an adapter for vLLM may change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness_sdk.errors import AdapterError
from harness_sdk.fingerprints import model_hash
from rollout_service.engine.vllm.lora import AdapterReader
from tests.engine_cases import save_adapter

# PEFT 0.21 reads a property that transformers 5.24 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")


def test_beside_experts_only_attention_and_delta_rules_are_served(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = model_folder("qwen3_5")
    save_adapter(tmp_path, folder, "qwen3_5")
    digest = model_hash(str(folder))

    every = AdapterReader(str(folder), digest, has_experts=False)
    kinds = {name.rpartition(".")[2] for name in every.read(str(tmp_path), max_rank=8).modules}
    assert {"q_proj", "in_proj_qkv", "in_proj_z", "out_proj", "up_proj"} <= kinds
    assert kinds <= {*every.targets()}
    assert every.shapes() is every.shapes()

    beside = AdapterReader(str(folder), digest, has_experts=True)
    with pytest.raises(AdapterError, match="beside experts; got down_proj, gate_proj, up_proj;"):
        beside.read(str(tmp_path), max_rank=8)


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "granitemoehybrid"])
def test_adapters_change_what_decoder_layers_hold_and_no_head(
    family: str, model_folder: Callable[[str], Path]
) -> None:
    targets = AdapterReader(str(model_folder(family)), "", has_experts=False).targets()
    assert {"q_proj", "k_proj", "v_proj", "o_proj"} <= {*targets}
    assert "lm_head" not in targets
