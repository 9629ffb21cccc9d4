"""The vLLM engine's asynchronous face: cursors on the host, pages and states in vLLM's process."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from harness_sdk.errors import InvalidRequest, Unavailable
from harness_sdk.types import SamplingOptions
from rollout_service.cursors import Cursor, Mount, child_cursor
from rollout_service.engine.base import EngineInfo, EngineStats, Generated, SampledToken
from rollout_service.engine.checks import check_cursor, check_token_ids, check_version
from rollout_service.engine.vllm.adapters import Adapters
from rollout_service.engine.vllm.builder import FootingBuilder
from rollout_service.engine.vllm.footing import hides_mounts
from rollout_service.engine.vllm.launch import has_tokenizer
from rollout_service.engine.vllm.limits import check_prompt, shortest_prompt
from rollout_service.engine.vllm.process import EngineProcess
from rollout_service.engine.vllm.starting import (
    EngineOptions,
    StepUse,
    adapters_over,
    builder_over,
    checked_facts,
    engine_info,
    launched_llm,
)
from rollout_service.engine.vllm.turn import Turn, check_options

_STATES_PER_SEQUENCE = 8
"""Recurrent checkpoints held for each running sequence where `max_states` is not given."""


class VllmEngine:
    """Cursors over vLLM 0.32.0; its scheduler, batching, kernels and LoRA do the work."""

    def __init__(
        self,
        model_path: str,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        max_tokens: int | None = None,
        max_states: int | None = None,
        page_tokens: int | None = None,
        mount_layers: tuple[int, ...] | None = None,
        max_num_seqs: int = 64,
        max_adapters: int = 4,
        max_lora_rank: int = 64,
        tensor_parallel_size: int = 1,
        async_scheduling: bool = True,
        detokenize: Callable[[Sequence[int]], str] | None = None,
        on_end: Callable[[Unavailable], None] | None = None,
        vllm_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepare an engine; `start` starts its process.

        Args:
            model_path: Hugging Face folder.
            device: cpu or cuda.
            dtype: Of weights and K/V: float32, bfloat16.
            max_tokens: Tokens whose K/V may be resident, in whole pages, recurrent states beside
                them; None takes what memory allows.
            max_states: Recurrent states that may be resident beside them, running ones included.
            page_tokens: Tokens per page where the model leaves the choice.
            mount_layers: Decoder layers that read mounts; None takes all attention layers of a
                hybrid, a middle quarter otherwise. A hybrid reads in all of them.
            max_num_seqs: Requests computed at once; others wait in order.
            max_adapters: LoRA versions beside the base model.
            max_lora_rank: Highest rank among them.
            tensor_parallel_size: Devices that share every layer's heads and widths.
            async_scheduling: Whether a step is scheduled while the one before it still runs.
            detokenize: Text of token ids; needed for stop strings. The engine process gets a copy.
            on_end: Called once where the engine process ends unasked; all calls raise then.
            vllm_arguments: Further engine arguments of vLLM.
        """
        self._options = EngineOptions(
            model_path=model_path,
            device=device,
            dtype=dtype,
            max_tokens=max_tokens,
            max_states=max_states or _STATES_PER_SEQUENCE * max_num_seqs,
            page_tokens=page_tokens,
            mount_layers=mount_layers,
            max_num_seqs=max_num_seqs,
            max_adapters=max_adapters,
            max_lora_rank=max_lora_rank,
            tensor_parallel_size=tensor_parallel_size,
            async_scheduling=async_scheduling,
            detokenize=detokenize,
            on_end=on_end,
            vllm_arguments=dict(vllm_arguments or {}),
        )
        self._info: EngineInfo | None = None
        self._llm: Any = None
        self._process: EngineProcess | None = None
        self._builder: FootingBuilder | None = None
        self._adapters: Adapters | None = None
        self._running: Counter[int] = Counter()
        self._tokens_sampled = 0
        self._shortest_prompt = shortest_prompt(model_path, device)

    @property
    def info(self) -> EngineInfo:
        """What this engine is; known once started."""
        if self._info is None:
            raise Unavailable("the engine has not been started", remedy="await start() first")
        return self._info

    async def start(self) -> None:
        """Start the engine process and load the model.

        Raises:
            ConfigError: The model, an option or the installed vLLM cannot be served.
        """
        options, on_step = self._options, StepUse()
        facts = await checked_facts(options)
        self._llm = await launched_llm(options, facts, on_step)
        # From here on `close` ends it, however the start goes on.
        self._process = EngineProcess(self._llm, options.on_end)
        builder = await builder_over(options, self._llm, self._process, on_step)
        self._adapters = adapters_over(options, facts, builder)
        self._info = engine_info(options, facts, builder)
        self._builder = builder
        if options.device == "cuda" and options.max_adapters:
            # vLLM compiles at the first score. That would be the probe of the first adapter, and
            # every running decode would wait for it.
            await self.score((0,) * 32, policy_version=0)

    async def close(self) -> None:
        """End the engine process; later calls raise `Unavailable`."""
        builder, self._builder = self._builder, None
        process, self._process, self._llm = self._process, None, None
        if builder is not None:
            await builder.close()
        if process is not None:
            await process.close()

    async def extend(
        self,
        parent: Cursor | None,
        token_ids: Sequence[int],
        *,
        mounts: tuple[Mount, ...],
        policy_version: int,
        score_from: int | None = None,
    ) -> Cursor:
        """Append tokens and keep pages and recurrent state at their end; see `Engine.extend`.

        Raises:
            InvalidRequest: A token, span or `score_from` that cannot be computed.
            BudgetExhausted: The cursor would pass the model's positions.
            ResourceExhausted: No room, and nothing that may be evicted.
            EngineError: The engine process failed.
            AdapterError: `policy_version` is not loaded.
        """
        builder = self._serving(policy_version)
        tokens = tuple(token_ids)
        first = len(tokens) if score_from is None else score_from
        cursor = child_cursor(
            parent,
            tokens,
            mounts=mounts,
            policy_version=policy_version,
            sampled=tuple(index >= first for index in range(len(tokens))),
        )
        self._check(cursor)
        check_prompt(cursor, self._shortest_prompt, is_scored=score_from is not None)
        with self._request(policy_version):
            if score_from is None:
                await builder.extend(policy_version, cursor)
                return cursor
            lowest = 0 if parent is not None else 1
            if not lowest <= score_from <= len(tokens):
                raise InvalidRequest(
                    "score_from names no token that something predicts",
                    value=score_from,
                    limit=f"{lowest} to {len(tokens)}",
                )
            logprobs = await builder.score(policy_version, cursor, score_from, keep=True)
        return replace(cursor, sampled_logprobs=logprobs)

    async def generate(
        self,
        parent: Cursor,
        prompt_token_ids: Sequence[int],
        sampling: SamplingOptions,
        *,
        stop_token_ids: frozenset[int],
        policy_version: int,
    ) -> AsyncIterator[SampledToken | Generated]:
        """Append the generation prompt to `parent` and sample; see `Engine.generate`.

        At temperature 0 the log-probabilities are those of the untempered distribution.

        Raises:
            InvalidRequest: A token or sampling option that cannot be computed.
            BudgetExhausted: The prompt leaves no position to sample at.
            ResourceExhausted: No room, and nothing that may be evicted.
            EngineError: The engine process failed.
            AdapterError: `policy_version` is not loaded.
        """
        check_options(
            sampling,
            can_detokenize=self._options.detokenize is not None,
            can_constrain=has_tokenizer(self._options.model_path),
        )
        builder = self._serving(policy_version)
        prompt = child_cursor(
            parent, tuple(prompt_token_ids), mounts=parent.mounts, policy_version=policy_version
        )
        room = self._check(prompt, num_more=1)
        turn = Turn(
            prompt=prompt,
            sampling=sampling,
            stop_token_ids=stop_token_ids,
            max_tokens=min(sampling.max_tokens, room),
        )
        with self._request(policy_version):
            stream = builder.generate(policy_version, turn)
            try:
                async for token in stream:
                    self._tokens_sampled += 1
                    yield token
            finally:
                await stream.aclose()
        assert turn.finished is not None and turn.finish_reason is not None
        yield Generated(cursor=turn.finished, finish_reason=turn.finish_reason)

    async def hand_over(self, turn: Cursor, shorter: Cursor) -> None:
        """Keep the residency of `turn` for `shorter`; see `Engine.hand_over`."""
        await self._live().hand_over(turn, shorter)

    async def release(self, cursors: Sequence[Cursor]) -> None:
        """Drop the residency of `cursors`; what a running request reads goes when it ends."""
        await self._live().release(cursors)

    async def evict(self, cursors: Sequence[Cursor]) -> None:
        """Drop the residency of `cursors` that no running request reads; rebuilt on use."""
        await self._live().evict(cursors)

    async def forget_all(self) -> None:
        """Drop every residency, running readers' at their end; adapters stay."""
        builder = self._live()
        for version in builder.adapters:
            await builder.drop_version(version)

    async def score(self, token_ids: Sequence[int], *, policy_version: int) -> tuple[float, ...]:
        """Log-probability of `token_ids[1:]` from a cold run that leaves nothing behind."""
        check_token_ids(self.info, token_ids)
        builder = self._serving(policy_version)
        cursor = child_cursor(None, tuple(token_ids), mounts=(), policy_version=policy_version)
        self._check(cursor)
        check_prompt(cursor, self._shortest_prompt, is_scored=True)
        with self._request(policy_version):
            return await builder.score(policy_version, cursor, 1, keep=False)

    async def load_adapter(self, version: int, path: str) -> None:
        """Load a PEFT folder as `version`; decodes go on, the switch falls between two steps.

        Raises:
            AdapterError: Version taken, no slot free, or a tensor missing, unknown or wrongly
                shaped; nothing changed.
        """
        await self._serving_adapters().load(version, path)

    async def unload_adapter(self, version: int) -> None:
        """Drop a version and all residency computed under it.

        Raises:
            AdapterError: Not loaded, the base model, or in use by a running request.
        """
        self._serving(version)
        is_running = self._running[version] > 0
        await self._serving_adapters().unload(version, is_running=is_running)

    async def adapter_checksums(self, version: int) -> dict[str, str]:
        """`tensor_checksum` of each tensor as it serves, keyed by its PEFT name."""
        self._serving(version)
        return await self._serving_adapters().checksums(version)

    def stats(self) -> EngineStats:
        """Occupancy after the last step, counters now."""
        builder = self._live()
        use = builder.client.use
        return EngineStats(
            resident_cursors=len(builder.store),
            recurrent_slots=use.states,
            tokens_resident=use.num_rows,
            tokens_capacity=use.capacity,
            running=self._running.total(),
            tokens_computed=builder.tokens_computed,
            tokens_recomputed=dict(builder.tokens_recomputed),
            tokens_sampled=self._tokens_sampled,
            preemptions=use.preemptions,
            foreign_blocks=use.foreign,
        )

    def _check(self, cursor: Cursor, *, num_more: int = 0) -> int:
        room = check_cursor(self.info, cursor, num_more=num_more)
        if hides_mounts(cursor):
            raise InvalidRequest(
                "a cursor cannot lose sight of what its parent has mounted",
                value=f"{len(cursor.mounts)} mounts",
                remedy="pass the parent's mounts too",
            )
        return room

    def _live(self) -> FootingBuilder:
        if self._builder is None:
            raise Unavailable("the engine is not running")
        return self._builder

    def _serving_adapters(self) -> Adapters:
        self._live()
        assert self._adapters is not None
        return self._adapters

    def _serving(self, version: int) -> FootingBuilder:
        builder = self._live()
        check_version(version, list(builder.adapters))
        return builder

    @contextmanager
    def _request(self, version: int) -> Iterator[None]:
        self._running[version] += 1
        try:
            yield
        finally:
            self._running[version] -= 1
