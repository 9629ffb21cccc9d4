"""Errors of this project as OpenAI's: HTTP status and error JSON, with value, limit and remedy."""

from __future__ import annotations

import logging
from typing import Any

from harness_sdk.errors import (
    AuthError,
    BudgetExhausted,
    Cancelled,
    DeadlineExceeded,
    EngineError,
    EpisodeNotFound,
    HarnessError,
    InvalidRequest,
    ResourceExhausted,
    StaleHead,
    ThreadEnded,
    Unavailable,
)
from rollout_service.chat.nesting import MAX_DEPTH

logger = logging.getLogger(__name__)


class ParameterError(InvalidRequest):
    """A parameter of a body that cannot be served.

    Attributes:
        param: Its name, with the path to it.
    """

    def __init__(self, message: str, *, param: str = "", **context: Any) -> None:
        super().__init__(message, **context)
        self.param = param

    def context(self) -> dict[str, Any]:
        """The keyword arguments that rebuild this error beside its message."""
        return {**super().context(), "param": self.param}


class ContextExceeded(BudgetExhausted):
    """The messages do not fit; agents that know the code shorten their history."""


class BodyTooLarge(ResourceExhausted):
    """A body over the service's limit."""


# Class, HTTP status, type, code; the first that fits. OpenAI's clients repeat 409, 429 and 5xx.
_TABLE: tuple[tuple[type[HarnessError], int, str, str | None], ...] = (
    (AuthError, 401, "authentication_error", "invalid_api_key"),
    (ContextExceeded, 400, "invalid_request_error", "context_length_exceeded"),
    (BudgetExhausted, 400, "invalid_request_error", "budget_exhausted"),
    (InvalidRequest, 400, "invalid_request_error", None),
    (EpisodeNotFound, 404, "invalid_request_error", "session_closed"),
    (ThreadEnded, 404, "invalid_request_error", "session_closed"),
    (BodyTooLarge, 413, "invalid_request_error", "body_too_large"),
    (StaleHead, 409, "conflict_error", None),
    (ResourceExhausted, 429, "rate_limit_error", None),
    (Unavailable, 503, "service_unavailable_error", None),
    (Cancelled, 503, "service_unavailable_error", None),
    (DeadlineExceeded, 504, "timeout_error", None),
    (HarnessError, 500, "server_error", None),
)


def as_harness_error(error: Exception) -> HarnessError:
    """`error`, or what stands for one that nobody expected."""
    if isinstance(error, HarnessError):
        return error
    if isinstance(error, RecursionError):
        return ParameterError(
            "the body is nested too deeply",
            value=error,
            limit=f"{MAX_DEPTH} levels in tools and arguments",
            remedy="flatten what the request holds",
        )
    logger.error("unexpected failure in a request", exc_info=error)
    return EngineError(
        f"the service failed unexpectedly: {error}",
        value=type(error).__name__,
        remedy="report it with the service's log; the session is where it was",
    )


def http_status(error: HarnessError) -> int:
    """The HTTP status that `error` travels under."""
    return _row(error)[0]


def error_json(error: HarnessError) -> dict[str, Any]:
    """OpenAI's error object; `value`, `limit` and `remedy` are ours."""
    _, kind, code = _row(error)
    return {
        "error": {
            "message": str(error),
            "type": kind,
            "param": getattr(error, "param", "") or None,
            "code": code,
            "value": error.value,
            "limit": error.limit,
            "remedy": error.remedy,
        }
    }


def _row(error: HarnessError) -> tuple[int, str, str | None]:
    return next(row[1:] for row in _TABLE if isinstance(error, row[0]))
