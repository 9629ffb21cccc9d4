"""Pins of a run: all or none, from when somebody rebuilds alone, and back at the run's end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import pytest

from rollout_service.engine.vllm.pins import Pins
from rollout_service.engine.vllm.room import ResidencyMissing


class Core:
    """Holds three residencies."""

    def __init__(self) -> None:
        self.pins: Counter[int] = Counter()

    async def command(self, operation: str, residencies: Sequence[int]) -> list[int]:
        missing = [residency for residency in residencies if residency not in (1, 2, 3)]
        if operation == "unpin":
            self.pins.subtract(residencies)
        elif not missing:
            self.pins.update(residencies)
        return missing


async def test_a_run_that_began_before_pins_from_when_it_matters() -> None:
    core, is_closed = Core(), False
    async with Pins(cast(Any, core), lambda: is_closed) as pins:
        await pins.add({1})
        assert not core.pins
        is_closed = True
        await pins.add({1, 2})
        is_closed = False
        assert core.pins == {1: 1, 2: 1}
    assert not core.pins.total()


async def test_what_is_gone_is_told_and_nothing_stays_pinned() -> None:
    core = Core()
    with pytest.raises(ResidencyMissing) as told:
        async with Pins(cast(Any, core), lambda: True) as pins:
            await pins.add({3})
            await pins.add({2, 9})
    assert told.value.residencies == [9]
    assert not core.pins.total()
