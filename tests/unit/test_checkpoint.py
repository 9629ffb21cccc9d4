"""Checkpoints: whole or absent, the newest kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness_sdk.errors import ConfigError, ResourceExhausted
from trainer_service.checkpoint import CheckpointStore, copy_durably


def _save(store: CheckpointStore, number: int) -> None:
    def save_adapter(folder: Path) -> None:
        folder.mkdir()
        (folder / "adapter.bin").write_text(str(number))

    store.save(
        number,
        save_adapter=save_adapter,
        state={"number": number},
        optimizer={"moment": torch.full((2,), float(number))},
    )


def test_newest_checkpoint_comes_back_whole(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    assert store.newest() is None
    torch.manual_seed(5)
    for number in (1, 2, 3):
        _save(store, number)
    expected = torch.rand(3)
    found = CheckpointStore(tmp_path, keep=2).newest()
    assert found is not None
    assert found.state == {"number": 3}
    assert (found.adapter / "adapter.bin").read_text() == "3"
    assert torch.equal(found.tensors()["moment"], torch.tensor([3.0, 3.0]))
    assert torch.equal(torch.rand(3), expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000002", "00000003"]


def test_checkpoint_that_failed_halfway_is_no_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    _save(store, 1)

    def full_disk(folder: Path) -> None:
        folder.mkdir()
        raise OSError("no space left")

    with pytest.raises(ResourceExhausted, match=r"no space.*make room"):
        store.save(2, save_adapter=full_disk, state={}, optimizer={})
    again = CheckpointStore(tmp_path, keep=2)
    found = again.newest()
    assert found is not None and found.state == {"number": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["00000001"]


def test_damaged_checkpoint_says_what_to_do(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    _save(store, 1)
    (tmp_path / "00000001" / "state.json").write_text("{")
    with pytest.raises(ConfigError, match="resume from the one before"):
        store.newest()


@pytest.mark.parametrize("left", [0, 100, 1000])
def test_torn_tensors_say_what_to_do(tmp_path: Path, left: int) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    _save(store, 1)
    path = tmp_path / "00000001" / "optimizer.pt"
    path.write_bytes(path.read_bytes()[:left])
    found = store.newest()
    assert found is not None
    with pytest.raises(ConfigError, match=r"00000001.*resume from the one before"):
        found.tensors()


def test_copy_replaces_an_older_folder_whole(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for folder, name in ((source, "new"), (target, "old")):
        folder.mkdir()
        (folder / name).write_text(name)
    copy_durably(source, target)
    assert [path.name for path in target.iterdir()] == ["new"]
