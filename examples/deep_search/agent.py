"""Deep search, agent-driven: a branch for each sub-question, the later ones reading the earlier.

The code branches and the model writes, so that a model of 135M parameters can take part; it may
call `search` itself, and is helped where it does not. `model_driven/` and `react/` leave it all to
the model. With `--limits.max-threads 0` the same prompts are worked off on one thread.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from harness_sdk import Limits, Message, SamplingOptions, Thread, Turn
from harness_sdk.errors import ConfigError

from .browser import Browser
from .corpus import is_held_out, shipped_corpus, shipped_questions
from .scoring import exact_match, f1, golds

LIMITS = Limits(thread_budget=2_048, answer_reserve=256, max_threads=6, max_turns=12)
PRIMITIVES = ()
"""None: this code calls them, not the model."""
# The temperature at which a 135M model still makes sense; it is recorded and trained as such.
SAMPLING = SamplingOptions(max_tokens=16, temperature=0.5)

REWARDS = {"exact_match": exact_match, "f1": f1}
REWARD = os.environ.get("DEEP_SEARCH_REWARD", "exact_match")
if REWARD not in REWARDS:
    raise ConfigError("no such DEEP_SEARCH_REWARD", value=REWARD, limit=", ".join(REWARDS))

_SYSTEM = "You answer questions from passages, in as few words as possible."
_NUM_PASSAGES, _PASSAGE_WORDS = 2, 32

_CLOSED = re.compile(r"(are|is|was|were|do|does|did|has|have|can)\b", re.IGNORECASE)
_NAME = re.compile(r"[A-Z][\w'-]*(?:(?: (?:of|the|from|in|de|von))* [A-Z][\w'-]*)*")
_PAIR = re.compile(rf"({_NAME.pattern}),? (?:and|or) (?:the )?({_NAME.pattern})")


def tasks() -> Sequence[Mapping[str, Any]]:
    """The questions to train on, comparisons first: a small model answers some of those."""
    return [task for task in _questions() if not is_held_out(task["id"])]


def eval_tasks() -> Sequence[Mapping[str, Any]]:
    """The questions that `octopus eval` scores, in the same order."""
    return [task for task in _questions() if is_held_out(task["id"])]


def score(task: Mapping[str, Any], answer: str) -> float:
    """The reward: exact match with the answer or one of its aliases, or F1."""
    return REWARDS[REWARD](answer, golds(task))


def metrics(task: Mapping[str, Any], answer: str) -> dict[str, float]:
    """What is reported beside the reward: all that could be it."""
    return {name: reward(answer, golds(task)) for name, reward in REWARDS.items()}


async def run(thread: Thread, task: Mapping[str, Any]) -> None:
    """Answer `task` on `thread`: a branch per sub-question, or all in turn where none is left."""
    browser = Browser(shipped_corpus(), hit_words=_PASSAGE_WORDS)
    question = task["question"]
    opening = [
        Message(role="system", content=_SYSTEM),
        Message(role="user", content=f"{question}\nName what has to be looked up."),
    ]
    turn = await thread.generate(opening, tools=[browser.search, browser.open_page])
    parts = sub_questions(task)
    if turn.budget.threads_left >= len(parts):
        evidence = await _in_branches(thread, parts, browser)
    else:
        evidence = await _in_turn(thread, parts, browser)
    thread.report(**browser.recall(task, evidence))
    kind = "Answer yes or no." if is_closed(question) else "Answer in a few words."
    turn = await thread.generate(f"{question} {kind}")
    await thread.done(short_answer(turn.text, question), evidence)


async def _in_branches(thread: Thread, parts: Sequence[str], browser: Browser) -> str:
    """Look `parts` up in a branch each; returns what they found it in."""
    branches = await thread.fork({f"hop{i}": part for i, part in enumerate(parts, start=1)})
    hops: list[tuple[Thread, asyncio.Task[None]]] = []
    for branch, part in zip(branches.values(), parts, strict=True):
        hops.append((branch, branch.spawn(_hop(branch, part, list(hops), browser))))
    return "; ".join(result.evidence for result in await thread.wait())


async def _hop(
    branch: Thread,
    part: str,
    earlier: Sequence[tuple[Thread, asyncio.Task[None]]],
    browser: Browser,
) -> None:
    """One sub-question in a branch, which reads the branch before."""
    if earlier:
        before, task = earlier[-1]
        await asyncio.wait([task])
        if before.step > 0:
            # Its passages and its answer become visible here without being encoded again.
            await branch.read_thread(before, (1, before.step))
    await branch.done(*await _look_up(branch, part, [t.answer for t, _ in earlier], browser))


async def _in_turn(thread: Thread, parts: Sequence[str], browser: Browser) -> str:
    """Look `parts` up one after the other on `thread` itself."""
    answers: list[str] = []
    evidence: list[str] = []
    for part in parts:
        answer, titles = await _look_up(thread, part, answers, browser)
        answers.append(answer)
        evidence.append(titles)
    return "; ".join(evidence)


async def _look_up(
    thread: Thread, part: str, answers: Sequence[str], browser: Browser
) -> tuple[str, str]:
    """Search for a sub-question and answer it; returns the answer and the passages' titles."""
    part = re.sub(r"#(\d+)", lambda match: _nth(answers, int(match[1])), part)
    turn = await thread.generate(f"{part} Call search.")
    found = browser.hits(_query(turn) or part, _NUM_PASSAGES)
    passages = "\n".join(f"{hit.title}: {browser.beginning(hit)}" for hit in found)
    observation = Message(role="tool", name="search", content=passages or "no hits")
    turn = await thread.generate([observation, Message(role="user", content=part)])
    return short_answer(turn.text, part), ", ".join(hit.title for hit in found)


def sub_questions(task: Mapping[str, Any]) -> list[str]:
    """The shipped decomposition, or one question about each of two things named.

    `#1` stands for the answer of the first sub-question.
    """
    if task.get("decomposition"):
        return [_spelled_out(hop["question"]) for hop in task["decomposition"]]
    question = task["question"]
    # The first word is capitalised whatever it is.
    plain = question[0].lower() + question[1:]
    pair = _PAIR.search(plain)
    names = list(pair.groups()) if pair else _NAME.findall(plain)
    asked = [f"What is known about {name}?" for name in names[:2]]
    return [*asked, question, question][:2]


def is_closed(question: str) -> bool:
    """Whether the question is answered by yes or no."""
    return _CLOSED.match(question) is not None and " or " not in question


def short_answer(text: str, question: str) -> str:
    """The answer in a reply: its yes or no where one was asked for, else its first line."""
    line = text.strip().partition("\n")[0].strip()
    first = re.match(r"(yes|no)\b", line, re.IGNORECASE)
    if first is not None and is_closed(question):
        return first[1].lower()
    return line.removesuffix(".")


def _questions() -> Sequence[Mapping[str, Any]]:
    return sorted(shipped_questions(), key=lambda task: task["type"] != "comparison")


def _spelled_out(hop: str) -> str:
    """MuSiQue writes some hops as `entity >> relation`."""
    entity, arrow, relation = hop.partition(" >> ")
    return f"What is the {relation} of {entity}?" if arrow else hop


def _query(turn: Turn) -> str:
    """What the model itself searches for; empty where it does not."""
    for call in turn.tool_calls:
        if call.name == "search" and not call.error:
            return str(call.arguments.get("query", ""))
    return ""


def _nth(answers: Sequence[str], number: int) -> str:
    return answers[number - 1] if 0 < number <= len(answers) else f"#{number}"
