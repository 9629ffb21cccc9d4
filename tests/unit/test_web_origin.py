"""Requests of web pages from elsewhere, as browsers send them."""

from __future__ import annotations

import socket

import pytest

from harness_sdk.web_origin import refused_because

OURS = "127.0.0.1:7000"
CROSS = {"Sec-Fetch-Site": "cross-site"}


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": OURS},
        {"Host": "localhost"},
        {"Host": "[::1]:7000"},
        {"Host": OURS, "Origin": f"http://{OURS}", "Sec-Fetch-Site": "same-origin"},
        {"Host": OURS, **CROSS, "Sec-Fetch-Mode": "navigate"},
    ],
)
def test_own_pages_and_programs_are_answered(headers: dict[str, str]) -> None:
    assert refused_because(headers, bound="127.0.0.1") == ""


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        ({}, "name"),
        ({"Host": "evil.example:7000"}, "name"),
        ({"Host": "localhost.evil.example"}, "name"),
        ({"Host": "127.0.0.1.evil.example"}, "name"),
        ({"Host": "127.0.0.1@evil.example"}, "name"),
        ({"Host": "[::1"}, "name"),
        ({"Host": "10.0.0.1"}, "name"),
        ({"Host": OURS, "Origin": "http://evil.example"}, "site"),
        ({"Host": OURS, "Origin": "null"}, "site"),
        ({"Host": OURS, "Origin": "http://127.0.0.1:7001"}, "site"),
        ({"Host": OURS, **CROSS, "Sec-Fetch-Mode": "no-cors"}, "site"),
        ({"Host": OURS, **CROSS}, "site"),
        ({"Host": OURS, "Sec-Fetch-Site": "same-site"}, "site"),
    ],
)
def test_other_sites_pages_are_not(headers: dict[str, str], told: str) -> None:
    assert told in refused_because(headers, bound="localhost")


def test_open_to_others_it_answers_what_nobody_can_rebind() -> None:
    for host in ("10.0.0.1:7000", "[fe80::1]", f"{socket.gethostname()}:7000", "localhost"):
        assert refused_because({"Host": host}, bound="0.0.0.0") == ""
    assert refused_because({"Host": "page.example:1"}, bound="page.example") == ""
    assert refused_because({"Host": "evil.example"}, bound="0.0.0.0")
    assert refused_because({"Host": "10.0.0.1", "Origin": "http://evil.example"}, bound="0.0.0.0")
