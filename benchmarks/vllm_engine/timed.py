"""Clocks in the engine's processes: what a request's first step costs beside the forward pass.

`scheduler_cls` and `worker_cls` name the classes below; they change nothing but keep times, once
they are told to.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from rollout_service.engine.vllm import worker
from rollout_service.engine.vllm.copies import COPIES_ATTRIBUTE
from rollout_service.engine.vllm.kv_manager import plan_of
from rollout_service.engine.vllm.scheduler import AheadCursorScheduler
from rollout_service.engine.vllm.seams import add_utility

TAKE_TIMES = "octopus_bench_times"
"""Utility call of the core that returns and forgets its times."""
CLOCKS = "octopus_bench_clocks"
"""The one that starts and stops them."""


class TimedScheduler(AheadCursorScheduler):
    """Times taking a request in and scheduling its first step, seconds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.times: list[dict[str, Any]] = []
        self.is_timed = False
        self._adding = 0.0

    def add_request(self, request: Any) -> None:
        """Timed."""
        begin = time.perf_counter()
        super().add_request(request)
        self._adding = time.perf_counter() - begin

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Timed where a request begins."""
        begin = time.perf_counter()
        output = super().schedule(*args, **kwargs)
        if self.is_timed and output.scheduled_new_reqs:
            seconds = self._adding + time.perf_counter() - begin
            self.times.append({"core_s": seconds, **self._attached(output)})
        return output

    def _attached(self, output: Any) -> dict[str, int]:
        """What the requests that begin were given without computing it, and what was copied."""
        new = [self.requests[data.req_id] for data in output.scheduled_new_reqs]
        plans = [plan for plan in map(plan_of, new) if plan is not None]
        copies = getattr(output, COPIES_ATTRIBUTE)
        page = self.registry.page_rows
        mounted = [span for plan in plans for span in plan.mounts]
        return {
            "requests": len(new),
            "rows": sum(plan.num_rows for plan in plans),
            "mounts": len(mounted),
            "mounted_rows": sum(span.num_rows for span in mounted),
            "copied_rows": sum(rows[-1] for rows in copies.rows),
            # The partial page behind a parent's last full one is copied whole; no other may be.
            "full_pages": sum(rows[-1] == page for rows in copies.rows),
            "copied_blocks": len(copies.blocks),
        }


class _TimedRunner:
    """Mixed into the model runner's class: times the step's set-up, copies included."""

    def _update_states(self, scheduler_output: Any) -> Any:
        if not (_Timed.is_timed and scheduler_output.scheduled_new_reqs):
            return super()._update_states(scheduler_output)  # type: ignore[misc]
        _wait_for_device()
        begin = time.perf_counter()
        result = super()._update_states(scheduler_output)  # type: ignore[misc]
        _wait_for_device()
        WORKER_TIMES.append(time.perf_counter() - begin)
        return result


WORKER_TIMES: list[float] = []


class _Timed:
    """Mixed into a worker's class."""

    is_timed = False

    def octopus_bench_clocks(self, is_timed: bool) -> None:
        """Start or stop the clocks."""
        _Timed.is_timed = is_timed

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """Once the runner is there."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        runner.__class__ = type("TimedRunner", (_TimedRunner, type(runner)), {})
        return super().load_model(*args, **kwargs)  # type: ignore[misc]

    def octopus_bench_times(self) -> list[float]:
        """Seconds of each step in which a request began; forgotten here."""
        times = list(WORKER_TIMES)
        WORKER_TIMES.clear()
        return times


def __getattr__(name: str) -> Any:
    if name in ("TimedGPUWorker", "TimedCPUWorker"):
        base = getattr(worker, name.replace("Timed", "Cursor"))
        globals()[name] = type(name, (_Timed, base), {"__module__": __name__})
        return globals()[name]
    raise AttributeError(name)


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _take_times(core: Any) -> list[dict[str, Any]]:
    times, core.scheduler.times = core.scheduler.times, []
    return times


def _set_clocks(core: Any, is_timed: bool) -> None:
    core.scheduler.is_timed = is_timed


add_utility(TAKE_TIMES, _take_times)
add_utility(CLOCKS, _set_clocks)
