"""The seam between sessions, which decide, and engines, which compute (design.md section 6)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from harness_sdk.types import FinishReason, SamplingOptions
from rollout_service.cursors import Cursor, Mount


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine is and how far it goes."""

    name: str
    """transformers | vllm"""
    model: str
    model_hash: str
    vocab_size: int
    max_positions: int
    mount_layers: tuple[int, ...]
    """Decoder layers whose attention reads mounted spans."""
    page_tokens: int
    """Tokens per KV page."""
    dtype: str = ""
    """Type of the weights, as bfloat16; empty where there are none."""
    head_dtype: str = ""
    """Type of the logits, as float32; empty where none are computed."""
    cursor_tokens: float = 0.0
    """Tokens whose room a resident cursor takes beside its own: its recurrent state, and what is
    left of its last page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Occupancy and work since the start; every recomputed token has its cause."""

    resident_cursors: int
    recurrent_slots: int
    tokens_resident: int
    tokens_capacity: int
    running: int
    tokens_computed: int
    """Tokens that went through the model, recomputation included."""
    tokens_recomputed: Mapping[str, int]
    """By cause: `eviction`, `refresh`; `lead`, a turn of which only the state behind its last token
    was kept, where the one before it is wanted; `last_token`, which is computed with each cursor
    that follows its own; `preemption`; `restart`, what went with an engine process."""
    tokens_sampled: int
    preemptions: int = 0
    """Times that a running request gave its room to older ones; it went on from there later."""
    foreign_blocks: int = 0
    """Blocks read under another policy version than the one that computed them: 0, always."""
    restarts: int = 0
    """Engine processes started after the first, each because the one before it had ended."""
    is_serving: bool = True
    """False while one is being started; calls wait for it."""

    @property
    def kv_use(self) -> float:
        """Share of the pool that is taken."""
        return self.tokens_resident / max(self.tokens_capacity, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """One sampled token."""

    token_id: int
    logprob: float
    """Nats, under the distribution sampled from (temperature applied)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """The end of a generation: the cursor that holds generation prompt and sampled tokens."""

    cursor: Cursor
    finish_reason: FinishReason


class Engine(Protocol):
    """Computes cursors. Calls may run concurrently; each is cancelled by cancelling its task.

    Residency is keyed by (policy version, cursor): a cursor asked for under another version than
    the one it was computed with is computed anew under that version, its ancestors and mounts too.
    """

    @property
    def info(self) -> EngineInfo:
        """What this engine is."""
        ...

    async def start(self) -> None:
        """Load the model and begin to serve."""
        ...

    async def close(self) -> None:
        """Cancel what runs and free everything."""
        ...

    async def extend(
        self,
        parent: Cursor | None,
        token_ids: Sequence[int],
        *,
        mounts: tuple[Mount, ...],
        policy_version: int,
        score_from: int | None = None,
    ) -> Cursor:
        """Append tokens and keep the recurrent state at their end.

        Args:
            parent: Cursor to extend; None begins a root. Identical roots of one version share
                their residency.
            token_ids: Tokens to append, at least one.
            mounts: The complete visible set of the new cursor.
            policy_version: Adapter to compute under.
            score_from: Index in `token_ids` from which tokens count as sampled; their
                log-probabilities are computed (imitation data). None scores nothing.

        Raises:
            EngineError: The forward pass failed.
            AdapterError: `policy_version` is not loaded.
        """
        ...

    def generate(
        self,
        parent: Cursor,
        prompt_token_ids: Sequence[int],
        sampling: SamplingOptions,
        *,
        stop_token_ids: frozenset[int],
        policy_version: int,
    ) -> AsyncIterator[SampledToken | Generated]:
        """Append the generation prompt to `parent` and sample until a stop.

        Yields each `SampledToken`, the stop id included, then one `Generated`. Closing the
        iterator early drops what was sampled and leaves no residency behind.
        """
        ...

    async def hand_over(self, turn: Cursor, shorter: Cursor) -> None:
        """Keep the residency of a generated `turn` for `shorter`, the turn without its last token.

        A residency that trails by that token is whole for `shorter`: nothing is computed again.
        """
        ...

    async def release(self, cursors: Sequence[Cursor]) -> None:
        """Drop the residency of `cursors`; pages shared with others stay until theirs go."""
        ...

    async def evict(self, cursors: Sequence[Cursor]) -> None:
        """Drop the residency of `cursors` that no running request reads; it is rebuilt on use."""
        ...

    async def load_adapter(self, version: int, path: str) -> None:
        """Load a PEFT folder as `version` beside the versions that serve.

        Raises:
            AdapterError: A tensor is missing, unknown or wrongly shaped; nothing changed.
        """
        ...

    async def unload_adapter(self, version: int) -> None:
        """Drop a version and all residency computed under it."""
        ...

    async def adapter_checksums(self, version: int) -> dict[str, str]:
        """sha256 of each tensor as it serves, keyed by its PEFT name."""
        ...

    async def score(self, token_ids: Sequence[int], *, policy_version: int) -> tuple[float, ...]:
        """Log-probability of `token_ids[1:]` from a cold run, in nats: the probe.

        Raises:
            InvalidRequest: Not 2 to `MAX_PROBE_TOKENS` tokens, more than the model has positions,
                or an unknown token.
            AdapterError: `policy_version` is not loaded.
        """
        ...

    def stats(self) -> EngineStats:
        """Occupancy and counters now."""
        ...
