"""KV cache groups by what they see: layers that read mounts apart from layers that never do.

A group has one block table, so a layer without mounts needs a table without mounted pages. vLLM
groups layers by their specs; here specs say which set a layer belongs to.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from harness_sdk.errors import ConfigError
from rollout_service.engine.vllm.seams import (
    VLLM_VERSION,
    FullAttentionSpec,
    MambaSpec,
    extract_layer_index,
)

_MAX_SPREAD = 1.5
"""vLLM makes one group of each set of layers where the largest set is smaller than this many times
the smallest; else it cuts sets into pieces of the smallest one's size."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSetSpec(FullAttentionSpec):
    """Full attention of one set of layers, which share a block table with no others."""

    layer_set: int = 0
    reads_mounts: bool = True

    @classmethod
    def merge(cls, specs: list[Any]) -> Any:
        """One spec for layers of one set.

        Raises:
            AssertionError: They are of several; vLLM then keeps them apart.
        """
        first = specs[0]
        assert all(_set_of(spec) == first.layer_set for spec in specs), "several sets of layers"
        merged = super().merge(specs)
        return dataclasses.replace(
            merged, layer_set=first.layer_set, reads_mounts=first.reads_mounts
        )

    def is_uniform_with_collection(self, kv_cache_specs: Mapping[str, Any]) -> bool:
        """Whether all the layers may share one table."""
        return all(_set_of(spec) == self.layer_set for spec in kv_cache_specs.values())


def is_recurrent(kv_cache_spec: Any) -> bool:
    """Whether a KV cache group holds one state block per request.

    Raises:
        ConfigError: A group whose pages cannot be shared between cursors: windows, chunks.
    """
    if isinstance(kv_cache_spec, MambaSpec):
        return True
    if type(kv_cache_spec) in (FullAttentionSpec, LayerSetSpec) and not _has_window(kv_cache_spec):
        return False
    raise ConfigError(
        "attention kind cannot be mounted",
        value=type(kv_cache_spec).__name__,
        limit="full attention and recurrent layers",
    )


def reads_mounts(kv_cache_spec: Any) -> bool:
    """Whether mounted rows stand in the tables of an attention group."""
    return getattr(kv_cache_spec, "reads_mounts", True)


def split_layers(specs: Mapping[str, Any], mount_layers: Collection[int]) -> dict[str, Any]:
    """Specs by which vLLM keeps layers that read mounts apart from the others.

    Args:
        specs: vLLM's spec of each layer.
        mount_layers: Indices of the decoder layers that read mounts.

    Returns:
        The same where every attention layer reads; of attention layers alone otherwise.

    Raises:
        ConfigError: A part of a hybrid's attention layers.
    """
    attention = [name for name, spec in specs.items() if not is_recurrent(spec)]
    reading = [name for name in attention if extract_layer_index(name) in mount_layers]
    mount_free = [name for name in attention if name not in reading]
    if not mount_free:
        return dict(specs)
    if len(attention) < len(specs):
        raise ConfigError(
            "vLLM mounts into all attention layers of a hybrid or none",
            value=sorted(mount_layers),
            limit=sorted(map(extract_layer_index, attention)),
            remedy="leave mount_layers unset",
        )
    num_reading, num_free = num_sets(len(reading), len(mount_free))
    # Every nth layer: so each stage of a pipeline has its share of each set.
    sets = [reading[i::num_reading] for i in range(num_reading)]
    sets += [mount_free[i::num_free] for i in range(num_free)]
    return {
        name: _as_set(specs[name], index, index < num_reading)
        for index, names in enumerate(sets)
        for name in names
    }


def num_sets(num_reading: int, num_free: int) -> tuple[int, int]:
    """Into how many sets layers that read mounts, and the others, are cut: as few as vLLM takes.

    Blocks of all groups are as large as the largest's, so sets must be of nearly one size.
    """
    return min(
        (
            pair
            for pair in itertools.product(range(1, num_reading + 1), range(1, num_free + 1))
            if _is_even(num_reading, pair[0], num_free, pair[1])
        ),
        key=lambda pair: (sum(pair), max(-(-num_reading // pair[0]), -(-num_free // pair[1]))),
    )


def check_groups(groups: Iterable[Any], specs: Mapping[str, Any]) -> None:
    """Refuse groups that are not the sets asked for: two groups of a set, or two sets in one.

    Raises:
        ConfigError: vLLM grouped otherwise.
    """
    found = [group.layer_names for group in groups if not is_recurrent(group.kv_cache_spec)]
    asked: dict[int, list[str]] = {}
    for name, spec in specs.items():
        if not is_recurrent(spec):
            asked.setdefault(_set_of(spec) or 0, []).append(name)
    if sorted(map(sorted, found)) != sorted(map(sorted, asked.values())):
        raise ConfigError(
            "vLLM groups layers in another way than mounts need",
            value=_layers(found),
            limit=_layers(list(asked.values())),
            remedy=f"install vllm {VLLM_VERSION}, or choose mount_layers that it splits evenly",
        )


def check_parallelism(parallel_config: Any, *, has_mount_free: bool) -> None:
    """Refuse ways to spread a model under which rows are not where tables say.

    Raises:
        ConfigError: Names the option.
    """
    # Rows of a page on several ranks; two halves of a batch; layers, so sets of layers, on several.
    refused = ["decode_context_parallel_size", "prefill_context_parallel_size"]
    refused += ["num_ubatches", "pipeline_parallel_size"] if has_mount_free else []
    for name in refused:
        size = getattr(parallel_config, name)
        if size > 1:
            raise ConfigError(
                "mounts cannot be spread this way",
                value=f"{name}={size}",
                limit=1,
                remedy="use tensor_parallel_size",
            )


def _is_even(num_reading: int, reading_sets: int, num_free: int, free_sets: int) -> bool:
    smallest = min(num_reading // reading_sets, num_free // free_sets)
    largest = max(-(-num_reading // reading_sets), -(-num_free // free_sets))
    return largest < _MAX_SPREAD * smallest


def _as_set(spec: Any, layer_set: int, reads: bool) -> LayerSetSpec:
    values = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec) if f.init}
    return LayerSetSpec(**values, layer_set=layer_set, reads_mounts=reads)


def _set_of(spec: Any) -> int | None:
    return getattr(spec, "layer_set", None)


def _layers(groups: Sequence[Sequence[str]]) -> list[list[int]]:
    return sorted(sorted(map(extract_layer_index, names)) for names in groups)


def _has_window(kv_cache_spec: Any) -> bool:
    return any(
        getattr(kv_cache_spec, name, None) for name in ("sliding_window", "attention_chunk_size")
    )
