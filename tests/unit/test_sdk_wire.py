"""The converters between the wire and the SDK's types, and the table of errors."""

from __future__ import annotations

import pickle

import grpc
import pytest

from harness_sdk import _status, _wire, deltas, errors, types

BUDGET = types.Budget(
    tokens_used=10, tokens_left=90, turns_left=4, threads_left=2, reserve_reached=True
)


@pytest.mark.parametrize("name", sorted(errors.ERRORS_BY_NAME))
def test_every_error_survives_the_wire_whole(name: str) -> None:
    error = errors.ERRORS_BY_NAME[name](
        "too far", value=9, limit="1 to 4", remedy="go back", episode_id="e1", thread_id="root"
    )
    status, text, trailers = _status.error_to_status(error)
    back = _status.error_from_status(status, text, trailers)
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert back.context() == error.context()
    assert back.retryable == error.retryable


def test_a_stale_head_tells_the_present_one() -> None:
    error = errors.StaleHead("moved", head=7, thread_id="root")
    back = _status.error_from_status(*_status.error_to_status(error))
    assert isinstance(back, errors.StaleHead) and back.head == 7
    assert pickle.loads(pickle.dumps(back)).head == 7


@pytest.mark.parametrize("status", [s for s in grpc.StatusCode if s is not grpc.StatusCode.OK])
def test_every_bare_status_has_its_error(status: grpc.StatusCode) -> None:
    error = _status.error_from_status(status, "told by the transport")
    assert type(error) is errors.ERROR_BY_STATUS[status.name]
    assert error.message == "told by the transport"


@pytest.mark.parametrize("cls", errors.ERRORS_BY_NAME.values())
def test_every_error_has_a_status(cls: type[errors.HarnessError]) -> None:
    assert _status.status_of(cls) is not grpc.StatusCode.OK


def test_unknown_error_kind_becomes_a_service_error() -> None:
    detail = _wire.pb.ErrorDetail(kind="ErrorOfAnotherRelease", message="new", remedy="upgrade")
    error = _status.error_from_detail(detail)
    assert type(error) is errors.ServiceError
    assert error.remedy == "upgrade"


def test_broken_detail_falls_back_to_the_status() -> None:
    error = _status.error_from_status(
        grpc.StatusCode.NOT_FOUND, "gone", [(_status.ERROR_METADATA_KEY, b"\xff\xff")]
    )
    assert type(error) is errors.EpisodeNotFound


def test_long_error_text_is_cut_below_the_metadata_limit() -> None:
    error = errors.ToolError("é" * 50_000, value="x" * 50_000, remedy="y" * 50_000)
    _, text, trailers = _status.error_to_status(error)
    assert 3 * len(text.encode()) + 4 / 3 * len(trailers[0][1]) < 8192
    back = _status.error_from_status(grpc.StatusCode.ABORTED, text, trailers)
    assert "100000 bytes" in back.message


@pytest.mark.parametrize(
    ("text", "side"),
    [
        ("CLIENT: Received message larger than max (83 vs. 64)", "client"),
        ("CLIENT: Sent message larger than max (83 vs. 64)", "client"),
        ("SERVER: Received message larger than max (83 vs. 64)", "server"),
        ("Received message larger than max (83 vs. 64)", "server"),
    ],
)
def test_oversize_status_names_side_size_and_limit(text: str, side: str) -> None:
    error = _status.error_from_status(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
    assert type(error) is errors.ResourceExhausted
    assert side in error.message
    assert (error.value, error.limit) == ("83 bytes", "64 bytes")


def test_turn_survives_the_wire() -> None:
    turn = types.Turn(
        step=2,
        text="so",
        reasoning="because",
        tool_calls=(
            types.ToolCall(call_id="c0", name="search", arguments={"query": "é", "k": 3}),
            types.ToolCall(call_id="c1", name="search", arguments={}, error="no JSON"),
        ),
        raw_text="raw",
        finish_reason="stop",
        token_ids=(5, 6),
        sampled_logprobs=(-0.5, -0.25),
        policy_version=7,
        budget=BUDGET,
        thread_ended=types.ThreadStatus.NO_DONE,
    )
    proto = _wire.turn_to_proto(turn, head=3)
    assert proto.head == 3
    assert _wire.turn_from_proto(proto, turn.token_ids, turn.sampled_logprobs) == turn


@pytest.mark.parametrize("text", ["", "é\n"])
def test_events_survive_the_wire(text: str) -> None:
    call = types.ToolCall(call_id="c", name="look", arguments={"q": [1, "é"]})
    events = (
        deltas.TextDelta(text=text),
        deltas.ReasoningDelta(text=text),
        deltas.CallBegun(name=text),
        deltas.CallArguments(text=text),
        deltas.CallFinished(call=call),
        deltas.AllWasReasoning(reasoning=text),
    )
    delta = deltas.TokenDelta(token_ids=(7,), sampled_logprobs=(-0.5,), text="a", events=events)
    assert _wire.delta_from_proto(_wire.delta_to_proto(delta)) == delta


def test_events_of_another_release_are_left_out() -> None:
    proto = _wire.pb.TokenDelta(events=[_wire.pb.ReplyEvent(), _wire.pb.ReplyEvent(text="a")])
    assert _wire.delta_from_proto(proto).events == (deltas.TextDelta(text="a"),)


def test_turn_with_missing_deltas_is_refused() -> None:
    proto = _wire.pb.TurnReply(num_tokens=2, finish_reason="stop")
    with pytest.raises(errors.ProtocolError, match="2 of each"):
        _wire.turn_from_proto(proto, [5], [-0.5])


def test_call_with_arguments_that_are_no_object_carries_an_error() -> None:
    call = _wire.tool_call_from_proto(_wire.pb.ToolCall(call_id="c0", arguments_json="[1]"))
    assert call.arguments == {}
    assert "no JSON object" in call.error


def test_message_and_sampling_survive_the_wire() -> None:
    message = types.Message(role="tool", content="4 hits", name="search", tool_call_id="c0")
    sampling = types.SamplingOptions(
        max_tokens=5, temperature=0.0, top_p=0.5, top_k=3, stop=("x",), seed=0
    )
    assert _wire.message_from_proto(_wire.message_to_proto(message)) == message
    assert _wire.sampling_from_proto(_wire.sampling_to_proto(sampling)) == sampling
    unseeded = types.SamplingOptions()
    assert _wire.sampling_from_proto(_wire.sampling_to_proto(unseeded)) == unseeded


@pytest.mark.parametrize(
    "structured",
    [
        types.StructuredOutput(json_schema='{"type": "integer"}'),
        types.StructuredOutput(regex="[ab]+"),
        types.StructuredOutput(choice=("yes", "no")),
        types.StructuredOutput(grammar='root ::= "x"'),
    ],
)
def test_a_constraint_survives_the_wire(structured: types.StructuredOutput) -> None:
    sampling = types.SamplingOptions(structured=structured)
    assert _wire.sampling_from_proto(_wire.sampling_to_proto(sampling)) == sampling


def test_no_constraint_and_two_are_refused() -> None:
    with pytest.raises(errors.InvalidRequest, match="got regex, choice; allowed: json_schema"):
        types.StructuredOutput(regex="a", choice=("a",))
    empty = _wire.pb.Sampling(structured=_wire.pb.StructuredOutput())
    with pytest.raises(errors.InvalidRequest, match="one constraint; got none"):
        _wire.sampling_from_proto(empty)


def test_unknown_role_is_refused() -> None:
    with pytest.raises(errors.InvalidRequest, match="developer"):
        _wire.message_from_proto(_wire.pb.Message(role="developer"))


def test_limits_survive_the_wire_and_none_stays_none() -> None:
    for limits in (
        types.Limits(thread_budget=100, max_turns=3),
        types.Limits(max_threads=0),
        types.Limits(max_threads=7, max_depth=2),
    ):
        assert _wire.limits_from_proto(_wire.limits_to_proto(limits)) == limits


def test_branch_result_survives_the_wire() -> None:
    result = types.BranchResult(
        thread_id="a",
        status=types.ThreadStatus.DONE,
        answer="4",
        evidence="p3",
        summary="short",
        steps=(types.StepSummary(step=1, num_tokens=9, summary="searched"),),
    )
    assert _wire.branch_result_from_proto(_wire.branch_result_to_proto(result)) == result


def test_info_and_status_survive_the_wire() -> None:
    info = types.ServerInfo(
        replica_id="r0",
        run="demo",
        model="tiny",
        engine="transformers",
        max_message_bytes=1 << 20,
        policy_versions=(0, 3),
        max_positions=4096,
        limits=types.Limits(thread_budget=32_768, answer_reserve=2048, max_threads=10),
    )
    status = types.ServerStatus(
        replica_id="r0",
        run="demo",
        engine="transformers",
        model="tiny",
        open_episodes=1,
        queued_episodes=2,
        live_threads=3,
        resident_cursors=4,
        recurrent_slots=5,
        tokens_resident=6,
        tokens_capacity=7,
        kv_use=0.5,
        policy_versions=(0, 3),
        uptime_s=1.5,
        metrics={"engine/tokens": 9.0},
    )
    assert _wire.info_from_proto(_wire.info_to_proto(info)) == info
    assert _wire.server_status_from_proto(_wire.server_status_to_proto(status)) == status
