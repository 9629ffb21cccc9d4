"""How full the pool will get: what the gate before an episode looks at.

Episodes are small when they begin. A gate that looks at the pool as it is admits every waiting one
at once, and all of them grow; this one looks at the fullest moment to come.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rollout_service.engine.base import EngineInfo, EngineStats

_NUM_REMEMBERED = 64
_NUM_MOMENTS = 8
"""Points in an episode's life that are looked at."""
_TYPICAL_CURSORS = 32
"""Of the first episode, of which nothing is known: sixteen turns and what they read."""
_LEARNING_RATE = 0.05
_MAX_TELLING_USE = 0.95
"""Above, the pool evicts, and its use says less than what the episodes take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """An open episode as the pool sees it."""

    num_tokens: int
    """Appended so far by all of its threads."""
    num_cursors: int
    is_growing: bool
    """Whether something of it runs, or has lately."""


class Forecast:
    """Expects each episode to take what episodes took lately, then to give all of it back.

    Example:
        Episodes end at 100 tokens, the pool holds 300, the gate is at 0.75. A third episode beside
        two that have just begun would bring it to 300 tokens: it waits. Beside three that are at
        0, 50 and 90 a fourth brings it to 200 (two at 50, one about to end, one gone): it begins.
    """

    def __init__(self, info: EngineInfo, prior_tokens: int) -> None:
        """Expect `prior_tokens` of an episode until the first ones have ended."""
        self._cursor_tokens = info.cursor_tokens
        prior = prior_tokens + _TYPICAL_CURSORS * info.cursor_tokens
        self._ended: deque[float] = deque([prior], maxlen=_NUM_REMEMBERED)
        self._correction = 1.0
        """What episodes are seen to take, over what their tokens and cursors should."""

    def ended(self, episode: Footprint) -> None:
        """Learn from an episode that has closed; one that never began tells nothing."""
        if episode.num_tokens:
            self._ended.append(self._size(episode))

    def expected_size(self, open_episodes: Sequence[Footprint]) -> float:
        """What an episode takes at its end, in tokens of the pool.

        All that was seen over the ends that were seen: long episodes end late, and the mean of
        those that have ended would leave them out.
        """
        running = sum(map(self._size, open_episodes))
        return (sum(self._ended) + running) / len(self._ended)

    def peak_use(self, stats: EngineStats, open_episodes: Sequence[Footprint]) -> float:
        """Share of the pool taken at the fullest moment to come if one more episode began.

        Where nothing grows the pool will stay as it is: then that counts, so a caller who holds
        one episode idle can open another.

        Args:
            stats: The pool now.
            open_episodes: Those that have been admitted.
        """
        final = self.expected_size(open_episodes)
        sizes = [self._size(episode) for episode in open_episodes]
        self._learn(stats, sum(sizes), final)
        if not any(episode.is_growing for episode in open_episodes):
            return stats.kv_use
        peak = 0.0
        for index in range(_NUM_MOMENTS + 1):
            grown = final * index / _NUM_MOMENTS
            later = (
                _later(size, grown, final) if episode.is_growing else size
                for size, episode in zip(sizes, open_episodes, strict=True)
            )
            peak = max(peak, grown + sum(later))
        return max(stats.kv_use, self._correction * peak / max(stats.tokens_capacity, 1))

    def _size(self, episode: Footprint) -> float:
        return episode.num_tokens + self._cursor_tokens * episode.num_cursors

    def _learn(self, stats: EngineStats, size: float, final: float) -> None:
        # Of little, what is being computed just now would count too much.
        if size >= final and stats.kv_use <= _MAX_TELLING_USE:
            seen = stats.tokens_resident / size
            self._correction += _LEARNING_RATE * (seen - self._correction)


def _later(size: float, grown: float, final: float) -> float:
    """What an episode holds once each has grown by `grown`."""
    if size >= final:
        return size
    later = size + grown
    return later if later <= final or math.isclose(later, final) else 0.0
