"""The two files of a LoRA version on this replica's disk: copied, bounded, compared."""

from __future__ import annotations

import hashlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness_sdk import control
from harness_sdk.control import PolicyAnnouncement
from harness_sdk.errors import AdapterError

_CHUNK_BYTES = 1 << 23


def make_empty(folder: Path) -> None:
    """Leave an empty folder there, whatever was in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def copy_adapter(version: int, source: Path, folder: Path, max_bytes: int) -> str:
    """Copy the two files of a version from a folder that the trainer shares.

    Returns:
        sha256 of the copied tensors, in hex.

    Raises:
        AdapterError: One is missing or too large.
    """
    sha256 = ""
    for name, limit in (
        (control.ADAPTER_FILE, max_bytes),
        (control.ADAPTER_CONFIG_FILE, control.MAX_ADAPTER_CONFIG_BYTES),
    ):
        try:
            size = (source / name).stat().st_size
        except FileNotFoundError as error:
            raise AdapterError(
                f"adapter {version} has no {name}",
                value=source,
                remedy="write it with safetensors, in PEFT's format, where every replica can read",
            ) from error
        if size > limit:
            raise AdapterError(
                f"{name} of adapter {version} is too large",
                value=f"{size} bytes",
                limit=f"{limit} bytes",
                remedy="raise adapters.max_bytes or lower the rank",
            )
        found = _copy(source / name, folder / name)
        sha256 = sha256 or found
    return sha256


def hash_adapter(folder: Path) -> str:
    """sha256 of a folder's tensors, in hex."""
    with (folder / control.ADAPTER_FILE).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_files(announcement: PolicyAnnouncement, folder: Path, sha256: str) -> None:
    """Compare the copied files with what was announced.

    Args:
        announcement: What was announced.
        folder: The copies.
        sha256: Hash of the copied tensors.

    Raises:
        AdapterError: They are others, or none of PEFT's.
    """
    version = announcement.version
    _expect(f"sha256 of adapter {version}", sha256, announcement.sha256)
    names = _tensor_names(version, folder / control.ADAPTER_FILE)
    _expect(f"number of tensors of adapter {version}", len(names), announcement.num_tensors)
    try:
        config = json.loads((folder / control.ADAPTER_CONFIG_FILE).read_bytes())
        rank, alpha = config["r"], config["lora_alpha"]
    except (ValueError, KeyError, TypeError) as error:
        raise AdapterError(
            f"{control.ADAPTER_CONFIG_FILE} of adapter {version} is not PEFT's", value=error
        ) from error
    _expect(f"rank of adapter {version}", rank, announcement.rank)
    _expect(f"alpha of adapter {version}", float(alpha), announcement.alpha)


def _copy(source: Path, target: Path) -> str:
    """Copy a file; returns the sha256 of what was written, hashed while it is written."""
    digest = hashlib.sha256()
    with source.open("rb") as read, target.open("wb") as written, ThreadPoolExecutor(1) as pool:
        while chunk := read.read(_CHUNK_BYTES):
            hashing = pool.submit(digest.update, chunk)
            written.write(chunk)
            hashing.result()
    return digest.hexdigest()


def _tensor_names(version: int, path: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return list(file.keys())
    except SafetensorError as error:
        raise AdapterError(f"adapter {version} is no safetensors file", value=error) from error


def _expect(what: str, found: Any, announced: Any) -> None:
    if found != announced:
        raise AdapterError(
            f"{what} is not the announced one",
            value=found,
            limit=announced,
            remedy="publish the version again",
        )
