"""Where gRPC's statuses end: errors <-> status, text and detail, both ways."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import cast

import grpc
from google.protobuf.message import DecodeError

from harness_sdk.errors import (
    ERROR_BY_STATUS,
    ERRORS_BY_NAME,
    HarnessError,
    ResourceExhausted,
    ServiceError,
    StaleHead,
)
from harness_sdk.rpc.v1 import rollout_pb2 as pb

ERROR_METADATA_KEY = "octopus-error-bin"
"""Trailing metadata that carries an `ErrorDetail`."""

# gRPC refuses trailing metadata past 8 KiB, the status text (percent-encoded) and the detail
# (base64) together.
_MAX_STATUS_BYTES = 400
_MAX_DETAIL_BYTES = 1000


def status_of(error: HarnessError | type[HarnessError]) -> grpc.StatusCode:
    """The gRPC status that `error` travels under."""
    return grpc.StatusCode[error.status]


def error_to_detail(error: HarnessError) -> pb.ErrorDetail:
    """`error` as its wire form; long texts are cut in the middle."""
    return pb.ErrorDetail(
        kind=type(error).__name__,
        message=_short(error.message),
        retryable=error.retryable,
        value=_short(error.value),
        limit=_short(error.limit),
        remedy=_short(error.remedy),
        episode_id=_short(error.episode_id),
        thread_id=_short(error.thread_id),
        head=error.head if isinstance(error, StaleHead) else 0,
    )


def error_from_detail(detail: pb.ErrorDetail) -> HarnessError:
    """The error that a service raised; one of an unknown kind becomes a `ServiceError`."""
    cls = ERRORS_BY_NAME.get(detail.kind, ServiceError)
    known = {"head": detail.head} if issubclass(cls, StaleHead) else {}
    return cls(
        detail.message,
        value=detail.value,
        limit=detail.limit,
        remedy=detail.remedy,
        episode_id=detail.episode_id,
        thread_id=detail.thread_id,
        **known,
    )


def error_to_status(
    error: HarnessError,
) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """Status, text and trailing metadata: the arguments of `ServicerContext.abort`."""
    detail = error_to_detail(error)
    return (
        status_of(error),
        _short(str(error), _MAX_STATUS_BYTES),
        ((ERROR_METADATA_KEY, detail.SerializeToString()),),
    )


def error_from_status(
    status: grpc.StatusCode,
    text: str = "",
    trailing_metadata: Iterable[tuple[str, str | bytes]] = (),
) -> HarnessError:
    """The error behind a failed call: from its detail, else from the table of bare statuses."""
    for key, value in trailing_metadata:
        if key == ERROR_METADATA_KEY and isinstance(value, bytes):
            try:
                return error_from_detail(pb.ErrorDetail.FromString(value))
            except DecodeError:
                break
    oversize = _oversize_error(text)
    if oversize is not None:
        return oversize
    return ERROR_BY_STATUS[status.name](text or f"the call failed with {status.name}")


def error_from_rpc(error: grpc.aio.AioRpcError) -> HarnessError:
    """The error behind an exception of grpc.aio."""
    pairs = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    return error_from_status(error.code(), error.details() or "", pairs)


def message_too_large(side: str, size: int, limit: int) -> ResourceExhausted:
    """The error of a message over `limit` bytes that `side` (client or server) would not take."""
    return ResourceExhausted(
        f"the message is larger than the {side} accepts",
        value=f"{size} bytes",
        limit=f"{limit} bytes",
        remedy="shorten the messages or raise the service's max_message_bytes",
    )


# gRPC's own text: "CLIENT: Sent message larger than max (83 vs. 64)".
_OVERSIZE = re.compile(
    r"(?:(?P<side>CLIENT|SERVER): )?(?P<act>Sent|Received) message larger than max "
    r"\((?P<size>\d+) vs\. (?P<limit>\d+)\)"
)


def _oversize_error(text: str) -> ResourceExhausted | None:
    found = _OVERSIZE.search(text)
    if found is None:
        return None
    # Without a prefix the status came from the peer, which is the one that received.
    side = (found["side"] or "SERVER").lower()
    return message_too_large(side, int(found["size"]), int(found["limit"]))


def _short(text: str, max_bytes: int = _MAX_DETAIL_BYTES) -> str:
    data = text.encode()
    if len(data) <= max_bytes:
        return text
    half = max_bytes // 2
    head, tail = data[:half].decode(errors="ignore"), data[-half:].decode(errors="ignore")
    return f"{head} ... ({len(data)} bytes) ... {tail}"
