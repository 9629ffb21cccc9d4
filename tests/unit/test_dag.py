"""Records to strips: what is merged, what is an action, what is counted, what is refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from harness_sdk.errors import ConfigError, InvalidRequest
from harness_sdk.record import EpisodeRecord, MountSpan, Node, NodeKind
from tests.path_reference import leaves, path_to
from tests.random_records import RecordWriter, random_record
from trainer_service.dag import flat_episode, pack_episodes
from trainer_service.strip import Strip


def writer() -> RecordWriter:
    return RecordWriter(rng=np.random.default_rng(0), vocab_size=100)


def random_records(seed: int, count: int = 3) -> list[EpisodeRecord]:
    rng = np.random.default_rng(seed)
    return [
        random_record(rng, 100, num_events=14, with_demonstrations=True, temperatures=(1.0, 0.7))
        for _ in range(count)
    ]


def strip_tokens(strip: Strip, records: list[EpisodeRecord]) -> list[tuple[int, Node, int]]:
    """(episode, record node, offset) of each row."""
    rows = []
    for node in strip.nodes:
        by_id = {each.node_id: each for each in records[node.episode].nodes}
        for part in node.record_nodes:
            length = len(by_id[part].token_ids)
            rows += [(node.episode, by_id[part], offset) for offset in range(length)]
    return rows


@pytest.mark.parametrize("seed", range(5))
def test_rows_hold_every_token_once_at_its_recorded_position(seed: int) -> None:
    records = random_records(seed)
    strip = pack_episodes(records)
    rows = strip_tokens(strip, records)
    assert len(rows) == len({(e, n.node_id, o) for e, n, o in rows}) == strip.num_tokens
    assert strip.num_tokens == sum(record.num_tokens for record in records)
    assert strip.token_ids.tolist() == [node.token_ids[offset] for _, node, offset in rows]
    assert strip.position_ids.tolist() == [node.position_start + offset for _, node, offset in rows]


@pytest.mark.parametrize("seed", range(5))
def test_actions_are_the_sampled_tokens_with_what_was_recorded(seed: int) -> None:
    records = random_records(seed)
    strip = pack_episodes(records)
    rows = strip_tokens(strip, records)
    parents = strip.layout.row_parents()
    expected = [
        row for row, (_, node, o) in enumerate(rows) if node.sampled[o] and parents[row] >= 0
    ]
    assert strip.action_row.tolist() == expected
    assert strip.action_source.tolist() == [parents[row] for row in expected]
    for index, row in enumerate(expected):
        episode, node, offset = rows[row]
        recorded = node.sampled_logprobs[sum(node.sampled[:offset])]
        assert strip.action_target[index] == node.token_ids[offset]
        assert strip.action_episode[index] == episode
        assert strip.sampled_logprobs[index] == pytest.approx(recorded, abs=1e-6)
        assert strip.temperature[index] == node.temperature
        assert strip.policy_version[index] == node.policy_version
        assert strip.is_demonstration[index] == (node.kind == NodeKind.DEMONSTRATION)


@pytest.mark.parametrize("seed", range(5))
def test_counts_equal_those_of_the_paths_one_by_one(seed: int) -> None:
    records = random_records(seed)
    strip = pack_episodes(records)
    rows = strip_tokens(strip, records)
    paths = [[path_to(record, leaf) for leaf in leaves(record)] for record in records]
    assert strip.num_paths.tolist() == [len(each) for each in paths]
    assert strip.path_episode.tolist() == [e for e, each in enumerate(paths) for _ in each]
    flat = sum(len(node.token_ids) for each in paths for path in each for node in path)
    assert strip.tokens_flat == flat
    through = {
        (episode, node.node_id): sum(node in path for path in paths[episode])
        for episode, record in enumerate(records)
        for node in record.nodes
    }
    for index, row in enumerate(strip.action_row.tolist()):
        episode, node, _ = rows[row]
        assert strip.leaf_counts[index] == through[episode, node.node_id]
    counted = [
        sum(
            sum(node.sampled) - (node.parent < 0 and node.sampled[0])
            for node in record.nodes
            if node.kind != NodeKind.DEMONSTRATION
        )
        for record in records
    ]
    assert strip.num_actions.tolist() == counted


@pytest.mark.parametrize("seed", range(5))
def test_visibility_is_ancestors_self_and_recorded_mounts(seed: int) -> None:
    records = random_records(seed)
    strip = pack_episodes(records)
    rows = strip_tokens(strip, records)
    row_of = {(e, node.node_id, offset): row for row, (e, node, offset) in enumerate(rows)}
    seen = [set() for _ in rows]
    for mount in strip.layout.mounts:
        for row in range(mount.query_begin, mount.query_end):
            seen[row] |= set(range(mount.key_begin, mount.key_end))
    for row, (episode, node, _) in enumerate(rows):
        assert seen[row] == {
            row_of[episode, span.node_id, offset]
            for span in node.mounts
            for offset in range(span.begin, span.end)
        }


def test_runs_merge_across_turns_and_part_at_forks_and_mounts() -> None:
    book = writer()
    for parent, kind in ((-1, NodeKind.CONTEXT), (0, NodeKind.TURN), (1, NodeKind.CONTEXT)):
        book.append("root", kind, parent=parent, sampled=kind == NodeKind.TURN, length=2)
    book.append("child", NodeKind.NOTE, parent=2, sampled=False, length=3)
    book.append("root", NodeKind.NOTE, parent=2, sampled=False, length=1)
    mounts = (MountSpan(node_id=3, begin=0, end=3),)
    book.append("root", NodeKind.STUB, parent=4, sampled=False, length=2, mounts=mounts)
    book.append("root", NodeKind.TURN, parent=5, sampled=True, length=2)
    strip = pack_episodes([book.record()])
    assert [node.record_nodes for node in strip.nodes] == [(0, 1, 2), (4,), (5, 6), (3,)]
    assert [node.parent for node in strip.nodes] == [-1, 0, 1, 0]
    assert strip.tokens_flat == 6 * 2 + 1 + 4 + 3


def test_mount_sets_that_read_the_same_merge_whatever_their_pieces() -> None:
    book = writer()
    book.append("root", NodeKind.CONTEXT, parent=-1, sampled=False, length=2)
    book.append("a", NodeKind.TURN, parent=0, sampled=True, length=6)
    pieces = (MountSpan(node_id=1, begin=3, end=6), MountSpan(node_id=1, begin=0, end=4))
    whole = (MountSpan(node_id=1, begin=0, end=6),)
    book.append("b", NodeKind.STUB, parent=0, sampled=False, length=1, mounts=pieces)
    book.append("b", NodeKind.TURN, parent=2, sampled=True, length=1, mounts=whole)
    strip = pack_episodes([book.record()])
    assert (2, 3) in [node.record_nodes for node in strip.nodes]
    assert len(strip.layout.mounts) == 1


def test_a_fork_gives_one_row_several_targets() -> None:
    book = writer()
    book.append("root", NodeKind.CONTEXT, parent=-1, sampled=False, length=3)
    for thread in ("a", "b"):
        book.append(thread, NodeKind.TURN, parent=0, sampled=True, length=2)
    strip = pack_episodes([book.record()])
    assert strip.action_source.tolist() == [2, 3, 2, 5]
    assert strip.action_row.tolist() == [3, 4, 5, 6]


def test_a_sampled_root_token_is_no_action() -> None:
    book = writer()
    book.append("root", NodeKind.TURN, parent=-1, sampled=True, length=3)
    strip = pack_episodes([book.record()])
    assert strip.action_row.tolist() == [1, 2]
    assert strip.sampled_logprobs.tolist() == pytest.approx(book.nodes[0].sampled_logprobs[1:])


def test_nodes_without_tokens_stand_for_their_parent() -> None:
    book = writer()
    book.append("root", NodeKind.CONTEXT, parent=-1, sampled=False, length=2)
    book.append("root", NodeKind.NOTE, parent=0, sampled=False, length=1)
    book.append("root", NodeKind.TURN, parent=1, sampled=True, length=2)
    record = book.record()
    empty = dataclasses.replace(record.nodes[1], token_ids=(), sampled=())
    strip = pack_episodes(
        [dataclasses.replace(record, nodes=(record.nodes[0], empty, record.nodes[2]))]
    )
    assert [node.record_nodes for node in strip.nodes] == [(0, 2)]


def changed(record: EpisodeRecord, index: int, **fields: object) -> EpisodeRecord:
    nodes = list(record.nodes)
    nodes[index] = dataclasses.replace(nodes[index], **fields)  # pyright: ignore[reportArgumentType]
    return dataclasses.replace(record, nodes=tuple(nodes))


@pytest.mark.parametrize(
    ("index", "fields", "message"),
    [
        (1, {"parent": 2}, "precedes its parent"),
        (2, {"node_id": 1}, "repeats"),
        (1, {"sampled": (True,)}, "does not add up"),
        (1, {"sampled_logprobs": ()}, "does not add up"),
        (1, {"mounts": (MountSpan(node_id=2, begin=0, end=1),)}, "mounts what does not precede"),
        (2, {"mounts": (MountSpan(node_id=1, begin=0, end=9),)}, "mounts what does not precede"),
        (2, {"mounts": (MountSpan(node_id=7, begin=0, end=1),)}, "mounts what does not precede"),
    ],
)
def test_malformed_records_are_refused_by_name(
    index: int, fields: dict[str, object], message: str
) -> None:
    book = writer()
    book.append("root", NodeKind.CONTEXT, parent=-1, sampled=False, length=2)
    book.append("root", NodeKind.TURN, parent=0, sampled=True, length=3)
    book.append("root", NodeKind.TURN, parent=1, sampled=True, length=3)
    with pytest.raises(InvalidRequest, match=message) as error:
        pack_episodes([changed(book.record(), index, **fields)])
    assert error.value.episode_id == "episode-0"


def test_nothing_to_pack_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="nothing to pack"):
        pack_episodes([])
    with pytest.raises(InvalidRequest, match="without tokens"):
        pack_episodes([writer().record()])
    with pytest.raises(InvalidRequest, match="nothing to predict"):
        flat_episode([1])


def test_one_strip_takes_one_set_of_mount_layers() -> None:
    def mounted(layers: tuple[int, ...]) -> EpisodeRecord:
        book = writer()
        book.append("root", NodeKind.CONTEXT, parent=-1, sampled=False, length=2)
        book.append("a", NodeKind.TURN, parent=0, sampled=True, length=3)
        spans = (MountSpan(node_id=1, begin=0, end=3),)
        book.append("b", NodeKind.STUB, parent=0, sampled=False, length=1, mounts=spans)
        return book.record(mount_layers=layers)

    plain = random_record(np.random.default_rng(0), 9, with_mounts=False, mount_layers=(7,))
    assert pack_episodes([mounted((1, 2)), plain]).mount_layers == (1, 2)
    assert pack_episodes([plain]).mount_layers is None
    with pytest.raises(ConfigError, match="different mount layers"):
        pack_episodes([mounted((1, 2)), mounted((1, 3))])


def test_flat_episode_makes_every_token_but_the_first_an_action() -> None:
    strip = flat_episode([5, 6, 7])
    assert strip.action_target.tolist() == [6, 7]
    assert strip.position_ids.tolist() == [0, 1, 2]
    assert strip.num_actions.tolist() == [2]


def test_a_strip_moves_whole() -> None:
    strip = pack_episodes(random_records(0)).to("meta")
    assert strip.layout.device.type == "meta"
    for field in dataclasses.fields(strip):
        value = getattr(strip, field.name)
        if isinstance(value, torch.Tensor):
            assert value.device.type == "meta", field.name
