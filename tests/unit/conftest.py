"""A scripted service and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from harness_sdk import OctopusClient
from tests.unit.scripted_server import FAST, ScriptedServer, serving


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
