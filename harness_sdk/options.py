"""What a caller may set on a client: frozen dataclasses, checked where they are made."""

from __future__ import annotations

from dataclasses import dataclass, fields

from harness_sdk.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How a call is repeated while the service is unavailable.

    Repeats carry the idempotency key of the first attempt and stay within the call's deadline.
    """

    max_attempts: int = 5
    """1 never repeats."""
    initial_backoff_s: float = 0.1
    """Pause before the first repeat."""
    max_backoff_s: float = 5.0
    """Longest pause."""
    multiplier: float = 2.0
    """Growth of the pause; each pause is drawn between half and the whole of it."""

    def __post_init__(self) -> None:
        _at_least("RetryPolicy.max_attempts", self.max_attempts, 1)
        _at_least("RetryPolicy.initial_backoff_s", self.initial_backoff_s, 0)
        _at_least("RetryPolicy.max_backoff_s", self.max_backoff_s, self.initial_backoff_s)
        _at_least("RetryPolicy.multiplier", self.multiplier, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Deadline of each kind of call in seconds, repeats included; None sets none."""

    connect_s: float | None = 10.0
    """The handshake."""
    admission_s: float | None = None
    """From opening an episode until it is admitted; a busy service lets new episodes wait."""
    call_s: float | None = 30.0
    """fork, rewind, read_thread, done, cancel, status."""
    generate_s: float | None = 900.0
    """One model turn, queueing in the engine included."""
    close_s: float | None = 30.0
    """Closing an episode, which writes its record."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value: float | None = getattr(self, each.name)
            if value is not None and value <= 0:
                raise ConfigError(
                    f"Timeouts.{each.name} is too small",
                    value=value,
                    limit="more than 0",
                    remedy="use None for no deadline",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsOptions:
    """TLS towards the service; a certificate and a key make it mutual."""

    ca_file: str | None = None
    """PEM of the authority that signed the service; None trusts gRPC's own roots."""
    cert_file: str | None = None
    """PEM of the client's certificate chain."""
    key_file: str | None = None
    """PEM of the client's private key."""
    server_name: str | None = None
    """Name to expect in the service's certificate; None takes the address's host."""

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ConfigError(
                "mutual TLS needs a certificate and its key",
                value=f"cert_file={self.cert_file}, key_file={self.key_file}",
                remedy="set both or neither",
            )


def _at_least(name: str, value: float, least: float) -> None:
    if value < least:
        raise ConfigError(f"{name} is too small", value=value, limit=f"{least} or more")
