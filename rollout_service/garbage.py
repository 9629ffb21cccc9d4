"""Python's garbage collection, kept from being part of a turn's latency."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLD = 20_000
"""Objects between two passes in place of Python's 700: a turn makes some thousand, nearly all of
which go by their count of references."""


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
