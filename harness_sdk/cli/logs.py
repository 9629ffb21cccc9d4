"""The log of a command, as text or as JSON: each line with the ids of what it is about, and
nothing in it that a terminal obeys or that passes for a line of our own.
"""

from __future__ import annotations

import json
import logging
import math
from datetime import UTC, datetime
from typing import Any

from harness_sdk.log_ids import NAMES, current_ids
from harness_sdk.printable import printable
from harness_sdk.tracing import trace_ids

FORMS = ("text", "json")

_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
_OWN = {*vars(logging.makeLogRecord({})), "message", "asctime"}
# `extra` names that say the same as the ids do.
_IDS = {"episode_id": "episode", "thread_id": "thread"}


class PrintableFormatter(logging.Formatter):
    """Control characters as escapes; further lines of a message or a traceback indented.

    Example:
        `2026-12-01 10:00:00,000 WARNING rollout_service.rpc.calls slow [run=a episode=e1 thread=t]`
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line itself, its ids at the end."""
        fields = _fields(record)
        told = " ".join(f"{name}={fields[name]}" for name in NAMES if fields.get(name))
        line = super().formatMessage(record)
        return f"{line} [{told}]" if told else line

    def format(self, record: logging.LogRecord) -> str:
        """One record, whose first line alone begins at the margin."""
        return printable(super().format(record))


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (ISO 8601, UTC), level, logger, message, the ids, trace and
    span where one is current, what `extra` gave, and the traceback under `exception`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """One record."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        trace = trace_ids()
        if trace is not None:
            line["trace_id"], line["span_id"] = trace
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # Escapes all but ASCII: what a terminal would obey comes out as text.
        return json.dumps({name: _strict(value) for name, value in line.items()}, default=str)


def set_up_logging(form: str = "text") -> None:
    """Log to stderr from INFO on, whatever was set up before.

    Args:
        form: One of `FORMS`.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else PrintableFormatter(_FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def log_arguments() -> list[str]:
    """Flags for a command that this one starts, so that it logs in the same form."""
    handlers = logging.getLogger().handlers
    is_json = any(isinstance(handler.formatter, JsonFormatter) for handler in handlers)
    return ["--log-format", "json"] if is_json else []


def _strict(value: Any) -> Any:
    """What JSON has no number for, as text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    extra = {_IDS.get(k, k): v for k, v in vars(record).items() if k not in _OWN}
    return {**current_ids(), **extra}
