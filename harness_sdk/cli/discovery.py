"""Finds the replicas of a run through the control bus, for as long as the run lasts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable

from harness_sdk.client import OctopusClient
from harness_sdk.errors import ConfigError, HarnessError, ServiceError, Unavailable
from harness_sdk.replicas import Replicas

logger = logging.getLogger(__name__)

_PAUSE_S = 1.0


@contextlib.asynccontextmanager
async def discovered(
    url: str, run: str, connect: Callable[[str], OctopusClient]
) -> AsyncGenerator[Replicas]:
    """Replicas that say on the bus that they serve `run`; the first has answered.

    One that joins later is used, one that says goodbye, or whose last will says so, is not given
    episodes any more. A broker that is away changes nothing; any other failure to listen ends the
    run at its next group.

    Args:
        url: Address of the MQTT broker.
        run: Name of the run.
        connect: Makes the client of an address.

    Raises:
        ConfigError: aiomqtt is not installed, or `url` is no address.
        Unavailable: No replica came.
        HarnessError: The bus cannot be followed, and not because it is away.
    """
    try:
        from rollout_service.bus import check_address
    except ImportError as error:
        raise ConfigError(
            "replicas are found through MQTT, which needs aiomqtt",
            remedy="pip install 'octopus-agents[rollout]', or name them with --address",
        ) from error
    check_address(url)
    async with Replicas(connect=connect) as replicas:
        following = asyncio.create_task(_follow(url, run, replicas))
        try:
            await replicas.first()
            yield replicas
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def _follow(url: str, run: str, replicas: Replicas) -> None:
    """Keep `replicas` as the bus has them; whatever ends that is told to those who ask for one."""
    try:
        await _keep_up(url, run, replicas)
    except HarnessError as error:
        await replicas.fail(error)
    except Exception as error:
        logger.exception("the control bus cannot be followed")
        failure = ServiceError(
            "replicas cannot be found through the control bus any more",
            value=f"{type(error).__name__}: {error}",
            remedy="see the log, or name the replicas with --address",
        )
        failure.__cause__ = error
        await replicas.fail(failure)


async def _keep_up(url: str, run: str, replicas: Replicas) -> None:
    from rollout_service.bus import follow_bus_state

    addresses: dict[str, str] = {}
    while True:
        try:
            async for state in follow_bus_state(url, run):
                for each in state.replicas:
                    known = addresses.get(each.replica_id)
                    address = each.address if each.alive else ""
                    if known and known != address:
                        replicas.leave(addresses.pop(each.replica_id))
                    if address and known != address:
                        addresses[each.replica_id] = address
                        replicas.join(address)
        except (Unavailable, ConnectionError, TimeoutError) as error:
            logger.warning("replicas stay as they are: %s", error)
        await asyncio.sleep(_PAUSE_S)
