"""LoRA versions: checked on the host against the base model, read back from the serving buffers.

vLLM merges alpha / rank into lora_B and keeps both in the model's dtype. A tensor's checksum is the
file's where the buffer holds exactly that rounding of it, and the buffer's own where it does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness_sdk.errors import AdapterError, ConfigError
from rollout_service.engine.transformers.adapters import (
    Adapter,
    LoraWeights,
    read_adapter,
    tensor_checksums,
)

_LAYERS = "layers."
"""In the names of what belongs to a decoder layer."""
_NOT_SERVED = "not served"
_DIFFERENT = "copies differ"
_TARGETS_BESIDE_EXPERTS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "in_proj_qkv",
    "in_proj_z",
    "out_proj",
)
LoraSpec = tuple[str, int, int, int]
"""A module's name in the Hugging Face model, its rank, its input and its output size."""
Served = dict[str, tuple[Tensor | str, Tensor | str]]
"""lora_A and lora_B as they serve, by module; the reason in place of one that does not."""
Gather = Callable[[Tensor], Sequence[Tensor]]
"""A tensor's counterparts on every rank that shares the model, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAdapter:
    """What is known of an adapter that serves; its tensors are in vLLM's buffers alone."""

    specs: Sequence[LoraSpec]
    """What the worker needs to find each tensor in its buffers."""
    expected: asyncio.Future[list[ExpectedTensor]]
    """lora_A and lora_B of each module, in the order of `specs`; others may wait for it too."""
    request: Any
    """vLLM's handle for requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedTensor:
    """Checksums of one tensor of an adapter's file."""

    name: str
    """In PEFT's file."""
    checksum: str
    """Of the file's values."""
    served: str
    """Of the values that a buffer holds where it holds this tensor."""


def lora_specs(adapter: Adapter) -> list[LoraSpec]:
    """What a worker needs to find an adapter's tensors in its buffers."""
    return [
        (name, lora.down.shape[0], lora.down.shape[1], lora.up.shape[0])
        for name, lora in adapter.modules.items()
    ]


def expected_tensors(adapter: Adapter, dtype: torch.dtype) -> list[ExpectedTensor]:
    """What is expected of each tensor; hashes all of them.

    Args:
        adapter: As it was read.
        dtype: Of the serving buffers.
    """
    own = adapter.tensors()
    served = [tensor for lora in adapter.modules.values() for tensor in as_served(lora, dtype)]
    # What a buffer takes as it is needs no second hash.
    changed = [
        None if buffer is file else buffer
        for file, buffer in zip(own.values(), served, strict=True)
    ]
    checksums = tensor_checksums(list(own.values()))
    others = iter(tensor_checksums([buffer for buffer in changed if buffer is not None]))
    return [
        ExpectedTensor(
            name=name, checksum=checksum, served=checksum if buffer is None else next(others)
        )
        for name, checksum, buffer in zip(own, checksums, changed, strict=True)
    ]


def told_checksums(
    specs: Sequence[LoraSpec],
    expected: Sequence[ExpectedTensor],
    served: Mapping[str, tuple[str, str]],
) -> dict[str, str]:
    """`tensor_checksum` of each tensor as it serves, keyed by its PEFT name.

    Args:
        specs: Of each module.
        expected: lora_A and lora_B of each module, in the order of `specs`.
        served: For each module the checksums of its serving lora_A and lora_B buffers.
    """
    nothing = (_NOT_SERVED, _NOT_SERVED)
    found = [checksum for spec in specs for checksum in served.get(spec[0], nothing)]
    # The file's where the buffer holds its rounding, else the buffer's.
    return {
        tensor.name: tensor.checksum if checksum == tensor.served else checksum
        for tensor, checksum in zip(expected, found, strict=True)
    }


class AdapterReader:
    """Reads PEFT folders for one base model, whose shapes it knows without its weights."""

    def __init__(self, model_path: str, model_hash: str, *, has_experts: bool) -> None:
        """Read for the model at `model_path`."""
        self._model_path = model_path
        self._model_hash = model_hash
        self._has_experts = has_experts
        self._module: nn.Module | None = None

    def shapes(self) -> nn.Module:
        """The base model without its weights, built once; blocks, for seconds at first."""
        if self._module is None:
            self._module = _shapes(self._model_path)
        return self._module

    def targets(self) -> tuple[str, ...]:
        """Names of the linear modules that adapters may change: those of decoder layers.

        vLLM holds buffers for these alone, and launches kernels for them in every step, whatever
        a version changes. Beside experts only attention and gated delta rules: no more is trained
        (Octopus Table 8), and there would be buffers for every expert of every layer.
        """
        if self._has_experts:
            return _TARGETS_BESIDE_EXPERTS
        modules = self.shapes().named_modules()
        names = {name for name, module in modules if isinstance(module, nn.Linear)}
        return tuple(sorted({name.rpartition(".")[2] for name in names if _LAYERS in name}))

    def read(self, path: str, *, max_rank: int) -> Adapter:
        """Read and check a folder; blocks.

        Raises:
            AdapterError: Unreadable, for another base model, of too high a rank, with an option
                that is not served, or with a tensor missing, unknown or wrongly shaped.
        """
        adapter = read_adapter(
            path, self.shapes(), model_path=self._model_path, model_hash=self._model_hash
        )
        outside = [name for name in adapter.modules if _LAYERS not in name]
        if outside:
            raise AdapterError(
                "adapter targets modules outside the decoder layers",
                value=", ".join(outside),
                limit="linear modules of decoder layers",
            )
        others = {name.rpartition(".")[2] for name in adapter.modules} - {*self.targets()}
        if others:
            raise AdapterError(
                "adapter targets modules that are not served beside experts",
                value=", ".join(sorted(others)),
                limit=", ".join(self.targets()),
            )
        rank = max(lora.down.shape[0] for lora in adapter.modules.values())
        if rank > max_rank:
            raise AdapterError(
                "adapter's rank is higher than the engine was started for",
                value=rank,
                limit=max_rank,
                remedy="start the engine with a larger max_lora_rank",
            )
        return adapter


def as_served(lora: LoraWeights, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """lora_A and lora_B as vLLM rounds them: cast, then scaled in place."""
    up = lora.up.to(dtype)
    return lora.down.to(dtype), up if lora.scale == 1 else up * lora.scale


def served_tensors(manager: Any, version: int, specs: Sequence[LoraSpec], gather: Gather) -> Served:
    """Worker side: copies of what lies in the buffers of `version`.

    Every rank calls it with the same arguments: a module's shards are put together again.

    Args:
        manager: vLLM's LoRA model manager.
        version: The adapter's id.
        specs: The modules asked for; one that has no buffers is left out.
        gather: Brings the ranks' shards together.
    """
    slot = manager.lora_index_to_id.index(version)
    wanted = {_layer_name(spec[0]): spec for spec in specs}
    found: dict[str, tuple[Tensor | str, Tensor | str]] = {}
    for module_name, module in manager.modules.items():
        parts = manager.packed_modules.get(module_name, [module_name])
        # One part may fill several slices of a merged layer, in order.
        slices = list(zip(module.lora_a_stacked, module.lora_b_stacked, strict=True))
        for part in parts:
            spec = wanted.get(_layer_name(part))
            if spec is None:
                break
            found[spec[0]] = _part(slices, slot, spec, gather)
    copies = iter(_on_host([each for pair in found.values() for each in pair]))
    return {name: (next(copies), next(copies)) for name in found}


def served_checksums(served: Served) -> dict[str, tuple[str, str]]:
    """Worker side: `tensor_checksum` of each copy, by module; takes a while, and no device."""
    whole = [each for pair in served.values() for each in pair]
    hashed = iter(tensor_checksums([each for each in whole if isinstance(each, Tensor)]))
    checksums = [next(hashed) if isinstance(each, Tensor) else each for each in whole]
    return dict(zip(served, zip(checksums[::2], checksums[1::2], strict=True), strict=True))


def _on_host(found: Sequence[Tensor | str]) -> list[Tensor | str]:
    """The tensors' bytes, brought in one go: one by one they would wait for the device each."""
    copies = [
        torch.empty(each.shape, dtype=each.dtype, pin_memory=each.is_cuda).copy_(
            each, non_blocking=True
        )
        if isinstance(each, Tensor)
        else each
        for each in found
    ]
    if any(isinstance(each, Tensor) and each.is_cuda for each in found):
        torch.cuda.synchronize()
    return copies


def _part(
    slices: list[tuple[Tensor, Tensor]], slot: int, spec: LoraSpec, gather: Gather
) -> tuple[Tensor | str, Tensor | str]:
    """lora_A and lora_B of the part that the next slices hold, which are taken."""
    _, rank, in_size, out_size = spec
    downs: list[Tensor | str] = []
    up_shards: list[Sequence[Tensor]] = []
    num_rows = 0
    # Shards may also be copies: of key and value heads fewer than ranks, of a row-parallel lora_B.
    while slices and num_rows < out_size:
        down, up = slices.pop(0)
        downs.append(_joined([gather(down[slot, 0, :rank])], in_size, dim=1))
        up_shards.append(gather(up[slot, 0, :, :rank]))
        num_rows += sum(shard.shape[0] for shard in up_shards[-1])
    return _one_of(downs), _joined(up_shards, out_size, dim=0)


def _one_of(copies: Sequence[Tensor | str]) -> Tensor | str:
    """The one of which all are copies, or the reason why there is none."""
    for each in copies:
        if isinstance(each, str):
            return each
        first = copies[0]
        if isinstance(first, Tensor) and not torch.equal(first, each):
            return _DIFFERENT
    return copies[0] if copies else _DIFFERENT


def _joined(slices: Sequence[Sequence[Tensor]], size: int, *, dim: int) -> Tensor | str:
    """Slices in a row, each joined from its shards; of equal copies one counts."""
    if not slices:
        return _NOT_SERVED
    num_copies = max(sum(t.shape[dim] for shards in slices for t in shards) // size, 1)
    joined: list[Tensor] = []
    for shards in slices:
        for first in range(0, len(shards), num_copies):
            copies = shards[first : first + num_copies]
            if not all(torch.equal(copies[0], copy) for copy in copies[1:]):
                return _DIFFERENT
            joined.append(copies[0])
    return torch.cat(joined, dim)


def _layer_name(module_name: str) -> str:
    """A module's name from its layer's number on: what stands in front differs between the two."""
    return module_name.rpartition(_LAYERS)[2]


def _shapes(model_path: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.from_pretrained(model_path)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise ConfigError(f"model has no causal language model: {error}") from error
