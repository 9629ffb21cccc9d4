"""An engine whose turns a test chooses token by token."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from harness_sdk.types import SamplingOptions
from rollout_service.cursors import Cursor, child_cursor
from rollout_service.engine.base import Generated, SampledToken
from rollout_service.engine.dry import DryEngine


class TurnEngine(DryEngine):
    """The dry engine with turns; `tokens` tells them, each token at -0.5 nats."""

    def tokens(
        self, parent: Cursor, sampling: SamplingOptions, stop_token_ids: frozenset[int]
    ) -> AsyncGenerator[int, None]:
        """One turn behind `parent`, to its end."""
        raise NotImplementedError

    async def generate(  # type: ignore[override]
        self,
        parent: Cursor,
        prompt_token_ids: Sequence[int],
        sampling: SamplingOptions,
        *,
        stop_token_ids: frozenset[int],
        policy_version: int,
    ) -> AsyncGenerator[SampledToken | Generated, Any]:
        """What `tokens` yields, and its cursor."""
        ids: list[int] = []
        async with contextlib.aclosing(self.tokens(parent, sampling, stop_token_ids)) as tokens:
            async for token_id in tokens:
                ids.append(token_id)
                yield SampledToken(token_id=token_id, logprob=-0.5)
        cursor = child_cursor(
            parent,
            (*prompt_token_ids, *ids),
            mounts=parent.mounts,
            policy_version=policy_version,
            sampled=(False,) * len(prompt_token_ids) + (True,) * len(ids),
            sampled_logprobs=(-0.5,) * len(ids),
        )
        self._resident.add(cursor)
        reason = "stop" if ids[-1] in stop_token_ids else "length"
        yield Generated(cursor=cursor, finish_reason=reason)
