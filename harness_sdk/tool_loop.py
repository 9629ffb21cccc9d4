"""The model-driven style: the model itself calls the tools and the branching primitives."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from harness_sdk._primitives import POLICY_ERRORS, call_primitive
from harness_sdk._requests import as_messages
from harness_sdk._turns import Messages
from harness_sdk.errors import BudgetExhausted, ConfigError, ToolError
from harness_sdk.thread import Thread
from harness_sdk.tools import Tool, tools_by_name
from harness_sdk.tracing import spanning
from harness_sdk.types import Message, SamplingOptions, ThreadStatus, ToolCall, Turn

logger = logging.getLogger(__name__)

_thread: contextvars.ContextVar[Thread] = contextvars.ContextVar("octopus_thread")


def current_thread() -> Thread:
    """The thread whose loop called the tool that asks.

    Raises:
        LookupError: No loop runs here.
    """
    return _thread.get()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLoopOptions:
    """How a loop treats turns and tools."""

    sampling: SamplingOptions | Callable[[Thread], SamplingOptions] | None = None
    """Of every turn, or of the next turn of the thread given; None takes the episode's."""
    tool_timeout_s: float | None = 60.0
    """Seconds that one tool call may take; None sets no limit."""
    raise_tool_failures: bool = False
    """A tool that raises or times out fails the episode; else the model is told the error.
    `ToolError` always fails the episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopEvent:
    """Something that a loop did, for logs and traces: a turn, a call, or the thread's end."""

    thread_id: str
    turn: Turn | None = None
    call: ToolCall | None = None
    observation: str | None = None
    """What the loop tells the model about `call`; None where the service tells it."""
    failed: bool = False
    """`call` was refused, or its tool failed."""
    elapsed_s: float = 0.0
    """Seconds that the turn or call took."""
    status: ThreadStatus | None = None
    """How the thread ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopResult:
    """How a thread ended, and the threads below it."""

    thread_id: str
    status: ThreadStatus
    answer: str
    evidence: str
    num_turns: int
    num_calls: int
    num_failed_calls: int
    children: Mapping[str, LoopResult] = field(default_factory=dict[str, "LoopResult"])
    """By thread id."""


class ToolLoop:
    """Runs threads until they end: generate, execute the parsed calls in order, tell the results.

    Calls that cannot run (malformed, unknown, refused by the service's rules) become observations
    that say what was wrong. Failures of the service or the engine are raised. In an episode
    without the primitive `done`, a turn without calls is the answer.

    Args:
        tools: The agent's functions, async or not; see `Tool.from_function`.
        options: Treatment of turns and tools.
        on_event: Called, and awaited where it is async, after each turn and call and at the end.
    """

    def __init__(
        self,
        tools: Sequence[Tool | Callable[..., Any]] = (),
        options: ToolLoopOptions | None = None,
        on_event: Callable[[LoopEvent], Awaitable[None] | None] | None = None,
    ) -> None:
        self.tools = tools_by_name(tools)
        self.options = options or ToolLoopOptions()
        self._on_event = on_event

    async def run(self, thread: Thread, messages: Messages = ()) -> LoopResult:
        """Drive `thread` from `messages` until it ends.

        Threads that the model forks run as tasks of the episode; those that still run when
        `thread` ends are cancelled.

        Raises:
            ToolError: A tool failed for a reason that is not the policy's.
            ConfigError: A tool has the name of one of the episode's primitives.
            HarnessError: The service or the engine failed.
        """
        clash = self.tools.keys() & set(thread.primitives)
        if clash:
            raise ConfigError(
                "a tool has the name of a primitive",
                value=", ".join(sorted(clash)),
                remedy="rename the tool or leave the primitive out of the episode",
            )
        below = _Below()
        loop = _ThreadLoop(self, thread, below)
        try:
            await loop.run(as_messages(messages))
        finally:
            for task in below.tasks:
                task.cancel()
            if below.tasks:
                await asyncio.wait(below.tasks)
        return _results(loop, below)

    async def tell(self, event: LoopEvent) -> None:
        """Hand `event` to the hook."""
        told = self._on_event(event) if self._on_event is not None else None
        if inspect.isawaitable(told):
            await told


@dataclass(slots=True)
class _Below:
    """The loops below the first, parents before their children, and the tasks that run them."""

    loops: list[_ThreadLoop] = field(default_factory=list["_ThreadLoop"])
    tasks: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])


def _results(root: _ThreadLoop, below: _Below) -> LoopResult:
    """The result of `root` with all below it, from the leaves up: trees may be of any depth."""
    found: dict[str, dict[str, LoopResult]] = {}
    for loop in reversed(below.loops):
        parent = loop.thread.parent
        assert parent is not None
        result = loop.result(found.pop(loop.thread.thread_id, {}))
        found.setdefault(parent.thread_id, {})[result.thread_id] = result
    return root.result(found.pop(root.thread.thread_id, {}))


class _ThreadLoop:
    """The loop of one thread; a fork begins further ones."""

    def __init__(self, loop: ToolLoop, thread: Thread, below: _Below) -> None:
        self.thread = thread
        self._loop = loop
        self._below = below
        self._status: ThreadStatus | None = None
        self._num_turns = 0
        self._num_calls = 0
        self._num_failed_calls = 0

    @property
    def status(self) -> ThreadStatus:
        """How the thread ended; one that was stopped on the way counts as cancelled."""
        status = self._status or self.thread.status
        return status if status.is_final else ThreadStatus.CANCELLED

    def result(self, children: dict[str, LoopResult]) -> LoopResult:
        """How the thread stands, with the results of its children, the last one first."""
        thread = self.thread
        return LoopResult(
            thread_id=thread.thread_id,
            status=self.status,
            answer=thread.answer,
            evidence=thread.evidence,
            num_turns=self._num_turns,
            num_calls=self._num_calls,
            num_failed_calls=self._num_failed_calls,
            children=dict(reversed(children.items())),
        )

    async def run(self, messages: Sequence[Message] = ()) -> None:
        """Turn after turn until the thread ends or its budgets allow no other."""
        before = _thread.set(self.thread)
        try:
            await self._run(messages)
        finally:
            _thread.reset(before)

    async def _run(self, messages: Sequence[Message]) -> None:
        while not self.thread.ended:
            turn = await self._turn(messages)
            if turn is None:
                break
            messages = [] if self.thread.ended else await self._execute(turn)
        if not self.thread.ended and self.thread.parent is not None:
            # Nobody else will end it, and its parent may wait for it.
            await self.thread.cancel(f"no further turn fits: {self._status}")
        await self._loop.tell(LoopEvent(thread_id=self.thread.thread_id, status=self.status))

    async def _turn(self, messages: Sequence[Message]) -> Turn | None:
        try:
            return await self._generate(messages)
        except BudgetExhausted as error:
            logger.info("thread %s: %s", self.thread.thread_id, error)
            if any(message.role == "tool" for message in messages):
                # What does not fit is replaced by the reason, so that the model can still answer.
                told = [_instead(message, f"error: {error}") for message in messages]
                try:
                    return await self._generate(told)
                except BudgetExhausted:
                    pass
        budget = self.thread.budget
        no_turns = budget is not None and budget.turns_left == 0
        self._status = ThreadStatus.MAX_TURNS if no_turns else ThreadStatus.BUDGET
        return None

    async def _generate(self, messages: Sequence[Message]) -> Turn:
        thread, started = self.thread, time.monotonic()
        # The service renders the tools into the first prompt of the root, which all inherit.
        first = thread.parent is None and thread.num_turns == 0
        sampling = self._loop.options.sampling
        turn = await thread.generate(
            messages,
            tools=list(self._loop.tools.values()) if first else None,
            sampling=sampling(thread) if callable(sampling) else sampling,
        )
        self._num_turns += 1
        elapsed_s = time.monotonic() - started
        await self._loop.tell(LoopEvent(thread_id=thread.thread_id, turn=turn, elapsed_s=elapsed_s))
        return turn

    async def _execute(self, turn: Turn) -> list[Message]:
        """The turn's calls in order; the observations that the service does not write itself."""
        if not turn.tool_calls and "done" not in self.thread.primitives:
            await self.thread.done(turn.text)
        observations: list[Message] = []
        for call in turn.tool_calls:
            started, failed, stands = time.monotonic(), False, True
            observation: str | None = None
            try:
                if call.name in self.thread.primitives and not call.error:
                    stands = await call_primitive(self.thread, call, self._begin_child)
                else:
                    observation = await self._call_tool(call)
            except _Observed as observed:
                observation, failed = f"error: {observed}", True
            except POLICY_ERRORS as error:
                observation, failed = f"error: {error}", True
            await self._count(call, observation, failed, time.monotonic() - started)
            if not stands:
                # Rewound or done: the rest of the turn answers to a past that is gone.
                return []
            if observation is not None:
                observations.append(
                    Message(
                        role="tool",
                        content=observation,
                        name=call.name,
                        tool_call_id=call.call_id,
                    )
                )
        return observations

    async def _call_tool(self, call: ToolCall) -> str:
        if call.error:
            raise _Observed(call.error)
        tool = self._loop.tools.get(call.name)
        if tool is None:
            known = [*self._loop.tools, *self.thread.primitives]
            raise _Observed(f"unknown tool `{call.name:.100}`; allowed: {', '.join(known)}")
        budget = self.thread.budget
        if budget is not None and budget.reserve_reached and "done" in self.thread.primitives:
            raise _Observed(f"the answer reserve is reached: no {call.name}; call done")
        bound = tool.bind(call.arguments)
        timeout_s = self._loop.options.tool_timeout_s
        limit = asyncio.timeout(timeout_s)
        try:
            with spanning("octopus.tool", tool=call.name, thread=self.thread.thread_id):
                async with limit:
                    return await tool.run(bound)
        except ToolError:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if limit.expired():
                text = f"{call.name} took longer than {timeout_s:g} s"
            return self._failed(call, text, error)

    def _failed(self, call: ToolCall, text: str, error: Exception) -> str:
        thread = self.thread
        if self._loop.options.raise_tool_failures:
            raise ToolError(
                f"tool {call.name} failed: {text}",
                episode_id=thread.episode_id,
                thread_id=thread.thread_id,
            ) from error
        logger.info("thread %s: tool %s failed", thread.thread_id, call.name, exc_info=error)
        raise _Observed(text) from error

    def _begin_child(self, child: Thread) -> None:
        loop = _ThreadLoop(self._loop, child, self._below)
        self._below.loops.append(loop)
        self._below.tasks.append(child.spawn(loop.run()))

    async def _count(
        self, call: ToolCall, observation: str | None, failed: bool, elapsed_s: float
    ) -> None:
        self._num_calls += 1
        self._num_failed_calls += failed
        await self._loop.tell(
            LoopEvent(
                thread_id=self.thread.thread_id,
                call=call,
                observation=observation,
                failed=failed,
                elapsed_s=elapsed_s,
            )
        )


class _Observed(Exception):
    """A failed call; its text is what the model is told."""


def _instead(message: Message, text: str) -> Message:
    return replace(message, content=text) if message.role == "tool" else message
