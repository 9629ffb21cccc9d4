"""Runs a test module as a program in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def interpreted(module: str, *args: str) -> Any:
    """The JSON that `python -m module` prints; this process may have Triton without it."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        # Threads cost more than these sizes give them to do.
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}:{ROOT}/kernels",
    }
    command = [sys.executable, "-m", module, *args]
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)
