"""One request or command at a time to the engine process, in this project's errors."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import pickle
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from harness_sdk.errors import (
    AdapterError,
    ConfigError,
    HarnessError,
    InvalidRequest,
    Unavailable,
)
from harness_sdk.types import FinishReason, StructuredOutput
from rollout_service.background import Background
from rollout_service.engine.vllm.gate import call_number
from rollout_service.engine.vllm.lora import LoraSpec
from rollout_service.engine.vllm.plan import EXTRA_ARG, AttachPlan
from rollout_service.engine.vllm.process import EngineProcess
from rollout_service.engine.vllm.room import NotReady, PoolFull, PoolUse, ResidencyMissing
from rollout_service.engine.vllm.stops import STOP_ARG, Detokenize
from rollout_service.engine.vllm.wire import COMMAND, LOAD_DETOKENIZER, RESULT_KEY

_GIVING_BACK = ("release", "evict", "unpin")
"""Commands that a process which has ended leaves nothing to do for."""
_LOGPROBS_OF_SAMPLED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How a run ended and what it left."""

    finish_reason: FinishReason
    num_computed: int
    """Rows that it had at the end, those that it was given included."""
    num_kept: int | None
    """Rows that its residency holds; None where it holds nothing."""


@dataclass(slots=True, kw_only=True)
class Output:
    """What one step, or the steps since the last one taken, made of a request."""

    token_ids: list[int]
    logprobs: list[dict[int, float]]
    """For each token: its log-probability and those asked for."""
    prompt_logprobs: list[float]
    """Of the prompt's tokens after the first; with the last output's first token."""
    end: RunEnd | None
    """With the last output of a run that was not cut short."""


class CoreClient:
    """vLLM's `AsyncLLM`, spoken to in plans."""

    def __init__(
        self, llm: Any, process: EngineProcess, on_evicted: Callable[[Iterable[int]], None]
    ) -> None:
        """Speak to `llm`; `on_evicted` hears of evicted residencies, of some more than once."""
        self._llm = llm
        self._process = process
        # Looked up when the engine was launched; vLLM reads its environment when imported.
        self._seams: Any = importlib.import_module("rollout_service.engine.vllm.seams")
        self._on_evicted = on_evicted
        self._num_evicted = 0
        """Evictions heard of."""
        self._numbers = itertools.count(1)
        self._background = Background()
        self.use = PoolUse()

    @property
    def dtype(self) -> str:
        """Type of the weights, as vLLM resolved what it was asked for."""
        return str(self._llm.model_config.dtype).removeprefix("torch.")

    @property
    def head_dtype(self) -> str:
        """Type of the logits, as vLLM resolved what it was asked for."""
        return str(self._llm.model_config.head_dtype).removeprefix("torch.")

    def on_step(self, kv_use: float) -> None:
        """Each step's pool use, from vLLM's statistics."""
        self.use.free = round(self.use.total * (1 - kv_use))

    async def stream(
        self,
        plan: AttachPlan,
        prompt: Sequence[int],
        *,
        lora: Any = None,
        score_prompt: bool = False,
        stop: Sequence[str] = (),
        structured: StructuredOutput | None = None,
        **sampling: Any,
    ) -> AsyncGenerator[Output]:
        """Compute `prompt` on top of a plan's rows and sample; closing aborts.

        Args:
            plan: What is there already, and who keeps the rest.
            prompt: Token ids to compute.
            lora: vLLM's handle of an adapter.
            score_prompt: Whether the prompt's log-probabilities are wanted.
            stop: Strings that end the request.
            structured: What the sampled text must be.
            sampling: Sampling parameters of vLLM.

        Raises:
            InvalidRequest: vLLM refuses the parameters.
            NotReady: The plan reads what was evicted meanwhile, or there is no room.
            EngineError: The engine failed.
            Unavailable: The engine process has ended.
        """
        if self._process.has_ended:
            # Its client has nobody left to wait for, and may not say so.
            raise self._process.failure(RuntimeError("no process"))
        if plan.num_rows + len(prompt) >= self._llm.model_config.max_model_len:
            raise PoolFull(self.use)
        params = self._seams.SamplingParams(
            extra_args={EXTRA_ARG: plan.to_wire(), STOP_ARG: list(stop)},
            detokenize=False,
            # A constraint may end with the model's own ends of sequence beside the stop ids.
            ignore_eos=structured is None,
            output_kind=self._seams.RequestOutputKind.DELTA,
            prompt_logprobs=_LOGPROBS_OF_SAMPLED if score_prompt else None,
            structured_outputs=None if structured is None else self._constraint(structured),
            **sampling,
        )
        stream = self._llm.generate(
            {"prompt_token_ids": list(prompt)},
            params,
            f"octopus-{next(self._numbers)}",
            lora_request=lora,
            priority=call_number.get(),
        )
        is_over, num_sampled = False, 0
        try:
            async for raw in stream:
                is_over = raw.finished
                self._take_report(raw.kv_transfer_params)
                if raw.outputs[0].finish_reason in ("error", "abort"):
                    await self._raise_cause(plan)
                output = _output(raw)
                num_sampled += len(output.token_ids)
                is_cut = output.end is not None and output.end.finish_reason == "length"
                if is_cut and num_sampled < sampling["max_tokens"]:
                    await self.command("release", [] if plan.keep_as is None else [plan.keep_as])
                    raise PoolFull(self.use)
                yield output
        except NotReady:
            raise
        except self._seams.Refusal as error:
            is_over = True
            raise InvalidRequest(f"vLLM refuses the request: {error}") from error
        except Exception as error:
            is_over = True
            raise self._process.failure(error) from error
        finally:
            if not is_over:
                await stream.aclose()
                # Comes back after the abort was carried out: then its pages are free.
                await self.command("release", [] if plan.keep_as is None else [plan.keep_as])

    async def command(self, operation: str, residencies: Sequence[int] = ()) -> list[int]:
        """`release`, `evict`, `missing`, `pin`, `unpin` or `usage`; returns what is gone.

        Raises:
            Unavailable: The engine process has ended.
        """
        try:
            report = await self._process.answer(
                self._llm.engine_core.call_utility_async(
                    COMMAND, operation, list(residencies), self._num_evicted
                )
            )
        except Exception as error:
            if operation in _GIVING_BACK and self._process.has_ended:
                return list(residencies)
            raise self._process.failure(error) from error
        self._take_report({RESULT_KEY: report})
        return list(report["gone"])

    async def load_detokenizer(self, detokenize: Detokenize) -> None:
        """Let the core read the tokens of requests that have stop strings.

        Raises:
            ConfigError: It cannot be sent to another process.
        """
        try:
            pickled = pickle.dumps(detokenize)
        except Exception as error:
            raise ConfigError(
                "detokenize cannot be sent to the engine process",
                value=f"{detokenize!r}: {error}",
                limit="what pickle takes: a module's function, or a method of a picklable object",
            ) from error
        await self._process.answer(
            self._llm.engine_core.call_utility_async(LOAD_DETOKENIZER, pickled)
        )

    async def load_lora(self, version: int, path: str) -> Any:
        """Load a PEFT folder between two steps; returns the handle that requests carry.

        Raises:
            AdapterError: vLLM refused it; nothing changed.
        """
        request = self._seams.LoRARequest(
            lora_name=f"version-{version}", lora_int_id=version, lora_path=path
        )
        try:
            await self._process.answer(self._llm.add_lora(request))
        except asyncio.CancelledError:
            # The core loads it all the same, into a slot that nobody would know of.
            self._background.begin(self._take_back_lora(version))
            raise
        except Unavailable:
            raise
        except Exception as error:
            raise AdapterError(f"vLLM refused the adapter: {error}", value=path) from error
        return request

    async def unload_lora(self, version: int) -> None:
        """Free a version's buffers."""
        await self._process.answer(self._llm.remove_lora(version))

    async def _take_back_lora(self, version: int) -> None:
        with contextlib.suppress(HarnessError):
            await self.unload_lora(version)

    async def hash_lora(self, version: int, specs: Sequence[LoraSpec]) -> None:
        """Begin to hash a version's serving buffers as they are now; steps go on meanwhile."""
        await self._on_workers("octopus_hash_lora", version, [list(spec) for spec in specs])

    async def lora_checksums(self, version: int) -> dict[str, tuple[str, str]]:
        """What was hashed, lora_A and lora_B by module; steps wait for what is not hashed yet."""
        served = await self._on_workers("octopus_lora_checksums", version)
        return {name: (down, up) for name, (down, up) in served.items()}

    async def _on_workers(self, method: str, *args: Any) -> Any:
        # Every rank takes part, and each knows the whole.
        first, *_ = await self._process.answer(self._llm.collective_rpc(method, args=args))
        return first

    def _constraint(self, structured: StructuredOutput) -> Any:
        return self._seams.StructuredOutputsParams(
            json=structured.json_schema or None,
            regex=structured.regex or None,
            choice=list(structured.choice) or None,
            grammar=structured.grammar or None,
        )

    async def _raise_cause(self, plan: AttachPlan) -> None:
        missing = await self.command("missing", plan.reads())
        if missing:
            raise ResidencyMissing(missing)
        raise PoolFull(self.use)

    def _take_report(self, params: Any) -> None:
        report = (params or {}).get(RESULT_KEY)
        if report is None:
            return
        self.use.take(report)
        self._on_evicted(report["evicted"])
        self._num_evicted = max(self._num_evicted, report["num_evicted"])


def _output(raw: Any) -> Output:
    completion = raw.outputs[0]
    return Output(
        token_ids=list(completion.token_ids),
        logprobs=[
            {token: entry.logprob for token, entry in position.items()}
            for position in completion.logprobs or []
        ],
        prompt_logprobs=[
            # The prompt's own token comes first of a position's entries.
            next(iter(position.values())).logprob
            for position in raw.prompt_logprobs or []
            if position
        ],
        end=_end(completion.finish_reason, raw.kv_transfer_params),
    )


def _end(finish_reason: FinishReason | None, params: Any) -> RunEnd | None:
    if finish_reason is None:
        return None
    report = params[RESULT_KEY]
    return RunEnd(
        finish_reason=finish_reason, num_computed=report["computed"], num_kept=report["kept"]
    )
