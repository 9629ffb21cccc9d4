"""One tokenizer and one template a run: what was made with another is refused and says so."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest

from harness_sdk.record import record_to_bytes
from harness_sdk.records_file import write_records
from harness_sdk.trajectories.tokenizers import ByteTokenizer, FileTokenizer
from rollout_service.chat import ChatRenderer, ChatTokenizer
from tests.chat_tokenizers import save_chat_tokenizer
from tests.records import small_record
from trainer_service.feed import FileFeed
from trainer_service.origin import Origin, RefusedRecord, tokenizer_hashes
from trainer_service.parsing import parse_record
from trainer_service.sections import BatchOptions

A, B, C = "a" * 64, "b" * 64, "c" * 64


def _record(episode_id: str, tokenizer: str = "", template: str = "", replica: str = "r"):
    return replace(
        small_record(episode_id),
        tokenizer_hash=tokenizer,
        template_hash=template,
        replica_id=replica,
    )


def test_folder_knows_the_hashes_that_its_users_write_into_records(tmp_path: Path) -> None:
    assert tokenizer_hashes(tmp_path) == frozenset()
    save_chat_tokenizer(tmp_path)
    served = ChatTokenizer.load(tmp_path).digest
    imported = FileTokenizer(tmp_path / "tokenizer.json").fingerprint
    assert served != imported
    assert tokenizer_hashes(tmp_path) == {served, imported}
    origin = Origin.of_folder(tmp_path)
    for tokenizer in (served, imported, ""):
        origin.check(_record("e", tokenizer))
    (tmp_path / "tokenizer.json").write_bytes(b"no tokenizer")
    assert len(tokenizer_hashes(tmp_path)) == 1


def test_record_of_another_tokenizer_than_the_folder_s_is_refused() -> None:
    origin = Origin({A})
    origin.check(_record("a", A))
    with pytest.raises(RefusedRecord) as refused:
        origin.check(_record("b", B, replica="replica-7"))
    assert refused.value.cause == "other_tokenizer"
    assert str(refused.value) == (
        f"episode b was made with another tokenizer; got {B} by replica-7; allowed: {A}, which"
        " the trainer's model folder has; give rollout and trainer the same model folder,"
        " tokenizer.json included"
    )
    with pytest.raises(RefusedRecord):
        origin.check(_record("c", ByteTokenizer.fingerprint))
    # What is no hash cannot be compared; the size of the vocabulary is, at the step.
    for unknown in ("", "Qwen/Qwen3-4B"):
        origin.check(_record("d", unknown))


def test_first_record_decides_where_the_folder_has_no_tokenizer() -> None:
    origin = Origin()
    origin.check(_record("a"))
    origin.check(_record("b", "Qwen/Qwen3-4B"))
    origin.check(_record("c", B))
    origin.check(_record("d", B))
    with pytest.raises(RefusedRecord, match=f"got {A} by r; allowed: {B}, which episode c by r"):
        origin.check(_record("e", A))


def test_records_of_one_run_share_their_template() -> None:
    origin = Origin({A})
    # A refused one decides nothing.
    with pytest.raises(RefusedRecord):
        origin.check(_record("a", B, C))
    origin.check(_record("b", A, "chatml"))
    origin.check(_record("c", A, B, "r0"))
    origin.check(_record("d", A, B, "r1"))
    with pytest.raises(RefusedRecord) as refused:
        origin.check(_record("e", A, C, "r2"))
    assert refused.value.cause == "other_template"
    assert f"got {C} by r2; allowed: {B}, which episode c by r0 has" in str(refused.value)
    assert "model.preamble" in refused.value.remedy


def test_preamble_of_a_replica_is_part_of_its_template(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.load(save_chat_tokenizer(tmp_path))
    full, compact = (ChatRenderer(tokenizer, preamble=p).template_hash for p in ("full", "compact"))
    origin = Origin.of_folder(tmp_path)
    origin.check(_record("a", tokenizer.digest, full))
    with pytest.raises(RefusedRecord, match="another chat template"):
        origin.check(_record("b", tokenizer.digest, compact))


def test_parsing_refuses_and_bad_records_decide_nothing() -> None:
    parse = functools.partial(parse_record, origin=Origin())
    bad = replace(_record("a", A), reward=7.0)
    with pytest.raises(ValueError, match=r"7\.0"):
        parse(record_to_bytes(bad))
    assert parse(record_to_bytes(_record("b", B))).episode_id == "b"
    with pytest.raises(RefusedRecord):
        parse(record_to_bytes(_record("c", A)))


def test_file_of_records_is_refused_with_the_episode(tmp_path: Path) -> None:
    write_records(tmp_path / "r", [_record("a", A), _record("b", B)])
    with pytest.raises(RefusedRecord, match=f"episode b .* got {B} by r; allowed: {A}"):
        FileFeed(tmp_path / "r", BatchOptions(), seed=0, state={}, origin=Origin({A}))
