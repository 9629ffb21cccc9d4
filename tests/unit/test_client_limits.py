"""Calls that one client may have, whatever others do."""

from __future__ import annotations

import contextlib

import pytest

from harness_sdk.errors import TooManyCalls
from rollout_service.access import ANYBODY, Caller, Scope
from rollout_service.client_limits import ClientLimits, client_name

AGENT = Caller(name="red", scope=Scope.AGENT)


def test_calls_at_a_time_are_counted_for_each_client_and_given_back() -> None:
    refusals: list[None] = []
    limits = ClientLimits(2, on_refused=lambda: refusals.append(None))
    with contextlib.ExitStack() as running:
        for _ in range(2):
            running.enter_context(limits.call("red", "OpenEpisode"))
        with pytest.raises(TooManyCalls) as caught, limits.call("red", "Generate"):
            pass
        error = caught.value
        assert (error.value, error.limit) == ("2 running", "2 calls at a time")
        assert "--server.client-calls" in error.remedy and error.retryable
        # Others go on, and what ends something is let through.
        with limits.call("blue", "Generate"), limits.call("red", "CloseEpisode"):
            pass
    with pytest.raises(KeyError), limits.call("red", "Generate"):
        raise KeyError
    for _ in range(3):
        with limits.call("red", "Generate"):
            pass
    assert len(refusals) == 1


def test_calls_a_second_come_back_with_the_time() -> None:
    now_s = [0.0]
    limits = ClientLimits(max_calls_per_s=10, now_s=lambda: now_s[0])

    def num_served(client: str) -> int:
        count = 0
        with contextlib.suppress(TooManyCalls):
            while count < 100:
                with limits.call(client, "Fork"):
                    count += 1
        return count

    assert num_served("red") == 10 and num_served("red") == 0
    assert num_served("blue") == 10
    now_s[0] = 0.35
    assert num_served("red") == 3
    now_s[0] = 60.0
    assert num_served("red") == 10, "no more than a second's worth is saved"
    with pytest.raises(TooManyCalls, match="10 calls a second"), limits.call("red", "CloseEpisode"):
        pass


def test_clients_that_call_no_more_are_forgotten() -> None:
    now_s = [0.0]
    limits = ClientLimits(1, 10, now_s=lambda: now_s[0])
    with limits.call("busy", "Wait"):
        for number in range(5000):
            now_s[0] += 1
            with limits.call(f"host {number}", "Connect"):
                pass
        assert len(limits._clients) <= 2001 and "busy" in limits._clients
        with pytest.raises(TooManyCalls), limits.call("busy", "Wait"):
            pass


def test_a_client_is_its_tokens_name_or_its_address() -> None:
    assert client_name(AGENT, "ipv4:10.0.0.1:5000") == "name red"
    assert client_name(ANYBODY, "ipv4:10.0.0.1:5000") == "host 10.0.0.1"
    assert client_name(ANYBODY, "ipv6:%5B::1%5D:5000") == client_name(ANYBODY, "::1") == "host ::1"
    assert client_name(ANYBODY, "10.0.0.1") == "host 10.0.0.1"
