"""Live progress: one line for each step, read from the trainer's metrics as they are written."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"

_POLL_S = 0.1
_BAR = 20


class Progress:
    """Writes to stdout.

    Attributes:
        steps: The steps so far, as the trainer reported them.
    """

    def __init__(self) -> None:
        self._begin_s = time.monotonic()
        self._objective = ""
        self._shown = 0
        self.steps: list[dict[str, Any]] = []

    @property
    def elapsed_s(self) -> float:
        """Since the demo began."""
        return time.monotonic() - self._begin_s

    def tell(self, text: str) -> None:
        """A line with the time before it."""
        sys.stdout.write(f"[{self.elapsed_s:5.1f} s] {text}\n")
        sys.stdout.flush()

    @contextlib.asynccontextmanager
    async def following(self, run_folder: Path) -> AsyncGenerator[None]:
        """Show the steps that the trainer makes while the block runs."""
        path = run_folder / METRICS_FILE
        task = asyncio.create_task(self._follow(path))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._show_new(path)

    async def _follow(self, path: Path) -> None:
        while True:
            self._show_new(path)
            await asyncio.sleep(_POLL_S)

    def _show_new(self, path: Path) -> None:
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._shown)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._shown += len(line)
                self._show(json.loads(line))

    def _show(self, step: dict[str, Any]) -> None:
        self.steps.append(step)
        if step["objective"] != self._objective:
            self._objective = step["objective"]
            sys.stdout.write(_HEADER)
        sys.stdout.write(step_line(len(of_objective(self.steps, self._objective)), step))
        sys.stdout.flush()


_HEADER = (
    f"{'step':>6} {'version':>7}  {'mean reward':<{_BAR + 6}} {'KL':>8} {'lag':>3}"
    f"  {'tokens packed / flat':>20} {'s':>5}\n"
)


def step_line(number: int, step: Mapping[str, Any]) -> str:
    """One line of progress."""
    reward = step["reward/mean"]
    tokens = f"{step['tokens/packed']:,.0f} / {step['tokens/flat']:,.0f}"
    seconds = step["seconds/wait"] + step["seconds/step"]
    bar = "█" * round(reward * _BAR)
    return (
        f"{number:6d} {step['policy/version']:7.0f}  {reward:5.3f} {bar:<{_BAR}} "
        f"{step['divergence/kl_mean']:8.1e} {step['policy/lag_max']:3.0f}"
        f"  {tokens:>20} {seconds:5.1f}\n"
    )


def of_objective(steps: list[dict[str, Any]], objective: str) -> list[dict[str, Any]]:
    """Those that were made with `objective`."""
    return [step for step in steps if step["objective"] == objective]
