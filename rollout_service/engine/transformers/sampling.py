"""Choosing the next token of many requests at once, each by its own options and seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from harness_sdk.errors import InvalidRequest
from harness_sdk.types import SamplingOptions


def check_sampling(
    options: SamplingOptions, *, can_detokenize: bool, can_constrain: bool = False
) -> None:
    """Refuse options that describe no distribution.

    Raises:
        InvalidRequest: A value out of range, stop strings without a way to read text, or a
            constraint where the engine has none.
    """
    faults = (
        ("max_tokens", options.max_tokens, options.max_tokens >= 1, "at least 1"),
        ("temperature", options.temperature, options.temperature >= 0, "0 (greedy) or more"),
        ("top_p", options.top_p, 0 < options.top_p <= 1, "above 0, at most 1"),
        ("top_k", options.top_k, options.top_k >= 0, "0 (all) or more"),
        ("stop", options.stop, all(options.stop), "strings that are not empty"),
    )
    for name, value, is_good, limit in faults:
        if not is_good:
            raise InvalidRequest(
                f"sampling option {name} out of range",
                value=value,
                limit=limit,
                remedy=f"correct {name}, or leave it out",
            )
    if options.stop and not can_detokenize:
        raise InvalidRequest(
            "stop strings need an engine with a tokenizer",
            value=options.stop,
            remedy="use stop token ids",
        )
    if options.structured is not None and not can_constrain:
        raise InvalidRequest(
            "this engine does not constrain what it samples",
            value=f"structured={options.structured.kind}",
            limit="structured=None",
            remedy="leave structured out, or serve the model and its tokenizer with vLLM",
        )


def sample(
    logits: Tensor, options: Sequence[SamplingOptions], generators: Sequence[random.Random]
) -> tuple[list[int], list[float]]:
    """One token for each row.

    A request's draw depends on its own logits and generator alone, never on its batch mates.

    Args:
        logits: `[N, V]`, at least float32.
        options: How each row is sampled.
        generators: Source of each row's draw; greedy rows take none.

    Returns:
        Token ids, and their log-probabilities in nats under the distribution sampled from: with
        temperature applied and renormalised over what top-k and top-p keep. A greedy row tells
        the log-probability of the untempered distribution.
    """
    temperatures = torch.tensor([o.temperature or 1.0 for o in options], device=logits.device)
    logprobs = torch.log_softmax(logits / temperatures.to(logits.dtype).unsqueeze(1), dim=-1)
    for row, option in enumerate(options):
        if option.temperature and (option.top_k or option.top_p < 1):
            logprobs[row] = _truncate(logprobs[row], option.top_k, option.top_p)
    token_ids = _draw(logprobs, options, generators)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    return token_ids.tolist(), chosen.tolist()


def _draw(
    logprobs: Tensor, options: Sequence[SamplingOptions], generators: Sequence[random.Random]
) -> Tensor:
    """Invert each row's distribution function at one uniform draw."""
    greedy = [option.temperature == 0 for option in options]
    best = logprobs.argmax(-1)
    if all(greedy):
        return best
    draws = [0.0 if g else source.random() for g, source in zip(greedy, generators, strict=True)]
    # float64: a float32 sum over a large vocabulary loses the tail.
    cumulated = logprobs.double().exp().cumsum(-1)
    points = torch.tensor(draws, dtype=torch.float64, device=logprobs.device).unsqueeze(1)
    token_ids = torch.searchsorted(cumulated, points * cumulated[:, -1:], right=True).squeeze(1)
    token_ids = token_ids.clamp_max(logprobs.shape[1] - 1)
    return torch.where(torch.tensor(greedy, device=logprobs.device), best, token_ids)


def _truncate(logprobs: Tensor, top_k: int, top_p: float) -> Tensor:
    """Keep the top_k likeliest, then the fewest that hold top_p of them; renormalise. `[V]`."""
    ordered, order = logprobs.sort(descending=True, stable=True)
    if top_k:
        ordered[top_k:] = float("-inf")
        ordered = ordered.log_softmax(-1)
    if top_p < 1:
        before = ordered.exp().cumsum(-1) - ordered.exp()
        ordered[(before >= top_p) & (torch.arange(len(order), device=order.device) > 0)] = float(
            "-inf"
        )
        ordered = ordered.log_softmax(-1)
    return torch.empty_like(logprobs).scatter_(0, order, ordered)
