"""A small verifiers environment: sums, played by a harness that loops in this process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import openai
import verifiers.v1 as vf

__all__ = ["SumsHarness", "SumsTaskset"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        said = trace.branches[-1].messages[-1].content
        return 2.0 if said == self.data.answer else 0.0


class SumsTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> Iterable[SumTask]:
        for n in (3, 4):
            question = f"What is {n} + {n}?"
            data = SumData(id=f"sum-{n}", prompt=question, answer=str(2 * n))  # pyright: ignore[reportCallIssue]
            yield SumTask(data)


class SumsHarness(vf.Harness[vf.HarnessConfig]):
    """Asks, hears "Sure?" once, and keeps the second answer."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None
    ) -> vf.ProgramResult:
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for question in ("Sure?", ""):
                reply = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages.append({"role": "assistant", "content": reply.choices[0].message.content})
                if question:
                    messages.append({"role": "user", "content": question})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
