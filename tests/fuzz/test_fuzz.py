"""A seeded slice of `make fuzz`, and what the whole of it has found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from harness_sdk._status import error_from_rpc
from harness_sdk.cli.run_config import RunConfig
from harness_sdk.cli.settings import load_config
from harness_sdk.errors import ConfigError, InvalidRequest
from harness_sdk.measures import measure
from harness_sdk.record import EpisodeRecord, MountSpan, Node, NodeKind
from harness_sdk.rpc.v1 import rollout_pb2 as pb
from rollout_service.engine.transformers import TransformersEngine
from tests.chat_tokenizers import VOCAB_SIZE, save_chat_tokenizer
from tests.fuzz.calls import METHODS, SERVICE, fuzz_calls
from tests.fuzz.dice import DiceEngine
from tests.fuzz.inputs import KINDS, fuzz_inputs
from tests.records import small_record
from tests.service.served import served
from tests.session_cases import CHAT
from tests.tiny_models import save_tiny_model


async def test_calls_drawn_from_the_proto_are_served_or_refused_by_type() -> None:
    found = await fuzz_calls(DiceEngine(1), 1, 600)
    assert not found.faults, "\n".join(found.lines())
    # Those that any episode comes to; what the rarer ones need depends on timing.
    for name in ("Connect", "OpenEpisode", "Generate", "Fork", "CloseEpisode", "Status"):
        assert found.succeeded[name], (name, found.lines())


async def test_the_same_calls_leave_nothing_of_a_model(tmp_path: Path) -> None:
    model = save_chat_tokenizer(save_tiny_model(tmp_path, "qwen3_5", vocab_size=VOCAB_SIZE))
    engine = TransformersEngine(str(model), max_tokens=200_000, detokenize=CHAT.tokenizer.decode)
    found = await fuzz_calls(engine, 2, 100)
    assert not found.faults, "\n".join(found.lines())
    assert found.succeeded["Generate"], found.lines()


@pytest.mark.parametrize(("kind", "count"), [("records", 200), ("templates", 8), ("configs", 150)])
def test_changed_inputs_are_taken_or_refused_by_type(kind: str, count: int) -> None:
    outcome = fuzz_inputs(KINDS[kind], 4, count)
    assert not outcome.faults, outcome.faults
    assert outcome.taken and outcome.refused, outcome


@pytest.mark.parametrize("name", ["Connect", "Generate"])
async def test_a_request_that_does_not_parse_is_refused_by_type(name: str) -> None:
    async with served(DiceEngine(0)) as running:
        (method,) = (each for each in METHODS if each.name == name)
        channel: Any = running.channel
        open_call = channel.unary_stream if method.server_streaming else channel.unary_unary
        call = open_call(SERVICE + name, request_serializer=bytes, response_deserializer=bytes)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            if method.server_streaming:
                _ = [event async for event in call(b"\x12\x02\xff\xfe")]
            else:
                await call(b"\x12\x02\xff\xfe")
        error = error_from_rpc(caught.value)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert isinstance(error, InvalidRequest) and "UTF-8" in error.remedy
        assert (error.value, error.limit) == ("4 bytes", SERVICE + name)
        assert (await running.stub.Status(pb.StatusRequest())).open_episodes == 0


def _turn(node_id: int, parent: int, **known: object) -> Node:
    fields: dict[str, object] = {
        "thread_id": "root", "step": 1, "kind": NodeKind.TURN, "token_ids": (7, 8),
        "sampled": (False, True), "sampled_logprobs": (-1.0,), "policy_version": 0,
        "position_start": 0, **known,
    }  # fmt: skip
    return Node(node_id=node_id, parent=parent, **fields)  # type: ignore[arg-type]


def test_a_record_whose_nodes_are_numbered_otherwise_is_measured_the_same() -> None:
    def record(numbers: tuple[int, int, int]) -> EpisodeRecord:
        first, second, third = numbers
        mount = (MountSpan(node_id=second, begin=0, end=2),)
        nodes = (
            _turn(first, -1),
            _turn(second, first, thread_id="a"),
            _turn(third, first, thread_id="b", kind=NodeKind.STUB, mounts=mount),
        )
        return replace(small_record("e"), nodes=nodes)

    assert measure(record((17, 5, 40))) == measure(record((0, 1, 2)))


@pytest.mark.parametrize(
    ("file", "flags", "message"),
    [
        ("primitives = 5", [], "primitives"),
        ("primitives = ['jump']", [], "unknown primitive"),
        ("limits = 5", ["--limits.max-turns", "1"], "limits.max_turns goes through limits"),
    ],
)
def test_configurations_that_ended_in_a_traceback_or_without_a_remedy(
    file: str, flags: list[str], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(file, "utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(RunConfig, path, flags, environment={})
    assert caught.value.remedy
