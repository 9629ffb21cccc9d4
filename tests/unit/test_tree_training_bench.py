"""The tree-training benchmark's trees, its counts, and one run of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.tree_training import trees
from benchmarks.tree_training.flops import model_flops, visible_pairs
from benchmarks.tree_training.memory import LiveBytes
from tests.tiny_models import save_tiny_model
from tests.tree_cases import random_case
from trainer_service.dag import pack_episodes
from trainer_service.policy import LoraOptions, Policy

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("number", range(5))
def test_pairs_are_those_of_the_dense_mask(number: int) -> None:
    case = random_case(np.random.default_rng(number), 60, 9)
    own = int(case.visible(mounted=False).sum())
    both = int(case.visible(mounted=True).sum())
    assert visible_pairs(case.layout) == (own, both - own)


def test_overlap_is_that_asked_for() -> None:
    for overlap in (0.2, 0.5, 0.8, 0.92):
        record = trees.overlapping(16, 256, overlap, 4).record(())
        flat = sum(path.num_tokens for path in trees.paths(record))
        assert flat == 16 * 256
        assert 1 - record.num_tokens / flat == pytest.approx(overlap, abs=0.01)


def test_octopus_has_its_branches_and_mounts() -> None:
    record = trees.octopus(20_000).record((3,))
    strip = pack_episodes([record])
    assert strip.num_tokens == pytest.approx(20_000, rel=0.01)
    assert int(strip.num_paths[0]) == 10
    new = [
        span
        for node in record.nodes
        for span in node.mounts[len(record.nodes[max(node.parent, 0)].mounts) :]
    ]
    assert len(new) == 24


def test_depth_and_node_length_are_those_asked_for() -> None:
    assert pack_episodes([trees.comb(1200, 60).record(())]).num_tokens == 1200
    strip = pack_episodes([trees.binary(128, 3).record(())])
    assert [node.length for node in strip.nodes] == [128] * 7


def test_flattened_paths_are_the_paths() -> None:
    record = trees.octopus(500).record((3,))
    flat = pack_episodes(trees.paths(record))
    assert flat.num_tokens == pack_episodes([record]).tokens_flat
    assert not flat.layout.mounts


def test_operations_are_counted_from_the_shapes(tmp_path: Path) -> None:
    policy = Policy.load(save_tiny_model(tmp_path, "llama"), lora=LoraOptions(rank=4))
    flops = model_flops(policy)
    projections = 8 * (2 * 48 * 48 + 2 * 48 * 24 + 3 * 48 * 80)
    assert flops.linear == 2 * projections
    assert flops.lora == 2 * 8 * 4 * (2 * 96 + 2 * 72 + 3 * 128)
    assert (flops.attention, flops.head) == (4 * 48, 2 * 48 * 300)
    assert (flops.num_attention, flops.num_mounted) == (8, 2)


def test_live_bytes_are_those_held_at_once() -> None:
    with LiveBytes() as meter:
        first = torch.zeros(1000)
        second = first + 1
        del first
        third = second + 1
    assert (meter.peak, meter.held) == (8000, 8000)
    del second, third
    assert meter.held == 0


@pytest.mark.soak
def test_benchmark_writes_its_rows(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks.tree_training", "--out", str(out)]
    subprocess.run([*command, "--only", "overlap 80"], cwd=ROOT, check=True, timeout=250)
    (row,) = json.loads(out.read_text())
    assert (row["tree"], row["tokens_flat"], row["nodes"]) == ("overlap 80 %", 4096, 17)
    assert row["speedup"] > 1 and row["bound_tokens"] > row["bound_flops"] > 4
    assert out.with_suffix(".svg").stat().st_size < 100_000
