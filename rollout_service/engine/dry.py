"""An engine that keeps cursors and computes nothing; torch-free.

Turns demonstrations into records without a model, and carries tests of sessions.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from harness_sdk.errors import AdapterError, InvalidRequest
from harness_sdk.types import SamplingOptions
from rollout_service.cursors import Cursor, Mount, child_cursor
from rollout_service.engine.base import EngineInfo, EngineStats, Generated, SampledToken
from rollout_service.engine.checks import check_cursor, check_probe, check_version

DRY_INFO = EngineInfo(
    name="dry",
    model="none",
    model_hash="",
    vocab_size=1 << 20,
    max_positions=1 << 20,
    mount_layers=(),
    page_tokens=16,
)
"""Limits of an engine that stands for no model in particular."""


class DryEngine:
    """Cursors without residency: log-probabilities are 0.0 and nothing can be sampled."""

    def __init__(self, *, info: EngineInfo = DRY_INFO, max_tokens: int = 1 << 20) -> None:
        """Stand in for the engine that `info` describes.

        Args:
            info: What records built with this engine say about their model.
            max_tokens: Capacity that `stats` reports; nothing is ever evicted.
        """
        self._info = info
        self._max_tokens = max_tokens
        self._resident: set[Cursor] = set()
        self._versions = {0}
        self._tokens_computed = 0

    @property
    def info(self) -> EngineInfo:
        """What this engine stands for."""
        return self._info

    async def start(self) -> None:
        """Nothing to load."""

    async def close(self) -> None:
        """Forget every cursor."""
        self._resident.clear()

    async def extend(
        self,
        parent: Cursor | None,
        token_ids: Sequence[int],
        *,
        mounts: tuple[Mount, ...],
        policy_version: int,
        score_from: int | None = None,
    ) -> Cursor:
        """The cursor alone; tokens from `score_from` on count as sampled, at 0.0 nats.

        Raises:
            AdapterError: `policy_version` is not loaded.
            BudgetExhausted: The cursor would pass the model's positions.
            InvalidRequest: A token or span that no model could compute.
        """
        check_version(policy_version, list(self._versions))
        tokens = tuple(token_ids)
        first = len(tokens) if score_from is None else score_from
        cursor = child_cursor(
            parent,
            tokens,
            mounts=mounts,
            policy_version=policy_version,
            sampled=tuple(index >= first for index in range(len(tokens))),
            sampled_logprobs=(0.0,) * (len(tokens) - first),
        )
        check_cursor(self._info, cursor)
        self._resident.add(cursor)
        self._tokens_computed += len(tokens)
        return cursor

    def generate(
        self,
        parent: Cursor,
        prompt_token_ids: Sequence[int],
        sampling: SamplingOptions,
        *,
        stop_token_ids: frozenset[int],
        policy_version: int,
    ) -> AsyncIterator[SampledToken | Generated]:
        """Always refused.

        Raises:
            InvalidRequest: There is no model to sample from.
        """
        raise InvalidRequest(
            "the dry engine has no model to sample from",
            remedy="append the turn as a demonstration, or serve with another engine",
        )

    async def hand_over(self, turn: Cursor, shorter: Cursor) -> None:
        """Know `shorter` in place of `turn`."""
        if turn in self._resident:
            self._resident.discard(turn)
            self._resident.add(shorter)

    async def release(self, cursors: Sequence[Cursor]) -> None:
        """Forget `cursors`."""
        self._resident.difference_update(cursors)

    async def evict(self, cursors: Sequence[Cursor]) -> None:
        """Nothing to drop: cursors hold no residency here."""

    async def load_adapter(self, version: int, path: str) -> None:
        """Know `version`; its folder is not read.

        Raises:
            AdapterError: `version` is loaded already.
        """
        if version in self._versions:
            raise AdapterError("policy version is loaded already", value=version)
        self._versions.add(version)

    async def unload_adapter(self, version: int) -> None:
        """Forget `version` and the cursors appended under it."""
        check_version(version, list(self._versions))
        self._versions.discard(version)
        self._resident = {c for c in self._resident if c.policy_version != version}

    async def adapter_checksums(self, version: int) -> dict[str, str]:
        """Empty: no tensor serves."""
        check_version(version, list(self._versions))
        return {}

    async def score(self, token_ids: Sequence[int], *, policy_version: int) -> tuple[float, ...]:
        """0.0 nats for each of `token_ids[1:]`."""
        check_version(policy_version, list(self._versions))
        check_probe(self._info, token_ids)
        return (0.0,) * (len(token_ids) - 1)

    def stats(self) -> EngineStats:
        """Tokens of the cursors that were not released."""
        return EngineStats(
            resident_cursors=len(self._resident),
            recurrent_slots=len(self._resident),
            tokens_resident=sum(len(cursor.token_ids) for cursor in self._resident),
            tokens_capacity=self._max_tokens,
            running=0,
            tokens_computed=self._tokens_computed,
            tokens_recomputed={},
            tokens_sampled=0,
        )
