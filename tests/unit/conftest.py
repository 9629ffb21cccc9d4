"""A scripted service and a client of it, and how generated examples are tried."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from hypothesis import settings

from harness_sdk import OctopusClient
from tests.unit.scripted_server import FAST, ScriptedServer, serving

# On cores that others use too, the time of one example tells nothing.
settings.register_profile("octopus", deadline=None)
settings.load_profile("octopus")


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    yield ScriptedServer()


@pytest.fixture
async def address(server: ScriptedServer) -> AsyncIterator[str]:
    async with serving(server) as address:
        yield address


@pytest.fixture
async def client(address: str) -> AsyncIterator[OctopusClient]:
    async with OctopusClient.connect(address, retry=FAST) as client:
        yield client
