"""What `octopus run` and `octopus eval` share: the agent as configured, and its clients."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from harness_sdk.agents import Agent, load_agent
from harness_sdk.client import OctopusClient
from harness_sdk.errors import ConfigError
from harness_sdk.options import TlsOptions
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
async def connected(
    addresses: Sequence[str], config: AgentConfig
) -> AsyncIterator[list[OctopusClient]]:
    """A client for each address.

    Raises:
        ConfigError: There is no address.
    """
    if not addresses:
        raise ConfigError(
            "no rollout service named",
            remedy="give --address host:port, as `octopus up` and `octopus rollout` print it",
        )
    token = config.token.get_secret_value() if config.token is not None else None
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                OctopusClient.connect(address, token=token, tls=_tls(config))
            )
            for address in addresses
        ]


def _tls(config: AgentConfig) -> TlsOptions | None:
    files = (config.tls_ca, config.tls_cert, config.tls_key)
    if not any(files):
        return None
    ca, cert, key = (str(path) if path is not None else None for path in files)
    return TlsOptions(ca_file=ca, cert_file=cert, key_file=key)
