"""LoRA versions on the vLLM engine: loaded beside running decodes, never read across."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest
from safetensors.torch import load_file

from harness_sdk.errors import AdapterError, InvalidRequest
from rollout_service.cursors import Cursor
from rollout_service.engine.vllm.rehearsal import rehearse
from tests.engine_cases import Play, save_adapter, span
from tests.reference import Reference
from tests.vllm.conftest import MAX_ADAPTERS, Served, new_play
from tests.vllm.episodes import rms
from tests.vllm.models import DTYPES

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.slow,
    pytest.mark.parametrize("family", ["llama", "granitemoehybrid", "qwen3_5"]),
    # PEFT 0.21 reads a property that transformers has renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]

# Random adapters this large amplify rounding. What bfloat16 hybrids tell of a token differs by more
# than a nat, of a turn of forty by less than half of what another version would have told.
TOLERANCE = 3e-4
BF16_RMS_LIMIT = 0.6


async def adapted(served: Served, folder: Path, version: int) -> Play:
    """Load a random adapter as `version`; returns its play."""
    model = save_adapter(folder / str(version), served.folder, served.family, seed=version)
    await served.engine.load_adapter(version, str(folder / str(version)))
    play = new_play(served, seed=version)
    play.reference = Reference(model.base_model.model.float(), served.engine.info.mount_layers)
    play.version = version
    return play


def distance(play: Play, turn: Cursor) -> float:
    """Root-mean-square between what the engine told and what the play's version would tell."""
    expected = play.reference.token_logprobs(turn)[-len(turn.sampled_logprobs) :]
    return rms(turn.sampled_logprobs, expected)


def check(play: Play, *turns: Cursor) -> None:
    """Each is what the play's version tells, as near as its dtype lets it be."""
    for turn in turns:
        if DTYPES[play.family] == "float32":
            play.check(turn, tolerance=TOLERANCE)
        else:
            assert distance(play, turn) <= BF16_RMS_LIMIT, distance(play, turn)


async def test_versions_come_beside_running_decodes(served: Served, tmp_path: Path) -> None:
    engine, base = served.engine, new_play(served, seed=4)
    root = await base.extend(None, 30)
    peer = await base.extend(root, 40)
    reader = await base.extend(root, 4, span(peer, 1, 38))
    refreshed = engine.stats().tokens_recomputed["refresh"]
    running = [asyncio.create_task(base.turn(peer, 90, seed=seed)) for seed in range(3)]
    plays = []
    for version in range(1, MAX_ADAPTERS + 1):
        plays.append(await adapted(served, tmp_path, version))
        running.append(asyncio.create_task(plays[-1].turn(reader, 40, seed=version)))
    turns = await asyncio.gather(*running)
    # None was aborted or cut, and each is what its version alone would have sampled.
    assert [len(turn.token_ids) - 3 for turn in turns] == [90] * 3 + [40] * MAX_ADAPTERS
    check(base, *turns[:3])
    for play, turn in zip(plays, turns[3:], strict=True):
        check(play, turn)
        # And of no other version.
        other = plays[play.version % MAX_ADAPTERS]
        assert distance(play, turn) < distance(other, turn) / 2
    # Root, peer and reader anew for each; the root to its end, so what follows starts behind it.
    # The reader's end, which no turn of version 0 has followed, anew for all but the first.
    again = MAX_ADAPTERS * (30 + (40 - 1) + (4 - 1)) + MAX_ADAPTERS - 1
    assert engine.stats().tokens_recomputed["refresh"] - refreshed == again
    assert engine.stats().foreign_blocks == 0

    with pytest.raises(AdapterError, match="no room for another policy version"):
        await engine.load_adapter(MAX_ADAPTERS + 1, str(tmp_path / "1"))
    busy = asyncio.create_task(plays[0].turn(reader, 40, seed=1))
    while not engine.stats().running:
        await asyncio.sleep(0)
    with pytest.raises(AdapterError, match="cannot be unloaded; got 1"):
        await engine.unload_adapter(1)
    check(plays[0], await busy)
    resident = engine.stats().tokens_resident
    await engine.unload_adapter(1)
    assert engine.stats().tokens_resident < resident
    with pytest.raises(AdapterError, match="not loaded; got 1"):
        await plays[0].extend(reader, 3)
    # Its place is free again, and the others serve on.
    fifth = await adapted(served, tmp_path, MAX_ADAPTERS + 1)
    check(fifth, await fifth.turn(turns[-1], 5, seed=1))
    check(plays[1], await plays[1].turn(reader, 3, seed=2))
    check(base, await base.extend(turns[0], 3))
    assert engine.stats().foreign_blocks == 0


async def test_a_fork_from_an_old_cursor_equals_a_cold_run_under_its_version(
    served: Served, tmp_path: Path
) -> None:
    engine, base = served.engine, new_play(served, seed=5)
    page = engine.info.page_tokens
    root = await base.extend(None, page - 3)
    producer = await base.turn(await base.extend(root, 9), 12, seed=1)
    old = await base.turn(await base.extend(root, 7, span(producer, 2, 11)), 6, seed=2)
    new = await adapted(served, tmp_path, 1)
    fork = await new.turn(old, 8, seed=3)
    onward = await new.extend(fork, 5, span(await new.extend(root, 4), 1))
    # Nothing of it is resident any more: all that it sees is computed anew.
    await engine.forget_all()
    cold = [await new.extend(old, fork.token_ids), await new.turn(old, 8, seed=3)]
    assert cold[1].token_ids == fork.token_ids
    tolerance = 2e-6 if DTYPES[served.family] == "float32" else 1.0
    assert cold[1].sampled_logprobs == pytest.approx(fork.sampled_logprobs, abs=tolerance)
    assert cold[0].sampled_logprobs[3:] == pytest.approx(fork.sampled_logprobs, abs=10 * tolerance)
    check(new, fork, onward, *cold)
    assert engine.stats().foreign_blocks == 0


async def test_checksums_are_read_back_from_the_serving_buffers(
    served: Served, tmp_path: Path
) -> None:
    engine = served.engine
    save_adapter(tmp_path, served.folder, served.family)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    expected = {
        name: hashlib.sha256(tensor.float().numpy().astype("<f4").tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }
    await engine.load_adapter(3, str(tmp_path))
    assert await engine.adapter_checksums(3) == expected
    assert await engine.adapter_checksums(0) == {}


async def test_an_adapter_of_too_high_a_rank_is_refused(served: Served, tmp_path: Path) -> None:
    save_adapter(tmp_path, served.folder, served.family, rank=16)
    with pytest.raises(AdapterError, match="rank is higher"):
        await served.engine.load_adapter(2, str(tmp_path))


async def test_a_load_that_is_cancelled_leaves_no_slot_taken(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_adapter(tmp_path, served.folder, served.family)
    llm = served.engine._supervisor.newest.builder.client._llm
    sent, add_lora = asyncio.Event(), llm.add_lora

    async def adding(request: object) -> object:
        sent.set()
        return await add_lora(request)

    monkeypatch.setattr(llm, "add_lora", adding)
    loading = asyncio.create_task(served.engine.load_adapter(2, str(tmp_path)))
    await sent.wait()
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    # Comes after the load, and after what takes it back.
    await asyncio.sleep(0)
    assert not await llm.engine_core.call_utility_async("list_loras")
    await served.engine.load_adapter(2, str(tmp_path))
    assert await served.engine.adapter_checksums(2)


async def test_only_decoder_layers_hold_adapters(served: Served) -> None:
    client = served.engine._supervisor.newest.builder.client
    targets = client._llm.vllm_config.lora_config.target_modules
    assert "o_proj" in targets
    assert "lm_head" not in targets


async def test_a_rehearsal_loads_and_scores_and_leaves_nothing(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = served.engine._supervisor.newest
    loaded, stats = dict(core.builder.adapters), served.engine.stats()
    scored: list[int] = []
    score = core.builder.score

    async def counted(version: int, cursor: Cursor, score_from: int, *, keep: bool) -> object:
        assert {version} == core.builder.adapters.keys() - loaded.keys()
        rehearsed = core.builder.adapters[version]
        assert rehearsed is not None
        # As large as one may be.
        names = {name.rpartition(".")[2] for name, *_ in rehearsed.specs}
        assert names == {*core.adapters.reader.targets()}
        assert {rank for _, rank, *_ in rehearsed.specs} == {core.adapters.max_rank}
        scored.append(len(cursor.token_ids))
        return await score(version, cursor, score_from, keep=keep)

    monkeypatch.setattr(core.builder, "score", counted)
    caplog.set_level("INFO", logger="rollout_service.engine.vllm.rehearsal")
    await rehearse(core.adapters, core.builder, max_tokens=130)
    assert caplog.records[0].message.startswith("a version was rehearsed")
    assert scored == [33, 34, 129]
    assert core.builder.adapters == loaded
    after = served.engine.stats()
    assert (after.resident_cursors, after.tokens_resident, after.recurrent_slots) == (
        stats.resident_cursors,
        stats.tokens_resident,
        stats.recurrent_slots,
    )


async def test_a_rehearsal_that_is_refused_is_told_and_leaves_nothing(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = served.engine._supervisor.newest
    loaded = dict(core.builder.adapters)

    async def refused(*_: object, **__: object) -> None:
        raise InvalidRequest("the prompt is too long")

    monkeypatch.setattr(core.builder, "score", refused)
    await rehearse(core.adapters, core.builder, max_tokens=1000)
    assert caplog.records[-1].levelname == "WARNING"
    assert "the prompt is too long" in caplog.records[-1].message
    assert core.builder.adapters == loaded
