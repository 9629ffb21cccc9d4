"""vLLM's KV cache manager with cursors: a request begins on the blocks of a plan."""

from __future__ import annotations

import itertools
from typing import Any

from rollout_service.engine.vllm.groups import is_recurrent, reads_mounts
from rollout_service.engine.vllm.mount_free import MountFreeManager
from rollout_service.engine.vllm.plan import AttachPlan
from rollout_service.engine.vllm.registry import CursorRegistry
from rollout_service.engine.vllm.residency import Group
from rollout_service.engine.vllm.seams import KVCacheManager, adopt, require_attributes


class CursorKVCacheManager(KVCacheManager):
    """Attaches a plan's blocks where a request is first scheduled, and again after preemption."""

    def adopt_registry(self) -> CursorRegistry:
        """Make the registry over this manager's groups and pool."""
        require_attributes(self, "coordinator", "block_pool", "empty_kv_cache_blocks")
        self.num_foreign_blocks = 0
        managers = self.coordinator.single_type_managers
        self.registry = CursorRegistry([_group(m) for m in managers], self.block_pool)
        for manager, group in zip(managers, self.registry.groups, strict=True):
            if not group.reads_mounts:
                adopt(manager, MountFreeManager)
                manager.start()
        return self.registry

    def get_computed_blocks(self, request: Any) -> tuple[Any, int, int]:
        """A plan's rows count as computed; nothing else is shared."""
        plan = plan_of(request)
        if plan is None:
            return super().get_computed_blocks(request)
        return self.empty_kv_cache_blocks, plan.num_rows, 0

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Room for new tokens, evicting residencies where the pool is short of it."""
        plan = plan_of(request)
        if plan is not None and request.num_computed_tokens == 0:
            return self._first_slots(request, plan, num_new_tokens, *args, **kwargs)
        num_tokens = request.num_computed_tokens + num_new_computed_tokens + num_new_tokens
        self.registry.make_room(self._num_missing(request, num_tokens))
        return super().allocate_slots(
            request, num_new_tokens, num_new_computed_tokens, *args, **kwargs
        )

    def pop_blocks(self, request: Any) -> list[list[Any]]:
        """A request's blocks by group; forgotten here, still referenced."""
        return [
            manager.pop_blocks_for_free(request.request_id)
            for manager in self.coordinator.single_type_managers
        ]

    def _first_slots(
        self, request: Any, plan: AttachPlan, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        managers = self.coordinator.single_type_managers
        # Pages of the new tokens: the last attached page may have room, so this may ask for one
        # too many, never for too few.
        more = sum(
            -(-max(num_new_tokens, request.num_tokens - plan.num_rows) // m.block_size)
            for m in managers
            if not is_recurrent(m.kv_cache_spec)
        )
        if self.registry.missing(plan) or not self.registry.make_room(
            self.registry.num_new_blocks(plan) + more
        ):
            return None
        version = version_of(request)
        self.num_foreign_blocks += self.registry.num_foreign_blocks(plan, version)
        copies = self.registry.copies
        mark = copies.mark()
        tables = self.registry.attach(plan)
        filled = {target for _, _, target in copies.blocks[mark[0] :]}
        for manager, table in zip(managers, tables, strict=True):
            manager.req_to_blocks[request.request_id] = table
            if isinstance(manager, MountFreeManager):
                manager.hide(request.request_id, plan.num_mounted)
            manager.num_cached_block[request.request_id] = 0
            if manager.records_new_block_ids:
                # Rows of a fresh page that nothing fills must not hold another run's numbers. Fresh
                # pages come last; one that is copied whole is filled.
                fresh = itertools.takewhile(lambda b: b.ref_cnt == 1, reversed(table))
                manager.new_block_ids += [b.block_id for b in fresh if b.block_id not in filled]
        slots = super().allocate_slots(request, num_new_tokens, plan.num_rows, *args, **kwargs)
        if slots is None:
            copies.undo(mark)
            self.free(request)
        return slots

    def _num_missing(self, request: Any, num_tokens: int) -> int:
        name, count = request.request_id, 0
        for manager in self.coordinator.single_type_managers:
            is_shorter = isinstance(manager, MountFreeManager)
            num_rows = manager.num_rows(name, num_tokens) if is_shorter else num_tokens
            num_missing = -(-num_rows // manager.block_size) - len(manager.req_to_blocks[name])
            count += max(num_missing, 0)
        return count


def _group(manager: Any) -> Group:
    spec = manager.kv_cache_spec
    return Group(
        is_recurrent=is_recurrent(spec),
        page_rows=manager.block_size,
        reads_mounts=reads_mounts(spec),
    )


def plan_of(request: Any) -> AttachPlan | None:
    """The plan that `add_request` found."""
    return getattr(request, "octopus_plan", None)


def version_of(request: Any) -> int:
    """The policy version that a request computes under."""
    return request.lora_request.lora_int_id if request.lora_request is not None else 0
