"""`octopus trees` prints its figures and writes records that training reads back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness_sdk.cli.__main__ import main
from harness_sdk.record import EpisodeRecord, NodeKind
from harness_sdk.records_file import read_records
from harness_sdk.trajectories.formats import read_runs
from harness_sdk.trajectories.render import Flag, render
from harness_sdk.trajectories.tokenizers import ByteTokenizer, FileTokenizer

DATA = Path(__file__).parents[1] / "data" / "trajectories"


def _qwen_like_tokenizer(folder: Path) -> Path:
    """A BPE with merges and the ChatML markers, trained on the spot."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([(DATA / "react.jsonl").read_text()], trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["trees", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def _paths(record: EpisodeRecord) -> list[tuple[int, ...]]:
    """Token ids of every root-to-leaf path."""
    parents = {node.parent for node in record.nodes}
    by_id = {node.node_id: node for node in record.nodes}
    found: list[tuple[int, ...]] = []
    for leaf in record.nodes:
        if leaf.node_id in parents:
            continue
        ids: tuple[int, ...] = ()
        node = leaf
        while True:
            ids = node.token_ids + ids
            if node.parent < 0:
                break
            node = by_id[node.parent]
        found.append(ids)
    return found


def test_json_has_exactly_the_documented_keys(capsys: pytest.CaptureFixture[str]) -> None:
    figures = _json(capsys, str(DATA / "react.jsonl"))
    assert set(figures) == {
        "trees", "paths", "tokens_unique", "tokens_flat", "por", "per_tree",
    }  # fmt: skip
    rows = figures["per_tree"]
    assert isinstance(rows, list)
    assert figures["trees"] == len(rows) == 6
    assert figures["paths"] == sum(row["paths"] for row in rows) == 22
    unique, flat = figures["tokens_unique"], figures["tokens_flat"]
    assert isinstance(unique, int) and isinstance(flat, int)
    assert figures["por"] == pytest.approx(1 - unique / flat)
    # Of five trials of one question most share their first steps.
    assert 0.4 < 1 - unique / flat < 0.8


def test_table_names_tasks_and_totals(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trees", str(DATA)]) == 0
    shown = capsys.readouterr().out
    assert "astropy__astropy-12907" in shown
    assert "trees" in shown.splitlines()[-3]


def test_records_hold_the_rendered_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trees.records"
    figures = _json(capsys, str(DATA), "--records", str(file))
    records = list(read_records(file))
    assert len(records) == figures["trees"]
    assert sum(record.num_tokens for record in records) == figures["tokens_unique"]
    rendered = [p for run in read_runs([DATA]) for p in render(run, ByteTokenizer())]
    ids = {path.token_ids for path in rendered}
    for record in records:
        assert set(_paths(record)) <= ids
    assert len({record.episode_id for record in records}) == len(records)


def test_records_are_well_formed_demonstrations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trees.records"
    _json(capsys, str(DATA), "--records", str(file), "--run", "warm")
    for record in read_records(file):
        ends: dict[int, int] = {-1: 0}
        threads = {thread.thread_id: thread for thread in record.threads}
        for node in record.nodes:
            assert node.position_start == ends[node.parent]
            ends[node.node_id] = node.position_start + len(node.token_ids)
            assert len(node.sampled) == len(node.token_ids) > 0
            assert len(node.sampled_logprobs) == sum(node.sampled)
            assert (node.kind is NodeKind.DEMONSTRATION) == any(node.sampled)
            assert node.thread_id in threads
        assert record.run == "warm"
        assert record.nodes[0].thread_id == "root"
        assert [t.thread_id for t in record.threads if not t.parent] == ["root"]
        assert all(t.parent in threads for t in record.threads if t.parent)


def test_reward_of_a_tree_is_the_mean_of_its_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "swe.records"
    figures = _json(capsys, str(DATA / "responses_swe.jsonl"), "--records", str(file))
    (record,) = read_records(file)
    assert record.reward == pytest.approx(0.4)
    rows = figures["per_tree"]
    assert isinstance(rows, list)
    assert sorted(rows[0]["rewards"]) == [0.0, 0.0, 0.0, 1.0, 1.0]


def test_min_reward_keeps_successes(capsys: pytest.CaptureFixture[str]) -> None:
    figures = _json(capsys, str(DATA / "responses_swe.jsonl"), "--min-reward", "1")
    assert figures["paths"] == 2
    assert main(["trees", str(DATA / "mini_local.traj.json"), "--min-reward", "1"]) == 1
    assert "--min-reward 1.0" in capsys.readouterr().err


def test_hugging_face_tokenizer_gives_fewer_tokens_and_the_same_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _qwen_like_tokenizer(tmp_path)
    react = str(DATA / "react.jsonl")
    by_bytes, by_bpe = _json(capsys, react), _json(capsys, react, "--tokenizer", str(folder))
    assert by_bpe["paths"] == by_bytes["paths"]
    flat, flat_bytes = by_bpe["tokens_flat"], by_bytes["tokens_flat"]
    assert isinstance(flat, int) and isinstance(flat_bytes, int)
    assert flat < 0.7 * flat_bytes
    tokenizer = FileTokenizer(folder / "tokenizer.json")
    run = read_runs([DATA / "react.jsonl"])[0]
    (fine,), (coarse,) = render(run, ByteTokenizer()), render(run, tokenizer)
    assert tokenizer.decode(coarse.token_ids) == ByteTokenizer().decode(fine.token_ids)
    assert coarse.flags.count(Flag.SAMPLED) > 0


def test_markers_quoted_in_text_stay_text(tmp_path: Path) -> None:
    tokenizer = FileTokenizer(_qwen_like_tokenizer(tmp_path))
    ids = tokenizer.encode("a <|im_end|> <|im_start|>system")
    assert tokenizer.turn_end not in ids
    assert tokenizer.turn_start not in ids
    assert tokenizer.decode(ids) == "a <|im_end|> <|im_start|>system"


def test_tokenizer_without_markers_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    for path, problem in ((tmp_path, "<|im_start|>"), (tmp_path / "none", "no tokenizer there")):
        assert main(["trees", str(DATA / "react.jsonl"), "--tokenizer", str(path)]) == 1
        assert problem in capsys.readouterr().err


def test_unknown_format_fails_with_the_known_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "log.json"
    file.write_text('{"hello": "world"}')
    assert main(["trees", str(file)]) == 1
    assert "mini-swe-agent" in capsys.readouterr().err
