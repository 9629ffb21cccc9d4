"""vLLM's scheduler with cursors: requests begin on shared blocks and leave theirs to a residency.

Runs in the engine core's process, where `scheduler_cls` names it.

Fairness: waiting requests are served by the number of their call (`gate.call_number`), preempted
ones among them, and the newest call's request is preempted first. So nothing that a later call asks
begins before what an earlier one does; only a request whose grammar is being compiled lets others
pass. One that reads what is gone, or that keeps all others from moving, is ended with an error
before it has begun, and its caller comes again.
"""

from __future__ import annotations

from typing import Any

from rollout_service.engine.vllm.copies import COPIES_ATTRIBUTE
from rollout_service.engine.vllm.kv_manager import CursorKVCacheManager, plan_of, version_of
from rollout_service.engine.vllm.placeholders import own_rows
from rollout_service.engine.vllm.plan import plan_from_wire
from rollout_service.engine.vllm.registry import CursorRegistry
from rollout_service.engine.vllm.seams import (
    AsyncScheduler,
    RequestStatus,
    Scheduler,
    add_utility,
    adopt,
    require_attributes,
)
from rollout_service.engine.vllm.stops import STOP_ARG, StopStrings
from rollout_service.engine.vllm.wire import COMMAND, LOAD_DETOKENIZER, RESULT_KEY


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
        self.num_preempted_rows = 0

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
        """Occupancy now, and what was evicted."""
        pool = self.kv_cache_manager.block_pool
        return {
            **self.registry.usage(),
            "page_rows": self.registry.page_rows,
            "blocks_per_page": self.registry.blocks_per_page,
            # One block is vLLM's null block.
            "total": pool.num_gpu_blocks - 1,
            "free": pool.get_num_free_blocks(),
            **self.registry.evictions(),
            "preemptions": self.num_preemptions,
            "preempted_rows": self.num_preempted_rows,
            "foreign": self.kv_cache_manager.num_foreign_blocks,
        }

    def _end_the_newest(self, waiting: list[Any]) -> None:
        """Where none of `waiting` can move, let go of what the newest keeps from eviction.

        One whose grammar is being compiled will move. One that has sampled gives way last, for its
        caller cannot come again; alone it stays while the host keeps residencies, which go when
        the call that it keeps them for ends or comes again.
        """
        if any(self._is_blocked_waiting_status(request.status) for request in waiting):
            return
        afresh = [request for request in waiting if not request.num_output_tokens]
        if afresh or len(waiting) > 1 or (waiting and not self.num_host_pins):
            self.grammar_compile_error_reqs.add((afresh or waiting)[-1].request_id)

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """Count it; what the request reads stays pinned, so it can attach again."""
        plan = plan_of(request)
        self.num_preemptions += 1
        self.num_preempted_rows += request.num_computed_tokens - (plan.num_rows if plan else 0)
        super()._preempt_request(request, *args, **kwargs)

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


def _command(
    core: Any, operation: str, residency_ids: list[int], num_evicted: int
) -> dict[str, Any]:
    """A cursor command; processed between two steps, in the order in which calls were sent.

    Args:
        core: vLLM's engine core.
        operation: What to do.
        residency_ids: With what.
        num_evicted: Evictions that the caller knows of.
    """
    scheduler: CursorScheduler = core.scheduler
    registry = scheduler.registry
    registry.confirm(num_evicted)
    gone: list[int] = []
    if operation == "release":
        registry.release(residency_ids)
    elif operation == "evict":
        registry.evict(residency_ids)
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
