"""Settings of every test process."""

from __future__ import annotations

import os

# Tiny matrices: with more threads than free cores, OpenMP spends its time waiting (measured: 109 s
# in place of 2 s for one test on two busy cores). Set before anything imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")
