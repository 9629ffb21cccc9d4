"""Settings of every test process."""

from __future__ import annotations

import gc
import os

# Tiny matrices: with more threads than free cores, OpenMP spends its time waiting (measured: 109 s
# in place of 2 s for one test on two busy cores). Set before anything imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests and what they import live to the end: no garbage is sought until all are there.
gc.disable()


def pytest_collection_finish() -> None:
    """Look for garbage from here on."""
    gc.enable()
