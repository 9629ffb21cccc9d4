"""The deep search example: its scoring, its corpus, its tools and what it makes of a question."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.deep_search import agent
from examples.deep_search.corpus import (
    DATA,
    NUM_HITS,
    PAGE_WORDS,
    Corpus,
    Passage,
    shipped_corpus,
    shipped_questions,
)
from examples.deep_search.model_driven import agent as model_driven
from examples.deep_search.scoring import exact_match, f1, normalise
from harness_sdk import Tool
from harness_sdk.agents import load_agent, task_id


@pytest.mark.parametrize(
    ("text", "normalised"),
    [
        ("The Eiffel Tower.", "eiffel tower"),
        ("  an  answer,\n twice ", "answer twice"),
        ("U.S.", "us"),
        ("theatre", "theatre"),
        ("rock 'n' roll!", "rock n roll"),
        ("", ""),
    ],
)
def test_normalise_drops_case_articles_punctuation(text: str, normalised: str) -> None:
    assert normalise(text) == normalised


@pytest.mark.parametrize(
    ("answer", "golds", "exact", "overlap"),
    [
        ("the Mystic River", ["Mystic River"], 1.0, 1.0),
        ("Mystic", ["Mystic River"], 0.0, 2 / 3),
        ("United States", ["America", "the United States"], 1.0, 1.0),
        ("river of the mystic", ["Mystic River"], 0.0, 0.8),
        ("yes", ["no"], 0.0, 0.0),
        ("yes it is", ["yes"], 0.0, 0.0),
        ("no", ["No."], 1.0, 1.0),
        ("", ["Boston"], 0.0, 0.0),
        ("Boston", [], 0.0, 0.0),
    ],
)
def test_scores_follow_squad(answer: str, golds: list[str], exact: float, overlap: float) -> None:
    assert exact_match(answer, golds) == exact
    assert f1(answer, golds) == pytest.approx(overlap)


def test_score_takes_aliases() -> None:
    task = {"answer": "Waylon Malloy Payne", "aliases": ["Waylon Payne"]}
    assert agent.score(task, "waylon payne") == 1.0
    assert agent.score(task, "Waylon") == 0.0
    assert agent.metrics(task, "Waylon")["f1"] == pytest.approx(2 / 3)


def test_every_supporting_passage_is_shipped() -> None:
    passages = shipped_corpus().passages
    tasks = agent.tasks()
    assert len(tasks) == 100
    assert all(passage in passages for task in tasks for passage in task["supporting"])
    assert len({task_id(task) for task in tasks}) == 100
    # The first ones are those that a small model can answer.
    assert [task["type"] for task in tasks[:23]] == ["comparison"] * 23


def test_shipped_data_is_small_and_attributed() -> None:
    assert sum(path.stat().st_size for path in DATA.iterdir()) < 1_200_000
    text = (DATA / "ATTRIBUTION.md").read_text()
    assert "CC BY-SA 4.0" in text
    for path in DATA.glob("*.gz"):
        assert path.name in text


def test_bm25_finds_the_supporting_passages() -> None:
    corpus = shipped_corpus()
    found = total = 0
    for task in shipped_questions():
        hits = {passage.passage_id for passage in corpus.best(task["question"])}
        found += len(hits & set(task["supporting"]))
        total += len(set(task["supporting"]))
    # The whole corpus of 10,001 passages gives 74 %; the multi-hop half needs its hops.
    assert found / total > 0.6
    # A hop, asked with the answer of the hop before, is found nearly always.
    (task,) = [t for t in shipped_questions() if t["question"].startswith("Who played the It'll")]
    hop = task["decomposition"][1]["question"].replace("#1", task["decomposition"][0]["answer"])
    assert set(task["supporting"]) & {p.passage_id for p in corpus.best(hop, 3)}


async def test_search_lists_ten_hits_with_snippets() -> None:
    lines = (await shipped_corpus().search("first female prime minister")).splitlines()
    assert len(lines) == NUM_HITS
    for line in lines:
        name, _, rest = line.partition(": ")
        title, _, snippet = rest.partition(" - ")
        assert name in shipped_corpus().passages
        assert title and 0 < len(snippet.split()) <= 25
    assert await shipped_corpus().search("zzzzqqqq") == "no hits: try other words"


async def test_pages_cover_a_passage_once() -> None:
    text = " ".join(f"w{i}" for i in range(2 * PAGE_WORDS + 1))
    corpus = Corpus([Passage(passage_id="d1", title="Long", text=text)])
    pages = [await corpus.open_page("d1", page) for page in (1, 2, 3)]
    assert [page.splitlines()[0] for page in pages] == [
        f"Long (page {page} of 3)" for page in (1, 2, 3)
    ]
    assert " ".join(page.splitlines()[1] for page in pages) == text
    assert await corpus.open_page("d1", 4) == "no page 4: d1 has pages 1 to 3"
    assert await corpus.open_page("d1", 0) == "no page 0: d1 has pages 1 to 3"
    assert "no passage 'd2'" in await corpus.open_page("d2")


def test_tools_have_schemas_for_the_model() -> None:
    corpus = shipped_corpus()
    search, open_page = (Tool.from_function(f).schema for f in (corpus.search, corpus.open_page))
    assert search["function"]["parameters"]["required"] == ["query"]
    assert open_page["function"]["parameters"]["required"] == ["passage_id"]
    assert open_page["function"]["parameters"]["properties"]["page"]["type"] == "integer"


def test_sub_questions_come_from_the_decomposition_or_the_names() -> None:
    hops = [{"question": "Dead Ernest >> author"}, {"question": "Where was #1 born?"}]
    assert agent.sub_questions({"question": "?", "decomposition": hops}) == [
        "What is the author of Dead Ernest?",
        "Where was #1 born?",
    ]
    assert agent.sub_questions({"question": "Are Medici and Senet both board games?"}) == [
        "What is known about Medici?",
        "What is known about Senet?",
    ]
    assert len(agent.sub_questions({"question": "who is it?"})) == 2


@pytest.mark.parametrize(
    ("reply", "question", "answer"),
    [
        ("No, they are not.\nMore", "Are both in Ohio?", "no"),
        ("Yes", "Is it?", "yes"),
        ("No idea", "Who is it?", "No idea"),
        ("Nobody knows", "Is it?", "Nobody knows"),
        ("Paris.", "Where?", "Paris"),
        ("", "Is it?", ""),
    ],
)
def test_short_answer_takes_yes_or_no_where_asked(reply: str, question: str, answer: str) -> None:
    assert agent.short_answer(reply, question) == answer


def test_both_folders_load_as_agents() -> None:
    folder = Path(agent.__file__).parent
    driven, guided = load_agent(folder / "model_driven"), load_agent(folder)
    assert guided.primitives == ()
    assert guided.limits is not None
    assert guided.limits.thread_budget == 2_048
    assert "fork" in driven.primitives
    assert driven.metrics is agent.metrics
    assert driven.run is model_driven.run
