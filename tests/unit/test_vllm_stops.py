"""Stop strings over token ids: found where they end, whatever the tokens' borders."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence

import pytest

from rollout_service.engine.vllm.stops import StopStrings
from tests.chat_tokenizers import chat_tokenizer

TOKENIZER = chat_tokenizer()


def first_end(finder: StopStrings, stops: Sequence[str], token_ids: Sequence[int]) -> int | None:
    """Number of tokens after which the first stop string is complete."""
    for end in range(1, len(token_ids) + 1):
        if finder.completed(stops, token_ids[:end]) is not None:
            return end
    return None


@pytest.mark.parametrize(
    "stop",
    [
        "fox",
        "k br",
        "n fox jum",
        "é",
        "né",
        "ü\n",
        "\n",
        " ",
        "</tool>",
        "日",
        "日本",
        "🙂",
        "<|im_end|>",
    ],
)
def test_a_string_is_found_at_the_token_that_completes_it(stop: str) -> None:
    text = "the quick brown fox jumped né über ü\n a 日本語 🙂 </tool> <|im_end|> fox"
    token_ids = [token for char in text for token in TOKENIZER.encode_plain(char)]
    rng = random.Random(1)
    for _ in range(20):
        start = rng.randrange(len(token_ids))
        tail = token_ids[start:]
        read = [TOKENIZER.decode(tail[:end]) for end in range(1, len(tail) + 1)]
        expected = next((n for n, text in enumerate(read, 1) if stop in text), None)
        assert first_end(StopStrings(TOKENIZER.decode), (stop,), tail) == expected


def test_only_tokens_that_may_end_a_string_are_read_in_their_place() -> None:
    calls: list[int] = []

    def decode(token_ids: Sequence[int]) -> str:
        calls.append(len(token_ids))
        return TOKENIZER.decode(token_ids)

    token_ids = TOKENIZER.encode_plain("abcabcabcabcabc Observation:") * 3
    finder = StopStrings(decode)
    end = first_end(finder, ("Observation:",), token_ids)
    assert TOKENIZER.decode(token_ids[:end]).endswith("Observation:")
    # Each token once by itself, and the tail where a colon came.
    assert sum(1 for size in calls if size > 1) == 1
    assert len(calls) <= len({*token_ids}) + 1


def test_the_decoder_travels_to_another_process() -> None:
    finder = StopStrings()
    token_ids = TOKENIZER.encode_plain("one stop")
    assert finder.completed(("stop",), token_ids) is None
    finder.load(pickle.dumps(TOKENIZER.decode))
    assert finder.completed(("never", "stop"), token_ids) == "stop"
