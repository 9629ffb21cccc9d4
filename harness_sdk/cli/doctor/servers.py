"""Redis, the MQTT broker, and the clock beside Redis's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from importlib import metadata, util

from harness_sdk.cli.doctor.check import Check, failed
from harness_sdk.errors import ConfigError, HarnessError

DURABLE = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
"""What the embedded server is run with, and an external one is compared with."""

_MAX_SKEW_S = 2.0
# Before this project's first commit: the clock was never set.
_EARLIEST_S = 1_767_225_600


def check_redis(url: str | None) -> Iterator[Check]:
    """Reachable, as durable as the embedded server, and not one that evicts."""
    if url is None:
        yield _embedded_redis()
        return
    from rollout_service.redis_state import read_server_settings

    try:
        settings = asyncio.run(read_server_settings(url))
    except HarnessError as error:
        yield failed("redis", error)
        return
    yield Check(name="redis", level="ok", text="reachable")
    if not settings:
        yield Check(
            name="redis settings", level="warn", text="hidden: CONFIG GET is refused",
            remedy=f"make sure of {', '.join(f'{k} {v}' for k, v in DURABLE.items())}",
        )  # fmt: skip
        return
    yield from _durability(settings)


def _embedded_redis() -> Check:
    from harness_sdk.cli.embedded import valkey_binary

    try:
        return Check(name="redis", level="ok", text=f"embedded, {valkey_binary()}")
    except ConfigError as error:
        return failed("redis", error)


def _durability(settings: Mapping[str, str]) -> Iterator[Check]:
    for key, ours in DURABLE.items():
        found = settings.get(key, ours)
        if found == ours:
            continue
        if key == "maxmemory-policy" and int(settings.get("maxmemory", "0")):
            yield Check(
                name=f"redis {key}", level="fail",
                text=f"{found}: at maxmemory {settings['maxmemory']} it deletes episodes",
                remedy=f"CONFIG SET {key} {ours}, and the same in its configuration file",
            )  # fmt: skip
            continue
        yield Check(
            name=f"redis {key}", level="warn", text=f"{found} is weaker than {ours}",
            remedy=f"CONFIG SET {key} {ours}, or episodes may be lost when the server ends",
        )  # fmt: skip


def check_broker(url: str | None) -> Check:
    """Reachable, and keeps retained messages."""
    if url is None:
        if util.find_spec("amqtt") is None:
            return Check(
                name="mqtt", level="fail", text="no embedded broker",
                remedy="pip install 'octopus-agents[rollout]', or give --mqtt-url",
            )  # fmt: skip
        return Check(name="mqtt", level="ok", text="embedded, amqtt " + metadata.version("amqtt"))
    from rollout_service.bus import broker_retains

    try:
        retains = asyncio.run(broker_retains(url))
    except HarnessError as error:
        return failed("mqtt", error)
    if not retains:
        return Check(
            name="mqtt", level="fail", text="retained messages are not kept",
            remedy="allow them (Mosquitto: retain_available true): replicas that start late read"
            " the policy from one",
        )  # fmt: skip
    return Check(name="mqtt", level="ok", text="reachable, keeps retained messages")


def check_clock(redis_url: str | None) -> Check:
    """This machine's clock, against Redis's where there is one."""
    if time.time() < _EARLIEST_S:
        text = time.strftime("%Y-%m-%d", time.gmtime())
        return Check(name="clock", level="fail", text=text, remedy="set the clock, run NTP")
    if redis_url is None:
        return Check(name="clock", level="ok", text=time.strftime("%Y-%m-%d %H:%M:%S %z"))
    from rollout_service.redis_state import read_clock_skew

    try:
        skew = asyncio.run(read_clock_skew(redis_url))
    except HarnessError:
        return Check(
            name="clock", level="warn", text="no Redis to compare with",
            remedy="correct --redis-url",
        )  # fmt: skip
    level = "ok" if abs(skew) <= _MAX_SKEW_S else "warn"
    remedy = "" if level == "ok" else "run NTP on both: entry ids carry Redis's time"
    return Check(name="clock", level=level, text=f"Redis is {skew:+.3f} s from here", remedy=remedy)
