"""Adapter folders: PEFT's options that serve, and those that are refused by name."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from harness_sdk.errors import AdapterError
from rollout_service.engine.transformers.adapters import (
    Adapter,
    AdapterSlots,
    read_adapter,
    tensor_checksum,
)

# PEFT 0.21 reads a property that transformers 5.24 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")


@pytest.fixture
def base(model_folder: Callable[[str], Path]) -> Any:
    return load(model_folder("llama"))


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(str(folder)).eval()


def saved(folder: Path, base: Any, **options: Any) -> Any:
    """A random adapter over a few modules, written by PEFT."""
    config = LoraConfig(
        **{"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], **options},
        init_lora_weights=False,
    )
    model = get_peft_model(base, config).eval()
    model.save_pretrained(str(folder))
    return model


def read(folder: Path, base: Any, **names: str) -> Adapter:
    return read_adapter(
        str(folder), base, **{"model_path": "a/llama", "model_hash": "f" * 64, **names}
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"down_proj": 5}, "alpha_pattern": {r"layers\.3\.self_attn\.q_proj": 1}},
        {"target_modules": r"model\.layers\.[02]\.self_attn\.(k|v)_proj"},
    ],
)
def test_served_adapter_equals_peft(
    options: dict[str, Any], model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = model_folder("llama")
    expected_model = saved(tmp_path, load(folder), **options)
    base = load(folder)
    slots = AdapterSlots(base, torch.device("cpu"))
    slots.add(4, read(tmp_path, base))
    token_ids = torch.arange(20)[None]
    with torch.no_grad():
        plain = base(input_ids=token_ids).logits
        slots.active = 4
        adapted = base(input_ids=token_ids).logits
        expected = expected_model(input_ids=token_ids).logits
        slots.active = 0
        back = base(input_ids=token_ids).logits
    torch.testing.assert_close(adapted, expected, rtol=0, atol=2e-5)
    assert torch.equal(plain, back)
    assert (adapted - plain).abs().max() > 0.01


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora is not served; got True"),
        ({"bias": "all"}, "bias is not served; got all; allowed: none"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not served"),
        ({"peft_type": "IA3"}, "not a LoRA adapter; got IA3"),
        ({"target_modules": ["q_proj", "wqkv"]}, "modules that the base model lacks; got wqkv"),
        ({"target_modules": "nothing"}, "targets no module"),
        ({"base_model_name_or_path": "b/other"}, "another base model; got b/other"),
        ({"base_model_name_or_path": "0" * 64}, "another base model"),
        ({"r": 4}, r"lora_A.weight has the wrong shape; got \(3, 48\); allowed: \(4, 48\)"),
    ],
)
def test_config_that_cannot_be_served_is_refused(
    change: dict[str, Any],
    message: str,
    base: Any,
    model_folder: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    saved(tmp_path, load(model_folder("llama")))
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(AdapterError, match=message):
        read(tmp_path, base)


def test_tensors_of_integers_are_refused(
    base: Any, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    saved(tmp_path, load(model_folder("llama")))
    file = tmp_path / "adapter_model.safetensors"
    name, tensor = next(iter((tensors := load_file(file)).items()))
    save_file({**tensors, name: tensor.int()}, file)
    with pytest.raises(AdapterError, match=f"{name} is of the wrong kind; got int32; allowed: f"):
        read(tmp_path, base)


def test_base_model_is_known_by_hash_or_folder_name(
    base: Any, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    saved(tmp_path, load(model_folder("llama")))
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text())
    for name in ("c" * 64, "elsewhere/llama", "", None):
        file.write_text(json.dumps({**config, "base_model_name_or_path": name}))
        assert len(read(tmp_path, base, model_hash="c" * 64).modules) == 16


def test_checksum_is_of_float32_values_in_c_order() -> None:
    values = torch.arange(6, dtype=torch.float32).view(2, 3)
    expected = hashlib.sha256(struct.pack("<6f", 0, 1, 2, 3, 4, 5)).hexdigest()
    assert tensor_checksum(values) == expected
    assert tensor_checksum(values.t().contiguous().t()) == expected
    assert tensor_checksum(values.bfloat16()) == expected
    assert tensor_checksum(values.t()) != expected
