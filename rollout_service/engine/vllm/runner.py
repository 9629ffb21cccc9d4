"""vLLM's model runner with cursors: row copies before a step, positions within it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout_service.engine.vllm.ahead import EndedRows
from rollout_service.engine.vllm.batch_plans import BatchPlans
from rollout_service.engine.vllm.blocks import block_regions
from rollout_service.engine.vllm.copies import COPIES_ATTRIBUTE
from rollout_service.engine.vllm.groups import (
    check_groups,
    check_parallelism,
    is_recurrent,
    reads_mounts,
    split_layers,
)
from rollout_service.engine.vllm.launch import MOUNT_LAYERS_KEY
from rollout_service.engine.vllm.mount_free import HiddenRows, MountFreeGroup, MountFreeTable
from rollout_service.engine.vllm.placeholders import TokenTable
from rollout_service.engine.vllm.seams import (
    GPUModelRunner,
    LogitsProcessorWithLoRA,
    adopt,
    require_attributes,
)
from rollout_service.engine.vllm.step_copier import GroupCaches, LaunchedCopier, StepCopier

_PARTS = (list, tuple)
"""A recurrent layer's states; an attention layer's cache is one tensor."""


class CursorRunner(GPUModelRunner):
    """What a model runner does more for requests that carry a plan."""

    def start_cursors(self, *, is_ahead: bool) -> None:
        """Check what the methods below read; called once the runner was built.

        Args:
            is_ahead: Whether steps are scheduled before the one before them has ended.
        """
        require_attributes(
            self, "requests", "input_batch", "positions", "uses_mrope", "max_model_len"
        )
        require_attributes(self, "compilation_config", "num_prompt_logprobs", "max_num_reqs")
        require_attributes(self, "input_ids", "query_start_loc", "device")
        self._ended_rows = EndedRows() if is_ahead else None
        self._copier: StepCopier | None = None
        self._hidden_rows: HiddenRows | None = None
        self._row_indices: Tensor | None = None
        self._plans = BatchPlans(self.device)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """Layers that read mounts and layers that do not in groups of their own."""
        mount_layers = self.vllm_config.additional_config[MOUNT_LAYERS_KEY]
        return split_layers(super().get_kv_cache_spec(), mount_layers)

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """Shorten the tables of mount-free groups, once the groups are known."""
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        self.input_batch.token_ids_cpu = self.input_batch.token_ids_cpu.view(TokenTable)
        groups = self.kv_cache_config.kv_cache_groups
        check_groups(groups, self.get_kv_cache_spec())
        mount_free = [i for i, g in enumerate(groups) if not reads_mounts(g.kv_cache_spec)]
        check_parallelism(self.parallel_config, has_mount_free=bool(mount_free))
        self._hidden_rows = HiddenRows(self.max_num_reqs, self.device) if mount_free else None
        for index in mount_free:
            table = self.input_batch.block_table[index]
            adopt(table, MountFreeTable)
            table.hidden = self._hidden_rows
            for group in self.attn_groups[index]:
                adopt(group, MountFreeGroup)
                group.hidden = self._hidden_rows

    def _update_states(self, scheduler_output: Any) -> Any:
        """Zero and copy after vLLM zeroed fresh pages, before anything is computed."""
        self._plans.forget(scheduler_output.finished_req_ids)
        result = super()._update_states(scheduler_output)
        copies = getattr(scheduler_output, COPIES_ATTRIBUTE, None)
        if copies is not None and (copies.blocks or copies.rows or copies.zeroed):
            assert self._copier is not None
            self._copier.copy(copies)
        return result

    def start_copier(self) -> None:
        """Find the memory of every layer; called once the caches are there to stay."""
        layers = self.compilation_config.static_forward_context
        groups = [
            (g.kv_cache_spec, [layers[name].kv_cache for name in g.layer_names])
            for g in self.kv_cache_config.kv_cache_groups
        ]
        caches = [cache for _, of_group in groups for cache in of_group]
        first = [min(c, key=Tensor.data_ptr) if isinstance(c, _PARTS) else c for c in caches]
        self._copier = self._make_copier(
            block_regions(first, self.kv_cache_config.num_blocks),
            [
                GroupCaches(
                    page_rows=spec.block_size, caches=[] if is_recurrent(spec) else of_group
                )
                for spec, of_group in groups
            ],
        )

    def _make_copier(self, regions: list[Tensor], groups: list[GroupCaches]) -> StepCopier:
        return LaunchedCopier(regions, groups)

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        """Turn row indices into rotary positions, once pages have been found by row index."""
        self._plans.take(self.input_batch.req_ids, self.requests)
        if self._hidden_rows is not None:
            self._hidden_rows.set(self._plans.num_mounted)
        result = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        offsets = self._plans.token_offsets(num_scheduled_tokens)
        if offsets is not None:
            self.positions[: len(offsets)] += offsets
        if self._ended_rows is not None:
            groups = self.kv_cache_config.kv_cache_groups
            states = [i for i, group in enumerate(groups) if is_recurrent(group.kv_cache_spec)]
            self._ended_rows.shield(self, num_scheduled_tokens, states)
        return result

    def _init_mrope_positions(self, req_state: Any) -> None:
        """Positions of a prompt along several rotary axes: its rows' indices along all alike.

        vLLM would count a context's rows for every request.
        """
        if self._row_indices is None:
            self._row_indices = torch.arange(self.max_model_len).expand(3, -1)
        req_state.mrope_positions, req_state.mrope_position_delta = self._row_indices, 0

    def _calc_mrope_positions(self, scheduler_output: Any) -> None:
        """The same for models with several rotary axes; text moves along all alike."""
        super()._calc_mrope_positions(scheduler_output)
        offsets = self._plans.offsets
        if offsets.any():
            counts = [scheduler_output.num_scheduled_tokens[r] for r in self.input_batch.req_ids]
            per_token = np.repeat(offsets, counts)
            self.mrope_positions.np[:, : len(per_token)] += per_token

    def _get_prompt_logprobs_dict(self, hidden_states: Any, num_scheduled_tokens: Any) -> Any:
        """Only the new tokens' rows: those in front were computed elsewhere."""
        if not self.num_prompt_logprobs:
            return {}
        for request_id in self.num_prompt_logprobs:
            # vLLM gathers by them, and keeps them meanwhile.
            state = self.requests[request_id]
            state.prompt_token_ids = np.array(state.prompt_token_ids, dtype=np.int64)
        with self._plain_head():
            found = super()._get_prompt_logprobs_dict(hidden_states, num_scheduled_tokens)
        for request_id, tensors in found.items():
            plan = self._plans.plan(request_id, self.requests)
            if plan is not None and tensors is not None:
                found[request_id] = type(tensors)(
                    *(None if t is None else t[plan.num_rows :] for t in tensors)
                )
        return found

    @contextmanager
    def _plain_head(self) -> Iterator[None]:
        """Logits of more rows than are sampled, without the adapters' part in the output head.

        vLLM 0.32.0 looks adapters up by sampled row there; ours never target the head.
        """
        heads = [m for m in self.get_model().modules() if isinstance(m, LogitsProcessorWithLoRA)]
        for head in heads:
            head._get_logits = head.base_layer._get_logits
        try:
            yield
        finally:
            for head in heads:
                del head._get_logits

    def _dummy_run(self, *args: Any, **kwargs: Any) -> Any:
        """Warm-up and captured batches are no requests'."""
        if self._hidden_rows is not None:
            self._hidden_rows.set(np.zeros(0, dtype=np.int32))
        return super()._dummy_run(*args, **kwargs)
