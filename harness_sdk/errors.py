"""Every error the SDK and the services raise, in one tree, and its gRPC status.

A service raises one of these; the converters in `_status.py` carry it to the caller whole.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self


class HarnessError(Exception):
    """Base of every error of this project.

    Attributes:
        retryable: Whether the same call may succeed later.
        value: What was given, as text; empty where it does not apply.
        limit: The limit or the allowed values, as text.
        remedy: What to do about it.
        episode_id: Episode concerned; empty where there is none.
        thread_id: Thread concerned; empty where there is none.
    """

    retryable: ClassVar[bool] = False
    status: ClassVar[str] = "UNKNOWN"

    def __init__(
        self,
        message: str,
        *,
        value: object = "",
        limit: object = "",
        remedy: str = "",
        episode_id: str = "",
        thread_id: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.value = str(value)
        self.limit = str(limit)
        self.remedy = remedy
        self.episode_id = episode_id
        self.thread_id = thread_id

    def __str__(self) -> str:
        parts = [self.message]
        if self.value:
            parts.append(f"got {self.value}")
        if self.limit:
            parts.append(f"allowed: {self.limit}")
        if self.remedy:
            parts.append(self.remedy)
        return "; ".join(parts)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.context()))

    def copy(self) -> Self:
        """A fresh one like it: one instance raised twice would collect both tracebacks."""
        return type(self)(self.message, **self.context())

    def context(self) -> dict[str, Any]:
        """The keyword arguments that rebuild this error beside its message."""
        return {
            "value": self.value,
            "limit": self.limit,
            "remedy": self.remedy,
            "episode_id": self.episode_id,
            "thread_id": self.thread_id,
        }


class ConfigError(HarnessError, ValueError):
    """A configuration that cannot work: unknown key, wrong type, unsupported pair of options."""

    status = "INVALID_ARGUMENT"


class InvalidRequest(HarnessError, ValueError):
    """An argument that the call cannot take."""

    status = "INVALID_ARGUMENT"


class ProtocolError(HarnessError):
    """The other end speaks another protocol version, or what it sent makes no sense."""

    status = "UNIMPLEMENTED"


class AuthError(HarnessError):
    """A missing, wrong or insufficient token."""

    status = "UNAUTHENTICATED"


class ClientClosed(HarnessError):
    """A call on a client, episode or thread that was closed."""

    status = "FAILED_PRECONDITION"


class ServiceError(HarnessError):
    """The service could not serve the call."""


class Unavailable(ServiceError):
    """The service cannot be reached or is shutting down."""

    retryable = True
    status = "UNAVAILABLE"


class DeadlineExceeded(ServiceError, TimeoutError):
    """The call's deadline passed."""

    status = "DEADLINE_EXCEEDED"


class ResourceExhausted(ServiceError):
    """A limit of the service: message size, memory, number of episodes."""

    status = "RESOURCE_EXHAUSTED"


class TooManyCalls(ResourceExhausted):
    """The client has more calls running, or begins more in a second, than the service allows."""

    retryable = True


class Cancelled(ServiceError):
    """The call was cancelled by its caller or by the service."""

    status = "CANCELLED"


class EpisodeError(HarnessError):
    """Something within one episode."""

    status = "FAILED_PRECONDITION"


class EngineError(EpisodeError):
    """The engine failed while it computed."""

    status = "INTERNAL"


class ToolError(EpisodeError):
    """A tool of the agent failed for a reason that is not the policy's."""

    status = "ABORTED"


class EpisodeNotFound(EpisodeError, LookupError):
    """No such episode on this replica, or it has been closed."""

    status = "NOT_FOUND"


class ThreadNotFound(EpisodeError, LookupError):
    """No such thread in the episode."""

    status = "NOT_FOUND"


class StepNotFound(EpisodeError, LookupError):
    """No such step on the thread's surviving path."""

    status = "OUT_OF_RANGE"


class StaleHead(EpisodeError):
    """Another writer moved the thread's head since the caller last saw it.

    Attributes:
        head: The thread's head now; 0 where another call runs on the thread.
    """

    status = "ABORTED"

    def __init__(self, message: str, *, head: int = 0, **context: Any) -> None:
        super().__init__(message, **context)
        self.head = head

    def context(self) -> dict[str, Any]:
        """The keyword arguments that rebuild this error beside its message."""
        return {**super().context(), "head": self.head}


class BudgetExhausted(EpisodeError):
    """A budget of the thread or the episode: tokens, turns, threads, depth, positions."""

    status = "RESOURCE_EXHAUSTED"


class ThreadEnded(EpisodeError):
    """A call on a thread that is done, failed or cancelled."""

    status = "FAILED_PRECONDITION"


class AdapterError(HarnessError):
    """An adapter that cannot be served: missing, unknown or wrongly shaped tensors, bad hash."""

    status = "DATA_LOSS"


def _rebuild(cls: type[HarnessError], message: str, context: dict[str, Any]) -> HarnessError:
    return cls(message, **context)


def _tree(cls: type[HarnessError]) -> dict[str, type[HarnessError]]:
    found = {cls.__name__: cls}
    for child in cls.__subclasses__():
        found.update(_tree(child))
    return found


ERRORS_BY_NAME: dict[str, type[HarnessError]] = _tree(HarnessError)

# What a bare gRPC status means where the server sent no detail.
ERROR_BY_STATUS: dict[str, type[HarnessError]] = {
    "CANCELLED": Cancelled,
    "UNKNOWN": ServiceError,
    "INVALID_ARGUMENT": InvalidRequest,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "NOT_FOUND": EpisodeNotFound,
    "ALREADY_EXISTS": InvalidRequest,
    "PERMISSION_DENIED": AuthError,
    "RESOURCE_EXHAUSTED": ResourceExhausted,
    "FAILED_PRECONDITION": EpisodeError,
    "ABORTED": StaleHead,
    "OUT_OF_RANGE": StepNotFound,
    "UNIMPLEMENTED": ProtocolError,
    "INTERNAL": EngineError,
    "UNAVAILABLE": Unavailable,
    "DATA_LOSS": AdapterError,
    "UNAUTHENTICATED": AuthError,
}
