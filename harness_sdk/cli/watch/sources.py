"""Followers of the run's sources: each keeps its part of the board, however often its server goes.

They read only: no consumer group, no message to a replica beside Status, nothing to the broker.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from redis.exceptions import RedisError

from harness_sdk import control
from harness_sdk._cancellation import cancellable
from harness_sdk.cli.status import replica_status
from harness_sdk.cli.watch.board import BROKER, MAX_STEPS, REDIS, REPLICAS, Board, Replica
from harness_sdk.cli.watch.episodes import read_entry
from harness_sdk.errors import HarnessError
from harness_sdk.options import TlsOptions
from harness_sdk.redis_client import redis_client
from rollout_service.bus import follow_bus_state
from rollout_service.redis_state import stream_state

logger = logging.getLogger(__name__)

LOOK_S = 2.0
"""Between two looks at replicas, permits and the consumer group."""
_BLOCK_MS, _TIMEOUT_S = 1000, 5.0
_BATCH = 16
_FIRST_DELAY_S, _LAST_DELAY_S = 0.2, 3.0
_RECORD, _FIGURES = control.RECORD_FIELD.encode(), control.FIGURES_FIELD.encode()


async def keep_following(board: Board, name: str, follow: Callable[[], Awaitable[None]]) -> None:
    """Run `follow` again whenever its source goes away, for as long as this is not cancelled."""
    delay_s = _FIRST_DELAY_S
    while True:
        begin = time.monotonic()
        try:
            await follow()
        except (HarnessError, RedisError, OSError) as error:
            board.lost(name, error)
        except Exception as error:
            # The page is an onlooker: no fault of it may end the services beside it.
            logger.exception("following the %s failed", name)
            board.lost(name, f"{type(error).__name__}: {error}")
        if time.monotonic() - begin > _LAST_DELAY_S:
            delay_s = _FIRST_DELAY_S
        await asyncio.sleep(delay_s)
        delay_s = min(2 * delay_s, _LAST_DELAY_S)


async def follow_streams(board: Board, url: str) -> None:
    """Episodes and steps: the newest that are kept, then each as it comes; permits on the way."""
    keys = (control.episodes_key(board.run), control.steps_key(board.run))
    async with redis_client(url, timeout_s=_TIMEOUT_S) as client:
        last = [await _newest(client, key) for key in keys]
        await _read_back(board, client, keys[0])
        for _, fields in reversed(await cancellable(client.xrevrange(keys[1], count=MAX_STEPS))):
            _take_step(board, fields)
        board.heard(REDIS)
        looked_s = 0.0
        while True:
            if time.monotonic() - looked_s > LOOK_S:
                await _look(board, client)
                looked_s = time.monotonic()
            wanted = dict(zip(keys, last, strict=True))
            found = await cancellable(client.xread(wanted, count=_BATCH, block=_BLOCK_MS))
            for key, entries in found or ():
                at = keys.index(key.decode())
                for entry_id, fields in entries:
                    last[at] = entry_id
                    if at == 0:
                        await _take_episode(board, entry_id, fields)
                    else:
                        _take_step(board, fields)
            board.heard(REDIS)


async def follow_bus(board: Board, url: str) -> None:
    """What the broker retains of policy and replicas."""
    async for state in follow_bus_state(url, board.run):
        board.bus = state
        board.heard(BROKER)
        board.touch()


async def follow_replicas(board: Board, token: str | None, tls: TlsOptions | None = None) -> None:
    """Status of each live replica, while somebody looks at the page."""
    while True:
        await board.watched.wait()
        if board.bus is not None:
            known = [state for state in board.bus.replicas if state.alive]
            shown = await asyncio.gather(*(replica_status(s.address, s, token, tls) for s in known))
            at_s = time.monotonic()
            board.replicas = {
                state.replica_id: _replica(board.replicas.get(state.replica_id), each, at_s)
                for state, each in zip(known, shown, strict=True)
            }
            problems = [each["unreachable"] for each in shown if each["unreachable"]]
            if problems:
                board.lost(REPLICAS, "; ".join(problems))
            elif shown:
                board.heard(REPLICAS)
            board.touch()
        await asyncio.sleep(LOOK_S)


def _replica(before: Replica | None, shown: dict[str, Any], at_s: float) -> Replica:
    return Replica(shown=shown, at_s=at_s, sampled_per_s=_speed(before, shown, at_s))


def _speed(before: Replica | None, shown: dict[str, Any], at_s: float) -> float | None:
    """Sampled tokens a second since the last look; None at the first, or after a restart."""
    if before is None or not before.shown["status"] or not shown["status"]:
        return None
    old, new = (
        each["status"]["metrics"].get("tokens/sampled", 0.0) for each in (before.shown, shown)
    )
    return (new - old) / (at_s - before.at_s) if new >= old and at_s > before.at_s else None


async def _newest(client: Any, key: str) -> bytes:
    entries = await cancellable(client.xrevrange(key, count=1))
    return entries[0][0] if entries else b"0"


async def _read_back(board: Board, client: Any, key: str) -> None:
    """The newest entries that are not here yet, from the end as far as they fit."""
    end = "+"
    while True:
        entries = await cancellable(client.xrevrange(key, max=end, count=_BATCH))
        for entry_id, fields in entries:
            if not board.episodes.has_room_for(entry_id.decode()):
                return
            if entry_id.decode() not in board.episodes:
                await _take_episode(board, entry_id, fields)
        if len(entries) < _BATCH:
            return
        end = f"({entries[-1][0].decode()}"


async def _take_episode(board: Board, entry_id: bytes, fields: dict[bytes, bytes]) -> None:
    data = fields.get(_RECORD, b"")
    row, packed = await asyncio.to_thread(read_entry, entry_id.decode(), data)
    board.episodes.add(row, packed)
    board.touch()


def _take_step(board: Board, fields: dict[bytes, bytes]) -> None:
    try:
        figures = json.loads(fields[_FIGURES])
        board.add_step(figures)
    except (KeyError, TypeError, ValueError) as error:
        logger.warning("a step's figures cannot be read: %r", error)


async def _look(board: Board, client: Any) -> None:
    """Permits and the trainer's place in the stream."""
    permits = await cancellable(client.hgetall(control.permits_key(board.run)))
    board.permits = {name.decode(): int(value) for name, value in permits.items()}
    board.stream = await cancellable(stream_state(client, board.run))
    board.touch()
