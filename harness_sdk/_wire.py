"""Where protobuf ends: wire messages <-> harness_sdk.types; errors have `_status`.

Both the client and the service convert here; no message travels further.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

from harness_sdk import deltas, types
from harness_sdk.errors import (
    InvalidRequest,
    ProtocolError,
)
from harness_sdk.rpc.v1 import rollout_pb2 as pb

PROTOCOL_VERSION = 1
"""Version of the wire that this release speaks."""

DEFAULT_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest message of either direction where neither end says otherwise."""


# Requests


def message_to_proto(message: types.Message) -> pb.Message:
    """A chat message for the wire."""
    return pb.Message(
        role=message.role,
        content=message.content,
        name=message.name,
        tool_call_id=message.tool_call_id,
    )


def message_from_proto(proto: pb.Message) -> types.Message:
    """A chat message from the wire.

    Raises:
        InvalidRequest: The role is none of `types.Role`.
    """
    if proto.role not in ("system", "user", "assistant", "tool"):
        raise InvalidRequest(
            "unknown message role",
            value=repr(proto.role),
            limit="system, user, assistant, tool",
            remedy="correct the message's role",
        )
    return types.Message(
        role=proto.role,
        content=proto.content,
        name=proto.name,
        tool_call_id=proto.tool_call_id,
    )


def sampling_to_proto(sampling: types.SamplingOptions) -> pb.Sampling:
    """Sampling options for the wire."""
    return pb.Sampling(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop=sampling.stop,
        seed=sampling.seed,
        structured=structured_to_proto(sampling.structured),
    )


def sampling_from_proto(proto: pb.Sampling) -> types.SamplingOptions:
    """Sampling options from the wire, as they were sent: 0 tokens stay 0."""
    return types.SamplingOptions(
        max_tokens=proto.max_tokens,
        temperature=proto.temperature,
        top_p=proto.top_p,
        top_k=proto.top_k,
        stop=tuple(proto.stop),
        seed=proto.seed if proto.HasField("seed") else None,
        structured=structured_from_proto(proto.structured)
        if proto.HasField("structured")
        else None,
    )


def structured_to_proto(structured: types.StructuredOutput | None) -> pb.StructuredOutput | None:
    """A constraint for the wire."""
    if structured is None:
        return None
    if structured.choice:
        return pb.StructuredOutput(choice=pb.Choice(texts=structured.choice))
    return pb.StructuredOutput(**{structured.kind: getattr(structured, structured.kind)})


def structured_from_proto(proto: pb.StructuredOutput) -> types.StructuredOutput:
    """A constraint from the wire.

    Raises:
        InvalidRequest: It says nothing.
    """
    kind = proto.WhichOneof("kind")
    if kind == "choice":
        return types.StructuredOutput(choice=tuple(proto.choice.texts))
    return types.StructuredOutput(**({kind: getattr(proto, kind)} if kind else {}))


_LIMIT_NAMES = ("thread_budget", "answer_reserve", "max_depth", "max_turns")


def limits_to_proto(limits: types.Limits) -> pb.Limits:
    """Limits for the wire; None becomes 0, the receiver's default, or absence for max_threads."""
    return pb.Limits(
        max_threads=limits.max_threads,
        **{name: getattr(limits, name) or 0 for name in _LIMIT_NAMES},
    )


def limits_from_proto(proto: pb.Limits) -> types.Limits:
    """Limits from the wire; 0 becomes None, but for max_threads."""
    return types.Limits(
        max_threads=proto.max_threads if proto.HasField("max_threads") else None,
        **{name: getattr(proto, name) or None for name in _LIMIT_NAMES},
    )


# Replies


def budget_to_proto(budget: types.Budget) -> pb.Budget:
    """A budget for the wire."""
    return pb.Budget(
        tokens_used=budget.tokens_used,
        tokens_left=budget.tokens_left,
        turns_left=budget.turns_left,
        threads_left=budget.threads_left,
        reserve_reached=budget.reserve_reached,
    )


def budget_from_proto(proto: pb.Budget) -> types.Budget:
    """A budget from the wire."""
    return types.Budget(
        tokens_used=proto.tokens_used,
        tokens_left=proto.tokens_left,
        turns_left=proto.turns_left,
        threads_left=proto.threads_left,
        reserve_reached=proto.reserve_reached,
    )


def tool_call_to_proto(call: types.ToolCall) -> pb.ToolCall:
    """A parsed call for the wire."""
    return pb.ToolCall(
        call_id=call.call_id,
        name=call.name,
        arguments_json=json.dumps(dict(call.arguments), ensure_ascii=False),
        error=call.error,
    )


def tool_call_from_proto(proto: pb.ToolCall) -> types.ToolCall:
    """A parsed call from the wire; arguments that are no JSON object become its error."""
    arguments, error = _arguments(proto.arguments_json), proto.error
    if arguments is None:
        arguments, error = {}, error or "the arguments are no JSON object"
    return types.ToolCall(call_id=proto.call_id, name=proto.name, arguments=arguments, error=error)


def _arguments(text: str) -> dict[str, Any] | None:
    try:
        value: object = json.loads(text or "{}")
    except ValueError:
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def delta_to_proto(delta: deltas.TokenDelta) -> pb.TokenDelta:
    """Sampled tokens for the wire."""
    return pb.TokenDelta(
        token_ids=delta.token_ids,
        logprobs=delta.sampled_logprobs,
        text=delta.text,
        events=[_event_to_proto(event) for event in delta.events],
    )


def delta_from_proto(proto: pb.TokenDelta) -> deltas.TokenDelta:
    """Sampled tokens from the wire; events of a newer service are left out."""
    events = [_event_from_proto(event) for event in proto.events]
    return deltas.TokenDelta(
        token_ids=tuple(proto.token_ids),
        sampled_logprobs=tuple(proto.logprobs),
        text=proto.text,
        events=tuple(event for event in events if event is not None),
    )


def _event_to_proto(event: deltas.ReplyEvent) -> pb.ReplyEvent:
    match event:
        case deltas.TextDelta(text=text):
            return pb.ReplyEvent(text=text)
        case deltas.ReasoningDelta(text=text):
            return pb.ReplyEvent(reasoning=text)
        case deltas.CallBegun(name=name):
            return pb.ReplyEvent(call_begun=name)
        case deltas.CallArguments(text=text):
            return pb.ReplyEvent(call_arguments=text)
        case deltas.CallFinished(call=call):
            return pb.ReplyEvent(call_finished=tool_call_to_proto(call))
        case deltas.AllWasReasoning(reasoning=reasoning):
            return pb.ReplyEvent(all_was_reasoning=reasoning)


def _event_from_proto(proto: pb.ReplyEvent) -> deltas.ReplyEvent | None:
    match proto.WhichOneof("event"):
        case "text":
            return deltas.TextDelta(text=proto.text)
        case "reasoning":
            return deltas.ReasoningDelta(text=proto.reasoning)
        case "call_begun":
            return deltas.CallBegun(name=proto.call_begun)
        case "call_arguments":
            return deltas.CallArguments(text=proto.call_arguments)
        case "call_finished":
            return deltas.CallFinished(call=tool_call_from_proto(proto.call_finished))
        case "all_was_reasoning":
            return deltas.AllWasReasoning(reasoning=proto.all_was_reasoning)
        case _:
            return None


def turn_to_proto(turn: types.Turn, head: int) -> pb.TurnReply:
    """The end of a model turn for the wire; its ids travelled in the deltas before."""
    return pb.TurnReply(
        head=head,
        step=turn.step,
        text=turn.text,
        reasoning=turn.reasoning,
        tool_calls=[tool_call_to_proto(call) for call in turn.tool_calls],
        finish_reason=turn.finish_reason,
        budget=budget_to_proto(turn.budget),
        policy_version=turn.policy_version,
        num_tokens=len(turn.token_ids),
        raw_text=turn.raw_text,
        thread_ended=turn.thread_ended or "",
    )


def turn_from_proto(
    proto: pb.TurnReply, token_ids: Sequence[int], sampled_logprobs: Sequence[float]
) -> types.Turn:
    """A model turn from its reply and what its deltas carried.

    Raises:
        ProtocolError: The deltas do not add up to the turn.
    """
    if not len(token_ids) == len(sampled_logprobs) == proto.num_tokens:
        raise ProtocolError(
            "the turn's deltas do not add up",
            value=f"{len(token_ids)} ids, {len(sampled_logprobs)} log-probabilities",
            limit=f"{proto.num_tokens} of each",
        )
    return types.Turn(
        step=proto.step,
        text=proto.text,
        reasoning=proto.reasoning,
        tool_calls=tuple(tool_call_from_proto(call) for call in proto.tool_calls),
        raw_text=proto.raw_text,
        finish_reason=cast(types.FinishReason, proto.finish_reason),
        token_ids=tuple(token_ids),
        sampled_logprobs=tuple(sampled_logprobs),
        policy_version=proto.policy_version,
        budget=budget_from_proto(proto.budget),
        thread_ended=types.ThreadStatus(proto.thread_ended) if proto.thread_ended else None,
    )


def branch_result_to_proto(result: types.BranchResult) -> pb.BranchResult:
    """How a branch ended, for the wire."""
    return pb.BranchResult(
        thread_id=result.thread_id,
        status=result.status,
        answer=result.answer,
        evidence=result.evidence,
        summary=result.summary,
        steps=[
            pb.StepSummary(step=step.step, num_tokens=step.num_tokens, summary=step.summary)
            for step in result.steps
        ],
    )


def branch_result_from_proto(proto: pb.BranchResult) -> types.BranchResult:
    """How a branch ended, from the wire."""
    return types.BranchResult(
        thread_id=proto.thread_id,
        status=types.ThreadStatus(proto.status),
        answer=proto.answer,
        evidence=proto.evidence,
        summary=proto.summary,
        steps=tuple(
            types.StepSummary(step=step.step, num_tokens=step.num_tokens, summary=step.summary)
            for step in proto.steps
        ),
    )


def read_result_from_proto(proto: pb.ReadThreadReply, branch: str) -> types.ReadResult:
    """What reading `branch` mounted."""
    return types.ReadResult(
        branch=branch,
        first_step=proto.first_step,
        last_step=proto.last_step,
        tokens_mounted=proto.tokens_mounted,
        next_position=proto.next_position,
        stub=proto.stub,
    )


def rewind_result_from_proto(proto: pb.RewindReply) -> types.RewindResult:
    """What a rewind returned and cancelled."""
    return types.RewindResult(
        step=proto.step,
        tokens_returned=proto.tokens_returned,
        cancelled_threads=tuple(proto.cancelled_threads),
    )


def episode_result_from_proto(proto: pb.CloseEpisodeReply) -> types.EpisodeResult:
    """What closing an episode left behind."""
    return types.EpisodeResult(
        stop_reason=types.StopReason(proto.stop_reason),
        entry_id=proto.entry_id,
        num_nodes=proto.num_nodes,
        num_tokens=proto.num_tokens,
    )


# The replica


def info_to_proto(info: types.ServerInfo) -> pb.ConnectReply:
    """The handshake's answer for the wire."""
    return pb.ConnectReply(
        protocol_version=PROTOCOL_VERSION,
        replica_id=info.replica_id,
        run=info.run,
        model=info.model,
        engine=info.engine,
        max_message_bytes=info.max_message_bytes,
        limits=limits_to_proto(info.limits),
        policy_versions=info.policy_versions,
        max_positions=info.max_positions,
    )


def info_from_proto(proto: pb.ConnectReply) -> types.ServerInfo:
    """The handshake's answer from the wire."""
    return types.ServerInfo(
        replica_id=proto.replica_id,
        run=proto.run,
        model=proto.model,
        engine=proto.engine,
        max_message_bytes=proto.max_message_bytes,
        policy_versions=tuple(proto.policy_versions),
        max_positions=proto.max_positions,
        limits=limits_from_proto(proto.limits),
    )


_STATUS_NAMES = tuple(
    name for name in types.ServerStatus.__slots__ if name not in ("policy_versions", "metrics")
)


def server_status_to_proto(status: types.ServerStatus) -> pb.StatusReply:
    """A replica's state for the wire."""
    return pb.StatusReply(
        policy_versions=status.policy_versions,
        metrics=dict(status.metrics),
        **{name: getattr(status, name) for name in _STATUS_NAMES},
    )


def server_status_from_proto(proto: pb.StatusReply) -> types.ServerStatus:
    """A replica's state from the wire."""
    return types.ServerStatus(
        policy_versions=tuple(proto.policy_versions),
        metrics=dict(proto.metrics),
        **{name: getattr(proto, name) for name in _STATUS_NAMES},
    )
