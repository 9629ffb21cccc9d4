"""Checkpoints that are whole or absent: adapter, optimiser, random state, position, version.

`save` returns once everything is on the disk; only then may entries be acknowledged and the
version be published.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError

from harness_sdk.errors import ConfigError, ResourceExhausted

_ADAPTER, _STATE, _TENSORS = "adapter", "state.json", "optimizer.pt"
_PARTIAL = ".partial-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One checkpoint on the disk."""

    folder: Path
    state: Mapping[str, Any]
    """What `save` was given, through JSON."""

    @property
    def adapter(self) -> Path:
        """PEFT folder."""
        return self.folder / _ADAPTER

    def tensors(self) -> dict[str, Any]:
        """The optimiser's state, on the CPU; the random state is restored on the way.

        Raises:
            ConfigError: It cannot be read.
        """
        try:
            saved = torch.load(self.folder / _TENSORS, map_location="cpu", weights_only=True)
        # A torn file is a RuntimeError or EOFError to torch, another file an UnpicklingError.
        except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
            raise _unreadable(self.folder, error) from error
        _set_random_state(saved["random"])
        return saved["optimizer"]


class CheckpointStore:
    """The newest checkpoints of a run.

    Args:
        folder: Made where it is missing.
        keep: How many are kept.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        folder.mkdir(parents=True, exist_ok=True)
        for partial in folder.glob(f"{_PARTIAL}*"):
            shutil.rmtree(partial)

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint; None in a fresh run.

        Raises:
            ConfigError: It cannot be read.
        """
        folders = self._folders()
        if not folders:
            return None
        try:
            state = json.loads((folders[-1] / _STATE).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise _unreadable(folders[-1], error) from error
        return Checkpoint(folder=folders[-1], state=state)

    def save(
        self,
        number: int,
        *,
        save_adapter: Callable[[Path], object],
        state: Mapping[str, Any],
        optimizer: Mapping[str, Any],
    ) -> Checkpoint:
        """Write checkpoint `number` durably, then forget the oldest ones.

        Args:
            number: Above every earlier one.
            save_adapter: Writes the PEFT files into the folder it is given.
            state: Plain data.
            optimizer: State dict of tensors and plain data.

        Raises:
            ResourceExhausted: It cannot be written; the earlier ones stand.
        """
        partial = self._folder / f"{_PARTIAL}{number}"
        try:
            partial.mkdir()
            save_adapter(partial / _ADAPTER)
            torch.save({"optimizer": optimizer, "random": _random_state()}, partial / _TENSORS)
            (partial / _STATE).write_text(json.dumps(state), "utf-8")
            sync_tree(partial)
        # A full disk is a RuntimeError to torch, and one of its own to safetensors.
        except (OSError, RuntimeError, SafetensorError) as error:
            raise ResourceExhausted(
                f"checkpoint {number} cannot be written",
                value=f"{self._folder}: {error}",
                limit=f"{shutil.disk_usage(self._folder).free >> 20} MiB free",
                remedy="make room and start the trainer again: it resumes from the one before",
            ) from error
        folder = self._folder / f"{number:08d}"
        partial.rename(folder)
        _sync(self._folder)
        for old in self._folders()[: -self._keep]:
            shutil.rmtree(old)
        return Checkpoint(folder=folder, state=state)

    def _folders(self) -> list[Path]:
        return sorted(path for path in self._folder.iterdir() if path.name.isdigit())


def _unreadable(folder: Path, error: Exception) -> ConfigError:
    return ConfigError(
        "the newest checkpoint cannot be read",
        value=f"{folder}: {str(error).partition(chr(10))[0]}",
        remedy="remove the folder to resume from the one before",
    )


def sync_tree(folder: Path) -> None:
    """Bring every file and folder below `folder` to the disk."""
    for path in sorted(folder.rglob("*"), reverse=True):
        _sync(path)
    _sync(folder)


def copy_durably(source: Path, target: Path) -> None:
    """Copy a folder so that `target` appears whole; an existing one is replaced."""
    partial = target.with_name(f"{_PARTIAL}{target.name}")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial)
    sync_tree(partial)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _random_state() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": [version, list(numbers), gauss],
    }


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
