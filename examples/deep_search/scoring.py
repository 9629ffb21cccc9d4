"""Exact match and F1 after the normalisation that SQuAD and HotpotQA use."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower case, without punctuation, articles and superfluous space.

    Example:
        `normalise("The  U.S., obviously") == "us obviously"`
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def golds(task: Mapping[str, Any]) -> list[str]:
    """Every answer of a task that counts as right."""
    return [task["answer"], *task["aliases"]]


def exact_match(answer: str, golds: Iterable[str]) -> float:
    """1.0 where the normalised answer is one of `golds`, else 0.0."""
    return float(any(normalise(answer) == normalise(gold) for gold in golds))


def f1(answer: str, golds: Iterable[str]) -> float:
    """Best overlap of words with one of `golds`, from 0 to 1."""
    return max((_f1(answer, gold) for gold in golds), default=0.0)


def _f1(answer: str, gold: str) -> float:
    said, wanted = normalise(answer).split(), normalise(gold).split()
    # HotpotQA's rule: a yes or no is right or wrong, never in part.
    closed = {"yes", "no", "noanswer"}
    if said != wanted and (closed & {" ".join(said), " ".join(wanted)}):
        return 0.0
    shared = (Counter(said) & Counter(wanted)).total()
    if shared == 0:
        return float(said == wanted)
    precision, recall = shared / len(said), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)
