"""What is measured, the most important first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.tree_training import trees
from benchmarks.tree_training.trees import TreeWriter
from harness_sdk.record import EpisodeRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One tree and what it is compared with."""

    name: str
    build: Callable[[tuple[int, ...]], EpisodeRecord]
    """The episode, given the layers that read mounts."""
    flat: str | None = None
    """Cases of one name flatten to the same paths, measured once; None leaves them out."""
    stock_paths: int = 0
    """Paths that stock transformers runs, one by one; the time of all follows from theirs."""
    max_piece_tokens: int | None = None
    """Compute the strip in pieces."""
    repeats: int = 2
    """Steps measured, after one that is not; with none, that one is all there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All cases of a device."""

    shape: str
    flat_strip_tokens: int
    """Rows of a strip of flattened paths."""
    seconds: float
    """Budget unless told otherwise."""
    cases: tuple[Case, ...]


def cpu_plan() -> Plan:
    """A tiny hybrid, below five minutes on one core."""
    cases = (
        _octopus("octopus 2K", 2000, flat="octopus 2K", repeats=2),
        *_overlaps((80, 20, 50, 92), path=256, paths=16, num_sampled=4, stock_paths=16),
        *_node_lengths(((128, 3), (512, 2))),
        *_depths(1200),
        _octopus("octopus 2K without mounts", 2000, mounted=False),
        _octopus("octopus 2K in pieces of 512", 2000, max_piece_tokens=512),
        *_recorded(3000),
    )
    return Plan(shape="tiny_hybrid", flat_strip_tokens=4096, seconds=280, cases=cases)


def cuda_plan() -> Plan:
    """Qwen3.5-4B's shape on one H200, within seven minutes; what has a limit to hold first."""
    same_paths = {"path": 4096, "paths": 16, "num_sampled": 64, "stock_paths": 3}
    cases = (
        *_overlaps((50,), **same_paths),
        *_node_lengths(((128, 8),)),
        *_depths(32_768),
        _octopus("octopus 32K", 32_768, repeats=4),
        _octopus("octopus 32K without mounts", 32_768, mounted=False, repeats=4),
        _case(
            "64K tokens, overlap 80 %",
            lambda: trees.overlapping(16, 20_480, 0.8, 320),
            flat="64K tokens",
        ),
        _case("262K tokens that see 16K", lambda: trees.fork(31, 12_288, 8060, 806), repeats=1),
        _comb("262K tokens", 262_144, 8, repeats=1),
        # Half the memory goes to keys, values and their gradients, the rest allows such a piece.
        _octopus("512K tokens in pieces of 6K", 524_288, max_piece_tokens=6144, repeats=0),
        *_overlaps((80, 20, 92), **same_paths),
        *_node_lengths(((512, 6), (4096, 3))),
        _octopus("octopus 200K", 200_000, flat="octopus 200K", repeats=1),
        *_recorded(20_000),
    )
    return Plan(shape="qwen3_5_4b", flat_strip_tokens=65_536, seconds=400, cases=cases)


def _case(name: str, writer: Callable[[], TreeWriter], **options: Any) -> Case:
    return Case(name=name, build=lambda layers: writer().record(layers), **options)


def _overlaps(
    percents: tuple[int, ...], *, path: int, paths: int, num_sampled: int, stock_paths: int
) -> list[Case]:
    def writer(overlap: float) -> Callable[[], TreeWriter]:
        return lambda: trees.overlapping(paths, path, overlap, num_sampled)

    return [
        _case(
            f"overlap {overlap} %",
            writer(overlap / 100),
            flat=f"{paths} paths of {path}",
            stock_paths=stock_paths if overlap == 80 else 0,
        )
        for overlap in percents
    ]


def _octopus(name: str, num_tokens: int, *, mounted: bool = True, **options: Any) -> Case:
    def build(layers: tuple[int, ...]) -> EpisodeRecord:
        record = trees.octopus(num_tokens).record(layers)
        return record if mounted else trees.without_mounts(record)

    return Case(name=name, build=build, **options)


def _comb(name: str, num_tokens: int, depth: int, **options: Any) -> Case:
    return _case(name, lambda: trees.comb(num_tokens, depth), **options)


def _depths(num_tokens: int) -> list[Case]:
    return [_comb(f"depth {depth}", num_tokens, depth) for depth in (5, 60)]


def _node_lengths(shapes: tuple[tuple[int, int], ...]) -> list[Case]:
    def writer(length: int, levels: int) -> Callable[[], TreeWriter]:
        return lambda: trees.binary(length, levels)

    return [
        _case(f"nodes of {length}", writer(length, levels), flat=f"nodes of {length}")
        for length, levels in shapes
    ]


def _recorded(max_tokens: int) -> list[Case]:
    """Three of the recorded trees."""
    return [
        Case(name=f"recorded: {name[:40].strip()}", build=lambda _, r=record: r, flat=name)
        for name, record in trees.recorded(max_tokens)[:3]
    ]
