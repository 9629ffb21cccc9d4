"""Sampling: the distribution, its truncation, its log-probabilities."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from harness_sdk.errors import InvalidRequest
from harness_sdk.types import SamplingOptions, StructuredOutput
from rollout_service.engine.transformers.sampling import check_sampling, sample

LOGITS = torch.tensor([0.0, 1.0, 2.0, 0.5, -1.0])


def draws(count: int, **options: Any) -> tuple[list[int], list[float]]:
    source = random.Random(7)
    return sample(
        LOGITS.expand(count, -1).clone(), [SamplingOptions(**options)] * count, [source] * count
    )


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, (0, 1, 2, 3, 4)),
        ({"temperature": 0.5}, (0, 1, 2, 3, 4)),
        ({"top_k": 2}, (1, 2)),
        ({"top_p": 0.6}, (1, 2)),
        ({"top_p": 0.01}, (2,)),
        ({"top_k": 4, "top_p": 0.95, "temperature": 2.0}, (0, 1, 2, 3)),
    ],
)
def test_frequencies_and_logprobs_follow_the_distribution(
    options: dict[str, Any], kept: tuple[int, ...]
) -> None:
    count = 20_000
    tokens, logprobs = draws(count, **options)
    weights = {t: math.exp(LOGITS[t].item() / options.get("temperature", 1.0)) for t in kept}
    total = sum(weights.values())
    assert set(tokens) == set(kept)
    for token, weight in weights.items():
        share = weight / total
        seen = tokens.count(token) / count
        assert seen == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / count) + 1e-9)
        assert logprobs[tokens.index(token)] == pytest.approx(math.log(share), abs=1e-6)


def test_greedy_tells_the_untempered_logprob() -> None:
    tokens, logprobs = draws(2, temperature=0.0, top_k=1)
    assert tokens == [2, 2]
    assert logprobs[0] == pytest.approx(LOGITS.log_softmax(-1)[2].item(), abs=1e-6)


def test_draw_does_not_depend_on_batch_mates() -> None:
    torch.manual_seed(0)
    rows = torch.randn(6, 50)
    options = [SamplingOptions(temperature=0.0 if row % 3 == 0 else 0.9) for row in range(6)]
    together, _ = sample(rows, options, [random.Random(row) for row in range(6)])
    alone = [
        sample(rows[r : r + 1], options[r : r + 1], [random.Random(r)])[0][0] for r in range(6)
    ]
    assert together == alone


def test_impossible_token_is_never_drawn() -> None:
    logits = torch.full((2000, 4), float("-inf"))
    logits[:, 2] = 0.0
    tokens, logprobs = sample(logits, [SamplingOptions()] * 2000, [random.Random(1)] * 2000)
    assert set(tokens) == {2}
    assert logprobs[0] == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens out of range; got 0; allowed: at least 1"),
        ({"temperature": -0.5}, "temperature out of range; got -0.5"),
        ({"top_p": 0.0}, "top_p out of range"),
        ({"top_p": 1.5}, "top_p out of range"),
        ({"top_k": -1}, "top_k out of range"),
        ({"stop": ("",)}, "stop out of range"),
        ({"stop": ("end",)}, "stop strings need an engine with a tokenizer"),
        (
            {"structured": StructuredOutput(regex="a+")},
            "does not constrain what it samples; got structured=regex",
        ),
    ],
)
def test_options_without_a_distribution_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check_sampling(SamplingOptions(**options), can_detokenize="tokenizer" not in message)
