"""What a caller has asked of the engine and how far it is: plain state, moved by the scheduler."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness_sdk.types import FinishReason, SamplingOptions
from rollout_service.cursors import Cursor
from rollout_service.engine.transformers.residency import Key, cursor_needs
from rollout_service.engine.transformers.strip import Run

# A visible token holds at least one byte and a character at most four; special tokens hold none.
_TOKENS_PER_STOP_CHARACTER = 4
_TOKENS_OF_SLACK = 16


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """Work under one policy version that ends with one result or one error."""

    version: int
    receive: Callable[[Any], None]
    """Takes what the request yields; called on the caller's event loop."""
    plan: deque[Cursor] = field(default_factory=deque)
    """Cursors still to compute before the request's own run, dependencies first."""
    pinned: set[Key] = field(default_factory=set)
    run: Run | None = None
    """The request's own run, shared with nobody."""

    def reads(self) -> list[Cursor]:
        """Cursors that must be resident; those that are not are computed first."""
        raise NotImplementedError

    def own_cursor(self) -> Cursor | None:
        """Cursor of the request's own run; None where `reads` is all there is to do."""
        return None

    def kept_cursor(self) -> Cursor | None:
        """Cursor whose residency the request leaves behind once it has finished."""
        return None


@dataclass(eq=False, slots=True, kw_only=True)
class ExtendRequest(Request):
    """Make a new cursor resident."""

    target: Cursor

    def reads(self) -> list[Cursor]:
        """The cursor itself: an identical root may be resident or on its way."""
        return [self.target]

    def kept_cursor(self) -> Cursor | None:
        """The new cursor."""
        return self.target


@dataclass(eq=False, slots=True, kw_only=True)
class ScoreRequest(Request):
    """Make a new cursor resident and tell the log-probabilities of its last tokens."""

    target: Cursor
    score_from: int
    is_probe: bool = False
    """Whether the cursor is dropped once scored."""
    logprobs: list[float] = field(default_factory=list)

    def reads(self) -> list[Cursor]:
        """All that the cursor sees."""
        return cursor_needs(self.target)

    def own_cursor(self) -> Cursor | None:
        """The new cursor, computed even where an identical root is resident."""
        return self.target

    def kept_cursor(self) -> Cursor | None:
        """The new cursor, unless it is a probe."""
        return None if self.is_probe else self.target


@dataclass(eq=False, slots=True, kw_only=True)
class GenerateRequest(Request):
    """Append a prompt and sample until a stop."""

    prompt: Cursor
    """The generation prompt as a cursor; never shown to anybody."""
    sampling: SamplingOptions
    stop_token_ids: frozenset[int]
    max_tokens: int
    generator: random.Random
    sampled_ids: list[int] = field(default_factory=list)
    sampled_logprobs: list[float] = field(default_factory=list)
    result: Cursor | None = None

    def reads(self) -> list[Cursor]:
        """All that the prompt sees."""
        return cursor_needs(self.prompt)

    def own_cursor(self) -> Cursor | None:
        """The prompt; sampled tokens are appended to its run."""
        return self.prompt

    def kept_cursor(self) -> Cursor | None:
        """The cursor of the finished turn."""
        return self.result

    def take(
        self, token_id: int, logprob: float, detokenize: Callable[[Sequence[int]], str] | None
    ) -> FinishReason | None:
        """Append a sampled token; returns why sampling ends, None where it goes on."""
        self.sampled_ids.append(token_id)
        self.sampled_logprobs.append(logprob)
        if token_id in self.stop_token_ids or self._stop_string_ends(detokenize):
            return "stop"
        return "length" if len(self.sampled_ids) >= self.max_tokens else None

    def _stop_string_ends(self, detokenize: Callable[[Sequence[int]], str] | None) -> bool:
        if not self.sampling.stop or detokenize is None:
            return False
        longest = max(map(len, self.sampling.stop))
        num_tail = longest * _TOKENS_PER_STOP_CHARACTER + _TOKENS_OF_SLACK
        tail = detokenize(self.sampled_ids[-num_tail:])
        return any(stop in tail for stop in self.sampling.stop)
