"""Episode records in one file: each is a 4-byte little-endian length, then its bytes."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from harness_sdk.errors import ProtocolError
from harness_sdk.record import EpisodeRecord, record_from_bytes, record_to_bytes

_LENGTH = struct.Struct("<I")


def write_records(path: Path, records: Iterable[EpisodeRecord]) -> int:
    """Write `records` to `path`, which appears whole or not at all.

    Returns:
        How many records were written.

    Raises:
        OSError: It cannot be written, as on a full disk; nothing is left of it.
    """
    count = 0
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            for record in records:
                data = record_to_bytes(record)
                file.write(_LENGTH.pack(len(data)))
                file.write(data)
                count += 1
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return count


def read_records(path: Path) -> Iterator[EpisodeRecord]:
    """Yield the records of `path` in order.

    Raises:
        ProtocolError: The file is cut short, or holds something else than records.
    """
    with path.open("rb") as file:
        index = 0
        while header := file.read(_LENGTH.size):
            length = _LENGTH.unpack(header)[0] if len(header) == _LENGTH.size else -1
            data = file.read(max(length, 0))
            if len(data) != length:
                raise ProtocolError(
                    f"records file {path.name} ends inside record {index}",
                    value=f"{len(data)} bytes",
                    limit=f"{length} bytes",
                    remedy="write it again with `octopus trees ... --records FILE`",
                )
            yield record_from_bytes(data)
            index += 1
