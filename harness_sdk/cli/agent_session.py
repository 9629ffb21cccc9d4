"""What `octopus run` and `octopus eval` share: the agent as configured, and its replicas."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from harness_sdk.agents import Agent, load_agent
from harness_sdk.cli.discovery import discovered
from harness_sdk.cli.tls_arguments import tls_options
from harness_sdk.client import OctopusClient
from harness_sdk.errors import ConfigError
from harness_sdk.masking import masked_url
from harness_sdk.replicas import Replicas
from harness_sdk.types import Limits, SamplingOptions

if TYPE_CHECKING:
    from harness_sdk.cli.run_config import AgentConfig


def configured_agent(folder: Path, config: AgentConfig) -> Agent:
    """The agent of `folder` with what `config` sets over its own limits and sampling."""
    agent = load_agent(folder)
    limits = config.limits.model_dump(exclude_none=True)
    sampling = config.sampling.model_dump(exclude_none=True)
    return replace(
        agent,
        limits=replace(agent.limits or Limits(), **limits),
        sampling=replace(agent.sampling or SamplingOptions(), **sampling),
        primitives=agent.primitives if config.primitives == "agent" else config.primitives,
    )


@contextlib.asynccontextmanager
async def reached(addresses: Sequence[str], config: AgentConfig) -> AsyncGenerator[Replicas]:
    """The replicas at `addresses`; without any, those that the control bus tells of.

    Raises:
        ConfigError: There is neither an address nor a broker.
        Unavailable: One of the addresses does not answer, or no replica came.
    """
    connect = functools.partial(
        OctopusClient.connect,
        token=config.token.get_secret_value() if config.token is not None else None,
        tls=tls_options(config.tls_ca, config.tls_cert, config.tls_key),
    )
    if addresses:
        async with contextlib.AsyncExitStack() as stack:
            yield Replicas(
                [await stack.enter_async_context(connect(address)) for address in addresses]
            )
        return
    if config.mqtt_url is None:
        raise ConfigError(
            "no rollout service named",
            remedy="give --address host:port, as `octopus up` and `octopus rollout` print it, or "
            "--mqtt-url and --run, to find all of a run",
        )
    if config.run is None:
        raise ConfigError(
            "mqtt_url finds the replicas of a run, and run is not set",
            value=masked_url(config.mqtt_url),
            remedy="give --run, or --address in place of --mqtt-url",
        )
    async with discovered(config.mqtt_url, config.run, connect) as replicas:
        yield replicas
