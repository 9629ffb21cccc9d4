"""Six ways to let a reader see a sibling's pages: `python -m benchmarks.learning.sharing MODEL`.

One checkpoint, the same episodes, the reader's next call after its read. The six differ in what
attention sees, at which positions, and in what the recurrent layers run over. The checkpoint was
trained with mounts and with text copies; the other ways are new to it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.learning.teacher import draw_script, play
from benchmarks.learning.variants import VARIANTS
from benchmarks.learning.world import LIMITS, draw_tasks
from benchmarks.pretrain_demo.dry_episodes import DryService
from benchmarks.pretrain_demo.forward import DagBatch, hidden_states
from harness_sdk.cli.demo.config import MODEL
from harness_sdk.record import EpisodeRecord, Node, NodeKind

_SEED = 3_000_017
"""Of tasks that neither pretraining nor study has seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Tokens that see the same."""

    token_ids: Sequence[int]
    start: int
    """Rotary position of the first; the others follow."""
    sees: str = ""
    """Segments that attention sees in whole, by letter."""
    path: str = ""
    """Segments that the recurrent layers have run over before, by letter."""

    @property
    def end(self) -> int:
        """Position after the last."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """One read of a record, in segments: what is shared, the source's own, the reader's."""

    shared: Segment
    """P: up to the fork."""
    source_before: Segment
    """A: what the source has of its own and does not show."""
    source: Segment
    """S: the pages that are read."""
    reader: Segment
    """B: the reader's own up to its call of `read_thread`."""
    after: Segment
    """R: the stub and the next turn, at the positions that a mount gives them."""
    num_sampled: int
    """Tokens of that turn, at the end of R."""

    @property
    def source_is_longer(self) -> bool:
        """Whether the pages end at a later position than the reader's own tokens."""
        return self.source.end > self.reader.end


Way = Callable[[Read], dict[str, Segment]]


def _blocked(read: Read) -> dict[str, Segment]:
    return _all(read, R=_after(read, read.reader.end, "PB", "PB"))


def _mount(read: Read) -> dict[str, Segment]:
    return _all(read, R=_after(read, read.after.start, "PBS", "PB"))


def _unshifted(read: Read) -> dict[str, Segment]:
    return _all(read, R=_after(read, read.reader.end, "PBS", "PB"))


def _relocated(read: Read) -> dict[str, Segment]:
    """Keys turned to the positions behind the reader's own: the source's whole path, moved."""
    by = read.reader.end - read.source.start
    moved = {
        "Q": _moved(read.shared, by, "", ""),
        "C": _moved(read.source_before, by, "Q", "Q"),
        "T": _moved(read.source, by, "QC", "QC"),
    }
    return _all(read, **moved, R=_after(read, moved["T"].end, "PBT", "PB"))


def _all_layers(read: Read) -> dict[str, Segment]:
    return _all(read, R=_after(read, read.after.start, "PBS", "PBS"))


def _text(read: Read) -> dict[str, Segment]:
    copy = Segment(token_ids=read.source.token_ids, start=read.reader.end, sees="PB", path="PB")
    return _all(read, T=copy, R=_after(read, copy.end, "PBT", "PBT"))


WAYS: dict[str, Way] = {
    "none": _blocked,
    "text copy": _text,
    "all-layer splice": _all_layers,
    "unshifted": _unshifted,
    "relocated copy": _relocated,
    "mount": _mount,
}


def _all(read: Read, **more: Segment) -> dict[str, Segment]:
    return {
        "P": read.shared, "A": read.source_before, "S": read.source, "B": read.reader, **more
    }  # fmt: skip


def _after(read: Read, start: int, sees: str, path: str) -> Segment:
    return Segment(token_ids=read.after.token_ids, start=start, sees=sees, path=path)


def _moved(segment: Segment, by: int, sees: str, path: str) -> Segment:
    return Segment(token_ids=segment.token_ids, start=segment.start + by, sees=sees, path=path)


def read_of(record: EpisodeRecord) -> Read:
    """The opener's read of the finder in a scripted episode."""
    nodes = {node.node_id: node for node in record.nodes}
    stub = next(node for node in record.nodes if node.kind is NodeKind.STUB)
    turn = next(node for node in record.nodes if node.parent == stub.node_id)
    source = _path(nodes, nodes[stub.mounts[-1].node_id])
    reader = _path(nodes, nodes[stub.parent])
    common = [node for node in source if node in reader]
    shown = {mount.node_id for mount in stub.mounts}
    own = [node for node in source if node not in common]
    hidden = [node for node in own if node.node_id not in shown]
    return Read(
        shared=_segment(common),
        source_before=_segment(hidden, sees="P", path="P"),
        source=_segment(own[len(hidden) :], sees="PA", path="PA"),
        reader=_segment(reader[len(common) :], sees="P", path="P"),
        after=_segment([stub, turn]),
        num_sampled=sum(turn.sampled),
    )


def _path(nodes: dict[int, Node], leaf: Node) -> list[Node]:
    path = [leaf]
    while path[-1].parent in nodes:
        path.append(nodes[path[-1].parent])
    return path[::-1]


def _segment(nodes: Sequence[Node], sees: str = "", path: str = "") -> Segment:
    token_ids = [token for node in nodes for token in node.token_ids]
    return Segment(token_ids=token_ids, start=nodes[0].position_start, sees=sees, path=path)


def batch_of(segments: dict[str, Segment]) -> DagBatch:
    """One row of a batch."""
    rows: dict[str, torch.Tensor] = {}
    total = 0
    for name, segment in segments.items():
        rows[name] = torch.arange(total, total + len(segment.token_ids))
        total += len(segment.token_ids)
    visible = torch.zeros(total, total, dtype=torch.bool)
    paths = [torch.cat([rows[n] for n in s.path + name]) for name, s in segments.items()]
    length = max(map(len, paths))
    path_slot = torch.zeros(total, dtype=torch.long)
    for number, (name, segment) in enumerate(segments.items()):
        own = rows[name]
        for other in segment.sees:
            visible[own[:, None], rows[other]] = True
        visible[own[:, None], own] = own[:, None] >= own
        path_slot[own] = number * length + torch.arange(len(paths[number]))[-len(own) :]
    positions = torch.cat([torch.arange(s.start, s.end) for s in segments.values()])
    return DagBatch(
        token_ids=torch.tensor([t for s in segments.values() for t in s.token_ids])[None],
        position_ids=positions[None],
        visible=visible[None],
        paths=torch.stack([torch.nn.functional.pad(p, (0, length - len(p))) for p in paths])[None],
        path_slot=path_slot[None],
    )


@torch.no_grad()
def turn_logits(model: Any, read: Read, way: Way) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the reader's next turn, `[N, V]`, and its tokens, `[N]`; R comes last."""
    batch = batch_of(way(read))
    rows = hidden_states(model, batch)[0, -read.num_sampled - 1 : -1]
    return model.lm_head(rows), batch.token_ids[0, -read.num_sampled :]


CALL, NUMBER = 1, slice(2, 5)
"""Of the turn's tokens: the one that opens the call and names it, and the code's digits."""


def measure(model: Any, reads: Sequence[Read]) -> list[dict[str, Any]]:
    """A row for each way.

    `exact` is the share of calls with the right code, `exact_longer` the same where the source is
    longer, `code_nats` what the code costs, `retained` the share of the text copy's gain over no
    sharing, `delta_nll` what the turn's other tokens cost more per token than with no sharing, and
    `hijacked` the share of turns whose call is not the reader's own next one.
    """
    found = {name: [_scores(model, read, way) for read in reads] for name, way in WAYS.items()}
    mean = {
        name: {key: fmean(score[key] for score in scores) for key in scores[0]}
        for name, scores in found.items()
    }
    gain = mean["none"]["code_nats"] - mean["text copy"]["code_nats"]
    longer = [i for i, read in enumerate(reads) if read.source_is_longer]
    return [
        {
            "way": name,
            "exact": mean[name]["exact"],
            "exact_longer": fmean(scores[i]["exact"] for i in longer),
            "code_nats": mean[name]["code_nats"],
            "retained": (mean["none"]["code_nats"] - mean[name]["code_nats"]) / gain,
            "delta_nll": mean[name]["other_nll"] - mean["none"]["other_nll"],
            "hijacked": mean[name]["hijacked"],
            "reads": len(reads),
            "reads_longer": len(longer),
        }
        for name, scores in found.items()
    ]


def _scores(model: Any, read: Read, way: Way) -> dict[str, float]:
    logits, targets = turn_logits(model, read, way)
    nats = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    right = logits.argmax(-1) == targets
    others = torch.ones(len(targets), dtype=torch.bool)
    others[NUMBER] = False
    return {
        "exact": float(right[NUMBER].all()),
        "code_nats": float(nats[NUMBER].sum()),
        "other_nll": float(nats[others].mean()),
        "hijacked": float(not right[CALL]),
    }


async def scripted_reads(count: int) -> list[Read]:
    """Reads of episodes in which all that can go right does."""
    service, variant = DryService(MODEL), VARIANTS["octopus"]
    rng, tasks, reads = random.Random(_SEED), draw_tasks(_SEED), list[Read]()
    while len(reads) < count:
        task = next(tasks)
        script = draw_script(rng, task, variant)
        if not script.forks or script.guesses or (task.detour and not script.goes_back):
            continue
        async with service.episode(
            task.task_id, primitives=variant.primitives, limits=LIMITS
        ) as episode:
            await play(episode, task, script, variant)
        reads.append(read_of(service.last_record))
    return reads


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="what benchmarks.learning.pretrain wrote")
    parser.add_argument("--reads", type=int, default=200)
    parser.add_argument("--out", type=Path, help="JSON list of rows")
    args = parser.parse_args(argv)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    rows = measure(model, asyncio.run(scripted_reads(args.reads)))
    text = ",\n".join(json.dumps({k: _rounded(v) for k, v in row.items()}) for row in rows)
    if args.out is not None:
        args.out.write_text(f"[\n{text}\n]\n", "utf-8")
    sys.stdout.write(text + "\n")
    return 0


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
