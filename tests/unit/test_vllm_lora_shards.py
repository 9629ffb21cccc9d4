"""Checksums of adapters over several ranks: of the whole tensor, however it is sharded."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rollout_service.engine.transformers.adapters import tensor_checksum
from rollout_service.engine.vllm.lora import LoraSpec, served_checksums, served_tensors

RANK, SLOT, NUM_RANKS = 2, 1, 4
_QKV = "model.layers.0.self_attn.qkv_proj"
_OUT = "model.layers.0.self_attn.o_proj"
_MIXED = "model.layers.1.linear_attn.in_proj_qkvz"


def test_shards_are_joined_and_copies_counted_once() -> None:
    torch.manual_seed(0)
    modules = {
        "layers.0.self_attn.q_proj": (torch.randn(RANK, 12), torch.randn(16, RANK)),
        # Two key and value heads of four rows for four ranks: two copies of each.
        "layers.0.self_attn.k_proj": (torch.randn(RANK, 12), torch.randn(8, RANK)),
        "layers.0.self_attn.v_proj": (torch.randn(RANK, 12), torch.randn(8, RANK)),
        "layers.0.self_attn.o_proj": (torch.randn(RANK, 16), torch.randn(12, RANK)),
        "layers.1.linear_attn.in_proj_qkv": (torch.randn(RANK, 12), torch.randn(24, RANK)),
        "layers.1.linear_attn.in_proj_z": (torch.randn(RANK, 12), torch.randn(8, RANK)),
    }
    specs = [
        (f"model.{name}", RANK, down.shape[1], up.shape[0]) for name, (down, up) in modules.items()
    ]
    expected = {
        f"model.{name}": (tensor_checksum(down), tensor_checksum(up))
        for name, (down, up) in modules.items()
    }
    assert checksums(modules, specs) == expected

    modules["layers.0.self_attn.o_proj"][1][3, 1] += 1
    changed = checksums(modules, specs)
    assert [name for name in expected if changed[name] != expected[name]] == [
        "model.layers.0.self_attn.o_proj"
    ]


def test_copies_that_differ_are_told() -> None:
    up = torch.randn(8, RANK)
    modules = {
        "layers.0.self_attn.q_proj": (torch.randn(RANK, 12), torch.randn(16, RANK)),
        "layers.0.self_attn.k_proj": (torch.randn(RANK, 12), up),
        "layers.0.self_attn.v_proj": (torch.randn(RANK, 12), torch.randn(8, RANK)),
        "layers.0.self_attn.o_proj": (torch.randn(RANK, 16), torch.randn(12, RANK)),
    }
    specs = [
        (f"model.{name}", RANK, down.shape[1], up.shape[0]) for name, (down, up) in modules.items()
    ]
    ranks = [buffers(modules, index) for index in range(NUM_RANKS)]
    ranks[3][_QKV].lora_b_stacked[1][SLOT, 0, 0, 0] += 1
    ranks[2][_OUT].lora_b_stacked[0][SLOT, 0, 5, 1] += 1
    found = read_back(ranks, specs)
    assert found["model.layers.0.self_attn.k_proj"][1] == "copies differ"
    assert found["model.layers.0.self_attn.o_proj"][1] == "copies differ"
    assert found["model.layers.0.self_attn.v_proj"][1] != "copies differ"


def checksums(
    modules: dict[str, tuple[Tensor, Tensor]], specs: Sequence[LoraSpec]
) -> dict[str, tuple[str, str]]:
    return read_back([buffers(modules, index) for index in range(NUM_RANKS)], specs)


def read_back(ranks: list[dict[str, Any]], specs: Sequence[LoraSpec]) -> dict[str, tuple[str, str]]:
    """What rank 0 tells; `gather` finds the other ranks' buffers by where rank 0's lie."""
    places = {
        stacked[SLOT].data_ptr(): (name, kind, index)
        for name, module in ranks[0].items()
        for kind in ("lora_a_stacked", "lora_b_stacked")
        for index, stacked in enumerate(getattr(module, kind))
    }

    def gather(tensor: Tensor) -> list[Tensor]:
        name, kind, index = places[tensor.data_ptr()]
        rows, columns = tensor.shape
        return [getattr(rank[name], kind)[index][SLOT, 0, :rows, :columns] for rank in ranks]

    packed = {
        _QKV: [_QKV.replace("qkv_proj", f"{part}_proj") for part in "qkv"],
        _MIXED: [_MIXED.replace("qkvz", part) for part in ("qkv", "z")],
    }
    manager = SimpleNamespace(lora_index_to_id=[None, 7], modules=ranks[0], packed_modules=packed)
    return served_checksums(served_tensors(manager, 7, specs, gather))


def buffers(modules: dict[str, tuple[Tensor, Tensor]], index: int) -> dict[str, Any]:
    """One rank's vLLM layers: columns sharded by output, rows by input, few heads copied."""

    def layer(*slices: tuple[Tensor, Tensor]) -> Any:
        return SimpleNamespace(
            lora_a_stacked=[_stacked(down) for down, _ in slices],
            lora_b_stacked=[_stacked(up) for _, up in slices],
        )

    def columns(name: str) -> tuple[Tensor, Tensor]:
        down, up = modules[name]
        return down, up.chunk(NUM_RANKS, 0)[index]

    def heads(name: str) -> tuple[Tensor, Tensor]:
        down, up = modules[name]
        return down, up.chunk(2, 0)[index // 2]

    first = "layers.0.self_attn."
    down, up = modules[f"{first}o_proj"]
    found = {
        _QKV: layer(columns(f"{first}q_proj"), heads(f"{first}k_proj"), heads(f"{first}v_proj")),
        _OUT: layer((down.chunk(NUM_RANKS, 1)[index], up)),
    }
    second = "layers.1.linear_attn."
    if f"{second}in_proj_qkv" in modules:
        down, up = modules[f"{second}in_proj_qkv"]
        parts = [part.chunk(NUM_RANKS, 0)[index] for part in up.split([8, 8, 8])]
        found[_MIXED] = layer(*((down, part) for part in parts), columns(f"{second}in_proj_z"))
    return found


def _stacked(tensor: Tensor) -> Tensor:
    """Two slots with room for a higher rank on one side."""
    stacked = torch.zeros(2, 1, *tensor.shape)
    stacked[SLOT, 0] = tensor
    return stacked
