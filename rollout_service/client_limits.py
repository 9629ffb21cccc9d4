"""What one client may ask of a replica at a time, so that none keeps the others waiting."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import unquote

from harness_sdk.errors import TooManyCalls
from rollout_service.access import Caller

_GIVING_BACK = ("Cancel", "CloseEpisode", "Done")
"""Calls that end something: a client that runs too much must be able to stop it."""
_MAX_IDLE = 1000
"""Clients that are remembered though none of their calls runs."""


@dataclass(slots=True)
class _Client:
    num_running: int
    allowance: float
    """Calls that it may begin at once."""
    seen_s: float


class ClientLimits:
    """Counts the calls of each client.

    Args:
        max_calls: Calls of a client that run at a time, streams included; None is no limit.
        max_calls_per_s: Calls that it may begin, those that are refused as running too many among
            them, a second's worth at once; None is no limit.
        on_refused: Told each refusal.
        now_s: A clock that only goes forward.
    """

    def __init__(
        self,
        max_calls: int | None = None,
        max_calls_per_s: float | None = None,
        *,
        on_refused: Callable[[], None] = lambda: None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_calls = max_calls
        self._max_calls_per_s = max_calls_per_s
        self._on_refused = on_refused
        self._now_s = now_s
        self._clients: dict[str, _Client] = {}

    @contextlib.contextmanager
    def call(self, client: str, name: str) -> Iterator[None]:
        """Around a call of `client`, the RPC `name`.

        Raises:
            TooManyCalls: It began too many lately, or too many of its calls run.
        """
        state = self._begin(client, name)
        try:
            yield
        finally:
            state.num_running -= 1

    def _begin(self, client: str, name: str) -> _Client:
        state = self._seen(client)
        rate, most = self._max_calls_per_s, self._max_calls
        if rate is not None and state.allowance < 1:
            self._on_refused()
            raise TooManyCalls(
                "the client begins too many calls",
                value=f"more than {max(rate, 1):g} within a second",
                limit=f"{rate:g} calls a second",
                remedy="pause before the next call, or raise --server.client-calls-per-s",
            )
        state.allowance -= 1
        if most is not None and state.num_running >= most and name not in _GIVING_BACK:
            self._on_refused()
            raise TooManyCalls(
                "too many calls of the client run",
                value=f"{state.num_running} running",
                limit=f"{most} calls at a time",
                remedy="close episodes or let turns end, or raise --server.client-calls",
            )
        state.num_running += 1
        return state

    def _seen(self, client: str) -> _Client:
        """The client's state now; its allowance grows with the time since it was last seen."""
        now_s, rate = self._now_s(), self._max_calls_per_s
        burst = 0.0 if rate is None else max(rate, 1.0)
        state = self._clients.get(client)
        if state is None:
            self._forget_idle()
            state = self._clients[client] = _Client(0, burst, now_s)
        if rate is not None:
            state.allowance = min(burst, state.allowance + rate * (now_s - state.seen_s))
        state.seen_s = now_s
        return state

    def _forget_idle(self) -> None:
        """Forget clients that call no more, where there are many; least lately seen first."""
        if len(self._clients) < 2 * _MAX_IDLE:
            return
        idle = [name for name, each in self._clients.items() if not each.num_running]
        idle.sort(key=lambda name: self._clients[name].seen_s)
        for name in idle[: max(len(idle) - _MAX_IDLE, 0)]:
            del self._clients[name]


def client_name(caller: Caller, peer: str) -> str:
    """Whose calls count together: a token's name, or the address where nobody has one.

    Args:
        caller: Who calls.
        peer: Its address, as gRPC tells it (`ipv4:127.0.0.1:5000`) or without a port.
    """
    if caller.name:
        return f"name {caller.name}"
    kind, _, rest = peer.partition(":")
    host = rest.rpartition(":")[0] if kind in ("ipv4", "ipv6") else peer
    return f"host {unquote(host).strip('[]')}"
