"""The sharing study: its mount is the trainer's, its text copy is plain text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.learning.sharing import WAYS, Read, read_of, turn_logits
from benchmarks.learning.teacher import Script, play
from benchmarks.learning.variants import VARIANTS
from benchmarks.learning.world import LIMITS, draw_tasks
from benchmarks.pretrain_demo.dry_episodes import DryService
from harness_sdk.cli.demo.config import MODEL
from harness_sdk.record import EpisodeRecord
from trainer_service.dag import pack_episodes
from trainer_service.policy import Policy

_SCRIPT = Script(forks=True, guesses=False, goes_back=True, replies_plainly=False, guess="000")


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


@pytest.fixture
async def record() -> EpisodeRecord:
    """The finder goes back from a detour before the opener reads it."""
    service, variant = DryService(MODEL), VARIANTS["octopus"]
    task = next(task for task in draw_tasks(0) if task.detour and not task.shelf_is_long)
    async with service.episode(
        task.task_id, primitives=variant.primitives, limits=LIMITS
    ) as episode:
        await play(episode, task, _SCRIPT, variant)
    return service.last_record


def _logprobs(model: Any, read: Read, way: str) -> torch.Tensor:
    logits, targets = turn_logits(model, read, WAYS[way])
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


async def test_the_mount_is_what_the_trainer_computes(model: Any, record: EpisodeRecord) -> None:
    strip = replace(pack_episodes([record]), mount_layers=None)
    with torch.no_grad():
        packed = Policy.load(MODEL, lora=None).logprobs(strip).policy_logprobs
    turn = next(n for n in record.nodes if (n.thread_id, n.step) == ("b", 3) and any(n.sampled))
    wanted = [token for token, sampled in zip(turn.token_ids, turn.sampled, strict=True) if sampled]
    found = strip.action_target.unfold(0, len(wanted), 1).eq(torch.tensor(wanted)).all(1)
    (first,) = found.nonzero().flatten().tolist()
    torch.testing.assert_close(
        _logprobs(model, read_of(record), "mount"),
        packed[first : first + len(wanted)],
        rtol=0.0,
        atol=1e-4,
    )


async def test_the_text_copy_is_one_plain_sequence(model: Any, record: EpisodeRecord) -> None:
    read = read_of(record)
    parts = (read.shared, read.reader, read.source, read.after)
    token_ids = torch.tensor([token for part in parts for token in part.token_ids])[None]
    with torch.no_grad():
        logits = model(token_ids).logits[0, -read.num_sampled - 1 : -1]
    plain = logits.log_softmax(-1).gather(1, token_ids[0, -read.num_sampled :, None])[:, 0]
    torch.testing.assert_close(_logprobs(model, read, "text copy"), plain, rtol=0.0, atol=1e-4)


async def test_a_relocated_copy_is_a_mount_where_no_position_changes(
    model: Any, record: EpisodeRecord
) -> None:
    read = read_of(record)
    there = replace(read.reader, start=read.source.start - len(read.reader.token_ids))
    aligned = replace(read, reader=there, after=replace(read.after, start=read.source.end))
    torch.testing.assert_close(
        _logprobs(model, aligned, "relocated copy"),
        _logprobs(model, aligned, "mount"),
        rtol=0.0,
        atol=1e-4,
    )


async def test_each_way_is_another_computation(model: Any, record: EpisodeRecord) -> None:
    read = read_of(record)
    assert read.source_is_longer
    found = [turn_logits(model, read, way)[0] for way in WAYS.values()]
    for place, one in enumerate(found):
        for other in found[place + 1 :]:
            assert (one - other).abs().max() > 1e-2
