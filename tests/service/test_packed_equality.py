"""Packed trees against the path-by-path reference: log-probabilities and every LoRA gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from harness_sdk.record import EpisodeRecord, MountSpan, NodeKind
from tests.packed import VOCAB, assert_equal_to_paths, load_policy, records_for, tokens_of
from tests.path_reference import load_reference, reference_logprobs
from tests.random_records import RecordWriter
from tests.tiny_models import FAMILIES, save_tiny_model
from tests.tiny_moe_models import MOE_FAMILIES, save_tiny_moe_model
from trainer_service.dag import pack_episodes
from trainer_service.policy import Policy


@pytest.fixture(scope="module")
def model_paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: save_tiny_model(root / family, family) for family in FAMILIES}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", [0, 2])
def test_random_dags_equal_their_paths(
    model_paths: dict[str, Path], tmp_path: Path, family: str, dtype: str, seed: int
) -> None:
    policy = load_policy(model_paths[family], dtype=dtype)
    records = records_for(policy, seed)
    assert pack_episodes(records).layout.mounts
    assert_equal_to_paths(
        policy, records, model_paths[family], tmp_path, dtype=dtype, family=family
    )


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_mixtures_of_experts_equal_their_paths(tmp_path: Path, family: str, dtype: str) -> None:
    model_path = save_tiny_moe_model(tmp_path / "model", family)
    policy = load_policy(model_path, dtype=dtype)
    assert_equal_to_paths(
        policy, records_for(policy, 0), model_path, tmp_path / "lora", dtype=dtype, family=family
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_trees_without_mounts_equal_stock_models(
    model_paths: dict[str, Path], tmp_path: Path, family: str
) -> None:
    policy = load_policy(model_paths[family])
    records = records_for(policy, 5, with_mounts=False)
    assert_equal_to_paths(
        policy, records, model_paths[family], tmp_path, dtype="float32", family=family
    )


def woven_record(policy: Policy) -> EpisodeRecord:
    """Three siblings that read each other: ahead, behind, mutually, through one another."""
    writer = RecordWriter(rng=np.random.default_rng(0), vocab_size=VOCAB)

    def add(thread: str, *, parent: int, sampled: bool, length: int, **mounted: list[int]) -> int:
        kind = NodeKind.TURN if sampled else NodeKind.CONTEXT
        seen = writer.nodes[parent].mounts if parent >= 0 else ()
        for source in mounted.get("sources", []):
            end = len(writer.nodes[source].token_ids)
            seen += (MountSpan(node_id=source, begin=0, end=end),)
        return writer.append(
            thread, kind, parent=parent, sampled=sampled, length=length, mounts=seen
        )

    root = add(
        "root", parent=add("root", parent=-1, sampled=False, length=5), sampled=True, length=3
    )
    a = add("a", parent=root, sampled=True, length=4)
    b = add("b", parent=root, sampled=True, length=1)
    c = add("c", parent=root, sampled=True, length=20)
    a_reads_c = add("a", parent=a, sampled=False, length=1, sources=[c])
    a_after = add("a", parent=a_reads_c, sampled=True, length=2)
    b_reads_a = add("b", parent=b, sampled=False, length=1, sources=[a_reads_c, a_after, c])
    b_after = add("b", parent=b_reads_a, sampled=True, length=3)
    a_reads_b = add("a", parent=a_after, sampled=False, length=1, sources=[b])
    add("a", parent=a_reads_b, sampled=True, length=1)
    c_reads_both = add("c", parent=c, sampled=False, length=1, sources=[b_after, a_after])
    add("c", parent=c_reads_both, sampled=True, length=2)
    add("c", parent=c, sampled=True, length=1)
    return writer.record(mount_layers=policy.mount_layers)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_mutual_and_transitive_mounts_equal_their_paths(
    model_paths: dict[str, Path], tmp_path: Path, family: str, dtype: str
) -> None:
    policy = load_policy(model_paths[family], dtype=dtype)
    records = [woven_record(policy)]
    assert_equal_to_paths(
        policy, records, model_paths[family], tmp_path, dtype=dtype, family=family
    )


def producer_gradients(policy: Policy, record: EpisodeRecord) -> dict[str, torch.Tensor]:
    """What the reader's loss leaves on the producer's rows of each K and V adapter."""
    strip = pack_episodes([record])
    rows = tokens_of(strip, [record])
    producer = [row for row, (_, (node, _)) in enumerate(rows) if node == 3]
    reader = [row for row, (_, (node, _)) in enumerate(rows) if node == len(record.nodes) - 1]
    outputs: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable[[object, object, torch.Tensor], None]:
        def hook(_module: object, _inputs: object, output: torch.Tensor) -> None:
            output.retain_grad()
            outputs[name] = output

        return hook

    handles = [
        module.register_forward_hook(keep(name))
        for name, module in policy.modules()
        if name.endswith(("k_proj.lora_B.default", "v_proj.lora_B.default"))
    ]
    taken = torch.isin(strip.action_row, torch.tensor(reader))
    policy.logprobs(strip).policy_logprobs[taken].sum().backward()
    for handle in handles:
        handle.remove()
    found = {}
    for name, output in outputs.items():
        gradient = output.grad if output.grad is not None else torch.zeros_like(output)
        found[name] = gradient[0, producer]
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_readers_loss_reaches_the_producers_keys_and_values(
    model_paths: dict[str, Path], family: str
) -> None:
    policy = load_policy(model_paths[family])

    def record(*, mounted: bool) -> EpisodeRecord:
        writer = RecordWriter(rng=np.random.default_rng(0), vocab_size=VOCAB)
        writer.append("root", NodeKind.CONTEXT, sampled=False, length=4)
        writer.append("root", NodeKind.TURN, sampled=True, parent=0, length=2)
        writer.append("root", NodeKind.NOTE, sampled=False, parent=1, length=1)
        writer.append("a", NodeKind.TURN, sampled=True, parent=1, length=5)
        mounts = (MountSpan(node_id=3, begin=0, end=5),) if mounted else ()
        writer.append("root", NodeKind.STUB, sampled=False, parent=2, length=2, mounts=mounts)
        writer.append("root", NodeKind.TURN, sampled=True, parent=4, length=3)
        return writer.record(mount_layers=policy.mount_layers)

    without = producer_gradients(policy, record(mounted=False))
    assert without and all(bool((gradient == 0).all()) for gradient in without.values())
    reached = producer_gradients(policy, record(mounted=True))
    layers = {f".layers.{layer}." for layer in policy.mount_layers}
    for name, gradient in reached.items():
        if any(layer in name for layer in layers):
            assert bool((gradient.abs().sum(-1) > 0).all()), name


def test_targets_shifted_by_one_row_are_caught(
    model_paths: dict[str, Path], tmp_path: Path
) -> None:
    policy = load_policy(model_paths["qwen3_5"])
    record = woven_record(policy)
    strip = pack_episodes([record])
    shifted = dataclasses.replace(strip, action_source=strip.action_row - 1)
    # Right inside a node, wrong where a node's first token follows its parent's last row.
    wrong = shifted.action_source != strip.action_source
    assert 0 < int(wrong.sum()) < len(wrong)
    policy.save_adapter(tmp_path)
    wanted = reference_logprobs(load_reference(model_paths["qwen3_5"], tmp_path), record)
    rows = tokens_of(strip, [record])
    expected = torch.stack([wanted[rows[row][1]] for row in strip.action_row.tolist()])
    error = (policy.logprobs(shifted).policy_logprobs - expected).detach().abs()
    assert float(error[~wrong].max()) <= 5e-5
    assert float(error[wrong].min()) > 1e-3
