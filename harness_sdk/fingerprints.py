"""Hashes by which services know a file and a base model: each side has to come to the same."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

_READ_BYTES = 1 << 20


def file_sha256(path: Path) -> str:
    """sha256 of the file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_hash(folder: str | Path) -> str:
    """sha256 of a model folder: the bytes of config.json, then of each *.safetensors by name.

    Read once per process and state of the files.
    """
    files = [Path(folder) / "config.json", *sorted(Path(folder).glob("*.safetensors"))]
    return _hash_files(
        tuple((str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.exists())
    )


@functools.lru_cache
def _hash_files(files: tuple[tuple[str, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for name, _, _ in files:
        with open(name, "rb") as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
    return digest.hexdigest()
