"""vLLM's scheduler with cursors: requests begin on shared blocks and leave theirs to a residency.

Runs in the engine core's process, where `scheduler_cls` names it.

Fairness: waiting requests are served by the number of their call (`gate.call_number`), preempted
ones among them, and the newest call's request is preempted first. So nothing that a later call asks
begins before what an earlier one does; only a request whose grammar is being compiled lets others
pass. One that reads what is gone, or that keeps all others from moving, is ended with an error
before it has begun, and its caller comes again.
"""

from __future__ import annotations

import itertools
from typing import Any

from rollout_service.engine.vllm.copies import COPIES_ATTRIBUTE
from rollout_service.engine.vllm.groups import is_recurrent, reads_mounts
from rollout_service.engine.vllm.mount_free import MountFreeManager
from rollout_service.engine.vllm.placeholders import own_rows
from rollout_service.engine.vllm.plan import AttachPlan, plan_from_wire
from rollout_service.engine.vllm.registry import CursorRegistry, Group
from rollout_service.engine.vllm.seams import (
    AsyncScheduler,
    KVCacheManager,
    RequestStatus,
    Scheduler,
    add_utility,
    adopt,
    require_attributes,
)
from rollout_service.engine.vllm.stops import STOP_ARG, StopStrings

COMMAND = "octopus_cursors"
"""Name of the core's utility call that carries cursor commands."""
LOAD_DETOKENIZER = "octopus_detokenizer"
"""Name of the one that brings the decoder for stop strings."""
RESULT_KEY = "octopus"
"""Where a finished request's report lies in its `kv_transfer_params`."""


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


class CursorScheduler(Scheduler):
    """vLLM's scheduler; a request that carries a plan reads and leaves residencies."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        require_attributes(
            self, "kv_cache_manager", "requests", "running", "waiting", "grammar_compile_error_reqs"
        )
        adopt(self.kv_cache_manager, CursorKVCacheManager)
        self.registry: CursorRegistry = self.kv_cache_manager.adopt_registry()
        self.stops = StopStrings()
        self.num_host_pins = 0
        self.num_preemptions = 0

    def add_request(self, request: Any) -> None:
        """Queue a request; what it reads is pinned until it ends.

        One that reads an evicted residency ends with an error, and its caller rebuilds.
        """
        plan = plan_from_wire(request.sampling_params and request.sampling_params.extra_args)
        request.octopus_plan = plan
        if plan is not None:
            own_rows(request, plan.num_rows)
            if self.registry.missing(plan):
                self.grammar_compile_error_reqs.add(request.request_id)
            else:
                self.registry.pin(plan.reads())
                request.octopus_pinned = True
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """One step."""
        output = super().schedule(*args, **kwargs)
        setattr(output, COPIES_ATTRIBUTE, self.registry.take_copies())
        if not (output.num_scheduled_tokens or self.running or self.grammar_compile_error_reqs):
            self._end_the_newest(list(self.waiting))
        return output

    def usage(self) -> dict[str, Any]:
        """Occupancy now, and what was evicted since the last report."""
        pool = self.kv_cache_manager.block_pool
        return {
            **self.registry.usage(),
            "page_rows": self.registry.page_rows,
            "blocks_per_page": self.registry.blocks_per_page,
            # One block is vLLM's null block.
            "total": pool.num_gpu_blocks - 1,
            "free": pool.get_num_free_blocks(),
            "evicted": self.registry.take_evicted(),
            "preemptions": self.num_preemptions,
            "foreign": self.kv_cache_manager.num_foreign_blocks,
        }

    def _end_the_newest(self, waiting: list[Any]) -> None:
        """Where none of `waiting` can move, let go of what the newest keeps from eviction.

        One whose grammar is being compiled will move. The last one stays while the host keeps
        residencies too: they go with the request that it keeps them for, which will wait behind.
        """
        if any(self._is_blocked_waiting_status(request.status) for request in waiting):
            return
        if len(waiting) > 1 or (waiting and not self.num_host_pins):
            self.grammar_compile_error_reqs.add(waiting[-1].request_id)

    def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
        """Count it; what the request reads stays pinned, so it can attach again."""
        self.num_preemptions += 1
        super()._preempt_request(*args, **kwargs)

    def _update_request_with_output(
        self, request: Any, new_token_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        """Also end where a stop string does."""
        new_token_ids, stopped = super()._update_request_with_output(
            request, new_token_ids, *args, **kwargs
        )
        stops = (request.sampling_params.extra_args or {}).get(STOP_ARG)
        if stops and request.status != RequestStatus.FINISHED_STOPPED:
            found = self.stops.completed(stops, request.output_token_ids)
            if found is not None:
                request.status, request.stop_reason = RequestStatus.FINISHED_STOPPED, found
                stopped = True
        return new_token_ids, stopped

    def _free_request(self, request: Any, delay_free_blocks: bool = False) -> tuple[Any, Any]:
        num_computed, num_kept = request.num_computed_tokens, _rows_to_keep(request)
        _, other = super()._free_request(request, delay_free_blocks)
        return {RESULT_KEY: {**self.usage(), "computed": num_computed, "kept": num_kept}}, other

    def _free_blocks(self, request: Any) -> None:
        """At the end of a turn hand the blocks over instead of freeing them."""
        plan, num_rows = plan_of(request), _rows_to_keep(request)
        if plan is not None and plan.keep_as is not None and num_rows is not None:
            blocks = self.kv_cache_manager.pop_blocks(request)
            self.registry.keep(plan, blocks, num_rows, version_of(request))
        if plan is not None and getattr(request, "octopus_pinned", False):
            request.octopus_pinned = False
            self.registry.unpin(plan.reads())
        super()._free_blocks(request)


class AheadCursorScheduler(CursorScheduler, AsyncScheduler):
    """The same where the core schedules a step before it has seen the last one's tokens."""


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


def _rows_to_keep(request: Any) -> int | None:
    """Rows that a finished request leaves to its residency; None where it leaves nothing.

    They end at its last token or in front of it. A step scheduled ahead has computed that token,
    never one behind it; `EndedRows` keeps a stop id out of the recurrent states.
    """
    if request.status not in (
        RequestStatus.FINISHED_STOPPED,
        RequestStatus.FINISHED_LENGTH_CAPPED,
    ):
        return None
    num_rows, num_trailing = request.num_computed_tokens, request.num_tokens - 1
    if request.output_token_ids[-1] in (request.sampling_params.stop_token_ids or ()):
        num_rows = min(num_rows, num_trailing)
    # Preempted while its last token was under way: nothing of it is left.
    return num_rows if num_rows >= num_trailing else None


def _command(core: Any, operation: str, residency_ids: list[int]) -> dict[str, Any]:
    """A cursor command; processed between two steps, in the order in which calls were sent."""
    scheduler: CursorScheduler = core.scheduler
    registry = scheduler.registry
    gone: list[int] = []
    if operation == "release":
        registry.release(residency_ids)
    elif operation == "evict":
        gone = registry.evict(residency_ids)
    elif operation == "missing":
        gone = registry.absent(residency_ids)
    elif operation == "pin":
        gone = registry.absent(residency_ids)
        if not gone:
            registry.pin(residency_ids)
            scheduler.num_host_pins += len(residency_ids)
    elif operation == "unpin":
        registry.unpin(residency_ids)
        scheduler.num_host_pins -= len(residency_ids)
    else:
        assert operation == "usage", operation
    return {**scheduler.usage(), "gone": gone}


def _load_detokenizer(core: Any, pickled: bytes) -> None:
    core.scheduler.stops.load(pickled)


add_utility(COMMAND, _command)
add_utility(LOAD_DETOKENIZER, _load_detokenizer)
