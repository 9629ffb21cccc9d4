"""Layers in KV cache groups by what they see, in vLLM's own classes; no engine is started."""

from __future__ import annotations

import random
import warnings
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    CommonAttentionMetadata,
)
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.worker.block_table import BlockTable
from vllm.v1.worker.utils import AttentionGroup

from harness_sdk.errors import ConfigError
from rollout_service.engine.mount_layers import choose_mount_layers
from rollout_service.engine.vllm.groups import (
    check_groups,
    check_parallelism,
    is_recurrent,
    num_sets,
    reads_mounts,
    split_layers,
)
from rollout_service.engine.vllm.mount_free import HiddenRows, MountFreeGroup, MountFreeTable
from rollout_service.engine.vllm.seams import adopt, extract_layer_index

CPU = torch.device("cpu")
PAGE, MAX_REQS, WIDTH = 16, 6, 32


@pytest.fixture(scope="module")
def config() -> Any:
    config = VllmConfig()
    config.cache_config.kv_cache_layout = "LBNHC"
    return config


def new_specs(num_layers: int) -> dict[str, Any]:
    return {
        f"model.layers.{layer}.self_attn.attn": FullAttentionSpec(
            block_size=PAGE, num_kv_heads=2, head_size=64, dtype=torch.bfloat16
        )
        for layer in range(num_layers)
    }


@pytest.mark.parametrize("num_layers", [2, 4, 16, 22, 24, 28, 30, 32, 36, 40, 48, 62, 64, 80, 94])
def test_middle_quarter_gets_one_group_of_four(config: Any, num_layers: int) -> None:
    layers = choose_mount_layers(range(num_layers), is_hybrid=False)
    specs = split_layers(new_specs(num_layers), layers)
    groups = get_kv_cache_groups(config, dict(specs))
    check_groups(groups, specs)
    assert len(groups) == (2 if num_layers == 2 else 4)
    # vLLM shares metadata between groups of equal specs, but not the buffers that a captured graph
    # reads: each group must build its own.
    assert len({group.kv_cache_spec for group in groups}) == len(groups)
    reading = [group for group in groups if reads_mounts(group.kv_cache_spec)]
    assert [sorted(map(extract_layer_index, g.layer_names)) for g in reading] == [list(layers)]
    assert sorted(n for g in groups for n in g.layer_names) == sorted(specs)
    # What unequal groups leave unused of a pool.
    largest = max(len(group.layer_names) for group in groups)
    assert largest * len(groups) <= 1.1 * num_layers
    pool = get_kv_cache_config_from_groups(config, groups, 10 * largest * 8192)
    assert pool.num_blocks == 10


def test_any_choice_is_kept_apart(config: Any) -> None:
    rng = random.Random(0)
    for _ in range(60):
        num_layers = rng.randint(2, 40)
        layers = tuple(sorted(rng.sample(range(num_layers), rng.randint(1, num_layers - 1))))
        specs = split_layers(new_specs(num_layers), layers)
        groups = get_kv_cache_groups(config, dict(specs))
        check_groups(groups, specs)
        for group in groups:
            kinds = {extract_layer_index(name) in layers for name in group.layer_names}
            assert kinds == {reads_mounts(group.kv_cache_spec)}


def test_all_layers_stay_as_vllm_has_them(config: Any) -> None:
    specs = new_specs(5)
    assert split_layers(specs, range(5)) == specs
    (group,) = get_kv_cache_groups(config, dict(specs))
    check_groups([group], specs)
    assert reads_mounts(group.kv_cache_spec)


def test_number_of_sets_is_the_least_that_vllm_keeps_whole() -> None:
    assert num_sets(9, 27) == (1, 3)
    assert num_sets(27, 9) == (3, 1)
    assert num_sets(19, 17) == (1, 1)
    assert num_sets(1, 35) == (1, 35)


def test_groups_that_mix_sets_are_refused_by_layers() -> None:
    specs = split_layers(new_specs(4), (1,))
    spec = next(iter(specs.values()))
    with pytest.raises(ConfigError, match=r"got \[\[0, 1, 2, 3\]\]; allowed: \[\[0\], \[1\], "):
        check_groups([KVCacheGroupSpec(list(specs), spec)], specs)


def test_part_of_a_hybrid_is_refused_by_layers() -> None:
    specs = new_specs(2)
    specs["model.layers.2.mamba"] = MambaSpec(
        block_size=64, shapes=((4, 4),), dtypes=(torch.float32,)
    )
    assert [is_recurrent(spec) for spec in specs.values()] == [False, False, True]
    assert split_layers(specs, (0, 1)) == specs
    with pytest.raises(ConfigError, match=r"of a hybrid or none; got \[1\]; allowed: \[0, 1\]"):
        split_layers(specs, (1,))


def test_ways_to_spread_that_move_rows_are_refused_by_name(config: Any) -> None:
    parallel = config.parallel_config
    check_parallelism(parallel, has_mount_free=True)
    changed = SimpleNamespace(**vars(parallel), num_ubatches=2)
    with pytest.raises(ConfigError, match="got num_ubatches=2"):
        check_parallelism(changed, has_mount_free=True)
    for option in ("decode_context_parallel_size", "pipeline_parallel_size"):
        changed = SimpleNamespace(**{**vars(parallel), "num_ubatches": 0, option: 2})
        with pytest.raises(ConfigError, match=f"got {option}=2; allowed: 1; use tensor"):
            check_parallelism(changed, has_mount_free=True)
    check_parallelism(changed, has_mount_free=False)


def new_table() -> Any:
    with warnings.catch_warnings():
        # It looks at every attribute of torch, deprecated ones too.
        warnings.simplefilter("ignore")
        current_platform.register_triton_kernel_overrides()
    table = BlockTable(PAGE, MAX_REQS, WIDTH, 256, False, CPU, 1)
    for row in range(MAX_REQS):
        table.add_row([100 * (row + 1) + block for block in range(WIDTH)], row)
    table.commit_block_table(MAX_REQS)
    return table


def starts_of(num_new: list[int]) -> torch.Tensor:
    return torch.tensor(np.concatenate([[0], np.cumsum(num_new)]), dtype=torch.int32)


def test_rows_are_written_where_a_shorter_table_has_them() -> None:
    rng, hidden, tables = random.Random(1), HiddenRows(MAX_REQS, CPU), [new_table(), new_table()]
    for table in tables:
        adopt(table, MountFreeTable)
        table.hidden = hidden
    for _ in range(30):
        num_reqs = rng.randint(1, MAX_REQS)
        counts = [rng.choice((0, 1, 15, 16, 33, 200)) for _ in range(num_reqs)]
        done = [count + rng.randint(0, 100) for count in counts]
        num_new = [rng.choice((1, 1, 17, 40)) for _ in range(num_reqs)]
        indices = np.concatenate([np.arange(d, d + n) for d, n in zip(done, num_new, strict=True)])
        hidden.set(np.array(counts))
        expected = [
            (100 * (row + 1) + (index - counts[row]) // PAGE) * PAGE + (index - counts[row]) % PAGE
            for row in range(num_reqs)
            for index in range(done[row], done[row] + num_new[row])
        ]
        for table in tables:
            positions = torch.from_numpy(indices)
            table.compute_slot_mapping(num_reqs, starts_of(num_new), positions)
            assert table.slot_mapping.gpu[: len(indices)].tolist() == expected
            # Nothing else may see other positions.
            assert positions.tolist() == indices.tolist()


class Builder:
    """Takes what a backend's metadata builder is given."""

    def build(self, common_prefix_len: int, metadata: Any) -> Any:
        return metadata

    def build_for_cudagraph_capture(self, metadata: Any) -> Any:
        return metadata


def new_metadata(seq_lens: torch.Tensor, num_reqs: int, max_seq_len: int) -> Any:
    starts = torch.arange(num_reqs + 1, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seq_lens[:num_reqs],
        seq_lens_cpu_upper_bound=seq_lens[:num_reqs].clone(),
        num_reqs=num_reqs,
        num_actual_tokens=num_reqs,
        max_query_len=1,
        max_seq_len=max_seq_len,
        block_table_tensor=torch.zeros(num_reqs, WIDTH, dtype=torch.int32),
        slot_mapping=torch.zeros(num_reqs, dtype=torch.int64),
    )


def test_lengths_are_shorter_in_the_buffer_that_was_captured() -> None:
    hidden = HiddenRows(MAX_REQS, CPU)
    group: Any = AttentionGroup(
        backend=cast(Any, SimpleNamespace),
        layer_names=["layer"],
        kv_cache_spec=cast(Any, None),
        kv_cache_group_id=1,
    )
    group.metadata_builders = [Builder()]
    adopt(group, MountFreeGroup)
    group.hidden = hidden
    # vLLM's own buffer; behind the batch it is zero.
    seq_lens = torch.zeros(MAX_REQS, dtype=torch.int32)
    captured = group.build_metadata_for_cudagraph_capture(new_metadata(seq_lens, 4, 4096))
    assert captured.max_seq_len == 4096

    seq_lens[:3] = torch.tensor([50, 9, 70])
    hidden.set(np.array([33, 0, 5]))
    full = new_metadata(seq_lens, 4, 70)
    built = group.build_metadata(full)
    assert built.seq_lens.tolist() == [17, 9, 65, 0]
    assert built.seq_lens_cpu_upper_bound.tolist() == [17, 9, 65, 0]
    assert built.max_seq_len == 65
    # A replayed graph reads the addresses that it was captured with.
    assert built.seq_lens.data_ptr() == captured.seq_lens.data_ptr() != seq_lens.data_ptr()
    assert captured.seq_lens.tolist() == [17, 9, 65, 0]
    # The group that reads mounts keeps its lengths.
    assert full.seq_lens.tolist() == [50, 9, 70, 0]

    # Another batch, and then one without anything hidden.
    hidden.set(np.array([0, 60]))
    seq_lens[:3] = torch.tensor([4, 64, 0])
    assert group.build_metadata(new_metadata(seq_lens, 4, 64)).seq_lens.tolist() == [4, 4, 0, 0]
    hidden.set(np.zeros(0, dtype=np.int64))
    assert group.build_metadata(new_metadata(seq_lens, 4, 64)).seq_lens.tolist() == [4, 64, 0, 0]
    assert captured.seq_lens.tolist() == [4, 64, 0, 0]
