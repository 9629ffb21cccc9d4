"""The vLLM engine's asynchronous face: cursors on the host, pages and states in vLLM's process.

Where that process ends, calls go on over the next: cursors are computed anew from their tokens.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from harness_sdk.errors import InvalidRequest, Unavailable
from harness_sdk.types import SamplingOptions
from rollout_service.cursors import Cursor, Mount, child_cursor
from rollout_service.engine.base import EngineInfo, EngineStats, Generated, SampledToken
from rollout_service.engine.checks import check_cursor, check_probe, check_version
from rollout_service.engine.vllm.builder import FootingBuilder
from rollout_service.engine.vllm.core import Core, start_core
from rollout_service.engine.vllm.footing import hides_mounts
from rollout_service.engine.vllm.launch import has_tokenizer
from rollout_service.engine.vllm.limits import check_prompt, shortest_prompt
from rollout_service.engine.vllm.starting import EngineOptions, checked_facts, engine_info
from rollout_service.engine.vllm.supervisor import RestartPolicy, Supervisor, check_blameless
from rollout_service.engine.vllm.turn import Turn, check_options

T = TypeVar("T")

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
        head_dtype: str = "float32",
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
        hang_timeout_s: float = 300.0,
        restarts: RestartPolicy | None = None,
        on_end: Callable[[Unavailable], None] | None = None,
        vllm_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepare an engine; `start` starts its process.

        Args:
            model_path: Hugging Face folder.
            device: cpu or cuda.
            dtype: Of weights and K/V: float32, bfloat16, float16.
            head_dtype: Of the logits: float32, or model.
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
            hang_timeout_s: Seconds within which the process has to answer, a step included; one
                that does not is killed, which is an end like others. 0 waits for ever.
            restarts: How often a process that ended is started again; None takes the defaults.
            on_end: Called once where it is not started again; all calls raise then.
            vllm_arguments: Further engine arguments of vLLM.
        """
        self._options = EngineOptions(
            model_path=model_path,
            device=device,
            dtype=dtype,
            head_dtype=head_dtype,
            max_tokens=max_tokens,
            max_states=max_states or _STATES_PER_SEQUENCE * max_num_seqs,
            page_tokens=page_tokens,
            mount_layers=mount_layers,
            max_num_seqs=max_num_seqs,
            max_adapters=max_adapters,
            max_lora_rank=max_lora_rank,
            tensor_parallel_size=tensor_parallel_size,
            async_scheduling=async_scheduling,
            hang_timeout_s=hang_timeout_s,
            detokenize=detokenize,
            vllm_arguments=dict(vllm_arguments or {}),
        )
        self._info: EngineInfo | None = None
        self._supervisor = Supervisor[Core](
            self._start_core, restarts or RestartPolicy(), on_given_up=on_end
        )
        self._loaded: dict[int, str] = {}
        """Folder of each version that a new process has to load."""
        self._running: Counter[int] = Counter()
        self._tokens_sampled = 0
        self._ended_use = Counter[str]()
        """What processes that have ended had counted."""
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
        await self._supervisor.start()

    async def close(self) -> None:
        """End the engine process; later calls raise `Unavailable`."""
        await self._supervisor.close()

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
        self._check_version(policy_version)
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
        if score_from is None:
            await self._computed(
                policy_version, lambda builder: builder.extend(policy_version, cursor)
            )
            return cursor
        lowest = 0 if parent is not None else 1
        if not lowest <= score_from <= len(tokens):
            raise InvalidRequest(
                "score_from names no token that something predicts",
                value=score_from,
                limit=f"{lowest} to {len(tokens)}",
            )
        logprobs = await self._computed(
            policy_version,
            lambda builder: builder.score(policy_version, cursor, score_from, keep=True),
        )
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

        Where the engine process ends meanwhile the next one samples on from the tokens that are
        there. A turn with a seed, stop strings or a constraint begins anew, or ends where tokens
        were given out. At temperature 0 the log-probabilities are those of the untempered
        distribution.

        Raises:
            InvalidRequest: A token or sampling option that cannot be computed.
            BudgetExhausted: The prompt leaves no position to sample at.
            ResourceExhausted: No room, and nothing that may be evicted.
            EngineError: The engine process failed.
            Unavailable: It ended in the middle of a turn that has to be sampled whole.
            AdapterError: `policy_version` is not loaded.
        """
        check_options(
            sampling,
            can_detokenize=self._options.detokenize is not None,
            can_constrain=has_tokenizer(self._options.model_path),
        )
        self._check_version(policy_version)
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
            for num_ends in itertools.count(1):
                core = await self._serving(policy_version)
                stream = core.builder.generate(policy_version, turn)
                try:
                    async for token in stream:
                        self._tokens_sampled += 1
                        yield token
                    break
                except Unavailable as cause:
                    if not core.has_ended:
                        raise
                    turn.check_resumes()
                    check_blameless(num_ends, cause)
                finally:
                    await stream.aclose()
        assert turn.finished is not None and turn.finish_reason is not None
        yield Generated(cursor=turn.finished, finish_reason=turn.finish_reason)

    async def hand_over(self, turn: Cursor, shorter: Cursor) -> None:
        """Keep the residency of `turn` for `shorter`; see `Engine.hand_over`."""
        await self._newest().hand_over(turn, shorter)

    async def release(self, cursors: Sequence[Cursor]) -> None:
        """Drop the residency of `cursors`; what a running request reads goes when it ends."""
        await self._newest().release(cursors)

    async def evict(self, cursors: Sequence[Cursor]) -> None:
        """Drop the residency of `cursors` that no running request reads; rebuilt on use."""
        await self._newest().evict(cursors)

    async def forget_all(self) -> None:
        """Drop every residency, running readers' at their end; adapters stay."""
        builder = self._newest()
        for version in builder.adapters:
            await builder.drop_version(version)

    async def score(self, token_ids: Sequence[int], *, policy_version: int) -> tuple[float, ...]:
        """Log-probability of `token_ids[1:]` from a cold run that leaves nothing behind."""
        check_probe(self.info, token_ids)
        self._check_version(policy_version)
        cursor = child_cursor(None, tuple(token_ids), mounts=(), policy_version=policy_version)
        check_prompt(cursor, self._shortest_prompt, is_scored=True)
        return await self._computed(
            policy_version, lambda builder: builder.score(policy_version, cursor, 1, keep=False)
        )

    async def load_adapter(self, version: int, path: str) -> None:
        """Load a PEFT folder as `version`; decodes go on, the switch falls between two steps.

        Raises:
            AdapterError: Version taken, no slot free, or a tensor missing, unknown or wrongly
                shaped; nothing changed.
        """
        await self._served(None, lambda core: core.adapters.load(version, path))
        self._loaded[version] = path

    async def unload_adapter(self, version: int) -> None:
        """Drop a version and all residency computed under it.

        Raises:
            AdapterError: Not loaded, the base model, or in use by a running request.
        """
        core = await self._serving(version)
        is_running = self._running[version] > 0
        try:
            await core.adapters.unload(version, is_running=is_running)
        except Unavailable:
            # Gone with its process, and the next one is not told to load it.
            if not core.has_ended:
                raise
        self._loaded.pop(version, None)

    async def adapter_checksums(self, version: int) -> dict[str, str]:
        """`tensor_checksum` of each tensor as it serves, keyed by its PEFT name."""
        self._check_version(version)
        return await self._served(version, lambda core: core.adapters.checksums(version))

    def stats(self) -> EngineStats:
        """Occupancy after the last step, counters now; nothing is resident between processes."""
        builder, is_serving = self._newest(), self._supervisor.is_serving
        use, ended = builder.client.use, self._ended_use
        num_preempted = use.preempted_rows + ended["preempted_rows"]
        return EngineStats(
            resident_cursors=len(builder.store) if is_serving else 0,
            recurrent_slots=use.states if is_serving else 0,
            tokens_resident=use.num_rows if is_serving else 0,
            tokens_capacity=use.capacity,
            running=self._running.total(),
            tokens_computed=builder.tokens_computed + num_preempted,
            tokens_recomputed={**builder.tokens_recomputed, "preemption": num_preempted},
            tokens_sampled=self._tokens_sampled,
            preemptions=use.preemptions + ended["preemptions"],
            foreign_blocks=use.foreign + ended["foreign"],
            restarts=self._supervisor.num_restarts,
            is_serving=is_serving,
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

    async def _start_core(self, before: Core | None) -> Core:
        options = self._options
        facts = await checked_facts(options)
        core = await start_core(options, facts, before, self._loaded)
        if before is not None:
            use = before.builder.client.use
            self._ended_use.update(
                preemptions=use.preemptions,
                preempted_rows=use.preempted_rows,
                foreign=use.foreign,
            )
        self._info = engine_info(options, facts, core.builder)
        return core

    def _newest(self) -> FootingBuilder:
        return self._supervisor.newest.builder

    def _check_version(self, version: int) -> None:
        self._newest()
        check_version(version, [0, *self._loaded])

    async def _serving(self, version: int | None) -> Core:
        """The process that runs, with `version` loaded; waits while one is being started."""
        core = await self._supervisor.running()
        _check_loaded(core, version)
        return core

    async def _computed(self, version: int, run: Callable[[FootingBuilder], Awaitable[T]]) -> T:
        """What `run` returns; the version stays loaded meanwhile."""
        with self._request(version):
            return await self._served(version, lambda core: run(core.builder))

    async def _served(self, version: int | None, run: Callable[[Core], Awaitable[T]]) -> T:
        """What `run` returns over a process that has `version`, or the next where one ends."""

        async def checked(core: Core) -> T:
            _check_loaded(core, version)
            return await run(core)

        return await self._supervisor.served(checked)

    @contextmanager
    def _request(self, version: int) -> Iterator[None]:
        self._running[version] += 1
        try:
            yield
        finally:
            self._running[version] -= 1


def _check_loaded(core: Core, version: int | None) -> None:
    if version is not None:
        check_version(version, list(core.builder.adapters))
