"""How Python is set while a replica serves."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLD = 20_000
"""Objects between two passes in place of Python's 700: a turn makes some thousand, nearly all of
which go by their count of references."""
_SWITCH_S = 2e-4


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Inside, garbage is sought seldom, and among what came since alone."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_THRESHOLD, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@contextmanager
def quickly_switched() -> Iterator[None]:
    """Inside, a thread that wants the interpreter waits for it 0.2 ms at most.

    Hashing an adapter takes it some thousand times, for microseconds each. While the event loop is
    busy, each would wait for Python's 5 ms: 18 s in place of 1.3 for an adapter of 244 MB.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
