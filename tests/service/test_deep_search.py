"""The deep search example, both styles, against the real rollout service and the real passages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from examples.deep_search import agent
from examples.deep_search.corpus import shipped_questions
from harness_sdk import Limits, OctopusClient, SamplingOptions
from harness_sdk.agents import load_agent
from harness_sdk.record import NodeKind
from harness_sdk.runner import run_task
from rollout_service.sessions import SessionOptions
from tests.service.sdk_service import ScriptedEngine, calls, scripted

FOLDER = Path(agent.__file__).parent
# The scripted model's tokens are bytes.
LIMITS = Limits(thread_budget=16_384, answer_reserve=256)


def _task(beginning: str) -> Mapping[str, Any]:
    (task,) = [task for task in shipped_questions() if task["question"].startswith(beginning)]
    return task


def test_searching_leaves_gpus_alone(tmp_path: Path) -> None:
    """A JAX that tells on what it is started, and refuses to be used for more."""
    jax = tmp_path / "jax"
    jax.mkdir()
    (jax / "__init__.py").touch()
    (jax / "lax.py").write_text(
        "import os\ncalls = []\ndef top_k(scores, k):\n"
        "    assert not calls, 'used'\n    calls.append(os.environ.get('JAX_PLATFORMS'))\n"
    )
    program = """
from examples.deep_search.corpus import Corpus, Passage
from jax.lax import calls
passages = [Passage(passage_id=str(n), title=word, text=word) for n, word in enumerate(WORDS)]
print(Corpus(passages).best("blue whale", 1)[0].title, calls)
""".replace("WORDS", "('red fox', 'blue whale', 'grey heron')")
    environment = {name: text for name, text in os.environ.items() if name != "JAX_PLATFORMS"}
    path = os.pathsep.join([str(tmp_path), *sys.path])
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={**environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert found.stdout == "blue whale ['cpu']\n", found.stderr


async def test_agent_forks_a_branch_per_hop_and_reads_the_hop_before() -> None:
    def script(text: str) -> str:
        if "Answer in a few words" in text:
            return "Waylon Payne"
        if "[branch hop2]" in text:
            return "Waylon Payne, he did" if "</tool_response>\n" in text else "."
        return "Jerry Lee Lewis" if "[branch hop1]" in text else "the singer"

    loaded = load_agent(FOLDER)
    task = _task("Who played the It'll Be Me singer")
    async with scripted(script) as service, OctopusClient.connect(service.address) as client:
        async with client.episode(limits=LIMITS, primitives=(), sampling=agent.SAMPLING) as episode:
            assert await run_task(loaded, episode, task) == 1.0
        assert isinstance(service.engine, ScriptedEngine)
        seen = service.engine.seen
    # The second hop is asked with the first one's answer, sees its passages, and finds its own.
    assert any("who played Jerry Lee Lewis on walk the line" in text for text in seen)
    assert '{"name": "search"' in seen[0] or "search(" in seen[0]
    (record,) = service.records.written
    assert [thread.thread_id for thread in record.threads] == ["root", "hop1", "hop2"]
    assert {thread.status for thread in record.threads} == {"done"}
    owners = {node.node_id: node.thread_id for node in record.nodes}
    stubs = [node for node in record.nodes if node.kind is NodeKind.STUB]
    assert [node.thread_id for node in stubs] == ["hop2"]
    assert {owners[mount.node_id] for mount in stubs[0].mounts} == {"hop1"}
    assert record.reward == 1.0


async def test_agent_without_workers_looks_up_every_hop_on_one_thread() -> None:
    def script(text: str) -> str:
        if "Answer in a few words" in text:
            return "Waylon Payne"
        return "Jerry Lee Lewis" if "Call search" in text else "the singer"

    loaded = load_agent(FOLDER)
    task = _task("Who played the It'll Be Me singer")
    limits = replace(LIMITS, max_threads=0)
    async with scripted(script) as service, OctopusClient.connect(service.address) as client:
        async with client.episode(limits=limits, primitives=(), sampling=agent.SAMPLING) as episode:
            assert await run_task(loaded, episode, task) == 1.0
        assert episode.figures["evidence_searched"] > 0
        assert isinstance(service.engine, ScriptedEngine)
        seen = service.engine.seen
    # The same prompts as with workers: the second hop is asked with the first one's answer.
    assert any("who played Jerry Lee Lewis on walk the line" in text for text in seen)
    (record,) = service.records.written
    assert [thread.thread_id for thread in record.threads] == ["root"]
    assert record.threads[0].num_turns == 1 + 2 * 2 + 1


async def test_a_search_call_of_the_model_is_honoured() -> None:
    def script(text: str) -> str:
        if "[branch" not in text:
            return "no"
        if "Call search" in text and "<tool_response>\n" not in text.split("Call search")[1]:
            return calls(("search", {"query": "snowfall in Seattle"}))
        return "6.8 inches"

    loaded = load_agent(FOLDER)
    task = _task("What is the usual average snowfall")
    async with scripted(script) as service, OctopusClient.connect(service.address) as client:
        sampling = SamplingOptions(max_tokens=200)
        async with client.episode(limits=LIMITS, primitives=(), sampling=sampling) as episode:
            assert await run_task(loaded, episode, task) == 0.0
        assert isinstance(service.engine, ScriptedEngine)
        # Three hops; every search went for Seattle whatever the hop asked.
        assert sum("Seattle: " in text.rsplit("Call search", 1)[-1] for text in service.engine.seen)
    assert len(service.records.written[0].threads) == 4


async def test_model_driven_agent_lets_the_model_do_it_all() -> None:
    passage = _task("What is the usual average snowfall")["supporting"][-1]

    def script(text: str) -> str:
        if "[branch" in text:
            if "page 1 of" in text:
                return calls(("done", {"answer": "6.8 inches"}))
            if "<tool_response>\nd" in text:
                return calls(("open_page", {"passage_id": passage}))
            return calls(("search", {"query": "average snowfall in Seattle"}))
        if "[fork]" not in text:
            return calls(("fork", {"branches": {"snow": "How much snow?"}}), ("wait", {}))
        return calls(("done", {"answer": "6.8 inches"}))

    loaded = load_agent(FOLDER / "model_driven")
    task = _task("What is the usual average snowfall")
    async with (
        scripted(script) as service,
        OctopusClient.connect(service.address) as client,
        client.episode(limits=LIMITS) as episode,
    ):
        assert await run_task(loaded, episode, task) == 1.0
    assert [thread.answer for thread in service.records.written[0].threads] == ["6.8 inches"] * 2
    assert episode.figures["gold_opened"] == 1.0
    assert episode.figures["gold_cited"] == 0.0


async def test_single_agent_searches_opens_and_answers_on_one_thread() -> None:
    passage = _task("What is the usual average snowfall")["supporting"][-1]

    def script(text: str) -> str:
        if "page 1 of" in text:
            return calls(("done", {"answer": "6.8 inches", "evidence": [passage]}))
        if "<tool_response>\nd" in text:
            return calls(("open_page", {"passage_id": passage}))
        return calls(("search", {"query": "average snowfall in Seattle"}))

    loaded = load_agent(FOLDER / "react")
    task = _task("What is the usual average snowfall")
    async with (
        scripted(script) as service,
        OctopusClient.connect(service.address) as client,
        client.episode(limits=LIMITS, primitives=loaded.primitives) as episode,
    ):
        assert await run_task(loaded, episode, task) == 1.0
        assert isinstance(service.engine, ScriptedEngine)
        assert "fork" not in service.engine.seen[0]
    assert len(service.records.written[0].threads) == 1
    assert episode.figures["gold_cited"] == 1.0


async def test_a_constrained_model_is_offered_calls_that_can_succeed() -> None:
    def script(text: str) -> str:
        if "[branch second]" in text:
            return calls(("done", {"answer": "6.8 inches"}))
        if "[branch first]" in text:
            return calls(("search", {"query": "Seattle"}))
        if "[wait]" in text:
            return calls(("search", {"query": "Seattle"}))
        if "[fork]" in text:
            return calls(("wait", {}))
        return calls(("fork", {"branches": {"first": "Where?", "second": "How much?"}}))

    loaded = load_agent(FOLDER / "constrained")
    options = SessionOptions(allow_truncated_sampling=True)
    async with (
        scripted(script, options=options) as service,
        OctopusClient.connect(service.address) as client,
        client.episode(limits=replace(LIMITS, max_threads=2, max_turns=4)) as episode,
    ):
        assert await run_task(loaded, episode, _task("What is the usual average snowfall")) == 0.0
    assert isinstance(service.engine, ScriptedEngine)
    offered: dict[str, list[set[str]]] = {"root": [], "first": [], "second": []}
    for text, sampling in zip(service.engine.seen, service.engine.samplings, strict=True):
        offered[_where(text)].append(_offered(sampling))
    alone = {"search", "open_page", "done"}
    # Two threads are all there are; each has steps to read once it has taken a turn.
    assert offered["root"] == [
        {"search", "fork"},
        {*alone, "wait"},
        {*alone, "read_thread"},
        {"done"},
    ]
    first = [each - {"read_thread"} for each in offered["first"][:3]]
    assert first == [{"search"}, alone, alone]
    assert offered["first"][3] == {"done"}
    assert len(offered["second"]) == 1


def _where(text: str) -> str:
    found = re.findall(r"\[branch (\w+)\]", text)
    return found[-1] if found else "root"


def _offered(sampling: SamplingOptions) -> set[str]:
    assert sampling.structured is not None
    return set(re.findall(r'\("(\w+)\\"', sampling.structured.grammar))
