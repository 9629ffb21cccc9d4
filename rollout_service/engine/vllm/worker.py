"""vLLM's workers with cursors: the pool that was asked for, and what serves of an adapter.

Runs where the model is; `worker_cls` names the class for the platform.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from rollout_service.engine.head import head_logits
from rollout_service.engine.vllm.groups import is_recurrent
from rollout_service.engine.vllm.launch import POOL_KEY, Pool
from rollout_service.engine.vllm.lora import served_checksums, served_tensors
from rollout_service.engine.vllm.rows import PackedRows
from rollout_service.engine.vllm.runner import CursorRunner
from rollout_service.engine.vllm.seams import (
    GPUWorker,
    LogitsProcessor,
    adopt,
    all_gather,
    find_seam,
    get_kv_cache_groups,
    num_ranks,
    pool_bytes_per_block,
    require_attributes,
)
from rollout_service.engine.vllm.step_copier import GroupCaches, PlainCopier, StepCopier


class CursorWorker:
    """What a worker does more than vLLM's, on every platform."""

    model_runner: Any
    vllm_config: Any

    def octopus_pool_bytes(self) -> int | None:
        """Bytes of the pool that was asked for; None where memory sets it."""
        pool = (self.vllm_config.additional_config or {}).get(POOL_KEY)
        if pool is None:
            return None
        groups = get_kv_cache_groups(self.vllm_config, self.model_runner.get_kv_cache_spec())
        specs = [group.kv_cache_spec for group in groups]
        page_rows = [spec.block_size for spec in specs if not is_recurrent(spec)]
        block_bytes = pool_bytes_per_block(self.vllm_config, groups)
        return Pool(**pool).num_blocks(page_rows) * block_bytes

    def compile_or_warm_up_model(self) -> Any:
        """The copies too, so that no step waits for them."""
        result = super().compile_or_warm_up_model()  # type: ignore[misc]
        self.model_runner.start_copier()
        return result

    def octopus_hash_lora(self, version: int, specs: list[Any]) -> None:
        """Copy the serving buffers of a version and hash them on a thread: steps go on."""
        require_attributes(self.model_runner, "lora_manager")
        manager = self.model_runner.lora_manager
        require_attributes(manager, "_adapter_manager")
        adapters = manager._adapter_manager
        require_attributes(adapters, "lora_index_to_id", "modules", "packed_modules")
        served = served_tensors(adapters, version, specs, self._gather)
        self._hashes[version] = self._hasher.submit(served_checksums, served)

    def octopus_lora_checksums(self, version: int) -> dict[str, Any]:
        """What was hashed, by module; waits for the rest of it."""
        return self._hashes.pop(version).result()

    @cached_property
    def _hasher(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="octopus-lora")

    @cached_property
    def _hashes(self) -> dict[int, Future[dict[str, Any]]]:
        """By version, until they are asked for."""
        return {}

    @staticmethod
    def _gather(tensor: Any) -> Sequence[Any]:
        """Each rank's part of a tensor that they share."""
        return all_gather(tensor.contiguous(), dim=0).chunk(num_ranks(), 0)


class CursorGPUWorker(CursorWorker, GPUWorker):
    """The worker of GPUs."""

    def _make_model_runner(self) -> Any:
        runner = super()._make_model_runner()
        adopt(runner, CursorRunner)
        runner.start_cursors(is_ahead=runner.use_async_scheduling)
        return runner

    def determine_available_memory(self) -> int:
        """The pool that was asked for, where memory allows it."""
        available = super().determine_available_memory()
        asked = self.octopus_pool_bytes()
        return available if asked is None else min(available, asked)


def _cpu_worker() -> type:
    """The worker of CPUs; its module imports only where vLLM was built for them."""
    base = find_seam("vllm.v1.worker.cpu_worker:CPUWorker", "init_device")
    runner_base = find_seam("vllm.v1.worker.cpu_model_runner:CPUModelRunner")

    class CursorCPURunner(CursorRunner, runner_base):
        """`CursorRunner` over the CPU's."""

        def load_model(self, *args: Any, **options: Any) -> None:
            """With an output head that widens its weight a block at a time, not whole each step."""
            super().load_model(*args, **options)
            for module in self.get_model().modules():
                if isinstance(module, LogitsProcessor):
                    module._apply_head = partial(_apply_head, module)

        def _make_copier(self, regions: list[Tensor], groups: list[GroupCaches]) -> StepCopier:
            layers = self.compilation_config.static_forward_context.values()
            isa = next(layer.isa for layer in layers if hasattr(layer, "isa"))
            return PlainCopier(regions, groups, PackedRows(isa))

        def sample_tokens(self, grammar_output: Any) -> Any:
            """Leave the seeds of unfinished prefills out.

            Their draws are thrown away. vLLM 0.32.0 turns their generators back, which those of
            CPUs cannot: it ended the engine process.
            """
            generators = self.input_batch.generators
            unfinished = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0]
            hidden = {row: generators.pop(row) for row in unfinished.tolist() if row in generators}
            try:
                return super().sample_tokens(grammar_output)
            finally:
                generators.update(hidden)

    class CursorCPUWorker(CursorWorker, base):
        """The worker of CPUs."""

        def init_device(self) -> None:
            # The runner's overlap of steps is CUDA's: here one ends before the next begins, while
            # the core may be a step ahead.
            scheduling = self.vllm_config.scheduler_config
            is_ahead, scheduling.async_scheduling = scheduling.async_scheduling, False
            super().init_device()
            # In the core's own process the configuration is the core's too.
            scheduling.async_scheduling = is_ahead
            adopt(self.model_runner, CursorCPURunner)
            self.model_runner.start_cursors(is_ahead=is_ahead)

        def determine_available_memory(self) -> int:
            """The pool that was asked for: vLLM-CPU's own figure is a share of all memory."""
            available = super().determine_available_memory()
            return self.octopus_pool_bytes() or available

    return CursorCPUWorker


def _apply_head(processor: Any, lm_head: Any, hidden_states: Tensor, embedding_bias: Any) -> Tensor:
    if embedding_bias is not None or processor.head_dtype in (None, hidden_states.dtype):
        return LogitsProcessor._apply_head(processor, lm_head, hidden_states, embedding_bias)
    return head_logits(hidden_states, lm_head.weight, processor.head_dtype)


def __getattr__(name: str) -> Any:
    if name == "CursorCPUWorker":
        globals()[name] = _cpu_worker()
        return globals()[name]
    raise AttributeError(name)
