"""The transformers engine's asynchronous face: one worker thread owns torch, calls wait for it."""

from __future__ import annotations

import asyncio
import logging
import queue
import random
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from harness_sdk.errors import AdapterError, EngineError, InvalidRequest, Unavailable
from harness_sdk.fingerprints import model_hash
from harness_sdk.types import SamplingOptions
from rollout_service.cursors import Cursor, Mount, child_cursor
from rollout_service.engine.base import EngineInfo, EngineStats, Generated, SampledToken
from rollout_service.engine.checks import check_cursor, check_probe, check_version
from rollout_service.engine.transformers.adapters import AdapterSlots, read_adapter
from rollout_service.engine.transformers.model import StripModel
from rollout_service.engine.transformers.requests import (
    ExtendRequest,
    GenerateRequest,
    Request,
    ScoreRequest,
)
from rollout_service.engine.transformers.residency import ResidencyStore
from rollout_service.engine.transformers.sampling import check_sampling
from rollout_service.engine.transformers.scheduler import Delivery, Scheduler

_log = logging.getLogger(__name__)

_ELSEWHERE = "connect to another replica"
_T = TypeVar("_T")

PAGE_TOKENS = 16
"""Only told to callers: K/V is kept by cursor here, without pages."""
_STEP_TOKENS = {"cpu": 512, "cuda": 4096}
"""Prefill tokens beside the decodes of a step: enough to fill the device, not to stall it."""


class TransformersEngine:
    """Cursors over a Hugging Face model; the embedded default, and the oracle of the others."""

    def __init__(
        self,
        model_path: str,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        head_dtype: str = "float32",
        max_tokens: int = 1 << 18,
        mount_layers: tuple[int, ...] | None = None,
        max_num_seqs: int = 256,
        detokenize: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """Prepare an engine; `start` loads the model.

        Args:
            model_path: Hugging Face folder.
            device: Torch device.
            dtype: Of weights and K/V: float32, bfloat16, float16 or float64.
            head_dtype: Of the logits: float32, at least, or model.
            max_tokens: Tokens whose K/V may be resident. A running request holds a working copy
                of its context beside them.
            mount_layers: Decoder layers that read mounts; None takes all attention layers of a
                hybrid, a middle quarter of the layers otherwise.
            max_num_seqs: Requests computed at once; others wait in order.
            detokenize: Text of token ids; needed for stop strings.
        """
        self._model_path = model_path
        self._device = device
        self._dtype = dtype
        self._head_dtype = head_dtype
        self._mount_layers = mount_layers
        self._max_num_seqs = max_num_seqs
        self._detokenize = detokenize
        self._store = ResidencyStore(max_tokens)
        self._commands: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._info: EngineInfo | None = None
        self._model: StripModel | None = None
        self._adapters: AdapterSlots | None = None
        self._scheduler: Scheduler | None = None
        self._stats: EngineStats | None = None

    @property
    def info(self) -> EngineInfo:
        """What this engine is; known once started."""
        if self._info is None:
            raise Unavailable("the engine has not been started", remedy="await start() first")
        return self._info

    async def start(self) -> None:
        """Load the model and begin to serve.

        Raises:
            ConfigError: The model or an option cannot be served.
        """
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._load)
        self._thread = threading.Thread(target=self._work, name="transformers-engine", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Cancel what runs and free everything; later calls raise `Unavailable`."""
        if self._closed or self._thread is None:
            self._closed = True
            return
        self._closed = True
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)
        self._model = self._adapters = self._scheduler = None

    async def extend(
        self,
        parent: Cursor | None,
        token_ids: Sequence[int],
        *,
        mounts: tuple[Mount, ...],
        policy_version: int,
        score_from: int | None = None,
    ) -> Cursor:
        """Append tokens and keep K/V and recurrent state at their end; see `Engine.extend`.

        Raises:
            InvalidRequest: A token, span or `score_from` that cannot be computed.
            BudgetExhausted: The cursor would pass the model's positions.
            ResourceExhausted: No room, and nothing that may be evicted.
            EngineError: The forward pass failed.
            AdapterError: `policy_version` is not loaded.
        """
        tokens = tuple(token_ids)
        first = len(tokens) if score_from is None else score_from
        cursor = child_cursor(
            parent,
            tokens,
            mounts=mounts,
            policy_version=policy_version,
            sampled=tuple(index >= first for index in range(len(tokens))),
        )
        check_cursor(self.info, cursor)
        if score_from is None:
            await self._result(
                lambda receive: ExtendRequest(
                    version=policy_version, receive=receive, target=cursor
                )
            )
            return cursor
        lowest = 0 if parent is not None else 1
        if not lowest <= score_from <= len(tokens):
            raise InvalidRequest(
                "score_from names no token that something predicts",
                value=score_from,
                limit=f"{lowest} to {len(tokens)}",
            )
        request = await self._result(
            lambda receive: ScoreRequest(
                version=policy_version, receive=receive, target=cursor, score_from=score_from
            )
        )
        return replace(cursor, sampled_logprobs=tuple(request.logprobs))

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
            EngineError: The forward pass failed.
            AdapterError: `policy_version` is not loaded.
        """
        check_sampling(sampling, can_detokenize=self._detokenize is not None)
        prompt = child_cursor(
            parent, tuple(prompt_token_ids), mounts=parent.mounts, policy_version=policy_version
        )
        room = check_cursor(self.info, prompt, num_more=1)
        received: asyncio.Queue[Any] = asyncio.Queue()
        request = GenerateRequest(
            version=policy_version,
            receive=received.put_nowait,
            prompt=prompt,
            sampling=sampling,
            stop_token_ids=stop_token_ids,
            max_tokens=min(sampling.max_tokens, room),
            generator=random.Random(sampling.seed),
        )
        is_over = False
        try:
            await self._call(lambda scheduler: scheduler.add(request))
            while not is_over:
                item = await received.get()
                is_over = not isinstance(item, SampledToken)
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            if not is_over:
                await self._cancel(request)

    async def hand_over(self, turn: Cursor, shorter: Cursor) -> None:
        """Keep the residency of `turn` for `shorter`; see `Engine.hand_over`."""
        await self._call(lambda _: self._store.hand_over(turn, shorter))

    async def release(self, cursors: Sequence[Cursor]) -> None:
        """Drop the residency of `cursors`; what a running request reads goes when it ends."""
        await self._call(lambda _: self._store.release(cursors))

    async def evict(self, cursors: Sequence[Cursor]) -> None:
        """Drop the residency of `cursors` that no running request reads; rebuilt on use."""
        await self._call(lambda _: self._store.evict(cursors))

    async def load_adapter(self, version: int, path: str) -> None:
        """Load a PEFT folder as `version`; decodes go on, the switch falls between two steps.

        Raises:
            AdapterError: Version taken, or a tensor missing, unknown or wrongly shaped; nothing
                changed.
        """
        model, adapters = self._model, self._adapters
        if model is None or adapters is None:
            raise Unavailable("the engine is not running", remedy=_ELSEWHERE)
        adapter = await asyncio.to_thread(
            read_adapter,
            path,
            model.module,
            model_path=self._model_path,
            model_hash=self.info.model_hash,
        )

        def bind(_: Scheduler) -> None:
            if version in adapters.versions:
                raise AdapterError(
                    "policy version is loaded already",
                    value=version,
                    limit="versions that are not loaded",
                )
            adapters.add(version, adapter)

        await self._call(bind)

    async def unload_adapter(self, version: int) -> None:
        """Drop a version and all residency computed under it.

        Raises:
            AdapterError: Not loaded, the base model, or in use by a running request.
        """

        def drop(scheduler: Scheduler) -> None:
            assert self._adapters is not None
            check_version(version, list(self._adapters.versions))
            if version == 0 or scheduler.serves(version):
                raise AdapterError(
                    "policy version cannot be unloaded",
                    value=version,
                    limit="an adapter that no running request uses",
                )
            self._adapters.remove(version)
            self._store.drop_version(version)

        await self._call(drop)

    async def adapter_checksums(self, version: int) -> dict[str, str]:
        """`tensor_checksum` of each tensor as it serves, keyed by its PEFT name."""

        def read(_: Scheduler) -> dict[str, str]:
            assert self._adapters is not None
            check_version(version, list(self._adapters.versions))
            return self._adapters.checksums(version)

        return await self._call(read)

    async def score(self, token_ids: Sequence[int], *, policy_version: int) -> tuple[float, ...]:
        """Log-probability of `token_ids[1:]` from a cold run that leaves nothing behind."""
        check_probe(self.info, token_ids)
        cursor = child_cursor(None, tuple(token_ids), mounts=(), policy_version=policy_version)
        request = await self._result(
            lambda receive: ScoreRequest(
                version=policy_version, receive=receive, target=cursor, score_from=1, is_probe=True
            )
        )
        return tuple(request.logprobs)

    def stats(self) -> EngineStats:
        """Occupancy and counters after the worker's last step."""
        if self._stats is None:
            raise Unavailable("the engine has not been started", remedy="await start() first")
        return self._stats

    async def _result(self, make: Callable[[Callable[[Any], None]], _R]) -> _R:
        """Run a request to its end; cancelling the caller cancels it and drops its cursor."""
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        request = make(lambda item: _settle(done, item))
        try:
            await self._call(lambda scheduler: scheduler.add(request))
            await done
        except asyncio.CancelledError:
            await self._cancel(request)
            raise
        return request

    async def _cancel(self, request: Request) -> None:
        if not self._closed:
            await asyncio.shield(self._call(lambda scheduler: scheduler.cancel(request)))

    async def _call(self, function: Callable[[Scheduler], _T]) -> _T:
        """Run `function` on the worker, between two steps."""
        loop, scheduler = self._loop, self._scheduler
        if self._closed or loop is None or scheduler is None:
            raise Unavailable("the engine is not running", remedy=_ELSEWHERE)
        future: asyncio.Future[_T] = loop.create_future()

        def run() -> None:
            try:
                result = function(scheduler)
            except Exception as error:  # handed to the caller whole
                loop.call_soon_threadsafe(_settle, future, error)
            else:
                self._stats = scheduler.stats()
                loop.call_soon_threadsafe(_settle, future, result)

        self._commands.put(run)
        return await future

    def _load(self) -> None:
        self._model = StripModel(
            self._model_path,
            device=self._device,
            dtype=self._dtype,
            head_dtype=self._head_dtype,
            mount_layers=self._mount_layers,
        )
        self._adapters = AdapterSlots(self._model.module, self._model.device)
        self._scheduler = Scheduler(
            self._model,
            self._adapters,
            self._store,
            max_num_seqs=self._max_num_seqs,
            max_step_tokens=_STEP_TOKENS.get(self._model.device.type, _STEP_TOKENS["cpu"]),
            detokenize=self._detokenize,
        )
        self._stats = self._scheduler.stats()
        self._info = EngineInfo(
            name="transformers",
            model=self._model_path,
            model_hash=model_hash(self._model_path),
            vocab_size=self._model.vocab_size,
            max_positions=int(self._model.config.max_position_embeddings),
            mount_layers=self._model.mount_layers,
            page_tokens=PAGE_TOKENS,
            dtype=str(self._model.dtype).removeprefix("torch."),
            head_dtype=str(self._model.head_dtype).removeprefix("torch."),
        )

    def _work(self) -> None:
        """The worker's loop: commands, then one step, until closed."""
        scheduler = self._scheduler
        assert scheduler is not None
        while True:
            for command in self._next_commands(scheduler.has_work):
                if command is None:
                    self._deliver(scheduler.fail_all(_closed()))
                    return
                command()
            if scheduler.has_work:
                deliveries = _step(scheduler)
                self._stats = scheduler.stats()
                self._deliver(deliveries)

    def _next_commands(self, has_work: bool) -> list[Callable[[], object] | None]:
        """What has been asked since; waits for something where there is nothing to compute."""
        commands = [] if has_work else [self._commands.get()]
        while True:
            try:
                commands.append(self._commands.get_nowait())
            except queue.Empty:
                return commands

    def _deliver(self, deliveries: list[Delivery]) -> None:
        if deliveries and self._loop is not None:
            self._loop.call_soon_threadsafe(_receive_all, deliveries)


_R = TypeVar("_R", bound=Request)


def _closed() -> Unavailable:
    return Unavailable("the engine was closed", remedy=_ELSEWHERE)


def _step(scheduler: Scheduler) -> list[Delivery]:
    try:
        return scheduler.step()
    except Exception as error:  # the boundary: a fault of ours must not leave callers waiting
        _log.exception("scheduler step failed")
        return scheduler.fail_all(EngineError(f"scheduler step failed: {error}"))


def _receive_all(deliveries: list[Delivery]) -> None:
    for request, item in deliveries:
        request.receive(item)


def _settle(future: asyncio.Future[Any], item: Any) -> None:
    """Give a caller that may have left its result or error."""
    if future.done():
        return
    if isinstance(item, Exception):
        future.set_exception(item)
    else:
        future.set_result(item)
