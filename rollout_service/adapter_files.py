"""The two files of a LoRA version on this replica's disk: copied, bounded, compared."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from harness_sdk import control
from harness_sdk.control import PolicyAnnouncement
from harness_sdk.errors import AdapterError
from harness_sdk.fingerprints import file_sha256

_CHUNK_BYTES = 1 << 23
_DTYPES = ("F32", "BF16", "F16")
_TENSOR_NAME = re.compile(r"(?=.{1,256}$)[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_MAX_PATTERN = 256
_REPEATS = re.compile(r"[*+?{]")


def make_empty(folder: Path) -> None:
    """Leave an empty folder there, whatever was in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def shared_folder(version: int, uri: str, shared: Path) -> Path:
    """Folder of a `file:///` address, which must lie in `shared`, links followed.

    Raises:
        AdapterError: It lies elsewhere.
    """
    parts = urlsplit(uri)
    folder = Path(unquote(parts.path))
    try:
        inside = not parts.netloc and folder.resolve().is_relative_to(shared.resolve())
    except (OSError, ValueError, RuntimeError):
        # A zero byte, or links that go round.
        inside = False
    if not inside:
        raise AdapterError(
            f"adapter {version} lies outside of the run's folder",
            value=uri,
            limit=f"a folder in {shared.resolve()}",
            remedy="mount the same run folder everywhere, or publish through Redis",
        )
    return folder


def copy_adapter(version: int, source: Path, folder: Path, max_bytes: int) -> None:
    """Copy the two files of a version from a folder that the trainer shares.

    Raises:
        AdapterError: One is missing, no regular file or too large.
    """
    for name, limit in (
        (control.ADAPTER_FILE, max_bytes),
        (control.ADAPTER_CONFIG_FILE, control.MAX_ADAPTER_CONFIG_BYTES),
    ):
        with _opened(version, source / name) as read:
            is_whole = _copy(read, folder / name, limit)
        if not is_whole:
            raise AdapterError(
                f"{name} of adapter {version} is too large",
                value=source,
                limit=f"{limit} bytes",
                remedy="raise adapters.max_bytes or lower the rank",
            )


def check_sha256(announcement: PolicyAnnouncement, folder: Path) -> None:
    """Compare the bytes of the copied tensors with what was announced; takes a while.

    Raises:
        AdapterError: They are others.
    """
    found = file_sha256(folder / control.ADAPTER_FILE)
    _expect(f"sha256 of adapter {announcement.version}", found, announcement.sha256)


def check_files(announcement: PolicyAnnouncement, folder: Path) -> None:
    """Compare all but the values of the copied files with what was announced.

    Raises:
        AdapterError: They are others, or none of PEFT's.
    """
    version = announcement.version
    _check_tensors(announcement, folder / control.ADAPTER_FILE)
    try:
        config = json.loads((folder / control.ADAPTER_CONFIG_FILE).read_bytes())
        rank, alpha = config["r"], float(config["lora_alpha"])
        _check_patterns(version, config)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise AdapterError(
            f"{control.ADAPTER_CONFIG_FILE} of adapter {version} is not PEFT's", value=error
        ) from error
    _expect(f"rank of adapter {version}", rank, announcement.rank)
    _expect(f"alpha of adapter {version}", alpha, announcement.alpha)


def _opened(version: int, path: Path) -> BinaryIO:
    """A regular file for reading: no link, nor a pipe or a device that would never end."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = open(path, "rb", opener=lambda name, _: os.open(name, flags))  # noqa: SIM115
    except OSError as error:
        raise AdapterError(
            f"adapter {version} has no {path.name}",
            value=f"{path.parent}: {error.strerror}",
            remedy="write it with safetensors, in PEFT's format, where every replica can read",
        ) from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise AdapterError(f"{path.name} of adapter {version} is no regular file", value=path)
    return file


def _copy(read: BinaryIO, target: Path, max_bytes: int) -> bool:
    """Copy a file of at most `max_bytes`; whether it had no more."""
    if os.fstat(read.fileno()).st_size > max_bytes:
        return False
    left = max_bytes
    with target.open("wb") as written:
        while chunk := read.read(_CHUNK_BYTES):
            left -= len(chunk)
            if left < 0:
                return False
            written.write(chunk)
    return True


def _check_tensors(announcement: PolicyAnnouncement, path: Path) -> None:
    """Names, shapes and types alone: no tensor is read."""
    from safetensors import SafetensorError, safe_open

    version = announcement.version
    try:
        with safe_open(path, framework="numpy") as file:
            names = list(file.keys())
            _expect(f"number of tensors of adapter {version}", len(names), announcement.num_tensors)
            for name in names:
                tensor = file.get_slice(name)
                _check_tensor(version, name, tensor.get_shape(), tensor.get_dtype())
    except SafetensorError as error:
        raise AdapterError(f"adapter {version} is no safetensors file", value=error) from error


def _check_tensor(version: int, name: str, shape: list[int], dtype: str) -> None:
    if not _TENSOR_NAME.fullmatch(name):
        raise AdapterError(
            f"adapter {version} names a tensor as no module is",
            value=repr(name[:100]),
            limit="letters, digits, _, - and dots between them, at most 256",
        )
    if len(shape) != 2 or dtype not in _DTYPES:
        raise AdapterError(
            f"tensor {name} of adapter {version} is no matrix of LoRA's",
            value=f"{dtype} {shape}",
            limit=f"two dimensions, {', '.join(_DTYPES)}",
        )


def _check_patterns(version: int, config: dict[str, Any]) -> None:
    """PEFT takes some names as regular expressions, which could be written to never end."""
    targets = config.get("target_modules")
    patterns = [targets] if isinstance(targets, str) else []
    for key in ("rank_pattern", "alpha_pattern"):
        patterns += list(config.get(key) or ())
    for pattern in patterns:
        if len(pattern) > _MAX_PATTERN or len(_REPEATS.findall(pattern)) > 1:
            raise AdapterError(
                f"a pattern of adapter {version} may take forever to match",
                value=repr(pattern[:100]),
                limit=f"{_MAX_PATTERN} characters, one of * + ? {{",
                remedy="list the modules by name",
            )


def _expect(what: str, found: Any, announced: Any) -> None:
    if found != announced:
        raise AdapterError(
            f"{what} is not the announced one",
            value=found,
            limit=announced,
            remedy="publish the version again",
        )
