"""The policy: what it loads, trains, writes and refuses."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from harness_sdk.errors import AdapterError, ConfigError
from harness_sdk.record import NodeKind
from tests.packed import exact_arithmetic, load_policy, records_for
from tests.path_reference import load_reference
from tests.random_records import RecordWriter
from tests.tiny_models import FAMILIES, LORA_TARGETS, save_tiny_model
from tests.tree_cases import relative_rms
from trainer_service.config import TrainerConfig
from trainer_service.dag import pack_episodes
from trainer_service.models import default_mount_layers, model_hooks
from trainer_service.policy import LoraOptions, Policy
from trainer_service.run_state import RunState

PROBE = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def model_paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: save_tiny_model(root / family, family) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_probe_equals_stock_transformers_with_the_saved_adapter(
    model_paths: dict[str, Path], tmp_path: Path, family: str
) -> None:
    policy = load_policy(model_paths[family])
    policy.save_adapter(tmp_path)
    reference = load_reference(model_paths[family], tmp_path)
    logits = reference(input_ids=torch.tensor([PROBE])).logits[0]
    wanted = logits[:-1].log_softmax(-1).gather(1, torch.tensor(PROBE[1:])[:, None])[:, 0]
    found = torch.tensor(policy.token_logprobs(PROBE))
    assert float((found - wanted.detach()).abs().max()) <= 5e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_adapter_sits_on_the_familys_modules(model_paths: dict[str, Path], family: str) -> None:
    policy = Policy.load(model_paths[family], lora=LoraOptions(rank=2))
    modules = {name.split(".")[-3] for name in policy.adapter_tensors()}
    assert modules == set(LORA_TARGETS[family])


def test_adapter_file_holds_the_tensors_and_checksums_of_memory(
    model_paths: dict[str, Path], tmp_path: Path
) -> None:
    policy = load_policy(model_paths["qwen3_5"])
    policy.save_adapter(tmp_path)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    tensors = policy.adapter_tensors()
    assert stored.keys() == tensors.keys() == policy.checksums().keys()
    for name, tensor in stored.items():
        assert torch.equal(tensor, tensors[name])
        digest = hashlib.sha256(tensor.numpy().astype("<f4").tobytes()).hexdigest()
        assert policy.checksums()[name] == digest
    config: Any = peft.LoraConfig.from_pretrained(str(tmp_path))
    assert (config.r, config.lora_alpha) == (4, 8)


def test_training_goes_on_from_a_stored_adapter(
    model_paths: dict[str, Path], tmp_path: Path
) -> None:
    policy = load_policy(model_paths["granitemoehybrid"])
    policy.save_adapter(tmp_path)
    options = LoraOptions(rank=4, alpha=8)
    path = model_paths["granitemoehybrid"]
    again = Policy.load(path, lora=options, adapter_path=tmp_path)
    assert again.checksums() == policy.checksums()
    assert again.token_logprobs(PROBE) == policy.token_logprobs(PROBE)
    assert all(parameter.requires_grad for parameter in again.trainable_parameters())
    with pytest.raises(AdapterError, match="another one"):
        Policy.load(path, lora=LoraOptions(rank=8, alpha=8), adapter_path=tmp_path)


def test_a_stored_adapter_with_a_missing_tensor_is_refused_by_name(
    model_paths: dict[str, Path], tmp_path: Path
) -> None:
    load_policy(model_paths["llama"]).save_adapter(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    missing = sorted(tensors)[3]
    del tensors[missing]
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match="does not fit") as error:
        Policy.load(model_paths["llama"], lora=LoraOptions(rank=4, alpha=8), adapter_path=tmp_path)
    assert missing in error.value.value


def test_a_new_adapter_is_the_base_model_and_follows_its_seed(
    model_paths: dict[str, Path],
) -> None:
    path = model_paths["qwen3"]
    state = torch.random.get_rng_state()
    new = Policy.load(path, lora=LoraOptions(seed=1))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert new.token_logprobs(PROBE) == Policy.load(path, lora=None).token_logprobs(PROBE)
    assert new.checksums() == Policy.load(path, lora=LoraOptions(seed=1)).checksums()
    assert new.checksums() != Policy.load(path, lora=LoraOptions(seed=2)).checksums()


@pytest.mark.parametrize("family", FAMILIES)
def test_without_an_adapter_every_weight_gets_its_stock_gradient(
    model_paths: dict[str, Path], tmp_path: Path, family: str
) -> None:
    policy = Policy.load(model_paths[family], lora=None, dtype="float64")
    book = RecordWriter(rng=np.random.default_rng(0), vocab_size=300, max_run=40)
    book.append("root", NodeKind.TURN, sampled=True, length=40)
    strip = pack_episodes([book.record()])
    stock = hf.AutoModelForCausalLM.from_pretrained(
        str(model_paths[family]), attn_implementation="eager", dtype=torch.float64
    )
    token_ids = strip.token_ids[None]
    with exact_arithmetic("float64", family):
        policy.logprobs(strip).policy_logprobs.mean().neg().backward()
        stock(input_ids=token_ids, labels=token_ids, use_cache=False).loss.backward()
    wanted = {name: p.grad for name, p in stock.named_parameters() if p.grad is not None}
    found = {name: p.grad for name, p in policy.named_trainable_parameters().items()}
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        assert gradient is not None
        error = float((gradient - wanted[name]).norm() / wanted[name].norm().clamp_min(1e-9))
        assert error <= 1e-9, name
    policy.save_model(tmp_path)
    again = Policy.load(tmp_path, lora=None, dtype="float64")
    assert again.token_logprobs(PROBE) == policy.token_logprobs(PROBE)
    with pytest.raises(ConfigError, match="all weights"):
        policy.adapter_tensors()


@pytest.mark.parametrize("family", FAMILIES)
def test_activation_checkpointing_changes_no_gradient(
    model_paths: dict[str, Path], family: str
) -> None:
    gradients = []
    for checkpointing in (False, True):
        policy = Policy.load(
            model_paths[family], lora=LoraOptions(rank=2), activation_checkpointing=checkpointing
        )
        strip = pack_episodes(records_for(policy, 0))
        policy.logprobs(strip).policy_logprobs.sum().backward()
        gradients.append([p.grad for p in policy.trainable_parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("family", FAMILIES)
def test_run_that_checkpoints_activations_keeps_far_fewer_bytes(
    model_paths: dict[str, Path], tmp_path: Path, family: str
) -> None:
    kept, probes = [], []
    for checkpointing in (False, True):
        model = {"path": model_paths[family], "activation_checkpointing": checkpointing}
        folder = tmp_path / str(checkpointing)
        config = TrainerConfig.model_validate({"model": model, "run_folder": folder})
        policy = RunState.load(config).policy
        kept.append(_bytes_kept(policy))
        probes.append(policy.token_logprobs(PROBE))
    assert kept[1] < kept[0] / 3
    assert probes[0] == probes[1]


def _bytes_kept(policy: Policy) -> int:
    """Size of what autograd holds between forward and backward, parameters aside."""
    own = {p.untyped_storage().data_ptr() for _, m in policy.modules() for p in m.parameters()}
    held: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    strip = pack_episodes(records_for(policy, 0))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = policy.logprobs(strip).policy_logprobs.sum()
    total = sum(held.values())
    out.backward()
    return total


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 0.05), ("float16", 0.01)])
def test_16_bit_models_keep_float32_adapters(
    model_paths: dict[str, Path], dtype: str, limit: float
) -> None:
    policy = Policy.load(model_paths["qwen3_5"], lora=LoraOptions(rank=2), dtype=dtype)
    assert policy.dtype == dtype
    assert {tensor.dtype for tensor in policy.adapter_tensors().values()} == {torch.float32}
    strip = pack_episodes(records_for(policy, 0))
    found = policy.logprobs(strip).policy_logprobs
    found.sum().backward()
    exact = Policy.load(model_paths["qwen3_5"], lora=LoraOptions(rank=2)).logprobs(strip)
    assert float((found - exact.policy_logprobs).detach().abs().max()) < limit


def test_a_strip_without_actions_has_a_gradient_of_zero(model_paths: dict[str, Path]) -> None:
    policy = Policy.load(model_paths["qwen3_5"], lora=LoraOptions(rank=2))
    book = RecordWriter(rng=np.random.default_rng(0), vocab_size=300)
    book.append("root", NodeKind.CONTEXT, sampled=False)
    out = policy.logprobs(pack_episodes([book.record()]))
    assert out.policy_logprobs.shape == (0,)
    out.policy_logprobs.sum().backward()


def test_model_hash_covers_config_and_weights_in_order(model_paths: dict[str, Path]) -> None:
    path = model_paths["llama"]
    digest = hashlib.sha256((path / "config.json").read_bytes())
    digest.update((path / "model.safetensors").read_bytes())
    assert Policy.load(path, lora=LoraOptions()).model_hash == digest.hexdigest()


def test_episodes_of_other_mount_layers_are_refused(model_paths: dict[str, Path]) -> None:
    policy = Policy.load(model_paths["qwen3_5"], lora=LoraOptions(), mount_layers=(5,))
    other = Policy.load(model_paths["qwen3_5"], lora=LoraOptions())
    assert other.mount_layers == (2, 5)
    strip = pack_episodes(records_for(other, 0))
    with pytest.raises(ConfigError, match="other mount layers"):
        policy.logprobs(strip)


def test_default_mount_layers_are_all_of_a_hybrid_and_a_middle_quarter_else() -> None:
    assert default_mount_layers(hf.Qwen3Config(num_hidden_layers=36)) == tuple(range(13, 22))
    assert default_mount_layers(hf.LlamaConfig(num_hidden_layers=30)) == tuple(range(11, 18))
    assert default_mount_layers(hf.LlamaConfig(num_hidden_layers=2)) == (0,)
    hybrid = hf.Qwen3_5TextConfig(num_hidden_layers=8)
    assert default_mount_layers(hybrid) == (3, 7)


def test_what_trees_cannot_compute_is_refused(model_paths: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="no packed-tree hooks") as error:
        model_hooks(hf.GPT2Config())
    assert error.value.value == "gpt2"
    sliding = hf.Qwen3Config(use_sliding_window=True, sliding_window=8, max_window_layers=2)
    with pytest.raises(ConfigError, match="no such layer"):
        model_hooks(sliding)
    with pytest.raises(ConfigError, match="unknown dtype"):
        Policy.load(model_paths["llama"], lora=None, dtype="float8")
    with pytest.raises(ConfigError, match=r"LoRA targets.*in_proj_z.*q_proj.*lora\.targets"):
        Policy.load(model_paths["llama"], lora=LoraOptions(target_modules=("in_proj_z",)))


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 1e-2), ("float16", 1.5e-3)])
def test_16_bit_adapters_multiply_as_served_and_learn_in_float32(
    model_paths: dict[str, Path], dtype: str, limit: float
) -> None:
    narrow = getattr(torch, dtype)
    policy = Policy.load(model_paths["qwen3_5"], lora=LoraOptions(rank=2), dtype=dtype)
    layer: Any = next(m for n, m in policy.modules() if n.endswith("self_attn.o_proj"))
    with torch.no_grad():
        layer.lora_B["default"].weight.normal_()
    x = torch.randn(1, 7, layer.in_features).to(narrow).requires_grad_()
    out = layer(x)
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    exact_x = x.detach().float().requires_grad_()
    merged = layer.base_layer.weight.float() + layer.scaling["default"] * up @ down
    exact = exact_x @ merged.t()
    weights = torch.randn(out.shape)
    wanted = torch.autograd.grad((exact * weights).sum(), [exact_x, down, up])
    (out.float() * weights).sum().backward()
    assert out.dtype == narrow and down.grad is not None and up.grad is not None
    low = x.detach()[0] @ down.detach().to(narrow).t()
    served = layer.base_layer(x.detach()[0])
    served.addmm_(low, up.detach().to(narrow).t(), alpha=layer.scaling["default"])
    assert torch.equal(out[0], served)
    assert relative_rms(out, exact) <= limit
    for found, expected in zip([x.grad, down.grad, up.grad], wanted, strict=True):
        assert found is not None
        assert relative_rms(found, expected) <= limit
