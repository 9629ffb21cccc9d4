"""How full the pool will get: what the gate before an episode looks at.

Episodes are small when they begin. A gate that looks at the pool as it is admits every waiting one
at once, and all of them grow; this one looks at the fullest moment to come.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_NUM_REMEMBERED = 64
_NUM_MOMENTS = 8
"""Points in an episode's life that are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """An open episode as the pool sees it."""

    num_tokens: int
    """Appended so far by all of its threads."""
    is_growing: bool
    """Whether something of it runs, or has lately."""


class Forecast:
    """Expects each episode to take what episodes took lately, then to give all of it back.

    Example:
        Episodes end at 100 tokens, the pool holds 300, the gate is at 0.75. A third episode beside
        two that have just begun would bring it to 300 tokens: it waits. Beside three that are at
        0, 50 and 90 a fourth brings it to 200 (two at 50, one about to end, one gone): it begins.
    """

    def __init__(self, prior_tokens: int) -> None:
        """Expect `prior_tokens` of an episode until the first ones have ended."""
        self._ended: deque[int] = deque([prior_tokens], maxlen=_NUM_REMEMBERED)

    def ended(self, num_tokens: int) -> None:
        """Learn from an episode that has closed; one that never began tells nothing."""
        if num_tokens:
            self._ended.append(num_tokens)

    def expected_tokens(self, open_episodes: Sequence[Footprint]) -> float:
        """What an episode takes at its end.

        All tokens seen over the ends seen: long episodes end late, and the mean of those that
        have ended would leave them out.
        """
        running = sum(episode.num_tokens for episode in open_episodes)
        return (sum(self._ended) + running) / len(self._ended)

    def peak_use(
        self, kv_use: float, tokens_capacity: int, open_episodes: Sequence[Footprint]
    ) -> float:
        """Share of the pool taken at the fullest moment to come if one more episode began.

        Where nothing grows the pool will stay as it is: then that counts, so a caller who holds
        one episode idle can open another.

        Args:
            kv_use: Share taken now.
            tokens_capacity: Tokens that the pool holds.
            open_episodes: Those that have been admitted.
        """
        if not any(episode.is_growing for episode in open_episodes):
            return kv_use
        final = self.expected_tokens(open_episodes)
        now = sum(episode.num_tokens for episode in open_episodes)
        # Recurrent states and page ends take room too; how much, only many tokens tell.
        share = max(1 / tokens_capacity, kv_use / now if now >= final else 0.0)
        moments = [final * index / _NUM_MOMENTS for index in range(_NUM_MOMENTS + 1)]
        peak = max(grown + sum(_later(e, grown, final) for e in open_episodes) for grown in moments)
        return max(kv_use, share * peak)


def _later(episode: Footprint, grown: float, final: float) -> float:
    """Tokens that `episode` holds once each has grown by `grown`."""
    later = episode.num_tokens + grown
    if not episode.is_growing or episode.num_tokens >= final:
        return episode.num_tokens
    return later if later <= final or math.isclose(later, final) else 0.0
