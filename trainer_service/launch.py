"""Which process of a trainer this is, as torchrun tells it through the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

from harness_sdk.errors import ConfigError


def place(environment: Mapping[str, str] | None = None) -> tuple[int, int]:
    """Number of this process, from 0, which leads, and how many there are; (0, 1) when alone.

    Raises:
        ConfigError: `RANK` and `WORLD_SIZE` do not go together: processes that each take
            themselves for the leader would train the same run.
    """
    variables = os.environ if environment is None else environment
    rank, size = variables.get("RANK"), variables.get("WORLD_SIZE")
    if rank is None and size in (None, "1"):
        return 0, 1
    if rank is None or size is None:
        found, missing = ("RANK", "WORLD_SIZE") if size is None else ("WORLD_SIZE", "RANK")
        raise ConfigError(
            f"{found} is set and {missing} is not",
            value=f"{found}={variables[found]}",
            limit="both, as torchrun sets them, or neither",
            remedy=f"start the processes with torchrun, or unset {found}",
        )
    try:
        number, count = int(rank), int(size)
    except ValueError:
        number, count = -1, 0
    if not 0 <= number < count:
        raise ConfigError(
            "RANK is none of WORLD_SIZE",
            value=f"RANK={rank}, WORLD_SIZE={size}",
            limit="0 to WORLD_SIZE - 1",
            remedy="start the processes with torchrun, or unset both",
        )
    return number, count
