"""Measures the cases in order and writes the rows after each."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.tree_training import trees
from benchmarks.tree_training.cases import Case, Plan
from benchmarks.tree_training.flops import model_flops
from benchmarks.tree_training.hardware import hardware
from benchmarks.tree_training.measure import matmul_peak, seconds, train
from benchmarks.tree_training.memory import peak_gib
from benchmarks.tree_training.models import RANK, random_policy
from benchmarks.tree_training.stock import StockTrainer
from harness_sdk.record import EpisodeRecord
from trainer_service.garbage import loaded_is_kept
from trainer_service.strip import Strip


class Bench:
    """One run: its policy, what was measured, and the files that it goes to."""

    def __init__(self, plan: Plan, device: str, out: Path, *, deadline: float) -> None:
        """Make the policy on `device`; rows go to `out` until `deadline` of `time.monotonic`."""
        self._plan, self._device, self._out, self._deadline = plan, device, out, deadline
        # Everything on the GPU computes each layer twice, so that all rows are of one kind.
        self._checkpointing = device == "cuda"
        self._policy = random_policy(plan.shape, device, checkpointing=self._checkpointing)
        self._flops = model_flops(self._policy)
        self._peak = matmul_peak(self._policy.device)
        self._flat_seconds: dict[str, float] = {}
        self._earlier: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        """One of each case, in order."""
        self.detail: dict[str, Any] = {
            **hardware(device),
            "matmul_flops_per_s": self._peak,
            "shape": plan.shape,
            "rank": RANK,
            "checkpointing": self._checkpointing,
        }
        """What stands behind the rows, by the tree's name, and the machine."""

    def run(self, cases: list[Case]) -> None:
        """Measure `cases`; starts none when the time is over."""
        self._warm_up()
        with loaded_is_kept():
            for case in cases:
                if time.monotonic() > self._deadline:
                    _say(f"{case.name}: no time left")
                    continue
                self._measure(case)
                self._write()

    def _warm_up(self) -> None:
        """Compile what is compiled once, on a small tree with mounts."""
        record = trees.octopus(4096 if self._device == "cuda" else 512).record(
            self._policy.mount_layers
        )
        begin = time.monotonic()
        train(self._policy, trees.packed([record], 1 << 30))
        self.detail["warm_up_s"] = time.monotonic() - begin

    def _measure(self, case: Case) -> None:
        record = case.build(self._policy.mount_layers)
        (strip,) = trees.packed([record], 1)
        flat = self._flat_strips(record)
        recomputed = self._checkpointing or case.max_piece_tokens is not None
        work = self._flops.step(strip, recomputed=recomputed)
        flat_work = sum(self._flops.step(each, recomputed=self._checkpointing) for each in flat)
        row = _shape_of(case, record, strip, flat)
        row["bound_flops"] = flat_work / self._flops.step(strip, recomputed=self._checkpointing)
        detail: dict[str, Any] = {"flops": work, "flat_flops": flat_work}
        self.rows.append(row)
        self.detail[case.name] = detail
        if not self._succeeds(detail, lambda: self._measure_tree(case, record, row, detail)):
            return
        detail["flops_per_s"] = work / detail["step_s"]
        detail["share_of_matmul_peak"] = detail["flops_per_s"] / self._peak
        self._write()
        if case.flat is not None:
            self._succeeds(detail, lambda: self._compare(case, record, row, detail))
            self._write()
        if case.stock_paths:
            self._succeeds(detail, lambda: self._compare_stock(case, record, detail))
        _say(_line(row, detail))

    def _succeeds(self, detail: dict[str, Any], measure: Callable[[], None]) -> bool:
        """Run `measure`; what PyTorch cannot do, for memory or else, is told and not measured."""
        try:
            measure()
        except RuntimeError as error:
            detail["error"] = str(error)[:300]
            _say(f"failed: {detail['error']}")
            torch.cuda.empty_cache()
            return False
        return True

    def _measure_tree(
        self, case: Case, record: EpisodeRecord, row: dict[str, Any], detail: dict[str, Any]
    ) -> None:
        # Pieces compute their activations again already.
        dict(self._policy.modules())[""].train(
            self._checkpointing and case.max_piece_tokens is None
        )

        def steps(count: int) -> list[float]:
            return [
                self._seconds(trees.packed([record], 1), case.max_piece_tokens)
                for _ in range(count)
            ]

        device = self._policy.device
        if device.type == "cuda":
            with peak_gib(device) as peak:
                detail["steps_s"] = steps(1 + case.repeats)
        else:
            detail["steps_s"] = steps(1 + case.repeats)
            with peak_gib(device) as peak:
                steps(1)
        detail["step_s"] = statistics.median(detail["steps_s"][1:] or detail["steps_s"])
        row["tokens_per_s"] = row["tokens_unique"] / detail["step_s"]
        row["peak_gib"] = peak[0]

    def _seconds(self, strips: list[Strip], max_piece_tokens: int | None = None) -> float:
        """Of one step over strips that are new, as in training: their tables are built in it."""

        def step() -> None:
            train(self._policy, strips, max_piece_tokens=max_piece_tokens)

        return seconds(step, self._policy.device)

    def _compare(
        self, case: Case, record: EpisodeRecord, row: dict[str, Any], detail: dict[str, Any]
    ) -> None:
        assert case.flat is not None
        if case.flat not in self._flat_seconds:
            flat = self._flat_strips(record)
            share = 1 + flat[0].num_tokens / row["tokens_flat"]
            expected = share * detail["step_s"] * detail["flat_flops"] / detail["flops"]
            if not self._has_time(case, expected):
                return
            self._seconds(flat[:1])
            self._flat_seconds[case.flat] = self._seconds(self._flat_strips(record))
        detail["flat_s"] = self._flat_seconds[case.flat]
        row["speedup"] = detail["flat_s"] / detail["step_s"]
        detail["share_of_flops_bound"] = row["speedup"] / row["bound_flops"]

    def _compare_stock(self, case: Case, record: EpisodeRecord, detail: dict[str, Any]) -> None:
        if not self._has_time(case, detail.get("flat_s", 10.0)):
            return
        paths = trees.paths(record)
        chosen = paths[: case.stock_paths]
        stock = StockTrainer(self._plan.shape, self._device, checkpointing=self._checkpointing)
        stock.train(chosen[0])

        def step() -> None:
            for path in chosen:
                stock.train(path)

        found = seconds(step, self._policy.device)
        detail["stock_paths_measured"] = len(chosen)
        detail["stock_s_per_path"] = found / len(chosen)
        detail["speedup_over_stock"] = found / len(chosen) * len(paths) / detail["step_s"]

    def _flat_strips(self, record: EpisodeRecord) -> list[Strip]:
        return trees.packed(trees.paths(record), self._plan.flat_strip_tokens)

    def _has_time(self, case: Case, expected_s: float) -> bool:
        left = self._deadline - time.monotonic()
        if expected_s > left:
            _say(f"{case.name}: a comparison of {expected_s:.0f} s does not fit {left:.0f} s")
        return expected_s <= left

    def keep_earlier(self) -> None:
        """Start from the rows that the file holds; those measured again are replaced."""
        if self._out.exists():
            self._earlier = json.loads(self._out.read_text())
            self.detail = json.loads(self._detail_path.read_text()) | self.detail

    def all_rows(self) -> list[dict[str, Any]]:
        """Those measured, behind the earlier ones that were not measured again."""
        measured = {row["tree"] for row in self.rows}
        return [row for row in self._earlier if row["tree"] not in measured] + self.rows

    def _write(self) -> None:
        self._out.parent.mkdir(parents=True, exist_ok=True)
        self._out.write_text(json.dumps(self.all_rows(), indent=1) + "\n")
        self._detail_path.write_text(json.dumps(self.detail, indent=1) + "\n")

    @property
    def _detail_path(self) -> Path:
        return self._out.with_name(f"{self._out.stem}_detail.json")


def _shape_of(case: Case, record: EpisodeRecord, strip: Strip, flat: list[Strip]) -> dict[str, Any]:
    tokens_flat = sum(each.num_tokens for each in flat)
    return {
        "tree": case.name,
        "tokens_unique": strip.num_tokens,
        "tokens_flat": tokens_flat,
        "nodes": len(strip.nodes),
        "depth": _depth(strip),
        "mounts": sum(
            len(node.mounts) - (len(record.nodes[node.parent].mounts) if node.parent >= 0 else 0)
            for node in record.nodes
        ),
        "bound_tokens": tokens_flat / strip.num_tokens,
        "bound_flops": None,
        "speedup": None,
        "tokens_per_s": None,
        "peak_gib": None,
    }


def _depth(strip: Strip) -> int:
    """Nodes on the longest path."""
    depths: list[int] = []
    for node in strip.nodes:
        depths.append(depths[node.parent] + 1 if node.parent >= 0 else 1)
    return max(depths)


def _line(row: dict[str, Any], detail: dict[str, Any]) -> str:
    def shown(value: float | None, digits: int = 2) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    return (
        f"{row['tree'][:32]:32} unique {row['tokens_unique']:7} flat {row['tokens_flat']:8} "
        f"bound {shown(row['bound_tokens'])} by flops {shown(row['bound_flops'])} "
        f"speedup {shown(row['speedup'])} {shown(row['tokens_per_s'], 0)} tok/s "
        f"{shown(row['peak_gib'])} GiB, {shown(detail.get('share_of_matmul_peak'))} of peak, "
        f"over stock {shown(detail.get('speedup_over_stock'))}"
    )


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
