"""How full the pool will get: what the gate before an episode looks at.

Episodes are small when they begin. A gate that looks at the pool as it is admits every waiting one
at once, and all of them grow; this one looks at the fullest moment to come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollout_service.engine.base import EngineInfo, EngineStats

_NUM_REMEMBERED = 64
_TYPICAL_CURSORS = 32
"""Of a thread of which nothing is known: sixteen turns and what they read."""
_FEW = 4
"""Episodes that may begin as if none forked, and ends that tell what they take if they do."""
_LEARNING_RATE = 0.05
_TELLING_USE = (0.01, 0.95)
"""Below, whole pages of little tell too much; above, what the pool has evicted is not seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """An open episode as the pool sees it."""

    num_tokens: int
    """Appended so far by all of its threads."""
    num_cursors: int
    num_threads: int
    """Threads that it may have, or has where it is not expected to fork."""
    is_growing: bool
    """Whether something of it runs, or has lately."""
    num_restarts: int = 0
    """Of the engine before it began: what it held before another one is there no more."""


class Forecast:
    """Expects each episode to take what episodes took lately, then to give all of it back.

    Example:
        Episodes end at 100 tokens, the pool holds 300, the gate is at 0.75. A third episode beside
        two that have just begun would bring it to 300 tokens: it waits. Beside three that are at
        0, 50 and 90 a fourth brings it to 200 (two at 50, one about to end, one gone): it begins.
    """

    def __init__(self, info: EngineInfo, thread_tokens: int) -> None:
        """Know nothing but `thread_tokens`, what a thread may append, until episodes have ended."""
        self._cursor_tokens = info.cursor_tokens
        self._thread = thread_tokens + _TYPICAL_CURSORS * info.cursor_tokens
        self._ended: deque[float] = deque(maxlen=_NUM_REMEMBERED)
        self._correction = 1.0
        """What episodes are seen to take, over what their tokens and cursors should."""
        self._num_seen = 0

    def ending(self, stats: EngineStats, open_episodes: Sequence[Footprint]) -> None:
        """Learn from the pool before an episode gives back what it took.

        Nobody may have waited while it ran, so nothing may have been learned of it yet.

        Args:
            stats: The pool now.
            open_episodes: Those that have taken from it, the one that ends among them.
        """
        self._learn(stats, open_episodes)

    def ended(self, episode: Footprint) -> None:
        """Learn from an episode that has closed; one that never began tells nothing."""
        if episode.num_tokens:
            self._ended.append(self._size(episode))

    def expected_size(self, open_episodes: Sequence[Footprint]) -> float:
        """What an episode takes at its end, in tokens of the pool.

        All that was seen over the ends that were seen: long episodes end late, and the mean of
        those that have ended would leave them out. Before a few have ended, an episode of one
        thread is seen beside them, and beyond a few that are open all the threads count that one of
        them may have.
        """
        seen, num_ended = sum(self._ended) + sum(map(self._size, open_episodes)), len(self._ended)
        if num_ended >= _FEW:
            return seen / num_ended
        if len(open_episodes) >= _FEW:
            num_threads = max(episode.num_threads for episode in open_episodes)
            return max(seen / (1 + num_ended), num_threads * self._thread)
        return (self._thread + seen) / (1 + num_ended)

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
        # Of little, what is being computed just now would count too much.
        if sum(sizes) >= final:
            self._learn(stats, open_episodes)
        if not any(episode.is_growing for episode in open_episodes):
            return stats.kv_use
        growing, steady = [0.0], 0.0
        for episode, size in zip(open_episodes, sizes, strict=True):
            if episode.is_growing and size < final:
                growing.append(size)
            else:
                steady += size
        peak = steady + _fullest_moment(growing, final)
        return max(stats.kv_use, self._correction * peak / max(stats.tokens_capacity, 1))

    def _size(self, episode: Footprint) -> float:
        return episode.num_tokens + self._cursor_tokens * episode.num_cursors

    def _learn(self, stats: EngineStats, open_episodes: Sequence[Footprint]) -> None:
        restarts = {episode.num_restarts for episode in open_episodes}
        if not stats.is_serving or restarts != {stats.restarts}:
            return
        size = sum(map(self._size, open_episodes))
        at_least, at_most = _TELLING_USE
        if size > at_least * stats.tokens_capacity and stats.kv_use <= at_most:
            self._num_seen += 1
            rate = max(_LEARNING_RATE, 1 / (1 + self._num_seen))
            self._correction += rate * (stats.tokens_resident / size - self._correction)


def _fullest_moment(sizes: Iterable[float], final: float) -> float:
    """The most that episodes hold at a time if all grow alike and each gives back `final`.

    That is when one of them ends: those that are no larger now are still there. One sort.
    """
    peak = held = 0.0
    for count, size in enumerate(sorted(sizes), start=1):
        held += size
        peak = max(peak, held + count * (final - size))
    return peak
