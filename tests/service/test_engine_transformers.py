"""What is particular to the transformers engine: states bit for bit, faults, layers, fairness."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from harness_sdk.control import MAX_PROBE_TOKENS
from harness_sdk.errors import ConfigError, EngineError, ResourceExhausted, Unavailable
from harness_sdk.fingerprints import model_hash
from harness_sdk.types import SamplingOptions
from rollout_service.cursors import Cursor
from rollout_service.engine.transformers import TransformersEngine
from rollout_service.engine.transformers.model import StripModel
from tests.engine_cases import Play, save_adapter, sharp_model, span
from tests.reference import Reference
from tests.tiny_models import save_tiny_model
from tests.tiny_moe_models import MOE_FAMILIES, tiny_moe_model

# PEFT 0.21 reads a property that transformers 5.24 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

HYBRIDS = ("qwen3_5", "granitemoehybrid")


@pytest.fixture(params=HYBRIDS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
async def engine(
    family: str, model_folder: Callable[[str], Path]
) -> AsyncIterator[TransformersEngine]:
    engine = TransformersEngine(str(model_folder(family)))
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture
def play(engine: TransformersEngine, family: str) -> Play:
    reference = Reference(sharp_model(family), engine.info.mount_layers)
    return Play(engine=engine, reference=reference, rng=random.Random(1))


@pytest.mark.parametrize("family", MOE_FAMILIES)
async def test_mixtures_of_experts_equal_the_oracle(family: str, tmp_path: Path) -> None:
    model = tiny_moe_model(family)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                # Louder than fresh weights, which answer alike whatever they read.
                parameter.mul_(4.0)
    model.save_pretrained(str(tmp_path))
    engine = TransformersEngine(str(tmp_path))
    await engine.start()
    reference = Reference(model, engine.info.mount_layers)
    play = Play(engine=engine, reference=reference, rng=random.Random(1))
    root = await play.extend(None, 30)
    turn = await play.turn(root, 9, seed=1)
    forks = [await play.extend(turn, 70), await play.extend(await play.extend(root, 1), 5)]
    mounted = await play.extend(forks[1], 6, span(forks[0], 3, 66))
    play.check(root, turn, *forks, mounted, await play.turn(mounted, 5, seed=2))
    await engine.close()


def states(engine: TransformersEngine, cursor: Cursor) -> dict[int, tuple[torch.Tensor, ...]]:
    """Convolution and recurrent state at the end of `cursor`, by decoder layer."""
    residency = engine._store.get(0, cursor)
    assert residency is not None
    return {
        layer: tuple(part.clone() for part in state) for layer, state in residency.states.items()
    }


async def test_mounting_leaves_recurrent_states_bit_equal(
    engine: TransformersEngine, play: Play
) -> None:
    root = await play.extend(None, 20)
    producer = await play.turn(root, 8, seed=1)
    reader = await play.extend(root, 7)
    await play.extend(producer, 1)
    before = {cursor: states(engine, cursor) for cursor in (producer, reader)}
    assert all(before.values())
    mounted = await play.extend(reader, (1, 2, 3), span(producer))
    plain = await play.extend(reader, (1, 2, 3))
    await play.turn(mounted, 5, seed=2)
    for cursor, old in before.items():
        new = states(engine, cursor)
        for layer, parts in old.items():
            assert all(torch.equal(a, b) for a, b in zip(parts, new[layer], strict=True))
    # Recurrent layers below the first attention layer never see the mount; those above do,
    # through their inputs.
    first_attention = engine.info.mount_layers[0]
    with_mount, without = states(engine, mounted), states(engine, plain)
    for layer, parts in with_mount.items():
        same = [torch.equal(a, b) for a, b in zip(parts, without[layer], strict=True)]
        assert same == [layer < first_attention] * 2


async def test_rebuilt_states_equal_those_before_eviction(
    engine: TransformersEngine, play: Play
) -> None:
    root = await play.extend(None, 70)
    reader = await play.extend(root, 9, span(await play.extend(root, 5)))
    before = states(engine, reader)
    await engine.evict([root, reader])
    assert engine._store.get(0, reader) is None
    await play.extend(reader, 1)
    for layer, parts in states(engine, reader).items():
        assert all(torch.equal(a, b) for a, b in zip(parts, before[layer], strict=True))


async def test_state_of_a_turn_stops_before_its_last_token(
    engine: TransformersEngine, play: Play
) -> None:
    root = await play.extend(None, 12)
    turn = await play.turn(root, 6, seed=3)
    short = await engine.extend(root, turn.token_ids[:-1], mounts=(), policy_version=0)
    for layer, parts in states(engine, turn).items():
        for one, other in zip(parts, states(engine, short)[layer], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-5)
    full = await engine.extend(root, turn.token_ids, mounts=(), policy_version=0)
    await play.extend(turn, 1)
    for layer, parts in states(engine, turn).items():
        for one, other in zip(parts, states(engine, full)[layer], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-5)


async def test_failed_forward_fails_its_requests_and_the_loop_survives(
    engine: TransformersEngine, play: Play
) -> None:
    root = await play.extend(None, 10)
    baseline = engine.stats()

    def break_on(module: Any, args: tuple[torch.Tensor, ...]) -> None:
        if (args[0] == 13).any():
            raise RuntimeError("device lost")

    assert engine._model is not None
    handle = engine._model.module.get_input_embeddings().register_forward_pre_hook(break_on)
    with pytest.raises(EngineError, match="device lost"):
        await play.extend(root, (13,))
    with pytest.raises(EngineError, match="device lost"):
        await play.sample(root, 5, prompt=(13,))
    handle.remove()
    stats = engine.stats()
    assert (stats.running, stats.tokens_resident) == (0, baseline.tokens_resident)
    play.check(await play.turn(root, 5, seed=1))


async def test_close_ends_running_requests(engine: TransformersEngine, play: Play) -> None:
    root = await play.extend(None, 10)
    turn = asyncio.create_task(play.turn(root, 900, seed=1))
    while engine.stats().running == 0:
        await asyncio.sleep(0.001)
    await engine.close()
    with pytest.raises(Unavailable, match="closed"):
        await turn
    with pytest.raises(Unavailable, match="not running"):
        await play.extend(root, 1)


async def test_long_prefill_does_not_starve_decodes(engine: TransformersEngine, play: Play) -> None:
    root = await play.extend(None, 10)
    stream = engine.generate(
        root, (1,), SamplingOptions(max_tokens=500), stop_token_ids=frozenset(), policy_version=0
    )
    await anext(stream)
    sampled = engine.stats().tokens_sampled
    # 2,000 tokens are four steps; each carries the decode along.
    await engine.extend(None, play.tokens(2000), mounts=(), policy_version=0)
    assert engine.stats().tokens_sampled - sampled >= 4
    await stream.aclose()  # type: ignore[attr-defined]


async def test_versions_take_turns(
    engine: TransformersEngine,
    play: Play,
    family: str,
    model_folder: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    save_adapter(tmp_path, model_folder(family), family)
    await engine.load_adapter(1, str(tmp_path))
    root = await play.extend(None, 10)
    long = asyncio.create_task(play.sample(root, 400, seed=1, version=0))
    while engine.stats().running == 0:
        await asyncio.sleep(0.001)
    short = await play.sample(root, 20, seed=1, version=1)
    assert not long.done()
    assert short.cursor.policy_version == 1
    long.cancel()
    with pytest.raises(asyncio.CancelledError):
        await long


async def test_mount_layers_are_chosen_and_checked(model_folder: Callable[[str], Path]) -> None:
    expected = {
        "qwen3_5": (2, 5), "granitemoehybrid": (1, 3), "llama": (3, 4), "qwen3": (3, 4),
        "qwen2": (1,),
    }  # fmt: skip
    for family, layers in expected.items():
        engine = TransformersEngine(str(model_folder(family)))
        await engine.start()
        assert engine.info.mount_layers == layers
        await engine.close()
    chosen = TransformersEngine(str(model_folder("llama")), mount_layers=(7, 0))
    await chosen.start()
    play = Play(
        engine=chosen, reference=Reference(sharp_model("llama"), (0, 7)), rng=random.Random(1)
    )
    root = await play.extend(None, 12)
    play.check(await play.extend(root, 3, span(await play.extend(root, 9), 2, 8)))
    await chosen.close()
    wrong = TransformersEngine(str(model_folder("qwen3_5")), mount_layers=(2, 3))
    with pytest.raises(ConfigError, match=r"without attention; got \[3\]; allowed: \[2, 5\]"):
        await wrong.start()


async def test_models_and_dtypes_that_cannot_be_served_are_refused(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 8,
    }  # fmt: skip
    some = hf.Qwen3Config(**sizes, use_sliding_window=True, max_window_layers=1)
    hf.Qwen3ForCausalLM(some).save_pretrained(str(tmp_path / "some"))
    hf.MistralForCausalLM(hf.MistralConfig(**sizes)).save_pretrained(str(tmp_path / "all"))
    for folder in ("some", "all"):
        with pytest.raises(ConfigError, match="full attention only; got sliding_attention"):
            await TransformersEngine(str(tmp_path / folder)).start()
    with pytest.raises(ConfigError, match="unknown dtype; got int8"):
        await TransformersEngine(str(model_folder("llama")), dtype="int8").start()


async def test_pressure_evicts_the_least_recently_used(
    model_folder: Callable[[str], Path],
) -> None:
    engine = TransformersEngine(str(model_folder("qwen3_5")), max_tokens=100)
    await engine.start()
    play = Play(
        engine=engine,
        reference=Reference(sharp_model("qwen3_5"), engine.info.mount_layers),
        rng=random.Random(3),
    )
    old = await play.extend(None, 40)
    new = await play.extend(None, 40)
    reader = await play.extend(new, 8, span(new, 0, 1))
    await play.extend(None, 30)
    computed = engine.stats().tokens_computed
    play.check(await play.extend(reader, 2))
    assert engine.stats().tokens_computed == computed + 2
    play.check(await play.extend(old, 2))
    assert engine.stats().tokens_recomputed["eviction"] >= 40
    assert engine.stats().tokens_resident <= 100
    with pytest.raises(ResourceExhausted, match="100 tokens"):
        await play.extend(None, 101)
    # What a running request reads stays, itself or through a mount; the newcomer waits for room.
    producer = await play.extend(None, 30)
    mounted = await play.extend(None, 10, span(producer))
    turn = asyncio.create_task(play.turn(mounted, 40, seed=1))
    while engine.stats().running == 0:
        await asyncio.sleep(0.001)
    newcomer = asyncio.create_task(play.extend(None, 61))
    resident = engine.stats().resident_cursors
    await engine.evict([producer, mounted])
    assert engine.stats().resident_cursors == resident
    before = engine.stats().tokens_recomputed["eviction"]
    play.check(await turn)
    play.check(await newcomer)
    assert engine.stats().tokens_recomputed["eviction"] == before
    assert engine.stats().tokens_resident <= 100
    await engine.close()


async def test_turns_go_on_between_the_passes_of_a_probe(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{TransformersEngine.__module__}._STEP_TOKENS", {"cpu": 64})
    engine = TransformersEngine(str(model_folder("qwen3_5")))
    await engine.start()
    reference = Reference(sharp_model("qwen3_5"), engine.info.mount_layers)
    play = Play(engine=engine, reference=reference, rng=random.Random(1))
    turn = asyncio.create_task(play.turn(await play.extend(None, 9), 60, seed=1))
    while engine.stats().tokens_sampled == 0:
        await asyncio.sleep(0.001)
    before = engine.stats().tokens_sampled
    await engine.score(play.tokens(MAX_PROBE_TOKENS), policy_version=0)
    assert engine.stats().tokens_sampled >= before + MAX_PROBE_TOKENS // 64
    play.check(await turn)
    await engine.close()


async def test_float64_agrees_with_float32(engine: TransformersEngine, play: Play) -> None:
    wide = TransformersEngine(engine.info.model, dtype="float64")
    await wide.start()
    tokens = play.tokens(90)
    one = await engine.score(tokens, policy_version=0)
    other = await wide.score(tokens, policy_version=0)
    assert one == pytest.approx(other, abs=2e-5)
    await wide.close()


def test_model_hash_follows_the_files(tmp_path: Path) -> None:
    first = save_tiny_model(tmp_path / "first", "llama", seed=1)
    same = save_tiny_model(tmp_path / "same", "llama", seed=1)
    other = save_tiny_model(tmp_path / "other", "llama", seed=2)
    assert model_hash(str(first)) == model_hash(str(same)) != model_hash(str(other))
    (same / "README.md").write_text("not part of the model")
    assert model_hash(str(first)) == model_hash(str(same))


@pytest.mark.parametrize("damage", ["config.json", "model.safetensors"])
async def test_folder_that_holds_no_whole_model_is_refused_by_name(
    tmp_path: Path, damage: str
) -> None:
    folder = save_tiny_model(tmp_path / "model", "qwen3")
    (folder / damage).write_text("{}")
    with pytest.raises(ConfigError, match=f"cannot be loaded on cpu; got {folder}"):
        await TransformersEngine(str(folder)).start()


@pytest.mark.parametrize("head_dtype", ["float32", "model"])
async def test_logits_of_a_bfloat16_model_are_float32_unless_told_otherwise(
    model_folder: Callable[[str], Path], head_dtype: str
) -> None:
    folder = str(model_folder("granitemoehybrid"))
    model = StripModel(
        folder, device="cpu", dtype="bfloat16", head_dtype=head_dtype, mount_layers=None
    )
    head = model.module.get_output_embeddings()
    hidden = torch.randn(5, head.weight.shape[1]).bfloat16()
    exact = hidden.double() @ head.weight.double().t() / model.config.logits_scaling
    error = float((model.logits(hidden).double() - exact).norm() / exact.norm())
    assert (error < 1e-5) is (head_dtype == "float32")
    engine = TransformersEngine(folder, dtype="bfloat16", head_dtype=head_dtype)
    await engine.start()
    assert engine.info.dtype == "bfloat16"
    assert engine.info.head_dtype == ("float32" if head_dtype == "float32" else "bfloat16")
    await engine.close()
