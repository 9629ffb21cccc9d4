"""A thread of an episode: its head, its turns and the five primitives."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import (
    AsyncGenerator,
    Callable,
    Coroutine,
    Generator,
    Mapping,
    Sequence,
)
from typing import Any, TypeVar

from harness_sdk import _channel, _requests, _wire
from harness_sdk._calls import Calls, Finish
from harness_sdk._channel import Q, R
from harness_sdk._session import Session
from harness_sdk._turns import Messages, Tools, turn_events, turn_request
from harness_sdk._waiting import watched
from harness_sdk.deltas import TokenDelta
from harness_sdk.errors import Cancelled, ProtocolError, ThreadEnded
from harness_sdk.log_ids import log_ids
from harness_sdk.rpc.v1 import rollout_pb2 as pb
from harness_sdk.types import (
    BranchResult,
    Budget,
    ReadResult,
    RewindResult,
    SamplingOptions,
    ThreadStatus,
    Turn,
)

T = TypeVar("T")


class Thread:
    """A branch with a head and a budget of its own.

    Its calls run one after another: a second one while the first still runs is refused. All of
    them raise `harness_sdk.errors` classes; `ClientClosed` once the episode is closed and
    `ThreadEnded` once the thread has ended.

    A call that was given up (a timeout around it, say) may still have taken effect. The thread
    learns so from its next call, which first takes over what the earlier one did: its turn, its
    children (in `children`, run where `fork` was given `run`), its end.
    """

    def __init__(
        self,
        session: Session,
        threads: dict[str, Thread],
        thread_id: str,
        head: int,
        *,
        parent: Thread | None = None,
        name: str = "",
        prompt: str = "",
    ) -> None:
        self.thread_id = thread_id
        self.parent = parent
        self.name = name or thread_id
        """What the parent called it."""
        self.prompt = prompt
        """The sub-task that it was forked with; empty at the root."""
        self.children: dict[str, Thread] = {}
        """By the name given to `fork`; a later child of the same name replaces the earlier."""
        self.step = 0
        """Model turns on the surviving path."""
        self.num_turns = 0
        """Model turns taken, rewound ones included."""
        self.num_sampled = 0
        """Tokens sampled in them."""
        self.num_rewinds = 0
        self.num_reads = 0
        self.budget: Budget | None = None
        """After the last call; None before the first."""
        self.status = ThreadStatus.RUNNING
        self.answer = ""
        self.evidence = ""
        self._session = session
        self._threads = threads
        self._calls = Calls(session, thread_id, head)
        self._end = asyncio.Event()
        threads[thread_id] = self

    @property
    def episode_id(self) -> str:
        """Id of the episode."""
        return self._session.episode_id

    @property
    def primitives(self) -> tuple[str, ...]:
        """Branching tools that the episode's model is offered."""
        return self._session.primitives

    @property
    def ended(self) -> bool:
        """Whether the thread has ended, as far as its client knows."""
        return self.status.is_final

    def report(self, **figures: float) -> None:
        """Set figures of the episode, which `octopus eval` shows beside its outcome."""
        self._session.figures |= figures

    async def generate(
        self,
        messages: Messages = (),
        *,
        tools: Tools | None = None,
        sampling: SamplingOptions | None = None,
        demonstration: str | None = None,
    ) -> Turn:
        """Append `messages` and take one model turn.

        Args:
            messages: What the model has not seen yet; nothing where a primitive's note is news
                enough. Earlier messages are never sent again.
            tools: The agent's own tools; only with the root's first turn. The primitives are
                added by the service.
            sampling: How to sample; None takes the episode's.
            demonstration: A reply to append and score in place of sampling (imitation data).

        Raises:
            BudgetExhausted: The messages do not fit, or no turn is left.
            EngineError: The engine failed.
        """
        request = turn_request(self._session, messages, tools, sampling, demonstration)
        async with contextlib.aclosing(self._one_turn(request)) as events:
            async for event in events:
                if isinstance(event, Turn):
                    return event
        raise AssertionError("a stream ends with its turn")

    async def stream(
        self,
        messages: Messages = (),
        *,
        tools: Tools | None = None,
        sampling: SamplingOptions | None = None,
        demonstration: str | None = None,
    ) -> AsyncGenerator[TokenDelta | Turn, None]:
        """`generate` as it happens: deltas with what they turn out to say, then the `Turn`.

        Leaving the loop early cancels the turn, and the thread is where it was before; use
        `contextlib.aclosing` to cancel it at once.

        Example:
            async with contextlib.aclosing(thread.stream("go on")) as deltas:
                async for delta in deltas:
                    if isinstance(delta, TokenDelta) and CallBegun(name="shell") in delta.events:
                        break
        """
        request = turn_request(self._session, messages, tools, sampling, demonstration)
        request.with_events = True
        async with contextlib.aclosing(self._one_turn(request)) as events:
            async for event in events:
                yield event

    async def _one_turn(
        self, request: pb.GenerateRequest
    ) -> AsyncGenerator[TokenDelta | Turn, None]:
        turn: Turn | None = None
        finish = functools.partial(self._finish_turn, request)
        with self._call("generate", request.call, finish):
            async with contextlib.aclosing(self._turn_events(request)) as events:
                async for event in events:
                    if isinstance(event, Turn):
                        turn = event
                        break
                    yield event
        assert turn is not None, "the events end with the turn"
        yield turn

    async def fork(
        self,
        branches: Mapping[str, str],
        *,
        run: Callable[[Thread], Coroutine[Any, Any, Any]] | None = None,
    ) -> dict[str, Thread]:
        """Branch after the last turn: one child a name, each with its sub-task.

        Args:
            branches: Name -> prompt.
            run: Called with each child; its coroutine becomes a task of the episode, as with
                `child.spawn`.

        Raises:
            BudgetExhausted: Too many threads, too deep, or a budget does not allow it.
        """
        branches = _requests.sub_tasks(branches)
        request = pb.ForkRequest(
            branches=[
                pb.Branch(thread_id=name, prompt=prompt) for name, prompt in branches.items()
            ],
        )

        async def send() -> dict[str, Thread]:
            reply = await self._unary(_channel.FORK, request)
            self._moved(reply.head, reply.budget)
            return self._forked(branches, reply.threads, run)

        with self._call("fork", request.call, send):
            return await send()

    async def rewind(self, step: int, *, note: str = "") -> RewindResult:
        """Return to the state after `step`; 0 is the state before the first turn.

        The tokens of later steps go back to the budget, turns do not. Children forked after
        `step` are cancelled, their tasks too. `note` is what the model is told about it.

        Raises:
            StepNotFound: No such step on the surviving path.
        """
        request = pb.RewindRequest(step=_requests.step_number("step", step), note=note)

        async def send() -> pb.RewindReply:
            reply = await self._unary(_channel.REWIND, request)
            self._moved(reply.head, reply.budget)
            self.step = reply.step
            self.num_rewinds += 1
            return reply

        async def finish() -> None:
            await self._cancelled((await send()).cancelled_threads)

        with self._call("rewind", request.call, finish):
            reply = await send()
        await self._cancelled(reply.cancelled_threads)
        return _wire.rewind_result_from_proto(reply)

    async def read_thread(self, branch: str | Thread, steps: tuple[int, int]) -> ReadResult:
        """Make steps `a..b` of another thread visible to this one, without copying them.

        Args:
            branch: A thread, its id, or the name of one of this thread's children.
            steps: First and last step; clamped to the source's finished ones.

        Raises:
            ThreadNotFound: No such thread.
            InvalidRequest: The range is empty, or the thread reads itself.
        """
        source = self._resolve(branch)
        first, last = _requests.step_range(steps)
        request = pb.ReadThreadRequest(
            branch=source,
            first_step=first,
            last_step=last,
        )

        async def send() -> ReadResult:
            reply = await self._unary(_channel.READ_THREAD, request)
            self._moved(reply.head, reply.budget)
            self.num_reads += 1
            return _wire.read_result_from_proto(reply, source)

        with self._call("read_thread", request.call, send):
            return await send()

    async def wait(
        self,
        branches: Sequence[str | Thread] | None = None,
        *,
        timeout_s: float | None = None,
        on_ended: Callable[[BranchResult], None] | None = None,
    ) -> list[BranchResult]:
        """Suspend until the branches have ended, and tell the model how.

        A child that nobody runs never ends; after a minute of waiting for it a warning says so.

        Args:
            branches: Descendants: threads, their ids, or children's names; None: every child.
            timeout_s: Give up after this many seconds on those that still run; None: never.
            on_ended: Called with each result as it arrives, before the whole is complete.
        """
        request = pb.WaitRequest(
            branches=[self._resolve(branch) for branch in branches or ()],
            timeout_s=timeout_s or 0.0,
        )
        call_s = self._session.timeouts.call_s
        deadline_s = None if timeout_s is None or call_s is None else timeout_s + call_s
        finish = functools.partial(self._wait, request, deadline_s, None)
        with self._call("wait", request.call, finish):
            return await self._wait(request, deadline_s, on_ended)

    async def done(self, answer: str, evidence: str = "") -> None:
        """End the thread with its answer; the root's is the episode's."""
        request = pb.DoneRequest(
            answer=_requests.text("answer", answer), evidence=_requests.text("evidence", evidence)
        )

        async def send() -> None:
            reply = await self._unary(_channel.DONE, request)
            self._calls.moved(reply.head)
            self._mark_ended(self.thread_id, ThreadStatus(reply.status), answer, evidence)

        with self._call("done", request.call, send):
            await send()

    async def cancel(self, reason: str = "") -> tuple[str, ...]:
        """End this thread and its descendants, their tasks too, whatever they are doing.

        Returns:
            Ids of the threads that this ended.
        """
        if self.ended:
            return ()
        request = pb.CancelRequest(call=self._calls.address(), reason=reason)
        reply = await self._session.unary(_channel.CANCEL, request, self._session.timeouts.call_s)
        await self._cancelled(reply.cancelled_threads)
        return tuple(reply.cancelled_threads)

    async def until_ended(self) -> ThreadStatus:
        """Suspend until this client knows that the thread has ended, and how.

        Unlike `wait` it tells the model nothing and is open to siblings; threads that wait for
        each other in a circle never return.
        """
        await self._end.wait()
        return self.status

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T | None]:
        """Run this thread's agent as a task of the episode.

        The task is cancelled when the thread is (its parent rewound, say) or when the episode
        closes; its failure fails the episode. Where it returns and the thread has not ended, the
        thread is cancelled, so that nobody waits for it forever.
        """
        try:
            task = self._session.spawn(self._own(coroutine), self.thread_id)
        except BaseException:
            coroutine.close()
            raise
        # A task that is cancelled before its first step never awaits it.
        task.add_done_callback(lambda _: coroutine.close())
        return task

    async def _own(self, coroutine: Coroutine[Any, Any, T]) -> T | None:
        try:
            with log_ids(thread=self.thread_id):
                result = await coroutine
        except (Cancelled, ThreadEnded):
            # The service may end the thread before its task hears of it.
            if self.ended and self.status is not ThreadStatus.CANCELLED:
                raise
            return None
        if not self.ended and self._session.is_open:
            await self.cancel("its agent returned without done")
        return result

    @contextlib.contextmanager
    def _call(
        self, action: str, context: pb.CallContext, finish: Finish
    ) -> Generator[None, None, None]:
        self._session.check_open()
        if self.ended:
            raise ThreadEnded(
                f"the thread has ended: no {action}",
                value=self.status,
                remedy="work on another thread, or fork before the thread ends",
                episode_id=self.episode_id,
                thread_id=self.thread_id,
            )
        with self._calls.one(action, context, finish):
            yield

    async def _unary(self, method: _channel.Method[Q, R], request: Q) -> R:
        return await self._calls.unary(method, request, self._session.timeouts.call_s)

    def _turn_events(self, request: pb.GenerateRequest) -> AsyncGenerator[TokenDelta | Turn, None]:
        return turn_events(self._session, self._calls, request, self._took)

    async def _finish_turn(self, request: pb.GenerateRequest) -> None:
        async for _ in self._turn_events(request):
            pass

    def _forked(
        self,
        branches: Mapping[str, str],
        forked: Sequence[pb.ForkedThread],
        run: Callable[[Thread], Coroutine[Any, Any, Any]] | None,
    ) -> dict[str, Thread]:
        children = {
            name: Thread(
                self._session,
                self._threads,
                each.thread_id,
                each.head,
                parent=self,
                name=name,
                prompt=prompt,
            )
            for (name, prompt), each in zip(branches.items(), forked, strict=True)
        }
        self.children.update(children)
        if run is not None:
            for child in children.values():
                child.spawn(run(child))
        return children

    async def _wait(
        self,
        request: pb.WaitRequest,
        deadline_s: float | None,
        on_ended: Callable[[BranchResult], None] | None,
    ) -> list[BranchResult]:
        reply: pb.WaitReply | None = None
        stream = self._calls.stream(_channel.WAIT, request, deadline_s)
        idle_s = functools.partial(self._idle_s, tuple(request.branches))
        where = {"episode_id": self.episode_id, "thread_id": self.thread_id}
        async with contextlib.aclosing(stream) as events, watched(idle_s, **where):
            async for event in events:
                if event.HasField("reply"):
                    reply = event.reply
                    self._moved(reply.head, reply.budget)
                    break
                if on_ended is not None:
                    on_ended(_wire.branch_result_from_proto(event.ended))
        if reply is None:
            raise ProtocolError("wait ended without a reply", episode_id=self.episode_id)
        results = [_wire.branch_result_from_proto(result) for result in reply.results]
        for result in results:
            self._mark_ended(result.thread_id, result.status, result.answer, result.evidence)
        return results

    def _idle_s(self, thread_ids: Sequence[str]) -> dict[str, float]:
        """Of each child that is waited for and runs, how long nobody has run it; by label."""
        waited = [
            thread
            for thread in self._threads.values()
            if (thread.thread_id in thread_ids if thread_ids else thread.parent is self)
        ]
        return {
            thread._label: thread._calls.idle_s
            for thread in waited
            if not thread.ended and not self._session.runs(thread.thread_id)
        }

    @property
    def _label(self) -> str:
        is_id = self.name == self.thread_id
        return self.name if is_id else f"{self.name} ({self.thread_id})"

    def _moved(self, head: int, budget: pb.Budget) -> None:
        self._calls.moved(head)
        self.budget = _wire.budget_from_proto(budget)

    def _took(self, turn: Turn, head: int) -> None:
        self._calls.moved(head)
        self.budget, self.step = turn.budget, turn.step
        self.num_turns += 1
        self.num_sampled += len(turn.token_ids)
        if turn.thread_ended is not None:
            self._mark_ended(self.thread_id, turn.thread_ended)

    def _mark_ended(
        self, thread_id: str, status: ThreadStatus, answer: str = "", evidence: str = ""
    ) -> None:
        thread = self._threads.get(thread_id)
        if thread is not None and status.is_final:
            thread.status, thread.answer, thread.evidence = status, answer, evidence
            thread._end.set()

    async def _cancelled(self, thread_ids: Sequence[str]) -> None:
        for thread_id in thread_ids:
            self._mark_ended(thread_id, ThreadStatus.CANCELLED)
        await self._session.cancel_tasks(frozenset(thread_ids))

    def _resolve(self, branch: str | Thread) -> str:
        if isinstance(branch, Thread):
            return branch.thread_id
        child = self.children.get(branch)
        return branch if child is None else child.thread_id
