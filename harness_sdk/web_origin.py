"""Whether a request to a server on this machine comes from one of its own pages or programs.

A web page from elsewhere can make its reader's browser send requests here, under a name of its own
that resolves to this machine (DNS rebinding) or across origins. Neither gets an answer.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine's loopback, by name or address."""
    if host == "localhost":
        return True
    address = _address(host)
    return address is not None and address.is_loopback


def refused_because(headers: Mapping[str, str], *, bound: str) -> str:
    """Why a request gets no answer; empty where nothing is wrong with it.

    Args:
        headers: Of the request; names in any case.
        bound: Host that the server is bound to: on the loopback alone its names are answered,
            elsewhere addresses and this machine's name too, which nobody can rebind.
    """
    host = headers.get("Host", "")
    if not _is_ours(_hostname(f"//{host}"), bound):
        return "not a name of this machine"
    origin = headers.get("Origin")
    if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
        return "asked for by another site's page"
    site = headers.get("Sec-Fetch-Site", "none")
    # Whoever follows a link to the page reads it himself; the other site cannot.
    follows_link = headers.get("Sec-Fetch-Mode") == "navigate"
    if site not in ("none", "same-origin") and not follows_link:
        return "asked for by another site's page"
    return ""


def _is_ours(host: str, bound: str) -> bool:
    if is_loopback(host):
        return True
    if is_loopback(bound):
        return False
    return _address(host) is not None or host in {socket.gethostname().lower(), bound.lower()}


def _hostname(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
