"""What a run under way has rebuilt and still needs: kept from eviction until it has begun."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from rollout_service.engine.vllm.core_client import CoreClient
from rollout_service.engine.vllm.room import ResidencyMissing


class Pins:
    """Pins of one run, taken back when the context is left."""

    def __init__(self, client: CoreClient, is_active: Callable[[], bool]) -> None:
        """Pin through `client`, and nothing while it is not needed."""
        self._client = client
        self._is_active = is_active
        self._pinned: list[int] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Pins:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            await asyncio.wait([self._task])
        if self._pinned:
            await asyncio.shield(self._client.command("unpin", self._pinned))

    async def add(self, residencies: Iterable[int]) -> None:
        """Pin residencies.

        Raises:
            ResidencyMissing: One of them is gone; none was pinned.
        """
        if self._is_active():
            # Finished even where the caller is cancelled: a pin that nobody knows of never goes.
            self._task = asyncio.create_task(self._add(sorted(residencies)))
            await asyncio.shield(self._task)

    async def _add(self, residencies: list[int]) -> None:
        missing = await self._client.command("pin", residencies)
        if missing:
            raise ResidencyMissing(missing)
        self._pinned += residencies
