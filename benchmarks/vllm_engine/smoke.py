"""Does the engine compute right? python -m benchmarks.vllm_engine.smoke [--only CASE...].

Small models of real head sizes, random weights, every family; `--tensor-parallel N` over N devices.
Every cursor's log-probabilities are compared with the transformers engine in float32 on the same
device, beside the difference of a cold flat run of the same engine (the noise floor): fork, fork
of a fork, rewind, turns, mounts at page edges, mounts after eviction, LoRA. Prints one line a case;
exits with 1 where one fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.vllm_engine.report import say
from benchmarks.vllm_engine.smoke_models import VOCAB, save_adapter, save_model
from harness_sdk.types import SamplingOptions
from rollout_service.cursors import Cursor, Mount, child_cursor
from rollout_service.engine.base import Generated
from rollout_service.engine.transformers import TransformersEngine
from rollout_service.engine.vllm import VllmEngine

LIMIT_RATIO = 1.5
"""Of a case's difference to the oracle over the flat runs'; fewer tokens, so more spread."""
LIMIT_RMS = 0.3
"""Nats, where the flat runs are quieter than bf16 usually is."""

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
            parent, (5, 6, 7), SamplingOptions(max_tokens=count), stop_token_ids=frozenset(),
            policy_version=self.version,
        )  # fmt: skip
        found = [event async for event in stream]
        assert isinstance(found[-1], Generated)
        return found[-1].cursor

    async def rms(self, *cursors: Cursor) -> float:
        """Root-mean-square difference to the oracle, nats."""
        squares: list[float] = []
        for cursor in cursors:
            expected = await self._rescored(cursor)
            squares += [
                (a - b) ** 2
                for a, b in zip(cursor.sampled_logprobs, expected.sampled_logprobs, strict=True)
            ]
        return math.sqrt(sum(squares) / len(squares))

    async def rms_flat(self, *cursors: Cursor) -> float:
        """That of a cold run over each cursor's whole path."""
        squares: list[float] = []
        for cursor in cursors:
            path = tuple(i for c in cursor.path() for i in c.token_ids)
            count = len(cursor.sampled_logprobs)
            cold = await self.engine.score(path, policy_version=self.version)
            expected = (await self._rescored(cursor)).sampled_logprobs
            squares += [(a - b) ** 2 for a, b in zip(cold[-count:], expected, strict=True)]
        return math.sqrt(sum(squares) / len(squares))

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
    model = save_model(folder / "model", case.pop("family"))
    arguments: dict[str, Any] = {"max_model_len": 8192}
    if device == "cuda":
        arguments |= {
            **case,
            "kv_cache_memory_bytes": 1 << 29,
            # Others may hold memory of the same device.
            "gpu_memory_utilization": 0.1,
            "gdn_prefill_backend": "triton",
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [1, 2, 4, 8],
            },
        }
    engine = VllmEngine(
        str(model), device=device, dtype="bfloat16", max_num_seqs=8, max_states=64, max_adapters=2,
        max_lora_rank=8, max_tokens=None if device == "cuda" else 16_384, vllm_arguments=arguments,
        tensor_parallel_size=ranks,
    )  # fmt: skip
    await engine.start()
    say(f"{name}: engine is up, pages of {engine.info.page_tokens}")
    oracle = TransformersEngine(
        str(model), device=device, dtype="float32", mount_layers=engine.info.mount_layers
    )
    await oracle.start()
    try:
        return await _compare(_Checks(engine, oracle), folder)
    finally:
        await engine.close()
        await oracle.close()


async def _compare(checks: _Checks, folder: Path) -> dict[str, dict[str, Any]]:
    engine, page = checks.engine, checks.engine.info.page_tokens
    found: dict[str, dict[str, Any]] = {}

    async def note(line: str, cursors: Sequence[Cursor], flat: float) -> None:
        value = await checks.rms(*cursors)
        is_ok = value <= max(LIMIT_RATIO * flat, min(LIMIT_RMS, 3 * flat)) and value < LIMIT_RMS
        found[line] = {"rms": round(value, 5), "flat_rms": round(flat, 5), "ok": is_ok}
        say(f"  {line}: {found[line]}")

    root = await checks.extend(None, 300)
    left, right = await asyncio.gather(checks.extend(root, 700), checks.extend(root, 90))
    nested = await checks.extend(left, 40)
    turn = await checks.turn(nested, 24)
    turns = await asyncio.gather(*(checks.turn(right, 24) for _ in range(6)))
    rewound = await checks.extend(left, 60)
    flat = await checks.rms_flat(root, left, right, nested, turn, rewound)
    for line, cursors in (
        ("root", [root]), ("fork", [left, right]), ("fork_of_fork", [nested]),
        ("turn", [turn]), ("turns_at_once", turns), ("rewind", [rewound]),
    ):  # fmt: skip
        await note(line, cursors, flat)
    for line, begin, end in (
        ("mount_whole", 0, 700), ("mount_inside_page", 11, 60), ("mount_edges", 37, 695),
        ("mount_to_page_edge", 3, max(page - 300, 9)),
    ):  # fmt: skip
        reader = await checks.extend(right, 50, Mount(source=left, begin=begin, end=min(end, 700)))
        after = await checks.turn(reader, 12)
        await note(line, [reader, after], flat)
    transitive = (
        await checks.extend(
            rewound, 40, Mount(source=after, begin=0, end=len(after.token_ids)), *after.mounts
        )
        if after.mounts
        else rewound
    )
    await note("mount_transitive", [transitive], flat)
    await engine.forget_all()
    again = await checks.extend(after, 30)
    await note("after_eviction", [again], flat)
    await _lora(checks, folder, note)
    await engine.forget_all()
    stats = engine.stats()
    is_ok = (stats.tokens_resident, stats.recurrent_slots, stats.running) == (0, 0, 0)
    found["nothing_left"] = {"ok": is_ok, "tokens": stats.tokens_resident}
    return found


async def _lora(checks: _Checks, folder: Path, note: Any) -> None:
    path = save_adapter(folder / "adapter", Path(checks.engine.info.model))
    for one in (checks.engine, checks.oracle):
        await one.load_adapter(1, str(path))
    checks.version = 1
    root = await checks.extend(None, 200)
    fork = await checks.extend(root, 60)
    turn = await checks.turn(fork, 12)
    await note("lora", [root, fork, turn], await checks.rms_flat(root, fork, turn))
    served = await checks.engine.adapter_checksums(1)
    say(f"  {len(served)} served tensors read back")
    checks.version = 0


if __name__ == "__main__":
    main()
