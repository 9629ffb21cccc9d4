"""A harness that watches calls while they are written, and stops a turn that goes wrong.

python -m examples.early_cancel 127.0.0.1:7040 "Make room in /tmp"
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

from harness_sdk import (
    CallArguments,
    CallBegun,
    Message,
    OctopusClient,
    SamplingOptions,
    Thread,
    ToolCall,
    Turn,
)

FORBIDDEN = ("rm ", "dd ", "mkfs")
MAX_STOPS = 8
"""A stopped turn counts as none, so that the thread's own limit never ends them."""


async def shell(command: str) -> str:
    """Run a command.

    Args:
        command: The command line.
    """
    return f"{command}: done"


async def watched_turn(thread: Thread, messages: list[Message]) -> Turn | None:
    """A turn; None where it was stopped in the middle of a forbidden command.

    The service stops sampling then, and the thread is where it was before.
    """
    name, written = "", ""
    tools = [shell] if thread.num_turns == 0 else None
    async with contextlib.aclosing(thread.stream(messages, tools=tools)) as deltas:
        async for delta in deltas:
            if isinstance(delta, Turn):
                return delta
            for event in delta.events:
                if isinstance(event, CallBegun):
                    name, written = event.name, ""
                elif isinstance(event, CallArguments):
                    written += event.text
                    if name == "shell" and any(word in written for word in FORBIDDEN):
                        return None
    raise AssertionError("a stream ends with its turn")


async def work(address: str, task: str) -> str:
    """Let the model run commands until it calls `done`; each try may be stopped on the way."""
    async with (
        OctopusClient.connect(address) as client,
        client.episode(
            task_id="early-cancel", primitives=("done",), sampling=SamplingOptions(max_tokens=256)
        ) as episode,
    ):
        root = episode.root
        messages, num_stops = [Message(role="user", content=task)], 0
        while not root.ended and num_stops < MAX_STOPS:
            turn = await watched_turn(root, messages)
            if turn is None:
                # Nothing of the stopped turn is seen, so that the rule comes with the task.
                rule = f"Never use {', '.join(FORBIDDEN)}."
                messages, num_stops = [*messages, Message(role="user", content=rule)], num_stops + 1
                continue
            messages = [await answered(root, call) for call in turn.tool_calls]
        await episode.close(reward=float(bool(root.answer)))
        return root.answer


async def answered(thread: Thread, call: ToolCall) -> Message:
    """What a call of the finished turn comes to."""
    if call.name == "done" and not call.error:
        await thread.done(str(call.arguments.get("answer", "")))
    result = call.error or await shell(str(call.arguments.get("command", "")))
    return Message(role="tool", content=result, name=call.name, tool_call_id=call.call_id)


if __name__ == "__main__":
    sys.stdout.write(asyncio.run(work(*sys.argv[1:3])) + "\n")
