"""A model turn: what it samples, and what it commits with what it appends."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable

from harness_sdk.deltas import TokenDelta
from harness_sdk.errors import BudgetExhausted, EngineError
from harness_sdk.record import NodeKind
from harness_sdk.tracing import spanning
from harness_sdk.types import FinishReason, Turn
from rollout_service.chat.calls import ParsedReply
from rollout_service.chat.tokenizer import TextStream
from rollout_service.cursors import Cursor, child_cursor
from rollout_service.engine.base import Generated
from rollout_service.sessions.appending import engine_errors, extend, joined_by, kind_of
from rollout_service.sessions.episode import Episode
from rollout_service.sessions.planning import TurnPlan, TurnRequest, check_sampling, plan_turn
from rollout_service.sessions.reading import ReplyReader, parsed, reply_reader
from rollout_service.sessions.replies import TurnReply
from rollout_service.sessions.threads import Step, Thread, short

Emit = Callable[[TokenDelta], None]


class _Told:
    """What the caller is told of a turn while it is sampled.

    Args:
        reader: What takes the reply apart; None tells no events.
        emit: Takes the deltas.
    """

    def __init__(self, reader: ReplyReader | None, emit: Emit) -> None:
        self._reader = reader
        self._emit = emit

    def push(self, token_ids: tuple[int, ...], logprobs: tuple[float, ...], text: str) -> None:
        """What was sampled, and as what it reads."""
        events = self._reader.push(text) if self._reader is not None else ()
        self._emit(
            TokenDelta(token_ids=token_ids, sampled_logprobs=logprobs, text=text, events=events)
        )

    def finish(self) -> None:
        """Nothing more is sampled."""
        events = self._reader.finish() if self._reader is not None else ()
        if events:
            self._emit(TokenDelta(token_ids=(), sampled_logprobs=(), text="", events=events))


async def take_turn(
    episode: Episode, thread: Thread, request: TurnRequest, emit: Emit
) -> TurnReply:
    """Append what is new, sample (or append a demonstration), commit both together.

    A failure or a cancellation leaves the head where it was and no residency behind.

    Raises:
        BudgetExhausted: No turn is left, or the messages do not fit.
        InvalidRequest: The request cannot be served.
        EngineError: The engine failed.
    """
    check_sampling(episode, request.sampling)
    episode.guardrails.check_turn(thread)
    plan = await plan_turn(episode, thread, request)
    version = episode.current_version(thread)
    fresh: list[Cursor] = []
    try:
        parent = thread.head
        if plan.token_ids:
            with spanning("octopus.extend", within=episode.span, tokens=len(plan.token_ids)):
                parent = await extend(episode, parent, plan.token_ids, thread.mounts, version)
            fresh.append(parent)
        assert parent is not None
        told = _Told(_reader(episode, thread, request, plan) if request.with_events else None, emit)
        take = _sample if request.demonstration is None else _demonstrate
        with spanning("octopus.turn", within=episode.span, policy_version=version) as span:
            turn, finish = await take(episode, parent, request, plan, version, told)
            span.set(tokens=len(turn.token_ids), finish_reason=finish, step=plan.step)
        fresh.append(turn)
        kept = _without_leaf(episode, turn)
        if kept is not turn:
            fresh.append(kept)
            with engine_errors(episode):
                await episode.service.engine.hand_over(turn, kept)
    except BaseException:
        # In the background: a caller may be cancelled a second time while it waits here.
        await episode.background.finish(episode.service.engine.release(fresh))
        raise
    observation = parent if plan.token_ids else None
    return _commit(episode, thread, request, plan, observation, kept, turn, finish)


async def _sample(
    episode: Episode,
    parent: Cursor,
    request: TurnRequest,
    plan: TurnPlan,
    version: int,
    told: _Told,
) -> tuple[Cursor, FinishReason]:
    service = episode.service
    max_tokens = min(request.sampling.max_tokens, plan.sampling_limit)
    text = TextStream(service.chat.tokenizer)
    with engine_errors(episode):
        events = service.engine.generate(
            parent,
            plan.opening,
            dataclasses.replace(request.sampling, max_tokens=max_tokens),
            stop_token_ids=service.chat.stop_token_ids,
            policy_version=version,
        )
        async with _closing(events):
            async for event in events:
                if isinstance(event, Generated):
                    told.finish()
                    return event.cursor, event.finish_reason
                ended = event.token_id in service.chat.stop_token_ids
                told.push(
                    (event.token_id,),
                    (event.logprob,),
                    text.finish() if ended else text.push(event.token_id),
                )
    raise EngineError(
        "the engine ended a turn without a cursor",
        remedy="report it with the service's log; the thread is where it was",
        episode_id=episode.episode_id,
    )


async def _demonstrate(
    episode: Episode,
    parent: Cursor,
    request: TurnRequest,
    plan: TurnPlan,
    version: int,
    told: _Told,
) -> tuple[Cursor, FinishReason]:
    chat = episode.service.chat
    reply = chat.reply(request.demonstration or "")
    room = plan.sampling_limit
    if episode.guardrails.model_driven:
        # The last word of a demonstration may use the reserve: it is `done`.
        room += episode.guardrails.limits.answer_reserve
    if len(reply) > room:
        raise BudgetExhausted(
            "the demonstration does not fit the thread's budget",
            value=f"{len(reply)} tokens",
            limit=f"{room} tokens",
            remedy="shorten it, or open the episode with a higher thread_budget",
            episode_id=episode.episode_id,
        )
    cursor = await extend(
        episode,
        parent,
        (*plan.opening, *reply),
        parent.mounts,
        version,
        score_from=len(plan.opening),
    )
    told.push(reply, cursor.sampled_logprobs, chat.tokenizer.decode(reply[:-1]))
    told.finish()
    return cursor, "stop"


def _without_leaf(episode: Episode, turn: Cursor) -> Cursor:
    """The turn without a sampled stop id that does not open the terminator."""
    chat = episode.service.chat
    last = turn.token_ids[-1]
    if last not in chat.stop_token_ids or chat.keeps(last) or not turn.sampled[-1]:
        return turn
    if len(turn.token_ids) == 1:
        # Nothing opened the turn and nothing else was sampled: without it there is no turn.
        return turn
    return child_cursor(
        turn.parent,
        turn.token_ids[:-1],
        mounts=turn.mounts,
        policy_version=turn.policy_version,
        sampled=turn.sampled[:-1],
        sampled_logprobs=turn.sampled_logprobs[:-1],
    )


def _commit(
    episode: Episode,
    thread: Thread,
    request: TurnRequest,
    plan: TurnPlan,
    observation: Cursor | None,
    turn: Cursor,
    sampled: Cursor,
    finish: FinishReason,
) -> TurnReply:
    """Make the turn the thread's head; nothing here can fail or wait.

    `sampled` is all that was sampled, `turn` the part that the path goes on from.
    """
    thread.tools = plan.tools
    before = thread.steps[-1]
    if observation is not None:
        joined = joined_by(plan.notes)
        episode.add_node(thread, before, observation, kind_of(plan.notes), joined=joined)
    before.took(plan.notes)
    thread.pending.clear()
    last = turn.token_ids[-1] if turn.sampled[-1] else None
    step = before if before.awaits_turn else thread.begin_step()
    step.turn = turn
    step.turn_due = thread.due = episode.service.chat.ending(last)
    thread.num_turns += 1
    demonstrated = request.demonstration is not None
    kind = NodeKind.DEMONSTRATION if demonstrated else NodeKind.TURN
    temperature = 1.0 if demonstrated else request.sampling.temperature
    episode.add_node(thread, step, turn, kind, temperature=temperature)
    if turn is not sampled:
        leaf = child_cursor(
            turn,
            sampled.token_ids[-1:],
            mounts=turn.mounts,
            policy_version=turn.policy_version,
            sampled=(True,),
            sampled_logprobs=sampled.sampled_logprobs[-1:],
        )
        episode.add_node(thread, step, leaf, kind, temperature=temperature, on_path=False)
    return _reply(episode, thread, request, plan, step, sampled, finish)


def _reply(
    episode: Episode,
    thread: Thread,
    request: TurnRequest,
    plan: TurnPlan,
    step: Step,
    sampled: Cursor,
    finish: FinishReason,
) -> TurnReply:
    chat = episode.service.chat
    ids = sampled.token_ids[sampled.sampled.index(True) :] if any(sampled.sampled) else ()
    ended_by_id = bool(ids) and ids[-1] in chat.stop_token_ids
    raw = chat.tokenizer.decode(ids[:-1] if ended_by_id else ids)
    said = parsed(_reader(episode, thread, request, plan), raw)
    step.summary = _summary(said)
    step.call_ids = tuple(call.call_id for call in said.tool_calls)
    ended = episode.guardrails.after_turn(thread, said.tool_calls)
    if ended is not None:
        thread.end(ended)
    turn = Turn(
        step=step.number,
        text=said.text,
        reasoning=said.reasoning,
        tool_calls=said.tool_calls,
        raw_text=raw,
        finish_reason=finish,
        token_ids=ids,
        sampled_logprobs=sampled.sampled_logprobs,
        policy_version=sampled.policy_version,
        budget=episode.budget(thread),
        thread_ended=ended,
    )
    return TurnReply(head=episode.moved(thread), turn=turn)


def _reader(episode: Episode, thread: Thread, request: TurnRequest, plan: TurnPlan) -> ReplyReader:
    return reply_reader(
        episode,
        thread,
        tools=plan.tools,
        step=plan.step,
        opening=plan.opening,
        stops=request.stops,
    )


def _summary(said: ParsedReply) -> str:
    if said.tool_calls:
        return short(", ".join(call.name or "bad call" for call in said.tool_calls))
    return short(said.text)


@contextlib.asynccontextmanager
async def _closing(events: AsyncIterator[object]) -> AsyncIterator[None]:
    """Close the engine's iterator however the block ends."""
    try:
        yield
    finally:
        close = getattr(events, "aclose", None)
        if close is not None:
            await close()
