"""Records in a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness_sdk.errors import ProtocolError
from harness_sdk.record import EpisodeRecord, Node, NodeKind, ThreadSummary
from harness_sdk.records_file import read_records, write_records


def _record(episode_id: str, token_ids: tuple[int, ...]) -> EpisodeRecord:
    node = Node(
        node_id=0,
        parent=-1,
        thread_id="root",
        step=1,
        kind=NodeKind.DEMONSTRATION,
        token_ids=token_ids,
        sampled=(True,) * len(token_ids),
        sampled_logprobs=(-0.5,) * len(token_ids),
        policy_version=0,
        position_start=0,
    )
    return EpisodeRecord(
        run="r",
        episode_id=episode_id,
        group_id="g",
        task_id="t",
        replica_id="",
        nodes=(node,),
        threads=(ThreadSummary(thread_id="root", parent="", depth=0, status="done"),),
        reward=1.0,
        answer="a",
        stop_reason="done",
        opened_at_s=0.0,
        closed_at_s=1.0,
        mount_layers=(),
        model_hash="m",
        tokenizer_hash="t",
        template_hash="",
        engine="",
    )


def test_records_file_returns_what_was_written(tmp_path: Path) -> None:
    records = [_record("a", (1, 2, 3)), _record("b", (4,) * 5000)]
    assert write_records(tmp_path / "x.records", records) == 2
    assert list(read_records(tmp_path / "x.records")) == records


def test_records_file_without_records_is_empty(tmp_path: Path) -> None:
    assert write_records(tmp_path / "x.records", []) == 0
    assert list(read_records(tmp_path / "x.records")) == []


@pytest.mark.parametrize("cut", [1, 3, 40])
def test_records_file_cut_short_names_the_record(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.records"
    write_records(path, [_record("a", (1,)), _record("b", (2,))])
    whole = path.read_bytes()
    first = 4 + int.from_bytes(whole[:4], "little")
    path.write_bytes(whole[: first + cut])
    with pytest.raises(ProtocolError, match="inside record 1"):
        list(read_records(path))


def test_records_file_keeps_the_old_file_where_writing_fails(tmp_path: Path) -> None:
    path = tmp_path / "x.records"
    write_records(path, [_record("a", (1,))])

    def broken():
        yield _record("b", (2,))
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError):
        write_records(path, broken())
    assert [record.episode_id for record in read_records(path)] == ["a"]
