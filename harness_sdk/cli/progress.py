"""How far the episodes of a command are: a bar where stderr is a terminal, and lines on stdout."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Generator
from typing import Any

from harness_sdk.runner import EpisodeOutcome


class EpisodeProgress:
    """Lines on stdout, above the bar where there is one."""

    def __init__(self, bar: Any = None) -> None:
        """Show on `bar`, one of tqdm's; None shows lines alone."""
        self._bar = bar
        self._rewards: list[float] = []
        self._num_failed = 0

    def line(self, text: str) -> None:
        """Write a line."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        else:
            sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def ended(self, episode: EpisodeOutcome) -> None:
        """Count an episode."""
        if self._bar is None:
            return
        if episode.reward is None:
            self._num_failed += 1
        else:
            self._rewards.append(episode.reward)
        mean = sum(self._rewards) / len(self._rewards) if self._rewards else 0.0
        self._bar.set_postfix_str(f"reward {mean:.3f}, {self._num_failed} failed", refresh=False)
        self._bar.update()


@contextlib.contextmanager
def episode_progress(total: int | None) -> Generator[EpisodeProgress]:
    """Show the progress of `total` episodes until the block ends; None where it is not known.

    tqdm comes with the services; without it there is no bar.
    """
    if not sys.stderr.isatty():
        yield EpisodeProgress()
        return
    try:
        tqdm: Any = importlib.import_module("tqdm")
        redirect: Any = importlib.import_module("tqdm.contrib.logging").logging_redirect_tqdm
    except ImportError:
        yield EpisodeProgress()
        return
    with tqdm.tqdm(total=total, unit="episode", dynamic_ncols=True) as bar, redirect():
        yield EpisodeProgress(bar)
