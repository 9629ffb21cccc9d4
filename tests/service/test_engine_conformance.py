"""What every engine must do, checked through the Engine protocol against a cold oracle.

Counts of computed tokens are each engine's own: vLLM leaves a cursor's last token to whoever needs
it (`rollout_service/engine/vllm/footing.py`).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from harness_sdk.errors import AdapterError, BudgetExhausted, InvalidRequest
from harness_sdk.types import SamplingOptions
from rollout_service.engine.base import EngineStats
from tests.engine_cases import Play, save_adapter, span
from tests.reference import Reference, flat_logprobs

# PEFT 0.21 reads a property that transformers 5.24 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")


async def test_forks_and_rewinds_equal_a_flat_cold_run(play: Play) -> None:
    root = await play.extend(None, 83)
    left, right = await asyncio.gather(play.extend(root, 9), play.extend(root, 70))
    nested = await play.extend(left, 5)
    turn = await play.turn(nested, 6, seed=4)
    single = await play.extend(turn, 1)
    rewound = await play.extend(left, 12)
    for cursor in (root, left, right, nested, turn, single, rewound):
        rows = flat_logprobs(play.reference.model, cursor)[-len(cursor.token_ids) - 1 : -1]
        scored = cursor.sampled_logprobs
        for row, token, logprob in zip(
            rows[-len(scored) :], cursor.token_ids[-len(scored) :], scored, strict=True
        ):
            assert logprob == pytest.approx(row[token].item(), abs=2e-5)
    play.check(root, left, right, nested, turn, single, rewound)


async def test_mounts_equal_the_oracle(play: Play) -> None:
    root = await play.extend(None, 30)
    near = await play.extend(root, 8)
    far = await play.extend(root, 66)
    ahead = await play.extend(near, 5, span(far, 3, 60))
    behind = await play.extend(far, 5, span(near, 1, 7))
    assert ahead.position_start == far.position_start + 60
    assert behind.position_start == far.next_position
    onward = await play.turn(await play.extend(ahead, 1), 5, seed=1)
    transitive = await play.extend(near, 1, span(behind), span(near, 0, 1))
    two = await play.extend(root, 6, span(far, 10, 20), span(onward, 2, 6))
    play.check(ahead, behind, onward, transitive, two)
    again = await play.extend(two, 4, span(behind, 0, 2))
    fork = await play.extend(two, 4)
    play.check(again, fork)


async def test_mount_of_rewound_steps_stays_readable(play: Play) -> None:
    root = await play.extend(None, 20)
    kept = await play.extend(root, 6)
    dropped = await play.turn(kept, 8, seed=2)
    rewound = await play.extend(kept, 7)
    reader = await play.extend(root, 9, span(dropped, 4, 11))
    play.check(rewound, reader)


async def test_single_token_nodes_equal_the_oracle(play: Play) -> None:
    cursor = await play.extend(None, 2)
    peer = await play.extend(cursor, 1)
    for _ in range(5):
        cursor = await play.extend(cursor, 1)
        play.check(cursor)
    reader = await play.extend(cursor, 1, span(peer))
    play.check(reader, await play.turn(reader, 1, seed=3))


async def test_sampled_logprobs_equal_rescoring(play: Play) -> None:
    root = await play.extend(None, 25)
    peer = await play.extend(root, 12)
    parent = await play.extend(root, 4, span(peer, 2, 10))
    turn = await play.turn(parent, 20, temperature=1.0, seed=5)
    again = await play.engine.extend(
        parent, turn.token_ids, mounts=parent.mounts, policy_version=0, score_from=3
    )
    assert again.sampled_logprobs == pytest.approx(turn.sampled_logprobs, abs=2e-5)
    play.check(turn)


async def test_eviction_is_rebuilt_exactly_and_counted(play: Play) -> None:
    root = await play.extend(None, 40)
    peer = await play.turn(root, 10, seed=1)
    early = await play.extend(root, 7)
    late = await play.extend(early, 8, span(peer, 1, 12))
    before = [await play.extend(late, tokens) for tokens in ((1, 2, 3), (4,))]
    fresh = [await play.extend(early, (9, 8))]
    await play.engine.evict([root, peer, early, late])
    before_rebuild = play.engine.stats()
    after = [await play.extend(late, tokens) for tokens in ((1, 2, 3), (4,))]
    fresh.append(await play.extend(early, (9, 8)))
    for old, new in zip([*before, fresh[0]], [*after, fresh[1]], strict=True):
        assert new.sampled_logprobs == pytest.approx(old.sampled_logprobs, abs=2e-6)
    play.check(*after, *fresh)
    # vLLM: up to each one's last token, with the parent's last one in front where nothing was
    # mounted between; `early` is computed to its end besides, because a mount follows it.
    recomputed = play.expected(transformers=40 + 13 + 7 + 8, vllm=(40 - 1) + 13 + 7 + (8 - 1))
    ends = play.expected(transformers=0, vllm=1)
    assert counted(play, before_rebuild) == (recomputed + ends + 3 + 1 + 2, recomputed, 0)


async def test_mount_recomputes_nothing_and_reads_the_producer(play: Play) -> None:
    root = await play.extend(None, 20)
    first = await play.extend(root, (11,) * 9)
    second = await play.extend(root, (12,) * 9)
    before = play.engine.stats()
    readers = [
        await play.extend(root, (1, 2, 3), *mounts)
        for mounts in ((span(first),), (span(second),), (span(first, 0, 5),))
    ]
    # vLLM: the two producers' last tokens besides, which are mounted.
    assert counted(play, before) == (play.expected(transformers=9, vllm=9 + 2), 0, 0)
    one, other, shorter = (reader.sampled_logprobs for reader in readers)
    # A cursor's first token is predicted before the mount.
    assert one[0] == other[0] == shorter[0]
    assert abs(one[2] - other[2]) > 1e-3
    assert abs(one[2] - shorter[2]) > 1e-3
    play.check(*readers)


async def test_release_of_everything_returns_to_zero(play: Play) -> None:
    root = await play.extend(None, 20)
    peer = await play.turn(root, 5, seed=1)
    reader = await play.extend(root, 3, span(peer))
    turn = await play.turn(reader, 5, seed=1)
    stats = play.engine.stats()
    assert stats.resident_cursors == 4
    assert stats.tokens_resident > 0
    await play.engine.release([root, peer, reader, turn])
    stats = play.engine.stats()
    assert (stats.resident_cursors, stats.recurrent_slots, stats.tokens_resident) == (0, 0, 0)
    assert stats.running == 0


async def test_mixed_requests_equal_each_alone(play: Play) -> None:
    root = await play.extend(None, 33)
    peer = await play.extend(root, 14)
    parents = [root, peer, await play.extend(root, 2, span(peer, 1, 13))]
    tokens = play.tokens(150)
    options = [{"temperature": 0.7, "seed": 1}, {"top_k": 9, "seed": 2}, {"top_p": 0.8, "seed": 3}]
    alone = [
        await play.turn(parent, 12, **chosen)
        for parent, chosen in zip(parents, options, strict=True)
    ]
    scored = await play.extend(peer, tokens)
    *together, again = await asyncio.gather(
        *(play.turn(parent, 12, **chosen) for parent, chosen in zip(parents, options, strict=True)),
        play.extend(peer, tokens),
    )
    assert again.sampled_logprobs == pytest.approx(scored.sampled_logprobs, abs=5e-6)
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids
        assert one.sampled_logprobs == pytest.approx(other.sampled_logprobs, abs=5e-6)


async def test_cancelled_generation_returns_to_the_baseline(play: Play) -> None:
    root = await play.extend(None, 20)
    peer = await play.extend(root, 6)
    baseline = play.engine.stats()
    reader = play.engine.generate(
        peer, (1, 2), SamplingOptions(max_tokens=900), stop_token_ids=frozenset(), policy_version=0
    )
    for _ in range(3):
        await anext(reader)
    assert play.engine.stats().running == 1
    assert play.engine.stats().tokens_resident > baseline.tokens_resident
    await reader.aclose()  # type: ignore[attr-defined]
    task = asyncio.create_task(play.turn(root, 900))
    extend = asyncio.create_task(play.extend(root, 2000))
    while play.engine.stats().running < 2:
        await asyncio.sleep(0.001)
    task.cancel()
    extend.cancel()
    for cancelled in (task, extend):
        with pytest.raises(asyncio.CancelledError):
            await cancelled
    stats = play.engine.stats()
    assert stats.running == 0
    assert stats.tokens_resident == baseline.tokens_resident
    assert stats.recurrent_slots == baseline.recurrent_slots
    assert stats.resident_cursors == baseline.resident_cursors
    play.check(await play.extend(peer, 4))


async def test_cancelled_turn_leaves_the_parent_state_untouched(play: Play) -> None:
    root = await play.extend(None, 20)
    before = await play.extend(root, (1, 2, 3))
    stream = play.engine.generate(
        root, (9,), SamplingOptions(max_tokens=50), stop_token_ids=frozenset(), policy_version=0
    )
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    after = await play.extend(root, (1, 2, 3))
    assert after.sampled_logprobs == before.sampled_logprobs


async def test_racing_identical_roots_are_computed_once(hybrid: Play) -> None:
    tokens = hybrid.tokens(300)
    engine, before = hybrid.engine, hybrid.engine.stats()
    roots = await asyncio.gather(
        *(engine.extend(None, tokens, mounts=(), policy_version=0) for _ in range(4))
    )
    roots.append(await engine.extend(None, tokens, mounts=(), policy_version=0))
    assert len({root.cursor_id for root in roots}) == 5
    alone = hybrid.expected(transformers=300, vllm=299)
    assert counted(hybrid, before) == (alone, 0, 0)
    resident = engine.stats().tokens_resident
    assert resident == hybrid.expected(transformers=300, vllm=pages_and_state(hybrid, alone))
    assert engine.stats().resident_cursors == 5
    await engine.release(roots[:4])
    assert engine.stats().tokens_resident == resident
    child = await hybrid.extend(roots[4], 5)
    hybrid.check(child)
    assert counted(hybrid, before) == (alone + 5, 0, 0)
    await engine.release([*roots[4:], child])
    assert engine.stats().tokens_resident == 0


async def test_cancelled_first_of_racing_roots_leaves_nothing_behind(hybrid: Play) -> None:
    tokens = hybrid.tokens(1200)
    engine = hybrid.engine
    first, second = (
        asyncio.create_task(engine.extend(None, tokens, mounts=(), policy_version=0))
        for _ in range(2)
    )
    before = engine.stats()
    while engine.stats().running < 2:
        await asyncio.sleep(0.001)
    first.cancel()
    root = await second
    assert first.cancelled()
    assert counted(hybrid, before) == (hybrid.expected(transformers=1200, vllm=1199), 0, 0)
    await engine.release([root])
    stats = engine.stats()
    assert (stats.resident_cursors, stats.tokens_resident) == (0, 0)


async def test_requests_past_a_limit_are_refused_by_name(hybrid: Play) -> None:
    engine = hybrid.engine
    limit = engine.info.max_positions
    with pytest.raises(BudgetExhausted, match=f"got {limit + 1}; allowed: {limit}"):
        await engine.extend(None, (1,) * (limit + 1), mounts=(), policy_version=0)
    root = await hybrid.extend(None, 4)
    with pytest.raises(BudgetExhausted, match=f"got {limit + 1}; allowed: {limit}"):
        await hybrid.sample(root, 1, prompt=(1,) * (limit - 4))
    with pytest.raises(InvalidRequest, match="outside the vocabulary; got 300"):
        await hybrid.extend(root, (300,))
    with pytest.raises(InvalidRequest, match="outside its source"):
        await hybrid.extend(root, 3, span(root, 2, 9))
    with pytest.raises(InvalidRequest, match="temperature out of range; got -1"):
        await hybrid.sample(root, 3, temperature=-1)
    with pytest.raises(AdapterError, match="not loaded; got 7"):
        await hybrid.sample(root, 3, version=7)
    with pytest.raises(AdapterError, match="not loaded; got 7"):
        await engine.extend(root, (1,), mounts=(), policy_version=7)
    assert engine.stats().resident_cursors == 1
    assert engine.stats().running == 0


async def test_stops_end_a_turn_where_they_were_sampled(hybrid: Play) -> None:
    root = await hybrid.extend(None, 12)
    free = await hybrid.sample(root, 30, seed=8)
    assert free.finish_reason == "length"
    tokens = free.cursor.token_ids[3:]
    at = next(i for i in range(5, 30) if tokens[i] not in tokens[:i])
    stopped = await hybrid.sample(root, 30, seed=8, stop_token_ids=frozenset({tokens[at]}))
    assert stopped.finish_reason == "stop"
    assert stopped.cursor.token_ids[3:] == tokens[: at + 1]
    # Whatever ended the turn, the state is that of its tokens and no further.
    probe = [
        await hybrid.extend(stopped.cursor, (1, 2)),
        await hybrid.extend(free.cursor, (1, 2)),
    ]
    hybrid.check(*probe)


async def test_stop_strings_span_tokens(hybrid: Play) -> None:
    from tests.engine_cases import detokenize

    root = await hybrid.extend(None, 12)
    free = await hybrid.sample(root, 30, seed=8)
    text = detokenize(free.cursor.token_ids[3:])
    stop = text[10:13]
    stopped = await hybrid.sample(root, 30, seed=8, stop=("never said", stop))
    assert stopped.finish_reason == "stop"
    assert detokenize(stopped.cursor.token_ids[3:]) == text[: text.index(stop) + 3]
    hybrid.check(await hybrid.extend(stopped.cursor, 2))


async def test_greedy_takes_the_likeliest_and_seeds_repeat(hybrid: Play) -> None:
    root = await hybrid.extend(None, 12)
    greedy = await hybrid.turn(root, 8, temperature=0.0)
    assert greedy.token_ids == (await hybrid.turn(root, 8, temperature=0.0)).token_ids
    assert greedy.token_ids == (await hybrid.turn(root, 8, top_k=1, seed=9)).token_ids
    rows = hybrid.reference.logprobs(greedy)
    for index in range(3, 11):
        assert rows[index - 1].argmax().item() == greedy.token_ids[index]
    hybrid.check(greedy)
    one, same, other = [await hybrid.turn(root, 8, seed=seed) for seed in (1, 1, 2)]
    assert one.token_ids == same.token_ids
    assert one.token_ids != other.token_ids
    empty = await hybrid.turn(root, 4, prompt=(), seed=3)
    hybrid.check(empty)


async def test_temperature_is_in_the_logprobs(hybrid: Play) -> None:
    root = await hybrid.extend(None, 12)
    turn = await hybrid.turn(root, 10, temperature=0.5, seed=1)
    rows = (hybrid.reference.logprobs(turn) / 0.5).log_softmax(-1)
    expected = [rows[i - 1][turn.token_ids[i]].item() for i in range(3, 13)]
    assert turn.sampled_logprobs == pytest.approx(expected, abs=5e-5)


async def test_adapters_serve_side_by_side(play: Play, tmp_path: Path) -> None:
    engine, before = play.engine, play.engine.stats()
    adapted = {
        version: save_adapter(tmp_path / str(version), play.folder, play.family, seed=version)
        for version in (1, 2)
    }
    root = await play.extend(None, 30)
    peer = await play.extend(root, 9)
    base_turn = asyncio.create_task(play.turn(peer, 60, seed=1))
    for version in adapted:
        await engine.load_adapter(version, str(tmp_path / str(version)))
    reader = await play.extend(root, 4, span(peer, 1, 8))
    oracles = {
        version: Reference(model.base_model.model, engine.info.mount_layers)
        for version, model in adapted.items()
    }
    plays = {
        version: Play(engine=engine, reference=oracle, rng=play.rng, version=version)
        for version, oracle in oracles.items()
    }
    turns = await asyncio.gather(*(p.turn(reader, 9, seed=1) for p in plays.values()))
    tolerance = play.expected(transformers=1e-4, vllm=3e-4)
    for version, turn in zip(plays, turns, strict=True):
        assert turn.policy_version == version
        # Random adapters this large amplify rounding: two torch builds differ by 4e-5, vLLM's
        # kernels from both by up to 1.2e-4.
        plays[version].check(turn, tolerance=tolerance)
    # Root, peer and reader were rebuilt under each version; nothing was read across. vLLM computes
    # a last token with what follows: the root's again under both, the reader's under the second.
    refreshed = play.expected(transformers=2 * (30 + 9 + 4), vllm=2 * (30 + 8 + 3) + 1)
    assert counted(play, before)[1:] == (0, refreshed)
    assert turns[0].sampled_logprobs != turns[1].sampled_logprobs
    play.check(reader, await base_turn)
    probe = play.tokens(20)
    scores = [await engine.score(probe, policy_version=version) for version in (0, 1)]
    expected = flat_scores(adapted[1], probe)
    assert scores[1] == pytest.approx(expected, abs=play.expected(transformers=2e-5, vllm=1e-4))
    assert scores[0] != pytest.approx(expected, abs=1e-3)
    resident = engine.stats().tokens_resident
    await engine.unload_adapter(1)
    assert engine.stats().tokens_resident <= resident - (30 + 9 + 4)
    with pytest.raises(AdapterError, match="not loaded; got 1"):
        await play.sample(reader, 3, version=1)
    plays[2].check(await plays[2].turn(reader, 3, seed=2), tolerance=tolerance)


async def test_adapter_checksums_are_those_of_the_file(hybrid: Play, tmp_path: Path) -> None:
    import hashlib

    from safetensors.numpy import load_file

    save_adapter(tmp_path, hybrid.folder, hybrid.family)
    await hybrid.engine.load_adapter(3, str(tmp_path))
    expected = {
        name: hashlib.sha256(tensor.astype("<f4").tobytes()).hexdigest()
        for name, tensor in load_file(tmp_path / "adapter_model.safetensors").items()
    }
    assert await hybrid.engine.adapter_checksums(3) == expected
    assert len(expected) > 8
    assert await hybrid.engine.adapter_checksums(0) == {}
    with pytest.raises(AdapterError, match="loaded already; got 3"):
        await hybrid.engine.load_adapter(3, str(tmp_path))


async def test_faulty_adapter_is_refused_by_name_and_the_old_one_serves(
    hybrid: Play, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    engine = hybrid.engine
    model = save_adapter(tmp_path, hybrid.folder, hybrid.family)
    await engine.load_adapter(1, str(tmp_path))
    served = await engine.adapter_checksums(1)
    file = tmp_path / "adapter_model.safetensors"
    good = load_file(file)
    name = next(name for name in good if "q_proj.lora_A" in name)
    unknown = re.sub(r"layers\.\d+", "layers.99", name)
    faults = {
        f"lacks a tensor; got {name}": {k: v for k, v in good.items() if k != name},
        f"no target module takes; got {unknown}": {**good, unknown: good[name].clone()},
        f"{name} has the wrong shape": {**good, name: good[name][:, :-1].contiguous()},
    }
    for message, tensors in faults.items():
        save_file(tensors, file)
        with pytest.raises(AdapterError, match=message):
            await engine.load_adapter(2, str(tmp_path))
    file.write_bytes(b"not a tensor file")
    with pytest.raises(AdapterError, match="cannot read"):
        await engine.load_adapter(2, str(tmp_path))
    assert await engine.adapter_checksums(1) == served
    with pytest.raises(AdapterError, match="not loaded"):
        await engine.adapter_checksums(2)
    probe = hybrid.tokens(12)
    expected = flat_scores(model, probe)
    tolerance = hybrid.expected(transformers=2e-5, vllm=1e-4)
    assert await engine.score(probe, policy_version=1) == pytest.approx(expected, abs=tolerance)


async def test_probe_of_too_few_or_too_many_tokens_is_refused(play: Play) -> None:
    before = play.engine.stats().tokens_computed
    for count in (0, 1, 1025, 25_000):
        with pytest.raises(InvalidRequest, match=rf"got {count}; allowed: 2 to \d+; set the train"):
            await play.engine.score((5,) * count, policy_version=0)
    assert play.engine.stats().tokens_computed == before


async def test_adapter_of_another_base_model_is_refused(
    hybrid: Play, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    other = "qwen3" if hybrid.family != "qwen3" else "llama"
    save_adapter(tmp_path, model_folder(other), other)
    with pytest.raises(AdapterError, match="another base model"):
        await hybrid.engine.load_adapter(1, str(tmp_path))


def counted(play: Play, before: EngineStats) -> tuple[int, int, int]:
    """Tokens computed since `before`, and those computed again: after an eviction, a refresh."""
    now = play.engine.stats()
    return (
        now.tokens_computed - before.tokens_computed,
        now.tokens_recomputed["eviction"] - before.tokens_recomputed["eviction"],
        now.tokens_recomputed["refresh"] - before.tokens_recomputed["refresh"],
    )


def pages_and_state(play: Play, num_tokens: int) -> int:
    """Tokens for which vLLM's blocks of a residency would have room; a state takes blocks too."""
    page, stats = play.engine.info.page_tokens, play.engine.stats()
    return (-(-num_tokens // page) + stats.recurrent_slots) * page


def flat_scores(model: object, token_ids: tuple[int, ...]) -> list[float]:
    import torch

    with torch.no_grad():
        logits = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]  # type: ignore[operator]
    rows = logits.log_softmax(-1)
    return [row[token].item() for row, token in zip(rows, token_ids[1:], strict=False)]
