"""The episode record survives its wire form, and bad bytes are refused."""

from __future__ import annotations

import pytest

from harness_sdk.errors import ProtocolError
from harness_sdk.record import (
    EpisodeRecord,
    MountSpan,
    Node,
    NodeKind,
    ThreadSummary,
    record_from_bytes,
    record_to_bytes,
)


def _record(reward: float | None) -> EpisodeRecord:
    prompt = Node(
        node_id=0,
        parent=-1,
        thread_id="root",
        step=0,
        kind=NodeKind.CONTEXT,
        token_ids=(1, 2, 3),
        sampled=(False, False, False),
        sampled_logprobs=(),
        policy_version=0,
        position_start=0,
    )
    turn = Node(
        node_id=1,
        parent=0,
        thread_id="root",
        step=1,
        kind=NodeKind.TURN,
        token_ids=(4, 5),
        sampled=(False, True),
        sampled_logprobs=(-0.5,),
        policy_version=2,
        position_start=9,
        mounts=(MountSpan(node_id=0, begin=1, end=3),),
        temperature=0.7,
        rewound=True,
    )
    return EpisodeRecord(
        run="r",
        episode_id="e",
        group_id="g",
        task_id="t",
        replica_id="rep",
        nodes=(prompt, turn),
        threads=(ThreadSummary(thread_id="root", parent="", depth=0, status="done", orphan=False),),
        reward=reward,
        answer="42",
        stop_reason="done",
        opened_at_s=1.5,
        closed_at_s=2.5,
        mount_layers=(2, 5),
        dtype="bfloat16",
        head_dtype="float32",
        model_hash="m",
        tokenizer_hash="k",
        template_hash="c",
        engine="transformers",
    )


@pytest.mark.parametrize("reward", [None, 0.0, 1.0])
def test_record_survives_the_wire(reward: float | None) -> None:
    record = _record(reward)
    assert record_from_bytes(record_to_bytes(record)) == record
    assert record.num_tokens == 5
    assert record.num_sampled == 1


@pytest.mark.parametrize("data", [b"", b"\xff\xff\xff", b"hello world"])
def test_bad_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        record_from_bytes(data)
