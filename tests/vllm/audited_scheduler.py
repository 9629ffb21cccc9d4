"""A scheduler whose core counts anew who holds which block, beside what its pool believes.

Runs in the engine core's process; `tests.vllm.audit` asks it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from rollout_service.engine.vllm.kv_manager import plan_of
from rollout_service.engine.vllm.scheduler import AheadCursorScheduler
from rollout_service.engine.vllm.seams import add_utility
from tests.vllm.audit import AUDIT

HANG = "octopus_test_hang"
"""A command that never ends."""
GATHER = "octopus_test_gather"
"""A command that ends when as many requests as it says have come behind it."""
STEPS = "octopus_test_steps"
"""A command that tells, and forgets, how many requests each step began."""


class AuditedScheduler(AheadCursorScheduler):
    """The engine's own: naming it brings the audit to the core."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_begun: list[int] = []

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """One step; remembers how many requests begin in it, where any does."""
        output = super().schedule(*args, **kwargs)
        if output.scheduled_new_reqs:
            self.num_begun.append(len(output.scheduled_new_reqs))
        return output


def _audit(core: Any) -> list[str]:
    """Runs between two steps; returns what does not add up."""
    scheduler = core.scheduler
    registry, manager = scheduler.registry, scheduler.kv_cache_manager
    managers = manager.coordinator.single_type_managers
    pool = manager.block_pool
    tables = [table for held in registry._held.values() for table in held.blocks]
    tables += [table for each in managers for table in each.req_to_blocks.values()]
    holders = Counter(block.block_id for table in tables for block in table)
    blocks = [block for block in pool.blocks if not block.is_null]
    faults = [
        f"block {block.block_id}: {block.ref_cnt} references, {holders[block.block_id]} holders"
        for block in blocks
        if block.ref_cnt != holders[block.block_id]
    ]
    free = Counter(block.block_id for block in pool.free_block_queue.get_all_free_blocks())
    unheld = Counter(block.block_id for block in blocks if not holders[block.block_id])
    if free != unheld or pool.get_num_free_blocks() != len(unheld):
        faults.append(f"free {free - unheld} though held, {unheld - free} though unheld")
    requests = list(scheduler.requests.values())
    pins = sum(map(_num_pins, requests))
    counted = sum(held.num_pins for held in registry._held.values())
    if counted != pins + scheduler.num_host_pins:
        faults.append(f"{counted} pins, {pins} of requests, {scheduler.num_host_pins} of the host")
    return faults + _strays(managers, {request.request_id for request in requests})


def _strays(managers: Iterable[Any], known: set[str]) -> list[str]:
    """Entries of requests that have ended."""
    return [
        f"{name} of {type(manager).__name__} knows {sorted(set(table) - known)}"
        for manager in managers
        for name in ("req_to_blocks", "num_cached_block", "_num_hidden")
        if set(table := getattr(manager, name, {})) - known
    ]


def _num_pins(request: Any) -> int:
    plan = plan_of(request)
    return len(plan.reads()) if plan and getattr(request, "octopus_pinned", False) else 0


def _hang(core: Any) -> None:
    while True:
        time.sleep(600)


def _gather(core: Any, num_requests: int) -> None:
    while core.input_queue.qsize() < num_requests:
        time.sleep(0.002)


def _steps(core: Any) -> list[int]:
    begun, core.scheduler.num_begun = core.scheduler.num_begun, []
    return begun


add_utility(AUDIT, _audit)
add_utility(HANG, _hang)
add_utility(GATHER, _gather)
add_utility(STEPS, _steps)
