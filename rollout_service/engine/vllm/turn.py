"""One model turn: how it is sampled, and the cursor that comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from harness_sdk.errors import InvalidRequest, Unavailable
from harness_sdk.types import FinishReason, SamplingOptions
from rollout_service.cursors import Cursor, child_cursor
from rollout_service.engine.transformers.sampling import check_sampling

_LOWEST_TEMPERATURE = 0.01
"""vLLM samples below this as if at this."""


@dataclass(eq=False, slots=True, kw_only=True)
class Turn:
    """What is to be sampled, and what has been."""

    prompt: Cursor
    """The generation prompt as a cursor; never shown to anybody."""
    sampling: SamplingOptions
    stop_token_ids: frozenset[int]
    max_tokens: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    finished: Cursor | None = None
    """The turn's cursor, once it is resident."""

    def check_resumes(self) -> None:
        """Refuse to sample on in another process where that is not what was asked for.

        A seed promises the same tokens each time; what stops or shapes a text has to see all of it.

        Raises:
            Unavailable: Tokens were sampled, with a seed, stop strings or a constraint.
        """
        options = self.sampling
        is_seeded = options.seed is not None and options.temperature > 0
        if self.token_ids and (is_seeded or options.stop or options.structured is not None):
            raise Unavailable(
                "the engine process ended in the middle of a turn that has to be sampled whole",
                value=f"{len(self.token_ids)} tokens sampled",
                limit="no seed, stop strings or constraint, to go on from there",
                remedy="repeat the call; the thread is where it was",
            )

    def vllm_sampling(self) -> dict[str, Any]:
        """vLLM's sampling parameters for what is left to sample."""
        options = self.sampling
        return {
            "max_tokens": self.max_tokens - len(self.token_ids),
            "temperature": options.temperature,
            "top_p": options.top_p,
            "top_k": options.top_k,
            "seed": options.seed,
            "stop_token_ids": sorted(self.stop_token_ids),
            "stop": options.stop,
            "structured": options.structured,
            "logprobs": 0,
        }

    def take(self, token_id: int, logprob: float) -> None:
        """Append a sampled token."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)

    def cursor(self) -> Cursor:
        """The turn's cursor over what has been sampled."""
        prompt = self.prompt
        return child_cursor(
            prompt.parent,
            prompt.token_ids + tuple(self.token_ids),
            mounts=prompt.mounts,
            policy_version=prompt.policy_version,
            sampled=prompt.sampled + (True,) * len(self.token_ids),
            sampled_logprobs=tuple(self.logprobs),
        )


def check_options(options: SamplingOptions, *, can_detokenize: bool, can_constrain: bool) -> None:
    """Refuse options that describe no distribution, or one that vLLM does not sample.

    Raises:
        InvalidRequest: A value out of range, stop strings without a way to read text, or a
            constraint for a model without a tokenizer.
    """
    check_sampling(options, can_detokenize=can_detokenize, can_constrain=can_constrain)
    if 0 < options.temperature < _LOWEST_TEMPERATURE:
        raise InvalidRequest(
            "sampling option temperature out of range",
            value=options.temperature,
            limit=f"0 (greedy), or at least {_LOWEST_TEMPERATURE}",
        )
