"""Asks the engine core who holds which block, and holds that against what its pool believes."""

from __future__ import annotations

from typing import Any

from rollout_service.engine.vllm import VllmEngine

AUDIT = "octopus_audit"
SCHEDULER = "tests.vllm.audited_scheduler.AuditedScheduler"
"""For `vllm_arguments`: brings the audit to the core."""


async def check_blocks(engine: VllmEngine) -> None:
    """Every block has as many references as holders, and is free exactly where it has none."""
    faults = await ask(engine, AUDIT)
    assert not faults, faults


async def check_nothing_left(engine: VllmEngine) -> None:
    """The same once all is given back: free pages, state slots and counts as at the start."""
    builder = engine._newest()
    await builder.client.command("usage")
    use, stats = builder.client.use, engine.stats()
    assert (use.free, use.residencies, use.states) == (use.total, 0, 0)
    assert (stats.running, stats.resident_cursors, stats.foreign_blocks) == (0, 0, 0)
    store = builder.store
    host = (store._entries, store._roots, store._readers, store._gone, store._ended)
    assert not any(host), [len(table) for table in host]
    assert not builder._flights._flights
    assert builder._gate._num_active == 0 and not builder._gate.is_closed
    await check_blocks(engine)


async def ask(engine: VllmEngine, command: str, *args: int) -> Any:
    """What the core answers to a command of `AuditedScheduler`'s module."""
    running = await engine._supervisor.running()
    core = running.builder.client._llm.engine_core
    return await core.call_utility_async(command, *args)
