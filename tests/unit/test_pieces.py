"""Strips in pieces: the whole strip's numbers, each forward at most twice, memory of one piece."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from torch import nn

from benchmarks.tree_training.memory import LiveBytes
from harness_sdk.record import EpisodeRecord, MountSpan, NodeKind
from tests.packed import load_policy, relative
from tests.random_records import RecordWriter, random_record
from tests.tiny_models import save_tiny_model
from tests.tiny_moe_models import MOE_FAMILIES, save_tiny_moe_model
from trainer_service.config import TrainerConfig
from trainer_service.dag import pack_episodes
from trainer_service.pieces import PieceBoundary, PiecePlan, PieceRun
from trainer_service.policy import Policy
from trainer_service.strip import Strip
from tree_kernels.layout import PieceLayout, TreeLayout

FAMILIES = ("llama", "qwen3_5", "granitemoehybrid")


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Policy]:
    """A policy by family and dtype, loaded once."""
    loaded: dict[tuple[str, str], Policy] = {}

    def get(family: str, dtype: str) -> Policy:
        if (family, dtype) not in loaded:
            save = save_tiny_moe_model if family in MOE_FAMILIES else save_tiny_model
            folder = save(tmp_path_factory.mktemp(family), family)
            loaded[family, dtype] = load_policy(folder, dtype=dtype)
        return loaded[family, dtype]

    return get


def _mounting_record(policy: Policy) -> EpisodeRecord:
    """Mounts of mounts, of two spans, repeated, and in both directions of the strip."""
    writer = RecordWriter(rng=np.random.default_rng(5), vocab_size=300)

    def turn(parent: int, length: int, *mounts: MountSpan) -> int:
        return writer.append(
            "root", NodeKind.TURN, sampled=True, parent=parent, length=length, mounts=mounts
        )

    def span(node: int, begin: int, end: int) -> MountSpan:
        return MountSpan(node_id=node, begin=begin, end=end)

    root = writer.append("root", NodeKind.CONTEXT, sampled=False, length=2)
    first = turn(root, 8)
    second = turn(root, 4, span(first, 2, 8))
    below = turn(second, 6, span(first, 2, 8))
    turn(first, 3)
    reader = turn(first, 5, span(below, 1, 5), span(second, 0, 2))
    third = turn(root, 4, span(reader, 0, 5), span(first, 2, 8))
    turn(below, 5, span(third, 1, 4), span(first, 2, 8), span(first, 0, 1))
    return writer.record(mount_layers=policy.mount_layers)


def _computed(
    policy: Policy, strip: Strip, max_piece_tokens: int | None
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Log-probabilities and entropies, and the gradients of a random combination of them."""
    weights = torch.randn(2, len(strip.action_row), generator=torch.Generator().manual_seed(1))
    for parameter in policy.trainable_parameters():
        parameter.grad = None
    found = policy.logprobs(strip, max_piece_tokens=max_piece_tokens)
    found.backward((found.policy_logprobs * weights[0] + found.entropy * weights[1]).sum())
    gradients = {}
    for name, parameter in policy.named_trainable_parameters().items():
        assert parameter.grad is not None, name
        gradients[name] = parameter.grad.clone()
    return [found.policy_logprobs.detach(), found.entropy.detach()], gradients


def _assert_whole(policy: Policy, strip: Strip, size: int, limit: float) -> None:
    wanted, wanted_gradients = _computed(policy, strip, None)
    found, gradients = _computed(policy, strip, size)
    for one, other in zip(found, wanted, strict=True):
        assert float((one - other).abs().max()) <= limit
    for name, gradient in gradients.items():
        assert float(wanted_gradients[name].norm()) > 0, name
        assert relative(gradient, wanted_gradients[name]) <= limit, name


@pytest.mark.parametrize(
    ("dtype", "size", "limit"),
    [
        ("float32", 1, 2e-5), ("float32", 7, 1e-5), ("float32", 64, 1e-5), ("float32", 1000, 0.0),
        ("float64", 7, 1e-12),
    ],
)  # fmt: skip
@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_have_the_values_and_gradients_of_the_whole(
    policies: Callable[[str, str], Policy], family: str, dtype: str, size: int, limit: float
) -> None:
    policy = policies(family, dtype)
    records = [_mounting_record(policy)]
    if size > 1:
        rng = np.random.default_rng(size)
        records.append(random_record(rng, 300, mount_layers=policy.mount_layers))
    _assert_whole(policy, pack_episodes(records), size, limit)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_pieces_of_mixtures_have_the_values_and_gradients_of_the_whole(
    policies: Callable[[str, str], Policy], family: str
) -> None:
    policy = policies(family, "float64")
    records = [_mounting_record(policy)]
    records.append(random_record(np.random.default_rng(7), 300, mount_layers=policy.mount_layers))
    _assert_whole(policy, pack_episodes(records), 7, 1e-11)


def test_mounts_of_the_case_cross_pieces_in_both_directions(
    policies: Callable[[str, str], Policy],
) -> None:
    layout = pack_episodes([_mounting_record(policies("llama", "float32"))]).layout
    piece_of = np.zeros(layout.num_tokens, dtype=np.int64)
    for number, piece in enumerate(PiecePlan(layout, 7).pieces):
        piece_of[piece.rows] = number
    crossing = {
        mount.key_begin < mount.query_begin
        for mount in layout.mounts
        if piece_of[mount.key_begin] != piece_of[mount.query_begin]
    }
    assert crossing == {False, True}


@given(number=st.integers(0, 10_000), size=st.integers(5, 40), family=st.sampled_from(FAMILIES))
@settings(max_examples=6, database=None)
@seed(6)
def test_pieces_of_random_trees_have_the_gradients_of_the_whole(
    policies: Callable[[str, str], Policy], number: int, size: int, family: str
) -> None:
    policy = policies(family, "float64")
    rng = np.random.default_rng(number)
    layers = policy.mount_layers
    records = [random_record(rng, 300, mount_layers=layers, num_events=5) for _ in range(2)]
    _assert_whole(policy, pack_episodes(records), size, 1e-11)


@pytest.mark.parametrize(("size", "passes"), [(1000, 1), (7, 2)])
def test_each_token_is_computed_twice_in_pieces_and_once_without_gradient(
    policies: Callable[[str, str], Policy], size: int, passes: int
) -> None:
    policy = policies("qwen3_5", "float32")
    record = _mounting_record(policy)
    ids = iter(range(300))
    nodes = tuple(
        replace(node, token_ids=tuple(next(ids) for _ in node.token_ids)) for node in record.nodes
    )
    strip = pack_episodes([replace(record, nodes=nodes)])
    counts: Counter[int] = Counter()
    embedding = next(m for _, m in policy.modules() if isinstance(m, nn.Embedding))
    hook = embedding.register_forward_pre_hook(lambda _, args: counts.update(args[0][0].tolist()))
    try:
        _computed(policy, strip, size)
        assert counts == dict.fromkeys(range(strip.num_tokens), passes)
        counts.clear()
        with torch.no_grad():
            policy.logprobs(strip, max_piece_tokens=size)
        assert counts == dict.fromkeys(range(strip.num_tokens), 1)
    finally:
        hook.remove()


class _Meter:
    """Bytes that autograd holds at once."""

    def __init__(self, policy: Policy) -> None:
        weights = [p for _, module in policy.modules() for p in module.parameters(recurse=False)]
        self._weights = {p.untyped_storage().data_ptr() for p in weights}
        self._held: Counter[tuple[int, int]] = Counter()
        self._bytes = 0
        self.peak = 0

    def pack(self, tensor: torch.Tensor) -> _Held:
        storage = tensor.untyped_storage()
        key = (storage.data_ptr(), storage.nbytes())
        if key[0] in self._weights:
            key = (0, 0)
        if not self._held[key]:
            self._bytes += key[1]
            self.peak = max(self.peak, self._bytes)
        self._held[key] += 1
        return _Held(tensor, lambda: self._release(key))

    def _release(self, key: tuple[int, int]) -> None:
        self._held[key] -= 1
        if not self._held[key]:
            self._bytes -= key[1]


class _Held:
    def __init__(self, tensor: torch.Tensor, release: Callable[[], None]) -> None:
        self.tensor = tensor
        self._release = release

    def __del__(self) -> None:
        self._release()


def _peak(policy: Policy, strip: Strip, size: int | None) -> int:
    meter = _Meter(policy)
    with torch.autograd.graph.saved_tensors_hooks(meter.pack, lambda held: held.tensor):
        _computed(policy, strip, size)
    return meter.peak


def _bush(policy: Policy, num_branches: int) -> Strip:
    """A trunk and branches, of 40 tokens each."""
    writer = RecordWriter(rng=np.random.default_rng(0), vocab_size=300)
    trunk = writer.append("root", NodeKind.CONTEXT, sampled=False, length=40)
    for _ in range(num_branches):
        writer.append("root", NodeKind.TURN, sampled=True, parent=trunk, length=40)
    return pack_episodes([writer.record(mount_layers=policy.mount_layers)])


@pytest.mark.parametrize("family", FAMILIES)
def test_memory_is_that_of_one_piece_however_long_the_strip(
    policies: Callable[[str, str], Policy], family: str
) -> None:
    policy = policies(family, "float32")
    short, long = _bush(policy, 3), _bush(policy, 12)
    # A piece of two branches reads the trunk besides.
    with_path = _peak(policy, _bush(policy, 2), None)
    assert _peak(policy, long, None) > 3.5 * with_path
    peaks = [_peak(policy, strip, 80) for strip in (short, long)]
    assert max(peaks) <= with_path, (peaks, with_path)


def test_all_memory_is_that_of_a_piece_and_the_boundary_with_its_gradients(
    policies: Callable[[str, str], Policy],
) -> None:
    policy = policies("llama", "float32")
    with_path, long = _bush(policy, 2), _bush(policy, 6)

    def peak(strip: Strip, size: int | None) -> int:
        with LiveBytes() as meter:
            _computed(policy, strip, size)
        return meter.peak

    # Keys and values of the trunk in eight layers, and gradients as wide as they are.
    boundary = 2 * (8 * 2 * 40 * 2 * 12 * 4)
    # Index tables and log-probabilities of four more branches.
    rest = 4 * 40 * 64
    assert peak(long, 80) <= peak(with_path, None) + boundary + rest


def test_boundary_keeps_what_other_pieces_read_and_no_more(
    policies: Callable[[str, str], Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[PieceRun] = []
    started = PieceRun.__init__

    def recorded(self: PieceRun, plan: PiecePlan) -> None:
        started(self, plan)
        runs.append(self)

    monkeypatch.setattr(PieceRun, "__init__", recorded)
    policy = policies("qwen3_5", "float32")
    policy.logprobs(_bush(policy, 12), max_piece_tokens=80)
    plan = runs[0].plan
    # Of 520 rows the trunk's alone; no cut falls inside a branch.
    assert plan.seen_rows.tolist() == list(range(40))
    assert (plan.end_rows.tolist(), plan.context_rows(4).tolist()) == ([39], [37, 38, 39])
    attention = 2 * 2 * (40 * 2 * 16 * 4)
    states = 4 * (4 * 12 * 16 * 8)
    windows = 4 * (3 * (2 * 2 * 12 + 4 * 16) * 4)
    found = sum(v.numel() * v.element_size() for v in runs[0].values.values())
    assert found == attention + states + windows


def test_gradients_of_the_boundary_add_up_in_float32() -> None:
    weight = torch.ones((), requires_grad=True)
    branches = 300
    layout = TreeLayout.build([-1] + [0] * branches, [1] * (branches + 1))

    def compute(piece: PieceLayout, boundary: PieceBoundary) -> tuple[torch.Tensor]:
        own = weight.bfloat16().expand(piece.num_tokens, 1)
        # What each branch sees: the root's row.
        return (boundary.with_seen((0, 0), own)[:-1].sum(0),)

    run = PieceRun(PiecePlan(layout, 1))
    outputs = run.forward(compute)
    run.backward(compute, [(torch.ones_like(each),) for (each,) in outputs])
    # Ones that are added up in bfloat16 stay at 256.
    assert weight.grad is not None
    assert float(weight.grad) == branches


def test_pieces_and_checkpointed_layers_are_not_combined(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "model": {"path": tmp_path, "activation_checkpointing": True},
        "batch": {"max_piece_tokens": 64},
    }
    with pytest.raises(ValueError, match="pieces compute their activations again already"):
        TrainerConfig.model_validate(options)
