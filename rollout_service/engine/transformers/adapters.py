"""LoRA adapters in PEFT's folder format, side by side, one served per forward pass.

An adapter is read and checked whole before the model is touched. Its tensors serve in float32,
so that what is read back is bit for bit what the trainer wrote.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from harness_sdk.errors import AdapterError

_PREFIX = "base_model.model."
_MAX_HASHING_THREADS = 8
_UNSUPPORTED = {
    "use_dora": False,
    "bias": "none",
    "modules_to_save": None,
    "layers_to_transform": None,
    "exclude_modules": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "fan_in_fan_out": False,
    "lora_bias": False,
}
"""Options of adapter_config.json that would change the forward pass, with what is served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraWeights:
    """One module's adapter: `y += scale * (x @ down.T) @ up.T`."""

    down: Tensor
    """lora_A, `[R, in]`, of the file's dtype until it is placed."""
    up: Tensor
    """lora_B, `[out, R]`, likewise."""
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A checked adapter: module name in the base model -> weights."""

    modules: Mapping[str, LoraWeights]

    def tensors(self) -> dict[str, Tensor]:
        """Each tensor by its PEFT name."""
        return {
            name: tensor
            for module, lora in self.modules.items()
            for name, tensor in (
                (f"{_PREFIX}{module}.lora_A.weight", lora.down),
                (f"{_PREFIX}{module}.lora_B.weight", lora.up),
            )
        }


@dataclass(eq=False, slots=True)
class AdapterSlots:
    """The versions that a model serves; version 0 is the base model alone."""

    module: nn.Module
    device: torch.device
    active: int = 0
    """Version of the next forward pass."""
    versions: dict[int, Adapter] = field(default_factory=lambda: {0: Adapter(modules={})})
    _by_module: dict[str, dict[int, LoraWeights]] = field(default_factory=dict)

    def add(self, version: int, adapter: Adapter) -> None:
        """Serve `adapter` as `version` from the next forward pass on."""
        placed = {
            name: LoraWeights(
                down=lora.down.to(self.device, torch.float32),
                up=lora.up.to(self.device, torch.float32),
                scale=lora.scale,
            )
            for name, lora in adapter.modules.items()
        }
        for name, lora in placed.items():
            if name not in self._by_module:
                self._by_module[name] = {}
                self.module.get_submodule(name).register_forward_hook(self._hook(name))
            self._by_module[name][version] = lora
        self.versions[version] = Adapter(modules=placed)

    def remove(self, version: int) -> None:
        """Stop serving `version`."""
        for name in self.versions.pop(version).modules:
            del self._by_module[name][version]

    def checksums(self, version: int) -> dict[str, str]:
        """`tensor_checksum` of each serving tensor of `version`, by its PEFT name."""
        tensors = self.versions[version].tensors()
        return dict(zip(tensors, tensor_checksums(list(tensors.values())), strict=True))

    def _hook(self, name: str) -> Any:
        by_version = self._by_module[name]

        def add_lora(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            lora = by_version.get(self.active)
            if lora is None:
                return output
            shrunk = F.linear(args[0].float(), lora.down)
            delta = F.linear(shrunk, lora.up)
            return torch.add(output, delta.to(output.dtype), alpha=lora.scale)

        return add_lora


def tensor_checksum(tensor: Tensor) -> str:
    """sha256, in hex, of a tensor's values as float32, little-endian, in C order.

    The rule that the trainer mirrors: the tensor's name and shape are not part of the hash;
    checksums are keyed by the tensor's name in adapter_model.safetensors, for example
    `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`.
    """
    values = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
    # Hashed where they lie: copies would take longer than the hash.
    return hashlib.sha256(values.astype("<f4", copy=False).data).hexdigest()


def tensor_checksums(tensors: Sequence[Tensor]) -> list[str]:
    """`tensor_checksum` of each, several at a time: a large adapter's take seconds one by one."""
    with ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_HASHING_THREADS)) as pool:
        return list(pool.map(tensor_checksum, tensors))


def read_adapter(path: str, base: nn.Module, *, model_path: str, model_hash: str) -> Adapter:
    """Read a PEFT folder and prove that it covers its target modules exactly.

    Args:
        path: Folder with adapter_config.json and adapter_model.safetensors.
        base: The base model, not changed.
        model_path: Folder of the base model.
        model_hash: Hash of the base model.

    Raises:
        AdapterError: Unreadable, for another base model, with an option that is not served, or
            with a tensor missing, unknown or wrongly shaped; the message names it.
    """
    config, tensors = _read_files(Path(path))
    _check_config(config, model_path=model_path, model_hash=model_hash)
    targets = _target_modules(config, base)
    modules = {}
    for name, linear in targets.items():
        rank = _pattern(config.get("rank_pattern"), name, config["r"])
        alpha = _pattern(config.get("alpha_pattern"), name, config["lora_alpha"])
        down = _take(tensors, f"{_PREFIX}{name}.lora_A.weight", (rank, linear.in_features))
        up = _take(tensors, f"{_PREFIX}{name}.lora_B.weight", (linear.out_features, rank))
        divisor = rank**0.5 if config.get("use_rslora") else rank
        modules[name] = LoraWeights(down=down, up=up, scale=alpha / divisor)
    if tensors:
        raise AdapterError(
            "adapter holds tensors that no target module takes",
            value=", ".join(sorted(tensors)),
            limit=f"lora_A.weight and lora_B.weight of {len(targets)} target modules",
        )
    return Adapter(modules=modules)


def _read_files(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(folder / "adapter_model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise AdapterError(
            f"cannot read the adapter: {error}",
            value=str(folder),
            limit="a folder with adapter_config.json and adapter_model.safetensors",
        ) from error
    return config, tensors


def _check_config(config: dict[str, Any], *, model_path: str, model_hash: str) -> None:
    """The adapter's kind and base model: named by hash, or by the folder's last component."""
    if config.get("peft_type") != "LORA":
        raise AdapterError("not a LoRA adapter", value=config.get("peft_type"), limit="LORA")
    for option, served in _UNSUPPORTED.items():
        if config.get(option) not in (served, None, [], {}):
            raise AdapterError(
                f"adapter option {option} is not served", value=config[option], limit=served
            )
    base = config.get("base_model_name_or_path") or ""
    known = (model_hash, Path(model_path).name)
    if base and base != model_hash and Path(base).name not in known:
        raise AdapterError(
            "adapter belongs to another base model", value=base, limit=" or ".join(known)
        )


def _target_modules(config: dict[str, Any], base: nn.Module) -> dict[str, nn.Linear]:
    """PEFT's rule: a full match of a pattern, or a name's last components among a list."""
    targets = config.get("target_modules") or []
    found = {}
    for name, module in base.named_modules():
        if isinstance(targets, str):
            hit = re.fullmatch(targets, name) is not None
        else:
            hit = any(name == target or name.endswith(f".{target}") for target in targets)
        if hit and isinstance(module, nn.Linear):
            found[name] = module
    if not isinstance(targets, str):
        idle = [t for t in targets if not any(f".{n}".endswith(f".{t}") for n in found)]
        if idle:
            raise AdapterError(
                "adapter targets modules that the base model lacks", value=", ".join(sorted(idle))
            )
    if not found:
        raise AdapterError("adapter targets no module of the base model", value=targets)
    return found


def _pattern(patterns: Mapping[str, int] | None, name: str, default: int) -> int:
    """PEFT's rank and alpha patterns: the first whose key matches the end of the name."""
    for key, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({key})$", name):
            return value
    return default


def _take(tensors: dict[str, Tensor], name: str, shape: tuple[int, int]) -> Tensor:
    if name not in tensors:
        raise AdapterError("adapter lacks a tensor", value=name, remedy="save every target module")
    tensor = tensors.pop(name)
    if tuple(tensor.shape) != shape:
        raise AdapterError(
            f"adapter tensor {name} has the wrong shape", value=tuple(tensor.shape), limit=shape
        )
    if not tensor.is_floating_point():
        raise AdapterError(
            f"adapter tensor {name} is of the wrong kind",
            value=str(tensor.dtype).removeprefix("torch."),
            limit="floating point",
        )
    return tensor
