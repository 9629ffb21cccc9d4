"""The same load and the same decoding on plain vLLM with prefix caching: a stateless client.

Every turn sends the whole prompt; a fork sends the root's again, a rewind a shorter one, a read
pastes the peer's tokens as an observation. Token ids go in, rendered as the sessions render them.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.vllm_engine.agent_load import (
    NUM_DECODES,
    compare,
    counts,
    decode_detail,
    decode_rate,
)
from benchmarks.vllm_engine.episodes import Script, Tally, load_scripts, play, told
from benchmarks.vllm_engine.report import Report, say
from benchmarks.vllm_engine.scale import Load, Scale
from benchmarks.vllm_engine.shapes import Texts
from benchmarks.vllm_engine.world import vllm_arguments
from harness_sdk.types import Message
from rollout_service.chat import ChatRenderer, ChatTokenizer, notes
from rollout_service.engine.vllm.launch import prepare_environment


class Plain:
    """vLLM's own asynchronous engine."""

    def __init__(self, llm: Any, seams: Any, chat: ChatRenderer) -> None:
        self._llm = llm
        self._seams = seams
        self.chat = chat
        self._numbers = itertools.count()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.sampled = 0

    async def stream(self, prompt: list[int], num_tokens: int) -> AsyncIterator[list[int]]:
        """Sample; yields token ids as they come."""
        params = self._seams.SamplingParams(
            max_tokens=num_tokens,
            temperature=1.0,
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=self._seams.RequestOutputKind.DELTA,
        )
        request = f"plain-{next(self._numbers)}"
        cached = 0
        async for raw in self._llm.generate({"prompt_token_ids": prompt}, params, request):
            cached = max(cached, raw.num_cached_tokens or 0)
            ids = list(raw.outputs[0].token_ids)
            self.sampled += len(ids)
            yield ids
        self.prompt_tokens += len(prompt)
        self.cached_tokens += cached

    async def generate(self, prompt: list[int], num_tokens: int) -> list[int]:
        """All of it."""
        return [i async for ids in self.stream(prompt, num_tokens) for i in ids]


class PlainPlayer:
    """An episode as lists of token ids."""

    def __init__(self, plain: Plain) -> None:
        self._plain = plain
        self._paths: dict[str, list[int]] = {"root": []}
        self._steps: dict[str, list[int]] = {"root": [0]}
        """Where each step begins in the path: a step is a turn and the observation after it."""

    async def turn(self, thread: str, text: str, num_tokens: int) -> None:
        chat, path = self._plain.chat, self._paths[thread]
        if text:
            role = "tool" if path else "user"
            path += chat.delta([Message(role=role, content=text)])
        self._steps[thread].append(len(path))
        path += chat.generation_prompt
        path += await self._plain.generate(path, num_tokens)
        path += chat.terminator

    async def fork(self, names: Sequence[str]) -> None:
        root = list(self._paths["root"])
        self._append("root", notes.fork_note(names))
        for name in names:
            self._paths[name], self._steps[name] = list(root), [len(root)]
            self._append(name, notes.task_note(name, "look into it"))

    async def rewind(self, thread: str, step: int) -> None:
        steps = self._steps[thread]
        del self._paths[thread][steps[step + 1] :], steps[step + 1 :]
        self._append(thread, notes.rewind_note(step, "another way"))

    async def read(self, thread: str, peer: str, step: int) -> None:
        steps = self._steps[peer]
        ids = self._paths[peer][steps[step] : steps[step + 1]]
        self._append(thread, notes.read_stub(peer, step, step, len(ids)))
        self._paths[thread] += ids

    def _append(self, thread: str, text: str) -> None:
        self._paths[thread] += self._plain.chat.delta([Message(role="tool", content=text)])


async def plain_load(plain: Plain, scale: Scale, texts: Texts, report: Report) -> None:
    """The agent-shaped load."""
    load = scale.load
    scripts, warm_up = load_scripts(load, texts)
    await _play_all(plain, warm_up, load, Tally())
    before = (plain.prompt_tokens, plain.cached_tokens, plain.sampled)
    tally = Tally()

    def figures(seconds: float) -> dict[str, Any]:
        prompt, cached, sampled = (
            now - then
            for now, then in zip(
                (plain.prompt_tokens, plain.cached_tokens, plain.sampled), before, strict=True
            )
        )
        return {
            **counts(tally, seconds, sampled),
            "prompt_tokens": prompt,
            "prefill_tokens_computed": prompt - cached,
            "kv_hit_rate": round(cached / max(prompt, 1), 5),
        }

    begin = time.perf_counter()
    async with told(report, "plain_load", tally, figures):
        await _play_all(plain, scripts, load, tally)
    seconds = time.perf_counter() - begin
    found = {"seconds": round(seconds, 2), "episodes": load.num_episodes, **figures(seconds)}
    report.put_detail("plain_load", found)
    compare(report)


async def _play_all(plain: Plain, scripts: list[Script], load: Load, tally: Tally) -> None:
    permits = asyncio.Semaphore(load.concurrency)

    async def one(number: int, script: Script) -> None:
        async with permits:
            asked = time.perf_counter()
            await play(script, PlainPlayer(plain), tally, random.Random(number))
            tally.episode_s.append(time.perf_counter() - asked)

    async with asyncio.TaskGroup() as group:
        for number, script in enumerate(scripts):
            group.create_task(one(number, script))


async def plain_decode(plain: Plain, scale: Scale, texts: Texts, report: Report) -> None:
    """Sequences of equal length that only decode."""
    num_sequences, context, num_tokens = scale.decode
    rng = random.Random(1)
    prompts = [[rng.randrange(8000) for _ in range(context)] for _ in range(num_sequences)]

    async def tokens(prompt: list[int]) -> AsyncIterator[int]:
        async for ids in plain.stream(prompt, num_tokens):
            yield len(ids)

    rates = [await decode_rate([tokens(p) for p in prompts]) for _ in range(NUM_DECODES)]
    report.put_detail("plain_decode", decode_detail(num_sequences, rates))
    compare(report)


@asynccontextmanager
async def running_plain(scale: Scale, folder: Path) -> AsyncIterator[Plain]:
    """Start plain vLLM with the arguments of our engine, prefix caching beside them."""
    prepare_environment()
    seams: Any = importlib.import_module("rollout_service.engine.vllm.seams")
    arguments = {
        "model": str(folder),
        "dtype": scale.dtype,
        "skip_tokenizer_init": True,
        "max_num_seqs": scale.engine["max_num_seqs"],
        "enable_prefix_caching": True,
        "enforce_eager": scale.device == "cpu",
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": 1,
        "disable_log_stats": True,
        **vllm_arguments(scale, "main"),
    }
    say("starting plain vLLM")
    llm = await asyncio.to_thread(
        seams.AsyncLLM.from_engine_args, seams.AsyncEngineArgs(**arguments)
    )
    say("plain vLLM is up")
    try:
        yield Plain(llm, seams, ChatRenderer(ChatTokenizer.load(folder)))
    finally:
        llm.shutdown()
