"""The demo's relay: its world, its teacher, and what pretraining makes of the teacher's records."""

from __future__ import annotations

import dataclasses
import random
import re
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.pretrain_demo import corpus
from benchmarks.pretrain_demo.dataset import COPIED, GUESSED, Episodes
from benchmarks.pretrain_demo.dry_episodes import DryService
from benchmarks.pretrain_demo.strips import save_strips, strip_from_record
from benchmarks.pretrain_demo.train import DEMO_SIZES, hybrid_config, score
from harness_sdk.cli.demo.task import draw_tasks
from harness_sdk.cli.demo.task import score as outcome
from harness_sdk.cli.demo.teacher import Script, draw_script, play
from harness_sdk.record import EpisodeRecord, NodeKind


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> DryService:
    folder = tmp_path_factory.mktemp("tokenizer")
    corpus.byte_tokenizer().save(str(folder / "tokenizer.json"))
    return DryService(folder)


async def _played(
    service: DryService, strategy: Any, seed: int = 0
) -> tuple[EpisodeRecord, str, Any]:
    task = next(draw_tasks(seed))
    script = Script(strategy=strategy, guess="555")
    async with service.episode(task.task_id) as episode:
        answer = await play(episode, task, script)
    return service.last_record, answer, task


async def test_relay_script_forks_reads_its_sibling_and_earns_the_reward(
    service: DryService,
) -> None:
    record, answer, task = await _played(service, "relay")
    assert outcome(task, answer) == 1.0
    assert {thread.thread_id for thread in record.threads} == {"root", "a", "b"}
    assert all(thread.status == "done" for thread in record.threads)
    stub = next(node for node in record.nodes if node.kind is NodeKind.STUB)
    sources = {record.nodes[mount.node_id].thread_id for mount in stub.mounts}
    assert (stub.thread_id, sources) == ("b", {"a"})


@pytest.mark.parametrize(("strategy", "threads"), [("guess_answer", 1), ("guess_code", 3)])
async def test_guessing_scripts_mount_nothing_and_earn_nothing(
    service: DryService, strategy: str, threads: int
) -> None:
    record, answer, task = await _played(service, strategy)
    assert outcome(task, answer) == 0.0
    assert len(record.threads) == threads
    assert not any(node.mounts for node in record.nodes)


async def test_opener_has_seen_the_code_nowhere_but_in_the_mounted_span(
    service: DryService,
) -> None:
    record, _, task = await _played(service, "relay", seed=3)
    reader = next(n for n in record.nodes if n.thread_id == "b" and n.kind is NodeKind.STUB)
    path, node = [], reader
    while node.parent >= 0:
        node = record.nodes[node.parent]
        path.append(service.tokenizer.decode(node.token_ids))
    mounted = "".join(
        service.tokenizer.decode(record.nodes[m.node_id].token_ids) for m in reader.mounts
    )
    assert task.code in mounted
    assert task.code not in "".join(path)


def test_scripts_follow_their_shares() -> None:
    rng = random.Random(0)
    tasks = list(islice(draw_tasks(0), 2000))
    scripts = [draw_script(rng, task, forks=0.6, reads=0.5) for task in tasks]
    shares = {
        name: np.mean([s.strategy == name for s in scripts]) for name in ("relay", "guess_answer")
    }
    assert shares["relay"] == pytest.approx(0.3, abs=0.03)
    assert shares["guess_answer"] == pytest.approx(0.4, abs=0.03)
    assert all(s.guess not in (t.code, t.treasure) for s, t in zip(scripts, tasks, strict=True))


async def test_pretraining_forward_agrees_with_the_trainers_packed_pass(
    service: DryService, tmp_path: Path
) -> None:
    from transformers import Qwen3_5ForCausalLM

    from trainer_service.dag import pack_episodes
    from trainer_service.policy import Policy

    record, _, _ = await _played(service, "relay")
    torch.manual_seed(0)
    config = hybrid_config(DEMO_SIZES, service.tokenizer.vocab_size, 0)
    model: Any = Qwen3_5ForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "model")
    # Without numbers no digit is a slot: all stay as they were recorded.
    save_strips(tmp_path / "episodes.npz", [strip_from_record(record, ())], list(range(10)))
    data = Episodes(tmp_path / "episodes.npz", "cpu")
    batch, before, role = data.draw(torch.tensor([0]), torch.Generator().manual_seed(0))
    found, _ = score(model, batch, before, role > 0)
    with torch.no_grad():
        policy = Policy.load(tmp_path / "model", lora=None)
        served = dataclasses.replace(record, mount_layers=policy.mount_layers)
        packed = policy.logprobs(pack_episodes([served]))
    expected = packed.policy_logprobs.sort().values
    assert len(expected) == record.num_sampled
    torch.testing.assert_close(found[role > 0].detach().sort().values, expected, atol=1e-5, rtol=0)


async def test_strips_mark_copied_and_guessed_digits_and_redraw_them_alike(
    service: DryService, tmp_path: Path
) -> None:
    record, _, task = await _played(service, "guess_code")
    script = Script(strategy="guess_code", guess="555")
    strip = corpus.record_strip(service, record, task, script)
    # `a` answers with the code; `b` tries its guess.
    assert [(strip.role == role).sum() for role in (COPIED, GUESSED)] == [3, 3]
    digits = [service.tokenizer.encode_plain(str(d))[0] for d in range(10)]
    save_strips(tmp_path / "episodes.npz", [strip], digits)
    data = Episodes(tmp_path / "episodes.npz", "cpu")
    batch, _, _ = data.draw(torch.tensor([0]), torch.Generator().manual_seed(4))
    text = service.tokenizer.decode(batch.token_ids[0, : len(strip.token_ids)].tolist())
    codes = set(re.findall(r"code (\d{3})\b|answer\": \"(\d{3})\"", text))
    assert task.code not in text
    assert len({code for pair in codes for code in pair if code}) == 1
