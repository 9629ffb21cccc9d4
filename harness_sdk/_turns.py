"""A model turn on the wire: its request, and what comes back of it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from harness_sdk import _channel, _requests, _wire
from harness_sdk._calls import Calls
from harness_sdk._session import Session
from harness_sdk.deltas import TokenDelta
from harness_sdk.errors import ProtocolError
from harness_sdk.rpc.v1 import rollout_pb2 as pb
from harness_sdk.tools import Tool
from harness_sdk.types import Message, SamplingOptions, ToolSchema, Turn

Messages = str | Message | Sequence[str | Message]
"""What a turn appends: text stands for a user message."""

Tools = Sequence[Tool | ToolSchema | Callable[..., Any]]


def turn_request(
    session: Session,
    messages: Messages,
    tools: Tools | None,
    sampling: SamplingOptions | None,
    demonstration: str | None,
) -> pb.GenerateRequest:
    """What asks for a turn, without its address; see `Thread.generate`."""
    return pb.GenerateRequest(
        messages=[_wire.message_to_proto(message) for message in _requests.as_messages(messages)],
        tools_json=_requests.tools_json(tools),
        sampling=_wire.sampling_to_proto(sampling or session.sampling),
        demonstration=demonstration,
    )


async def turn_events(
    session: Session, calls: Calls, request: pb.GenerateRequest, took: Callable[[Turn, int], None]
) -> AsyncGenerator[TokenDelta | Turn, None]:
    """The deltas of a turn, then the turn.

    Args:
        session: The episode's.
        calls: Of the thread.
        request: Asks for the turn.
        took: Told the turn and the thread's new head, before the turn is given out.

    Raises:
        ProtocolError: The service ended without a turn.
    """
    token_ids: list[int] = []
    logprobs: list[float] = []
    stream = calls.stream(_channel.GENERATE, request, session.timeouts.generate_s)
    async with contextlib.aclosing(stream) as events:
        async for event in events:
            if event.HasField("turn"):
                turn = _wire.turn_from_proto(event.turn, token_ids, logprobs)
                took(turn, event.turn.head)
                yield turn
                return
            delta = _wire.delta_from_proto(event.delta)
            token_ids += delta.token_ids
            logprobs += delta.sampled_logprobs
            yield delta
    raise ProtocolError("generate ended without a turn", episode_id=session.episode_id)
