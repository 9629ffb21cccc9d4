"""Episodes for the warm-up: the agent's own, with the right words wherever a question has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from harness_sdk.agents import Agent, Task
from harness_sdk.thread import Thread
from harness_sdk.types import SamplingOptions, Turn


def taught(agent: Agent) -> Agent:
    """`agent` with its answers put in its mouth.

    All other turns are sampled as they come, at temperature 1: imitating one's own samples of
    temperature 1 changes nothing on average.
    """

    async def run(thread: Thread, task: Task) -> None:
        await agent.run(cast("Thread", TaughtThread(thread, task)), task)

    sampling = agent.sampling or SamplingOptions()
    return replace(agent, run=run, sampling=replace(sampling, temperature=1.0))


class TaughtThread:
    """A thread of the deep search agent that knows the answers of its task.

    Args:
        thread: What does all else.
        task: A question that is trained on.
        hop: Number of the sub-question that it looks up, from 0; None for the root.
    """

    def __init__(self, thread: Any, task: Task, hop: int | None = None) -> None:
        self._thread = thread
        self._task = task
        self._hop = hop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._thread, name)

    async def generate(self, messages: Any = (), **options: Any) -> Turn:
        """The right answer where `messages` ask for one that is known, else what the model says."""
        return await self._thread.generate(messages, demonstration=self._known(messages), **options)

    async def fork(self, branches: Any) -> dict[str, TaughtThread]:
        """A taught thread for each branch."""
        children = await self._thread.fork(branches)
        return {
            name: TaughtThread(child, self._task, hop)
            for hop, (name, child) in enumerate(children.items())
        }

    async def read_thread(self, branch: TaughtThread, steps: tuple[int, int]) -> Any:
        """As any thread reads another."""
        return await self._thread.read_thread(branch.thread_id, steps)

    def _known(self, messages: Any) -> str | None:
        """The root is asked for its answer with a text, a branch with passages and a question."""
        asked_with_text = isinstance(messages, str)
        if self._hop is None:
            return self._task["answer"] if asked_with_text else None
        hops: Sequence[Any] = self._task.get("decomposition") or ()
        if asked_with_text or self._hop >= len(hops):
            return None
        return hops[self._hop]["answer"]
