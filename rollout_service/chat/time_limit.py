"""An end for templates that have none: jinja's sandbox bounds what they reach, not how long."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import jinja2

_TEMPLATE_FILE = "<template>"
_JINJA = jinja2.__name__


class TimeIsUp(BaseException):
    """The limit is reached; no handler of the template's faults may take it for one."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Stop templates that this thread renders in the block after `seconds`.

    Raises:
        TimeIsUp: One was stopped, between two of its lines: one endless operation is not.
    """
    end_s = time.monotonic() + seconds

    def check(frame: FrameType, event: str, given: Any) -> Any:
        if time.monotonic() > end_s:
            raise TimeIsUp
        return check

    def enter(frame: FrameType, event: str, given: Any) -> Any:
        module = frame.f_globals.get("__name__") or ""
        traced = frame.f_code.co_filename == _TEMPLATE_FILE or module.startswith(_JINJA)
        return check(frame, event, given) if traced else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)
