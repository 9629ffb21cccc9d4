"""The newest episodes of a run: a row of figures each, and the records while there is room."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from dataclasses import dataclass

from harness_sdk.errors import EpisodeNotFound, ProtocolError
from harness_sdk.measures import path_lengths
from harness_sdk.record import EpisodeRecord, record_from_bytes
from harness_sdk.view.layout import mounts_made

MAX_RECORD_BYTES = 64 * 1024 * 1024
"""Compressed records that are kept; about 250 episodes of 50,000 tokens."""
_MAX_TEXT = 160
_PARSED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRow:
    """What the page's tables show of an episode; texts are cut to 160 characters."""

    entry_id: str
    """Place in the stream; names the episode in addresses."""
    episode_id: str = ""
    group_id: str = ""
    task_id: str = ""
    replica_id: str = ""
    reward: float | None = None
    stop_reason: str = ""
    answer: str = ""
    problem: str = ""
    """Why it failed, or why its record cannot be read."""
    num_threads: int = 0
    num_rewinds: int = 0
    num_mounted: int = 0
    """Tokens that threads mounted."""
    num_tokens: int = 0
    num_flat: int = 0
    """Tokens of all root-to-leaf paths."""
    num_sampled: int = 0
    versions: tuple[int, ...] = ()
    """Policy versions that sampled, rising."""
    opened_at_s: float = 0.0
    closed_at_s: float = 0.0


def episode_row(entry_id: str, record: EpisodeRecord) -> EpisodeRow:
    """The figures of `record`."""
    mounts = mounts_made(record)
    return EpisodeRow(
        entry_id=entry_id,
        episode_id=record.episode_id,
        group_id=record.group_id,
        task_id=_cut(record.task_id),
        replica_id=_cut(record.replica_id),
        reward=record.reward,
        stop_reason=_cut(record.stop_reason),
        answer=_cut(record.answer),
        problem=_cut(f"{record.error_kind}: {record.error_message}" if record.error_kind else ""),
        num_threads=len(record.threads),
        num_rewinds=sum(thread.num_rewinds for thread in record.threads),
        num_mounted=sum(span.end - span.begin for spans in mounts.values() for span in spans),
        num_tokens=record.num_tokens,
        num_flat=sum(path_lengths(record)),
        num_sampled=record.num_sampled,
        versions=tuple(sorted({n.policy_version for n in record.nodes if any(n.sampled)})),
        opened_at_s=record.opened_at_s,
        closed_at_s=record.closed_at_s,
    )


class Episodes:
    """Rows of the newest `max_rows` episodes, and of the newest of those their records.

    Args:
        max_rows: Rows kept.
        max_bytes: Compressed records kept, in bytes.
    """

    def __init__(self, max_rows: int, max_bytes: int = MAX_RECORD_BYTES) -> None:
        self.max_rows = max_rows
        self._max_bytes = max_bytes
        self._rows: dict[str, tuple[int, EpisodeRow]] = {}
        self._entries: dict[str, str] = {}
        self._packed: dict[str, bytes] = {}
        self._parsed: OrderedDict[str, EpisodeRecord] = OrderedDict()
        self.num_bytes = 0
        self.serial = 0
        """Rises with each row."""
        self.num_seen = 0
        """Rows since the start, those that have gone included."""

    def __contains__(self, entry_id: str) -> bool:
        return entry_id in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, since: int = 0) -> list[EpisodeRow]:
        """Those that came after the serial number `since`, the newest entry first."""
        found = [row for serial, row in self._rows.values() if serial > since]
        return sorted(found, key=lambda row: entry_order(row.entry_id), reverse=True)

    def add(self, row: EpisodeRow, packed: bytes) -> None:
        """Keep an episode; one whose id is here already is a repeated send."""
        if row.entry_id in self._rows or row.episode_id in self._entries:
            return
        self.serial += 1
        self.num_seen += 1
        self._rows[row.entry_id] = (self.serial, row)
        if row.episode_id:
            self._entries[row.episode_id] = row.entry_id
        self._packed[row.entry_id] = packed
        self.num_bytes += len(packed)
        if len(self._rows) > self.max_rows:
            self._forget(min(self._rows, key=entry_order))
        while self.num_bytes > self._max_bytes and self._packed:
            self._drop_record(min(self._packed, key=entry_order))

    def has_room_for(self, entry_id: str) -> bool:
        """Whether an entry would be kept beside the newer ones."""
        if len(self._rows) < self.max_rows:
            return True
        return entry_order(entry_id) > min(map(entry_order, self._rows))

    def row(self, entry_id: str) -> EpisodeRow:
        """The row of an entry.

        Raises:
            EpisodeNotFound: It is not kept.
        """
        if entry_id not in self._rows:
            raise EpisodeNotFound(
                "this episode is no longer kept, or never was",
                value=entry_id,
                limit=f"the newest {self.max_rows}",
            )
        return self._rows[entry_id][1]

    def record(self, entry_id: str) -> EpisodeRecord:
        """The whole record of an entry; parsing a long one takes a moment.

        Raises:
            EpisodeNotFound: It is not kept.
            ProtocolError: It cannot be read.
        """
        row = self.row(entry_id)
        # Each step stands alone: newer entries may push this one out meanwhile, in another thread.
        record = self._parsed.pop(entry_id, None)
        if record is None:
            packed = self._packed.get(entry_id)
            if packed is None:
                raise EpisodeNotFound(
                    "of this episode only the figures are kept",
                    value=row.episode_id,
                    limit=f"records of {self._max_bytes // 2**20} MiB together, the newest",
                )
            record = record_from_bytes(zlib.decompress(packed))
        self._parsed[entry_id] = record
        for oldest in list(self._parsed)[:-_PARSED]:
            self._parsed.pop(oldest, None)
        return record

    def _forget(self, entry_id: str) -> None:
        _, row = self._rows.pop(entry_id)
        self._entries.pop(row.episode_id, None)
        self._drop_record(entry_id)

    def _drop_record(self, entry_id: str) -> None:
        self.num_bytes -= len(self._packed.pop(entry_id, b""))
        self._parsed.pop(entry_id, None)


def read_entry(entry_id: str, data: bytes) -> tuple[EpisodeRow, bytes]:
    """A stream entry as its row and its compressed bytes; one that is no record says so."""
    try:
        row = episode_row(entry_id, record_from_bytes(data))
    except (ProtocolError, ValueError) as error:
        row = EpisodeRow(entry_id=entry_id, problem=_cut(f"unreadable record: {error}"))
    return row, zlib.compress(data, 1)


def entry_order(entry_id: str) -> tuple[int, int]:
    """Sort key of a stream's entry ids."""
    milliseconds, _, number = entry_id.partition("-")
    return int(milliseconds), int(number or 0)


def _cut(text: str) -> str:
    text = " ".join(text[: 2 * _MAX_TEXT].split())
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"
