"""The replicas that a run goes to: which there are, which answer, and how busy each one is.

A group stays on one replica, where its episodes share the prompt's cursor; an episode never moves,
for its cursors live where it was opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness_sdk.client import OctopusClient
from harness_sdk.errors import HarnessError, Unavailable

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LAST_PAUSE_S = 1.0, 30.0


@dataclass(slots=True, kw_only=True, eq=False)
class Replica:
    """One replica as this run sees it."""

    client: OctopusClient
    is_present: bool = True
    """False once it has left: it gets no more episodes, those that run may end."""
    num_assigned: int = 0
    """Episodes that run there or are about to."""
    num_failures: int = 0
    """Episodes in a row that failed for reasons of the infrastructure."""
    last_use: int = 0
    """Place of its newest group among all; breaks ties between equally busy ones."""
    avoided_until_s: float = 0.0
    """On the monotonic clock; it lost an episode and may be dead."""
    pause_s: float = _FIRST_PAUSE_S

    @property
    def address(self) -> str:
        """Where it is reached."""
        return self.client.address


class Replicas:
    """The replicas of a run: fixed, or joining and leaving.

    Args:
        clients: Connected clients of replicas that are there from the start; they stay the
            caller's to close.
        connect: Makes the client of an address that `join` names.
        patience_s: How long a run without any replica waits for one.

    As an async context manager it closes what it has connected.
    """

    def __init__(
        self,
        clients: Sequence[OctopusClient] = (),
        *,
        connect: Callable[[str], OctopusClient] = OctopusClient.connect,
        patience_s: float = 600.0,
    ) -> None:
        self._connect = connect
        self._patience_s = patience_s
        self._present = [Replica(client=client) for client in clients]
        self._changed = asyncio.Condition()
        self._joining: dict[str, asyncio.Task[None]] = {}
        self._own: set[Replica] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        self._uses = 0
        self._failure: HarnessError | None = None
        self._refusal = ""
        """Why one could not be connected to, the last time."""

    async def __aenter__(self) -> Replicas:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        tasks = [*self._joining.values(), *self._leaving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for replica in self._own:
            await replica.client.close()

    @property
    def present(self) -> tuple[Replica, ...]:
        """Those that have joined, answered, and not left."""
        return tuple(self._present)

    def join(self, address: str) -> None:
        """Connect to a replica, for as long as it takes, and use it from then on."""
        known = any(replica.address == address for replica in self._present)
        if not known and address not in self._joining:
            self._joining[address] = asyncio.create_task(self._until_connected(address))

    def leave(self, address: str) -> None:
        """Give the replica no more episodes; its connection closes behind its last one."""
        task = self._joining.pop(address, None)
        if task is not None:
            task.cancel()
        for replica in [each for each in self._present if each.address == address]:
            logger.info("replica %s has left, %d episodes on it", address, replica.num_assigned)
            replica.is_present = False
            self._present.remove(replica)
            self._close_if_idle(replica)

    async def fail(self, error: HarnessError) -> None:
        """Whoever asks for a replica from here on is told `error`: nobody finds them any more."""
        async with self._changed:
            self._failure = error
            self._changed.notify_all()

    async def first(self) -> Replica:
        """Any replica, once there is one.

        Raises:
            Unavailable: None came in `patience_s` seconds.
            HarnessError: What `fail` was told.
        """
        try:
            async with asyncio.timeout(self._patience_s), self._changed:
                await self._changed.wait_for(lambda: self._present or self._failure)
        except TimeoutError as error:
            raise Unavailable(
                "no replica of the rollout service is there",
                value=self._refusal,
                limit=f"{self._patience_s:g} s",
                remedy="start one on the same run and the same broker; octopus status shows them",
            ) from error
        if self._failure is not None:
            raise self._failure.copy() from self._failure
        return self._present[0]

    async def assign(self, num_episodes: int) -> Replica:
        """The least busy replica, which counts as busier by so many episodes.

        Raises:
            Unavailable: None came in `patience_s` seconds.
            HarnessError: What `fail` was told.
        """
        await self.first()
        now_s = time.monotonic()
        # One that is avoided is still better than none.
        replica = min(
            self._present,
            key=lambda each: (each.avoided_until_s > now_s, each.num_assigned, each.last_use),
        )
        self._uses += 1
        replica.num_assigned += num_episodes
        replica.last_use = self._uses
        return replica

    async def move(self, replica: Replica, preferred: Replica) -> Replica:
        """Where an episode assigned to `replica` goes, which is assigned there from then on.

        Args:
            replica: Where it is assigned.
            preferred: Where its group is; taken unless it has left or is avoided.

        Raises:
            Unavailable: No replica came in `patience_s` seconds.
            HarnessError: What `fail` was told.
        """
        if not self._is_usable(preferred):
            preferred = await self.assign(1)
        else:
            preferred.num_assigned += 1
        self.release(replica)
        return preferred

    def release(self, replica: Replica) -> None:
        """One of the assigned episodes has ended."""
        replica.num_assigned -= 1
        self._close_if_idle(replica)

    def note_success(self, replica: Replica) -> None:
        """An episode there ended well."""
        replica.num_failures = 0
        replica.avoided_until_s, replica.pause_s = 0.0, _FIRST_PAUSE_S

    def note_failure(self, replica: Replica, *, lost: bool) -> int:
        """An episode there failed for a reason that is not the policy's.

        Args:
            replica: Where.
            lost: Whether the replica itself was gone; it is avoided for a while, each time longer.

        Returns:
            Failures in a row, of the replica of all present ones that has the fewest.
        """
        replica.num_failures += 1
        if lost and replica.avoided_until_s <= time.monotonic():
            replica.avoided_until_s = time.monotonic() + replica.pause_s
            replica.pause_s = min(2 * replica.pause_s, _LAST_PAUSE_S)
        # Those of one that has left are nobody's fault any more, while others serve.
        return min((each.num_failures for each in self._present), default=0)

    def has_other(self, replica: Replica) -> bool:
        """Whether an episode that was lost there can start again elsewhere."""
        return any(each is not replica and self._is_usable(each) for each in self._present)

    def _is_usable(self, replica: Replica) -> bool:
        return replica.is_present and replica.avoided_until_s <= time.monotonic()

    async def _until_connected(self, address: str) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                client = await self._connect(address).__aenter__()
                break
            except Exception as error:
                known = isinstance(error, HarnessError)
                self._refusal = str(error) if known else f"{type(error).__name__}: {error}"
                logger.warning(
                    "replica %s says it is there: %s",
                    address,
                    self._refusal,
                    exc_info=None if known else error,
                )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        replica = Replica(client=client)
        self._own.add(replica)
        del self._joining[address]
        async with self._changed:
            self._present.append(replica)
            self._changed.notify_all()
        logger.info("replica %s has joined", address)

    def _close_if_idle(self, replica: Replica) -> None:
        if replica.is_present or replica.num_assigned or replica not in self._own:
            return
        self._own.remove(replica)
        closing = asyncio.create_task(_close(replica))
        self._leaving.add(closing)
        closing.add_done_callback(self._leaving.discard)


async def _close(replica: Replica) -> None:
    with contextlib.suppress(HarnessError):
        await replica.client.close()
