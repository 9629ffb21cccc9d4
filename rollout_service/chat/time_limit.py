"""An end for templates that have none: jinja's sandbox bounds what they reach, not how long."""

from __future__ import annotations

import contextlib
import contextvars
import math
import time
from collections.abc import Iterator

_end_s: contextvars.ContextVar[float] = contextvars.ContextVar("end_s", default=math.inf)
"""On the monotonic clock."""


class TimeIsUp(BaseException):
    """The limit is reached; no handler of the template's faults may take it for one."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Stop templates that are rendered in the block after `seconds`.

    Raises:
        TimeIsUp: One was stopped, between two of its steps: one endless operation is not.
    """
    token = _end_s.set(min(_end_s.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        _end_s.reset(token)


def check_time() -> None:
    """What compiled templates call at each step that may come again.

    Raises:
        TimeIsUp: The limit is reached.
    """
    if time.monotonic() > _end_s.get():
        raise TimeIsUp
