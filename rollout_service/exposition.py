"""The replica's state and counters for Prometheus."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from harness_sdk.exposition import exposed
from rollout_service.sessions import Sessions

_READ_S = 5.0

_STATE = (
    "open_episodes", "queued_episodes", "live_threads", "resident_cursors", "recurrent_slots",
    "tokens_resident", "tokens_capacity", "kv_use", "uptime_s",
)  # fmt: skip

_COUNTERS = {"tokens/recomputed_": "cause"}


def figures(sessions: Sessions) -> dict[str, float]:
    """What `Status` tells, by name; the newest policy version among it."""
    status = sessions.status()
    found = {name: float(getattr(status, name)) for name in _STATE}
    found["policy/version"] = float(max(status.policy_versions, default=0))
    return {**found, **status.metrics}


@contextlib.contextmanager
def exposed_sessions(sessions: Sessions, *, host: str, port: int) -> Iterator[str]:
    """Serve them until the block ends; yields `host:port`.

    Raises:
        ConfigError: prometheus_client is not installed, or the address cannot be bound.
    """
    loop = asyncio.get_running_loop()

    async def on_the_loop() -> dict[str, float]:
        return figures(sessions)

    def read() -> dict[str, float]:
        # The sessions belong to the event loop's thread.
        return asyncio.run_coroutine_threadsafe(on_the_loop(), loop).result(_READ_S)

    labels = {"run": sessions.options.run, "replica": sessions.options.replica_id}
    with exposed(
        "rollout", read, host=host, port=port, labels=labels, counters=_COUNTERS
    ) as address:
        yield address
