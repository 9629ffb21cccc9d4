"""Where no waiting request can move, one is let go that loses nothing, if there is one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollout_service.engine.vllm.scheduler import CursorScheduler


@pytest.mark.parametrize(
    ("num_sampled", "num_host_pins", "ended"),
    [
        # It holds its own context with pins of the host: waiting would be for itself.
        ((0,), 2, {0}),
        ((0,), 0, {0}),
        # A turn waits for what the host keeps, and is refused where it keeps nothing.
        ((7,), 2, set()),
        ((7,), 0, {0}),
        # The newest that can come again; else the newest.
        ((0, 0), 0, {1}),
        ((0, 7), 2, {0}),
        ((0, 0, 7), 0, {1}),
        ((7, 7), 2, {1}),
        ((), 0, set()),
    ],
)
def test_who_is_let_go(num_sampled: tuple[int, ...], num_host_pins: int, ended: set[int]) -> None:
    core = SimpleNamespace(
        num_host_pins=num_host_pins,
        grammar_compile_error_reqs=set(),
        _is_blocked_waiting_status=lambda status: status == "compiling",
    )
    waiting = [
        SimpleNamespace(request_id=number, num_output_tokens=count, status="waiting")
        for number, count in enumerate(num_sampled)
    ]
    CursorScheduler._end_the_newest(cast(Any, core), waiting)
    assert core.grammar_compile_error_reqs == ended
    compiling = SimpleNamespace(request_id=99, num_output_tokens=0, status="compiling")
    core.grammar_compile_error_reqs.clear()
    CursorScheduler._end_the_newest(cast(Any, core), [*waiting, compiling])
    assert not core.grammar_compile_error_reqs, "it will move by itself"
