"""An engine whose model throws dice: the whole protocol, and nothing to compute."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from harness_sdk.types import SamplingOptions
from rollout_service.cursors import Cursor, child_cursor
from rollout_service.engine.base import Generated, SampledToken
from rollout_service.engine.dry import DRY_INFO, DryEngine
from tests.chat_tokenizers import VOCAB_SIZE

_STOP = 0.2


class DiceEngine(DryEngine):
    """Random tokens of the chat tokenizer's vocabulary.

    Args:
        seed: Of the dice.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(info=replace(DRY_INFO, vocab_size=VOCAB_SIZE))
        self._rng = random.Random(seed)

    async def generate(  # type: ignore[override]
        self,
        parent: Cursor,
        prompt_token_ids: Sequence[int],
        sampling: SamplingOptions,
        *,
        stop_token_ids: frozenset[int],
        policy_version: int,
    ) -> AsyncGenerator[SampledToken | Generated, Any]:
        """A turn that ends at each token with a chance of one in five."""
        ids: list[int] = []
        while len(ids) < sampling.max_tokens:
            stops = self._rng.random() < _STOP
            pool = sorted(stop_token_ids) if stops else range(VOCAB_SIZE)
            ids.append(self._rng.choice(pool))
            # As an engine's worker would: others run between two tokens.
            await asyncio.sleep(0)
            yield SampledToken(token_id=ids[-1], logprob=-1.0)
            if ids[-1] in stop_token_ids:
                break
        cursor = child_cursor(
            parent,
            (*prompt_token_ids, *ids),
            mounts=parent.mounts,
            policy_version=policy_version,
            sampled=(False,) * len(prompt_token_ids) + (True,) * len(ids),
            sampled_logprobs=(-1.0,) * len(ids),
        )
        self._resident.add(cursor)
        reason = "stop" if ids[-1] in stop_token_ids else "length"
        yield Generated(cursor=cursor, finish_reason=reason)
