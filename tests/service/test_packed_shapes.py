"""Packed trees of real shapes against the path-by-path reference, in float32 and bfloat16."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from harness_sdk.record import EpisodeRecord, NodeKind
from tests.packed import (
    VOCAB,
    Measured,
    assert_equal_to_paths,
    gradients_of,
    load_policy,
    packed_pass,
    path_pass,
    records_for,
    relative,
    tokens_of,
)
from tests.random_records import RecordWriter
from tests.tiny_models import FAMILIES, tiny_model
from tests.tiny_moe_models import MOE_FAMILIES, tiny_moe_model
from trainer_service.dag import pack_episodes
from trainer_service.policy import Policy

FAMILY_CASES = [
    family
    if family in ("qwen3_5", "granitemoehybrid")
    else pytest.param(family, marks=pytest.mark.soak)
    for family in FAMILIES + MOE_FAMILIES
]

LENGTHS = (3, 64, 1, 63, 2, 65, 4, 1000)


def save_model(folder: Path, family: str) -> Path:
    """A tiny model that remembers for hundreds of tokens; its weights are the same in bfloat16."""
    model = (tiny_moe_model if family in MOE_FAMILIES else tiny_model)(family)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            # Fresh ones forget a chunk of 16 rows to within float32.
            parameter.data = torch.linspace(-6, -3, len(parameter))
    model.bfloat16().save_pretrained(folder)
    return folder


def tree_record(policy: Policy, trunk: Sequence[int], leaves: Sequence[int]) -> EpisodeRecord:
    """A path of nodes of lengths `trunk`, and leaves below them, from its end to its begin.

    More leaves than nodes, so that two end the path and no leaf only prolongs it.
    """
    writer = RecordWriter(rng=np.random.default_rng(0), vocab_size=VOCAB)

    def add(parent: int, length: int) -> int:
        name = f"t{len(writer.nodes)}"
        return writer.append(name, NodeKind.TURN, parent=parent, sampled=True, length=length)

    path = [-1]
    for length in trunk:
        path.append(add(path[-1], length))
    for index, length in enumerate(leaves):
        add(path[-1 - index % len(trunk)], length)
    return writer.record(mount_layers=policy.mount_layers)


SHAPES = {
    "lengths": (LENGTHS, (1, 65, 4, 63, 2, 64, 1, 3, 2)),
    "depth_60": ((2, 1, 1) * 19 + (3, 1), (1, 2) * 30),
    "leaves_512": ((2,), (1, 1, 2, 1) * 128),
}
"""Lengths on the path and of the leaves."""


@pytest.mark.parametrize(
    "shape", ["lengths", "depth_60", pytest.param("leaves_512", marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("family", FAMILY_CASES)
def test_real_shapes_equal_their_paths(tmp_path: Path, family: str, shape: str) -> None:
    model_path = save_model(tmp_path / "model", family)
    policy = load_policy(model_path)
    record = tree_record(policy, *SHAPES[shape])
    assert_equal_to_paths(
        policy, [record], model_path, tmp_path / "lora", dtype="float32", family=family
    )


@pytest.mark.parametrize("family", FAMILY_CASES)
def test_bfloat16_is_as_near_to_float32_as_its_paths(tmp_path: Path, family: str) -> None:
    model_path = save_model(tmp_path / "model", family)
    policy = load_policy(model_path, dtype="bfloat16")
    policy.save_adapter(tmp_path / "lora")
    records = records_for(policy, 2)
    packed = packed_pass(policy, pack_episodes(records))
    exact = path_pass(model_path, tmp_path / "lora", records, dtype="float32")
    paths = path_pass(model_path, tmp_path / "lora", records, dtype="bfloat16")
    ours, theirs = distances(packed, exact), distances(paths, exact)
    assert min(theirs) > 1e-4
    assert [a / b <= 2 for a, b in zip(ours, theirs, strict=True)] == [True, True]


def distances(found: Measured, wanted: Measured) -> tuple[float, float]:
    """Relative root mean squares of log-probabilities and of all gradients together."""
    gradients = [
        torch.cat([g.double().flatten() for _, g in sorted(m[1].items())]) for m in (found, wanted)
    ]
    return relative(found[0], wanted[0]), relative(gradients[0], gradients[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_changed_branch_leaves_its_siblings_bit_equal(tmp_path: Path, family: str) -> None:
    policy = load_policy(save_model(tmp_path / "model", family))
    record = tree_record(policy, (5, 3), (66, 20, 4, 7, 1, 9))
    other = record.nodes[2]
    # The first leaf on the strip: all siblings follow it.
    assert pack_episodes([record]).nodes[2].record_nodes == (other.node_id,)
    changed = tuple((token + 1) % VOCAB for token in other.token_ids)
    nodes = list(record.nodes)
    nodes[other.node_id] = dataclasses.replace(other, token_ids=changed)
    runs = [
        siblings_pass(policy, each, other.node_id)
        for each in (record, dataclasses.replace(record, nodes=tuple(nodes)))
    ]
    (siblings, own, gradients), (siblings_after, own_after, gradients_after) = runs
    assert not torch.equal(own, own_after)
    assert torch.equal(siblings, siblings_after)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, gradients_after[name]), name


def siblings_pass(
    policy: Policy, record: EpisodeRecord, node_id: int
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities outside of a node and in it, and gradients of a loss over the former."""
    strip = pack_episodes([record])
    rows = tokens_of(strip, [record])
    outside = torch.tensor([rows[row][1][0] != node_id for row in strip.action_row.tolist()])
    parameters = policy.named_trainable_parameters()
    for parameter in parameters.values():
        parameter.grad = None
    logprobs = policy.logprobs(strip).policy_logprobs
    siblings = logprobs[outside]
    (siblings * torch.arange(1, len(siblings) + 1)).sum().backward()
    return siblings.detach(), logprobs[~outside].detach(), gradients_of(parameters)
