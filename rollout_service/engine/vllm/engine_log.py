"""What the engine's processes write: passed on to the service's log, and the last lines kept."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque

logger = logging.getLogger(__name__)

_KEPT = 20
_MAX_LINE = 2000
_READ_S = 1.0


class EngineLog:
    """A pipe that the processes of one engine write to, and the thread that reads it.

    Attributes:
        output: Descriptor to write to, until `seal`.
    """

    def __init__(self) -> None:
        self._reader, self.output = os.pipe()
        self._is_sealed = False
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self._reading = threading.Thread(target=self._read, daemon=True, name="octopus-engine-log")
        self._reading.start()

    def seal(self) -> None:
        """Nobody else begins to write; the log ends with the last of those who do."""
        if not self._is_sealed:
            self._is_sealed = True
            os.close(self.output)

    def last_lines(self) -> list[str]:
        """The last that was written; call it off the event loop, once the processes have ended."""
        self.seal()
        self._reading.join(_READ_S)
        return list(self._lines)

    def _read(self) -> None:
        # Progress is written over itself with a carriage return alone, which ends a line too.
        with os.fdopen(self._reader, encoding="utf-8", errors="replace") as lines:
            while line := lines.readline(_MAX_LINE):
                if told := line.rstrip():
                    self._lines.append(told)
                    logger.info("engine: %s", told)
