"""Where a step's figures go: one line of JSON in the run folder, one line in the log."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

log = logging.getLogger(__name__)

_SUMMARY = (
    ("reward", "reward/mean", ".3f"),
    ("loss", "loss/total", ".4f"),
    ("kl", "divergence/kl_mean", ".2e"),
    ("dlogp", "divergence/dlogp_max", ".2e"),
    ("grad", "optim/grad_norm", ".3g"),
    ("lr", "optim/lr", ".2e"),
    ("packed/flat", "tokens/packed_over_flat", ".3f"),
    ("tok/s", "tokens/per_s", ".0f"),
    ("lag", "policy/lag_max", ".0f"),
    ("s", "seconds/step", ".2f"),
)


def report(path: Path, step: int, values: Mapping[str, float], **labels: str) -> str:
    """Append a step's `area/name` floats to the JSONL file at `path` and log their summary.

    Args:
        path: The run's `metrics.jsonl`.
        step: Optimiser steps since the run began, skipped ones included.
        values: `area/name` to value.
        labels: Texts that go beside the figures, as the run's name.

    Returns:
        The line.
    """
    line: dict[str, Any] = {"step": step, "time_s": time.time(), **labels}
    line.update({name: float(value) for name, value in sorted(values.items())})
    text = json.dumps(line)
    with path.open("a+b") as file:
        if file.tell() and _last_byte(file) != b"\n":
            # A process that was killed left half a line.
            file.write(b"\n")
        file.write(text.encode() + b"\n")
    parts = [f"{label} {values[name]:{form}}" for label, name, form in _SUMMARY if name in values]
    log.info("step %d: %s", step, ", ".join(parts), extra={"step": step, **labels})
    return text


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, torn ones left out."""
    lines = []
    for text in path.read_text("utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def _last_byte(file: BinaryIO) -> bytes:
    file.seek(-1, os.SEEK_END)
    return file.read(1)
