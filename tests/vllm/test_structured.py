"""Constrained turns: the text obeys, and log-probabilities are those of what the mask leaves."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from harness_sdk.errors import InvalidRequest
from harness_sdk.types import StructuredOutput
from rollout_service.chat import ChatTokenizer
from rollout_service.cursors import Cursor
from tests.chat_tokenizers import save_chat_tokenizer
from tests.engine_cases import Play
from tests.reference import Reference
from tests.vllm.conftest import Served, serve
from tests.vllm.models import save_servable_model, servable_model

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def constrained(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """A hybrid with a byte-level tokenizer; the core is a step ahead."""
    root = tmp_path_factory.mktemp("tokenized")
    folder = save_servable_model(root / "granitemoehybrid", "granitemoehybrid")
    save_chat_tokenizer(folder)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = ChatTokenizer.load(folder)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(
            json.dumps(config | {"eos_token_id": tokenizer.added_ids["<|im_end|>"]})
        )
    async for served in serve(
        root, "granitemoehybrid", async_scheduling=True, detokenize=tokenizer.decode
    ):
        yield served


@pytest.fixture
def tokenizer(constrained: Served) -> ChatTokenizer:
    return ChatTokenizer.load(constrained.folder)


@pytest_asyncio.fixture(loop_scope="session")
async def play(constrained: Served) -> AsyncIterator[Play]:
    engine = constrained.engine
    reference = Reference(servable_model(constrained.family), engine.info.mount_layers)
    yield Play(engine=engine, reference=reference, rng=random.Random(31))
    await engine.forget_all()
    assert engine.stats().tokens_resident == 0


async def constrained_turn(
    play: Play, tokenizer: ChatTokenizer, parent: Cursor, max_tokens: int = 40, **constraint: Any
) -> tuple[Cursor, str]:
    """A turn under a constraint, and its text without the stop id."""
    turn = await play.sample(
        parent,
        max_tokens,
        seed=3,
        stop_token_ids=frozenset({tokenizer.added_ids["<|im_end|>"]}),
        structured=StructuredOutput(**constraint),
    )
    assert turn.finish_reason == "stop"
    assert turn.cursor.token_ids[-1] == tokenizer.added_ids["<|im_end|>"]
    return turn.cursor, tokenizer.decode(turn.cursor.token_ids[3:-1])


async def test_every_kind_of_constraint_is_obeyed_at_once(
    play: Play, tokenizer: ChatTokenizer
) -> None:
    root = await play.extend(None, 40)
    free = asyncio.create_task(play.turn(root, 30, seed=5))
    (_, choice), (_, number), (_, grammar), (_, value) = await asyncio.gather(
        constrained_turn(play, tokenizer, root, choice=("left", "right")),
        constrained_turn(play, tokenizer, root, regex=r"[ab]{3}-\d\d"),
        constrained_turn(play, tokenizer, root, grammar='root ::= "u" ("v" | "w") "."'),
        constrained_turn(play, tokenizer, root, json_schema='{"type": "boolean"}'),
    )
    assert choice in ("left", "right")
    assert re.fullmatch(r"[ab]{3}-\d\d", number)
    assert grammar in ("uv.", "uw.")
    assert json.loads(value) in (True, False)
    # A batch mate without a constraint is not masked.
    play.check(await free)


async def test_logprobs_are_those_of_what_the_mask_leaves(
    play: Play, tokenizer: ChatTokenizer
) -> None:
    root = await play.extend(None, 40)
    turn, text = await constrained_turn(play, tokenizer, root, choice=("ab", "ac", "x"))
    rows = play.reference.logprobs(turn)
    allowed = [{"a", "x"}, {"b", "c"}] if text != "x" else [{"a", "x"}]
    expected = []
    for step, characters in enumerate(allowed):
        ids = [tokenizer.encode_plain(character)[0] for character in sorted(characters)]
        left = rows[2 + step][ids].log_softmax(-1)
        expected.append(left[ids.index(turn.token_ids[3 + step])].item())
    assert turn.sampled_logprobs == pytest.approx((*expected, 0.0), abs=2e-5)


async def test_what_follows_a_constrained_turn_equals_a_cold_run(
    play: Play, tokenizer: ChatTokenizer
) -> None:
    root = await play.extend(None, 40)
    turn, _ = await constrained_turn(play, tokenizer, root, regex=r"[abc]{9}")
    forks = await asyncio.gather(*(play.turn(turn, 6, seed=seed) for seed in range(3)))
    play.check(*forks, await play.extend(turn, 5), await play.extend(root, 5))


async def test_what_cannot_be_compiled_is_refused_by_name(
    play: Play, tokenizer: ChatTokenizer
) -> None:
    root = await play.extend(None, 10)
    faulty = (
        StructuredOutput(regex="(a"),
        StructuredOutput(grammar="root ::="),
        StructuredOutput(json_schema="{"),
    )
    for structured in faulty:
        with pytest.raises(InvalidRequest, match="vLLM refuses the request"):
            await play.turn(root, 9, structured=structured)
    play.check(await play.turn(root, 3, seed=1))
