"""Stop strings, looked for in the core: nothing is scheduled past one that its client has to find.

Token ids are the core's own language, so the text comes from the service's decoder, sent over once.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence

Detokenize = Callable[[Sequence[int]], str]

STOP_ARG = "octopus_stop"
"""Key of a request's stop strings in `SamplingParams.extra_args`."""
# A visible token holds at least one byte and a character at most four; special tokens hold none.
_TOKENS_PER_CHARACTER = 4
_TOKENS_OF_SLACK = 16
_UNFINISHED = "\ufffd"
"""What a token reads as alone that holds a part of a character."""


class StopStrings:
    """Finds the stop string that a sampled token completes."""

    def __init__(self, detokenize: Detokenize | None = None) -> None:
        """Read tokens with `detokenize`; None finds nothing until one is loaded."""
        self._detokenize = detokenize
        self._texts: dict[int, str] = {}

    def load(self, pickled: bytes) -> None:
        """Take over the decoder that the service pickled."""
        self._detokenize = pickle.loads(pickled)
        self._texts.clear()

    def completed(self, stops: Sequence[str], token_ids: Sequence[int]) -> str | None:
        """The stop string that the last of `token_ids` completes, of several the first given.

        Args:
            stops: Strings that are not empty.
            token_ids: All that was sampled; nothing in front of the last token completed one.
        """
        if self._detokenize is None or not any(self._may_end(s, token_ids[-1]) for s in stops):
            return None
        num_tail = max(map(len, stops)) * _TOKENS_PER_CHARACTER + _TOKENS_OF_SLACK
        tail = self._detokenize(token_ids[-num_tail:])
        return next((stop for stop in stops if stop in tail), None)

    def _may_end(self, stop: str, token_id: int) -> bool:
        """Whether the token's own text may hold the string's last character.

        Saves reading the tail for nearly every token. A space is where decoders differ between a
        token alone and in its place, and only ASCII cannot be torn apart.
        """
        last = stop[-1]
        if not last.isascii() or last == " ":
            return True
        text = self._texts.get(token_id)
        if text is None:
            assert self._detokenize is not None
            text = self._texts[token_id] = self._detokenize((token_id,))
        return last in text or _UNFINISHED in text
