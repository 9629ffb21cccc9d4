"""An engine whose model throws dice: the whole protocol, and nothing to compute."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from dataclasses import replace

from harness_sdk.types import SamplingOptions
from rollout_service.cursors import Cursor
from rollout_service.engine.dry import DRY_INFO
from tests.chat_tokenizers import VOCAB_SIZE
from tests.turn_engine import TurnEngine

_STOP = 0.2


class DiceEngine(TurnEngine):
    """Random tokens of the chat tokenizer's vocabulary.

    Args:
        seed: Of the dice.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(info=replace(DRY_INFO, vocab_size=VOCAB_SIZE))
        self._rng = random.Random(seed)

    async def tokens(
        self, parent: Cursor, sampling: SamplingOptions, stop_token_ids: frozenset[int]
    ) -> AsyncGenerator[int, None]:
        """A turn that ends at each token with a chance of one in five."""
        for _ in range(sampling.max_tokens):
            stops = self._rng.random() < _STOP
            token_id = self._rng.choice(sorted(stop_token_ids) if stops else range(VOCAB_SIZE))
            # As an engine's worker would: others run between two tokens.
            await asyncio.sleep(0)
            yield token_id
            if token_id in stop_token_ids:
                return
