"""Random episodes on a real model: what was sampled is what a cold engine computes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from harness_sdk.errors import HarnessError
from harness_sdk.record import NodeKind
from harness_sdk.types import Limits, Message, SamplingOptions
from rollout_service.engine.transformers import TransformersEngine
from rollout_service.sessions.threads import Thread
from tests.chat_tokenizers import renderer
from tests.session_cases import CHAT, LOOK, Bench
from tests.tiny_models import save_tiny_model


def load(folder: Path) -> TransformersEngine:
    return TransformersEngine(
        str(folder), max_tokens=20_000, detokenize=CHAT.tokenizer.decode, max_num_seqs=4
    )


async def play(bench: Bench, rng: random.Random, num_calls: int) -> None:
    """Sampled and demonstrated turns, forks, rewinds and reads, refusals included."""
    episode = bench.sessions.episode(bench.episode_id)
    await bench.say()
    await bench.fork("a", "b")

    async def sample(thread: Thread) -> None:
        # A hot model samples every kind of token, control tokens among them.
        sampling = SamplingOptions(
            max_tokens=rng.randint(1, 12), temperature=rng.choice([1.0, 1.0, 3.0]),
            seed=rng.randrange(1 << 30),
        )  # fmt: skip
        observation = [Message(role="tool", content="o" * rng.randrange(20))]
        await bench.sessions.turn(
            bench.call(thread.thread_id), observation[: rng.randrange(2)], sampling=sampling
        )

    async def fork(thread: Thread) -> None:
        await bench.fork(f"c{len(episode.threads)}", thread=thread.thread_id)

    async def rewind(thread: Thread) -> None:
        await bench.sessions.rewind(
            bench.call(thread.thread_id), max(len(thread.steps) - 2, 0), "n"
        )

    async def read(thread: Thread) -> None:
        source = rng.choice([name for name in episode.threads if name != thread.thread_id])
        await bench.sessions.read_thread(bench.call(thread.thread_id), source, 1, 3)

    async def say(thread: Thread) -> None:
        await bench.say(thread.thread_id, LOOK)

    for _ in range(num_calls):
        act = rng.choice([sample] * 4 + [read] * 4 + [say, fork, rewind])
        try:
            await act(rng.choice(list(episode.threads.values())))
        except HarnessError as error:
            assert not type(error).__name__.endswith("EngineError"), error


@pytest.fixture(scope="module")
def roomy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny hybrid model with ids for every family's control tokens."""
    return save_tiny_model(tmp_path_factory.mktemp("roomy"), "qwen3_5", vocab_size=300)


@pytest.mark.parametrize(
    ("seed", "template"),
    [
        *((seed, "") for seed in range(3)),
        (3, "mistral-7b-v0.3-vllm"),  # nothing opens a turn
        (4, "deepseek-r1"),  # nothing does behind a tool's answer
        (5, "gpt-oss"),  # ends a turn otherwise than the history shows
        (6, "glm-4.5"),  # the next message ends a turn
    ],
)
async def test_recorded_logprobs_equal_a_cold_engines(
    chat_folder: Path, roomy_folder: Path, seed: int, template: str
) -> None:
    folder = roomy_folder if template else chat_folder
    engine, cold = load(folder), load(folder)
    await engine.start()
    await cold.start()
    bench = Bench(engine=engine, chat=renderer(template)[1] if template else CHAT)
    episode = await bench.open(
        primitives=("fork", "rewind", "read_thread", "wait"), limits=Limits(max_threads=3)
    )
    await play(bench, random.Random(seed), 80)
    checked, mounted = 0, 0
    for node in episode.nodes:
        cursor = node.cursor
        if not cursor.sampled_logprobs:
            continue
        # Its parents and mounts have no residency here: all is computed anew from token ids.
        again = await cold.extend(
            cursor.parent,
            cursor.token_ids,
            mounts=cursor.mounts,
            policy_version=0,
            score_from=cursor.sampled.index(True),
        )
        if node.temperature == 1.0:
            assert again.sampled_logprobs == pytest.approx(cursor.sampled_logprobs, abs=1e-4)
            checked += len(again.sampled_logprobs)
            mounted += bool(cursor.mounts)
        assert again.position_start == cursor.position_start
    assert checked > 50 and mounted > 2, (checked, mounted)
    record = await bench.close(reward=1.0)
    assert (record.dtype, record.head_dtype) == ("float32", "float32")
    assert {node.kind for node in record.nodes} >= {NodeKind.TURN, NodeKind.STUB, NodeKind.NOTE}
    assert engine.stats().tokens_resident == 0 and engine.stats().recurrent_slots == 0
    await engine.close()
    await cold.close()


async def test_a_leaf_is_cut_off_and_nothing_is_computed_again(chat_folder: Path) -> None:
    engine = load(chat_folder)
    await engine.start()
    bench = Bench(engine=engine)
    end_of_text = next(iter(CHAT.stop_token_ids - {CHAT.terminator[0]}))
    await bench.open(primitives=(), limits=Limits(max_turns=200))
    await bench.say()
    leaf, before = None, engine.stats()
    for seed in range(150):
        # A very hot model soon samples the other stop id.
        sampling = SamplingOptions(max_tokens=40, temperature=50.0, seed=seed)
        before = engine.stats()
        turn = await bench.sessions.turn(bench.call(), (), sampling=sampling)
        if turn.token_ids[-1] == end_of_text:
            leaf = turn
            break
        await bench.sessions.rewind(bench.call(), 1)
    assert leaf is not None
    await bench.say("root", "after")
    computed = engine.stats().tokens_computed - before.tokens_computed
    assert engine.stats().resident_cursors == before.resident_cursors + 4
    record = await bench.close()
    appended = record.nodes[-5:]
    assert [each.token_ids == (end_of_text,) for each in appended] == [0, 0, 1, 0, 0]
    # All but the leaf and the last sampled token, which nothing has needed yet.
    assert computed == sum(len(each.token_ids) for each in appended) - 1
    assert sum(engine.stats().tokens_recomputed.values()) == 0
    (node,) = [n for n in record.nodes if n.token_ids == (end_of_text,)]
    following = next(n for n in record.nodes if n.node_id > node.node_id)
    assert following.parent == node.parent
    assert following.token_ids[:2] == CHAT.terminator
    assert engine.stats().tokens_resident == 0
    await engine.close()
