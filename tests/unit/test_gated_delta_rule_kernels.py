"""The gated delta rule's self-test, chain tables, and states at a piece's edge."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.tree_cases import relative_rms
from tree_kernels.chain_scan.scan import checked_block_t
from tree_kernels.gated_delta_rule import tree_gated_delta_rule_with_states
from tree_kernels.gated_delta_rule.function import chain_scan
from tree_kernels.gated_delta_rule.naive import naive_tree_gated_delta_rule
from tree_kernels.gated_delta_rule.self_test import kernels_work
from tree_kernels.layout import TreeLayout

TREE = TreeLayout.build([-1, 0, 1, 2, 0], [3, 5, 20, 2, 4])


@pytest.fixture
def fresh_self_test() -> Iterator[None]:
    kernels_work.cache_clear()
    yield
    kernels_work.cache_clear()


@pytest.mark.usefixtures("fresh_self_test")
def test_kernels_that_do_not_run_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        # This process has Triton without the interpreter, and no GPU.
        assert not kernels_work(torch.device("cpu"), torch.float32, 1, 1, 4, 4)
    (message,) = caplog.messages
    assert "do not run on cpu, torch.float32, 1 heads of 4 by 4" in message


@pytest.mark.usefixtures("fresh_self_test")
@pytest.mark.parametrize(("factor", "wrong"), [(1 + 1e-4, "off by 1.0e-04"), (math.nan, "nan")])
def test_kernels_that_are_wrong_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, factor: float, wrong: str
) -> None:
    def inexact(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, ends = naive_tree_gated_delta_rule(*args, **options)
        return out * factor, ends

    monkeypatch.setattr("tree_kernels.gated_delta_rule.self_test.chain_scan", inexact)
    assert not kernels_work(torch.device("cpu"), torch.float32, 1, 2, 8, 6)
    assert wrong in caplog.messages[0] and "allowed: 2e-05" in caplog.messages[0]
    monkeypatch.undo()
    monkeypatch.setattr(
        "tree_kernels.gated_delta_rule.self_test.chain_scan", naive_tree_gated_delta_rule
    )
    assert kernels_work(torch.device("cpu"), torch.float32, 2, 2, 8, 6)


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_pieces_equal_the_whole_tree(chunk_size: int | None) -> None:
    """Nodes 2 and 3 form a piece of their own, which starts inside a chunk of the whole."""
    generator = torch.Generator().manual_seed(5)
    shapes = {"query": (2, 6), "key": (2, 6), "value": (4, 5), "log_decay": (4,), "beta": (4,)}
    leaves = {
        name: torch.randn(TREE.num_tokens, *shape, generator=generator, dtype=torch.float64) / 3
        for name, shape in shapes.items()
    }
    leaves["log_decay"] = -leaves["log_decay"].abs()
    leaves = {name: each.requires_grad_() for name, each in leaves.items()}
    initial = torch.randn(1, 4, 6, 5, generator=generator, dtype=torch.float64).requires_grad_()

    whole, (end,) = tree_gated_delta_rule_with_states(
        **leaves, layout=TREE, initial_states=initial, end_nodes=[3], chunk_size=chunk_size
    )
    above, below = torch.tensor([*range(8), *range(30, 34)]), torch.arange(8, 30)
    top, between = tree_gated_delta_rule_with_states(
        **{name: each[above] for name, each in leaves.items()},
        layout=TreeLayout.build([-1, 0, 0], [3, 5, 4]),
        initial_states=initial,
        end_nodes=[1],
        chunk_size=chunk_size,
    )
    bottom, (last,) = tree_gated_delta_rule_with_states(
        **{name: each[below] for name, each in leaves.items()},
        layout=TreeLayout.build([-1, 0], [20, 2]),
        initial_states=between,
        end_nodes=[1],
        chunk_size=chunk_size,
    )
    weights = torch.randn(whole.shape, generator=generator, dtype=torch.float64)
    inputs = [*leaves.values(), initial]
    pieces = (top * weights[above]).sum() + (bottom * weights[below]).sum() + last.sum()
    wanted = torch.autograd.grad((whole * weights).sum() + end.sum(), inputs)
    for found, expected in zip(torch.autograd.grad(pieces, inputs), wanted, strict=True):
        assert relative_rms(found, expected) <= 1e-11
    assert relative_rms(last, end) <= 1e-11


def test_the_chain_table_of_a_small_tree() -> None:
    table = TreeLayout.build([-1, 0, 0, -1], [3, 2, 1, 2]).chains(2, [3])
    assert table.chunk_begins.tolist() == [0, 2, 3, 5, 6]
    assert table.chunk_lengths.tolist() == [2, 1, 2, 1, 2]
    assert table.run_begins.tolist() == [0, 3, 5, 6]
    assert table.run_ends.tolist() == [3, 5, 6, 8]
    assert table.run_chunks.tolist() == [0, 2, 3, 4]
    assert table.run_slots.tolist() == [2, -1, -1, 3]
    assert table.run_starts.tolist() == [0, 2, 2, 1]
    assert table.chain_runs.tolist() == [0, 2, 3, 4]
    assert table.chain_slots.tolist() == [0, 2, 1]
    (group,) = table.groups
    assert (group.first_chunk, group.num_chunks) == (0, 5)
    assert [level.tolist() for level in group.levels] == [[0, 2], [1]]
    assert group.runs.tolist() == [0, 1, 2, 3]
    assert table.slot_begins.tolist() == [0, 1, 2, 3, 3]
    assert table.slot_chains.tolist() == [0, 2, 1]
    assert table.root_chains.tolist() == [0, 2]
    assert table.end_slots.tolist() == [3]


def test_depth_alone_adds_no_level() -> None:
    comb = TreeLayout.build([-1, 0, 1, 2, 3, 2, 1, 0], [1] * 8)
    (group,) = comb.chains(16).groups
    assert [len(level) for level in group.levels] == [1, 3]


def test_groups_bound_the_states_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 0's branch of 90 rows is cut in three runs, and the strip in groups of 64 rows."""
    monkeypatch.setattr("tree_kernels.layout.chains.RUN_ROWS", 32)
    monkeypatch.setattr("tree_kernels.layout.chains.GROUP_ROWS", 64)
    table = TreeLayout.build([-1, 0, 0], [10, 90, 30]).chains(16)
    assert table.run_begins.tolist() == [0, 10, 42, 74, 100]
    assert table.run_slots.tolist() == [1, 2, 3, -1, -1]
    assert table.run_starts.tolist() == [0, 1, 2, 3, 1]
    assert [group.first_chunk for group in table.groups] == [0, 3, 7]
    assert [group.num_chunks for group in table.groups] == [3, 4, 2]
    # The branch goes on in the second group from slot 2: another chain, which waits for none.
    assert [[chains.tolist() for chains in group.levels] for group in table.groups] == [
        [[0]],
        [[1]],
        [[2]],
    ]
    assert table.chain_slots.tolist() == [0, 2, 1]
    assert table.most_chunks == 4


@pytest.mark.parametrize("end_nodes", [[1, 1], [5], [-1]])
def test_unknown_end_nodes_are_refused(end_nodes: list[int]) -> None:
    x = torch.randn(34, 2, 4)
    with pytest.raises(ValueError, match="end_nodes"):
        tree_gated_delta_rule_with_states(x, x, x, x[..., 0], x[..., 0], TREE, end_nodes=end_nodes)


def test_initial_states_of_another_number_of_roots_are_refused() -> None:
    x = torch.randn(34, 2, 4)
    with pytest.raises(ValueError, match="initial_states"):
        tree_gated_delta_rule_with_states(
            x, x, x, x[..., 0], x[..., 0], TREE, initial_states=torch.zeros(2, 2, 4, 4)
        )


@pytest.mark.parametrize(
    ("chunk_size", "key_dim", "message"), [(48, 4, "chunk_size 48"), (64, 129, "dimension 129")]
)
def test_sizes_that_the_kernels_do_not_know_are_refused(
    chunk_size: int, key_dim: int, message: str
) -> None:
    x = torch.randn(34, 2, key_dim)
    with pytest.raises(ValueError, match=message):
        chain_scan(
            x,
            x,
            x,
            x[..., 0],
            x[..., 0],
            TREE,
            initial_states=None,
            end_nodes=[],
            chunk_size=chunk_size,
        )


@pytest.mark.parametrize(("key_dim", "value_dim"), [(12, 20), (64, 64), (128, 256)])
def test_heads_that_no_gpu_has_run_are_refused_there(key_dim: int, value_dim: int) -> None:
    key, value = torch.empty(3, 1, key_dim), torch.empty(3, 1, value_dim)
    with pytest.raises(ValueError, match=f"heads of {key_dim} by {value_dim}; allowed on a GPU"):
        checked_block_t(None, key, value, torch.device("cuda"))
    assert checked_block_t(None, key, value, torch.device("cpu")) == 32
