"""Does the engine compute right? python -m benchmarks.vllm_engine.smoke [--only CASE...].

Small models of real head sizes, random weights, every family; `--tensor-parallel N` over N devices.
Forks, rewinds, turns, mounts at page edges, mounts after eviction and LoRA are compared with the
transformers engine in float32, beside a cold flat run of the same tokens without mounts (the noise
floor); a mounted cursor must be far nearer to the oracle that mounts than to the one that does not.
Prints one line a case; exits with 1 where one fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.vllm_engine.report import say
from benchmarks.vllm_engine.smoke_models import EXPERT_FAMILIES, VOCAB, save_adapter, save_model
from harness_sdk.types import SamplingOptions
from rollout_service.cursors import Cursor, Mount, child_cursor
from rollout_service.engine.base import Generated
from rollout_service.engine.transformers import TransformersEngine
from rollout_service.engine.vllm import VllmEngine

LIMIT_MEDIAN = 1.3
"""Of the cases' differences to the oracle over those of flat runs of the same tokens."""
LIMIT_RATIO = 2.5
"""Of one case, which has few tokens."""
LIMIT_FLAT_RMS = 0.3
"""Nats of all flat runs; beyond, the engine is wrong or too noisy to be judged."""
MIN_LOST_RATIO = 2.0
"""Of a mounted case's difference to the oracle without mounts over that to the one with them."""
MIN_UNIT = 128
"""Tokens that matter as a mount; lengths are near multiples of it and of the page."""

CASES: dict[str, dict[str, Any]] = {
    "hybrid_flash": {"family": "hybrid", "attention_backend": "FLASH_ATTN"},
    "hybrid_triton": {"family": "hybrid", "attention_backend": "TRITON_ATTN"},
    "dense_flash": {"family": "dense", "attention_backend": "FLASH_ATTN"},
    "dense_triton": {"family": "dense", "attention_backend": "TRITON_ATTN"},
    "llama_flash": {"family": "llama", "attention_backend": "FLASH_ATTN"},
    "granite_flash": {"family": "granite", "attention_backend": "FLASH_ATTN"},
    "dense_moe_flash": {"family": "dense_moe", "attention_backend": "FLASH_ATTN"},
    "hybrid_moe_flash": {"family": "hybrid_moe", "attention_backend": "FLASH_ATTN"},
    "next_flash": {"family": "next", "attention_backend": "FLASH_ATTN"},
}


def main() -> None:
    """Run the cases one after the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    failed: list[str] = []
    found: dict[str, Any] = {}
    for name in args.only:
        begin = time.perf_counter()
        try:
            with tempfile.TemporaryDirectory() as scratch:
                found[name] = asyncio.run(
                    _case(name, args.device, Path(scratch), args.tensor_parallel)
                )
            bad = [line for line in found[name] if not found[name][line]["ok"]]
            failed += [f"{name}/{line}" for line in bad]
        except Exception as error:
            traceback.print_exception(error)
            found[name] = {"error": repr(error)}
            failed.append(name)
        say(f"{name}: {time.perf_counter() - begin:.0f} s, failed so far: {failed}")
        if args.out:
            args.out.write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.write(json.dumps(found, indent=1) + f"\nFAILED: {failed}\n")
    sys.exit(bool(failed))


class _Checks:
    """An engine, its oracle, and short calls."""

    def __init__(self, engine: VllmEngine, oracle: TransformersEngine) -> None:
        self.engine = engine
        self.oracle = oracle
        self.rng = random.Random(3)
        self.version = 0

    def ids(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(5, VOCAB) for _ in range(count))

    async def extend(self, parent: Cursor | None, count: int, *mounts: Mount) -> Cursor:
        inherited = parent.mounts if parent is not None else ()
        return await self.engine.extend(
            parent, self.ids(count), mounts=inherited + mounts, policy_version=self.version,
            score_from=0 if parent is not None else 1,
        )  # fmt: skip

    async def turn(self, parent: Cursor, count: int) -> Cursor:
        stream = self.engine.generate(
            parent, (5, 6, 7), SamplingOptions(max_tokens=count, seed=self.rng.randrange(1 << 30)),
            stop_token_ids=frozenset(), policy_version=self.version,
        )  # fmt: skip
        found = [event async for event in stream]
        assert isinstance(found[-1], Generated)
        return found[-1].cursor

    async def differences(self, cursor: Cursor) -> dict[str, list[float]]:
        """To the oracle, nats a token: the cursor's own, a flat run's, and as if mounts were lost.

        The flat run takes the same tokens without cursors and mounts, and so does its oracle.
        """
        path = tuple(token for node in cursor.path() for token in node.token_ids)
        flat, expected_flat = await asyncio.gather(
            self.engine.score(path, policy_version=self.version),
            self.oracle.score(path, policy_version=self.version),
        )
        found = cursor.sampled_logprobs
        flat, expected_flat = flat[-len(found) :], expected_flat[-len(found) :]
        differences = {"flat_rms": _minus(flat, expected_flat)}
        if not cursor.mounts:
            return differences | {"rms": _minus(found, expected_flat)}
        expected = (await self._rescored(cursor)).sampled_logprobs
        return differences | {
            "rms": _minus(found, expected),
            "rms_if_lost": _minus(found, expected_flat),
        }

    async def _rescored(self, cursor: Cursor) -> Cursor:
        first = len(cursor.token_ids) - len(cursor.sampled_logprobs)
        again = child_cursor(
            cursor.parent, cursor.token_ids, mounts=cursor.mounts, policy_version=self.version
        )
        return await self.oracle.extend(
            again.parent, again.token_ids, mounts=again.mounts, policy_version=self.version,
            score_from=first,
        )  # fmt: skip


async def _case(name: str, device: str, folder: Path, ranks: int) -> dict[str, dict[str, Any]]:
    case = dict(CASES[name])
    family = case.pop("family")
    model = save_model(folder / "model", family)
    # vLLM has no CPU kernel for experts beside adapters.
    max_adapters = 0 if device == "cpu" and family in EXPERT_FAMILIES else 2
    arguments: dict[str, Any] = {"max_model_len": 8192}
    if device == "cuda":
        arguments |= {
            **case,
            "kv_cache_memory_bytes": 1 << 29,
            # Others may hold memory of the same device.
            "gpu_memory_utilization": 0.1,
            "gdn_prefill_backend": "triton",
            "compilation_config": {
                "cudagraph_capture_sizes": [1, 2, 4, 8],
            },
        }
    engine = VllmEngine(
        str(model), device=device, dtype="bfloat16", max_num_seqs=8, max_states=64,
        max_adapters=max_adapters, max_lora_rank=8, vllm_arguments=arguments,
        max_tokens=None if device == "cuda" else 16_384, tensor_parallel_size=ranks,
    )  # fmt: skip
    await engine.start()
    say(f"{name}: engine is up, pages of {engine.info.page_tokens}")
    oracle = TransformersEngine(
        str(model), device=device, dtype="float32", mount_layers=engine.info.mount_layers
    )
    await oracle.start()
    try:
        cases = _Cases(_Checks(engine, oracle))
        for shift in (-1, 0, 1):
            await _play_round(cases, shift)
        if max_adapters:
            await _lora(cases, folder)
        return await cases.summary()
    finally:
        await engine.close()
        await oracle.close()


class _Cases:
    """What was found, by case."""

    def __init__(self, checks: _Checks) -> None:
        self.checks = checks
        self.found: dict[str, dict[str, Any]] = {}
        self._flat: list[float] = []

    async def note(self, line: str, *cursors: Cursor) -> None:
        """Compare what one case made, and say how it went."""
        each = await asyncio.gather(*(self.checks.differences(cursor) for cursor in cursors))
        figures = {
            kind: _rms([value for differences in each for value in differences[kind]])
            for kind in each[0]
        }
        self._flat += [value for differences in each for value in differences["flat_rms"]]
        rms = figures["rms"]
        is_ok = rms <= LIMIT_RATIO * figures["flat_rms"] and (
            figures.get("rms_if_lost", math.inf) >= MIN_LOST_RATIO * rms
        )
        self.found[line] = {kind: round(value, 5) for kind, value in figures.items()}
        self.found[line] |= {"ratio": round(rms / figures["flat_rms"], 3), "ok": is_ok}
        say(f"  {line}: {self.found[line]}")

    async def summary(self) -> dict[str, dict[str, Any]]:
        """Every case, all of them together, and what is left in the pool once all is dropped."""
        lost = [
            case["rms_if_lost"] / case["rms"]
            for case in self.found.values()
            if "rms_if_lost" in case
        ]
        ratios = [case["ratio"] for case in self.found.values()]
        median, flat = statistics.median(ratios), _rms(self._flat)
        together = {
            "cases": len(ratios), "median_ratio": round(median, 3), "worst_ratio": max(ratios),
            "flat_rms": round(flat, 5), "least_lost_ratio": round(min(lost), 2),
            "ok": median <= LIMIT_MEDIAN and flat <= LIMIT_FLAT_RMS,
        }  # fmt: skip
        await self.checks.engine.forget_all()
        stats = self.checks.engine.stats()
        is_empty = (stats.tokens_resident, stats.recurrent_slots, stats.running) == (0, 0, 0)
        nothing_left = {"ok": is_empty, "tokens": stats.tokens_resident}
        say(f"  together: {together}, left in the pool: {nothing_left}")
        return {**self.found, "together": together, "nothing_left": nothing_left}


async def _play_round(cases: _Cases, shift: int) -> None:
    """Thirteen cases behind a root that ends `shift` tokens from a page edge."""
    checks = cases.checks
    page = checks.engine.info.page_tokens
    unit = page * math.ceil(MIN_UNIT / page)
    root = await checks.extend(None, unit + shift)
    left, right, other = await asyncio.gather(
        checks.extend(root, 2 * unit + 40), checks.extend(root, 30), checks.extend(root, unit)
    )
    nested = await checks.extend(left, 40)
    await cases.note(f"fork {shift}", left, right, other)
    await cases.note(f"fork_of_fork {shift}", nested)
    await cases.note(f"turn {shift}", await checks.turn(nested, 32))
    turns = await asyncio.gather(*(checks.turn(right, 16) for _ in range(4)))
    await cases.note(f"turns_at_once {shift}", *turns)
    await cases.note(f"rewind {shift}", await checks.extend(left, unit - 41))
    edge, after = unit - shift, right
    for line, begin, end in (
        ("mount_whole", 0, 2 * unit + 40), ("mount_inside", 11, edge - 1),
        ("mount_to_edge", 3, edge), ("mount_from_edge", edge, edge + unit + 1),
        ("mount_edges", edge - 1, edge + unit),
    ):  # fmt: skip
        reader = await checks.extend(right, 50, Mount(source=left, begin=begin, end=end))
        after = await checks.turn(reader, 16)
        await cases.note(f"{line} {shift}", reader, after)
    read = Mount(source=after, begin=0, end=len(after.token_ids))
    transitive = await checks.extend(other, 50, read, *after.mounts)
    await cases.note(f"mount_transitive {shift}", transitive)
    second = Mount(source=other, begin=shift + 1, end=unit)
    await cases.note(f"two_mounts {shift}", await checks.extend(after, 50, second))
    await checks.engine.forget_all()
    await cases.note(f"after_eviction {shift}", await checks.extend(after, 50))


async def _lora(cases: _Cases, folder: Path) -> None:
    checks = cases.checks
    path = save_adapter(folder / "adapter", Path(checks.engine.info.model))
    for one in (checks.engine, checks.oracle):
        await one.load_adapter(1, str(path))
    checks.version = 1
    root = await checks.extend(None, 200)
    fork = await checks.extend(root, 60)
    await cases.note("lora", fork, await checks.turn(fork, 16))
    served = await checks.engine.adapter_checksums(1)
    say(f"  {len(served)} served tensors read back")
    checks.version = 0


def _minus(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(one, other, strict=True)]


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(statistics.fmean(value**2 for value in values))


if __name__ == "__main__":
    main()
