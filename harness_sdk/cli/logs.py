"""The log of a command: one format, and nothing that a model, a tool or a file name said in it
that a terminal obeys or that passes for a line of our own.
"""

from __future__ import annotations

import logging

from harness_sdk.printable import printable

_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


class PrintableFormatter(logging.Formatter):
    """Control characters as escapes; further lines of a message or a traceback indented."""

    def format(self, record: logging.LogRecord) -> str:
        """One record, whose first line alone begins at the margin."""
        return printable(super().format(record))


def set_up_logging() -> None:
    """Log to stderr from INFO on, whatever was set up before."""
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter(_FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
