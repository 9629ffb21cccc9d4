"""The SDK-driven style: the program decides where to branch, the model only writes.

python -m examples.branching 127.0.0.1:7040 "How can a small town cut its car traffic?"
"""

from __future__ import annotations

import asyncio
import sys

from harness_sdk import OctopusClient, SamplingOptions, Thread

ANGLES = {
    "cost": "Judge the ideas by what they cost.",
    "risk": "Judge the ideas by what can go wrong.",
}


async def judge(branch: Thread) -> None:
    """One branch: it sees everything up to the fork, and its own sub-task."""
    verdict = await branch.generate()
    await branch.done(verdict.text)


async def decide(address: str, question: str) -> str:
    """Ideas once, judged by two branches at the same time, weighed by the root."""
    async with (
        OctopusClient.connect(address) as client,
        client.episode(
            task_id="branching", primitives=(), sampling=SamplingOptions(max_tokens=256)
        ) as episode,
    ):
        root = episode.root
        await root.generate(f"{question} List three ideas.")
        branches = await root.fork(ANGLES, run=judge)
        await root.wait()
        # Not a copy of their text: their keys and values become visible to the root.
        for branch in branches.values():
            await root.read_thread(branch, (1, branch.step))
        choice = await root.generate("Choose one idea and say why.")
        await root.done(choice.text)
        await episode.close(reward=float(bool(choice.text)))
        return choice.text


if __name__ == "__main__":
    sys.stdout.write(asyncio.run(decide(*sys.argv[1:3])) + "\n")
