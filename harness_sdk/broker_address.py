"""The MQTT broker's address, read from one URL: host, port, user, and TLS, which is verified."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit

from harness_sdk.errors import ConfigError
from harness_sdk.masking import masked_url

_PORTS = {"mqtt": 1883, "mqtts": 8883}
# redis-py's names, so that one knows both addresses.
_TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerAddress:
    """Where the broker is and who asks."""

    hostname: str
    port: int
    username: str | None
    password: str | None = field(repr=False)
    tls_context: ssl.SSLContext | None
    """None speaks plain text."""


def broker_address(url: str) -> BrokerAddress:
    """Read `mqtt://[user:password@]host[:port]`, or `mqtts://` for TLS.

    Args:
        url: With `mqtts`, `?ssl_ca_certs=FILE` names the authority where it is none of the
            system's, `&ssl_certfile=FILE&ssl_keyfile=FILE` the client's own certificate.

    Raises:
        ConfigError: It is no such address, or a file cannot be used.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
        files = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
    except ValueError:
        parts, port, files = urlsplit(""), None, {}
    known = set(files) <= set(_TLS_FILES) if parts.scheme == "mqtts" else not files
    if parts.scheme not in _PORTS or not parts.hostname or port == 0 or not known:
        raise ConfigError(
            "mqtt.url is no address of a broker",
            value=masked_url(url),
            limit="mqtt://host:port or mqtts://host:port, the latter with ?"
            + "&".join(f"{name}=FILE" for name in _TLS_FILES),
            remedy="correct mqtt.url",
        )
    return BrokerAddress(
        hostname=parts.hostname,
        port=port or _PORTS[parts.scheme],
        username=_unquoted(parts.username),
        password=_unquoted(parts.password),
        tls_context=_tls_context(files) if parts.scheme == "mqtts" else None,
    )


def _unquoted(text: str | None) -> str | None:
    return unquote(text) if text else None


def _tls_context(files: dict[str, str]) -> ssl.SSLContext:
    ca, cert, key = (files.get(name) for name in _TLS_FILES)
    if (cert is None) != (key is None):
        raise ConfigError(
            "mqtt.url names one half of the client's certificate",
            value=cert or key,
            limit="ssl_certfile and ssl_keyfile together",
            remedy="name both or neither",
        )
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert is not None:
            context.load_cert_chain(cert, key)
    except OSError as error:
        raise ConfigError(
            "cannot use the TLS files of mqtt.url",
            value=", ".join(files.values()),
            remedy=f"check them: {error}",
        ) from error
    return context
