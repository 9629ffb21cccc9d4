"""Host side: what the core holds of each cursor, and what a run over its children starts from.

Every footing trails its cursor by the last token, which the child's run computes: so an empty
generation prompt and a child's first log-probability cost no second pass. A *complete* footing
covers the last token too; mounts need it, of the source and of the reader's parent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rollout_service.cursors import Cursor, Mount
from rollout_service.engine.vllm.plan import AttachPlan, RowSpan

Key = tuple[int, int]
"""Policy version and cursor id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footing:
    """Rows in front of the next one to compute."""

    parent: int | None = None
    """Residency whose rows and state are inherited."""
    mounts: tuple[RowSpan, ...] = ()
    """Spans beside them, where nothing has been computed on top of them yet."""
    num_rows: int = 0
    """The parent's rows and the mounted ones."""
    num_mounted: int = 0
    """Rows among them that were mounted, here or for an ancestor."""
    is_own: bool = False
    """Whether `parent` was computed for the cursor itself, whose rows are then its last ones."""

    def plan(self, *, position: int, keep_as: int | None) -> AttachPlan:
        """A request's plan whose first new token has rotary position `position`."""
        return AttachPlan(
            parent=self.parent,
            mounts=self.mounts,
            num_rows=self.num_rows,
            num_mounted=self.num_mounted,
            offset=position - self.num_rows,
            keep_as=keep_as,
        )

    def with_mounts(self, spans: Iterable[RowSpan]) -> Footing:
        """The same with more spans visible."""
        spans = tuple(spans)
        num_more = sum(span.num_rows for span in spans)
        return Footing(
            parent=self.parent,
            mounts=self.mounts + spans,
            num_rows=self.num_rows + num_more,
            num_mounted=self.num_mounted + num_more,
        )

    @staticmethod
    def after(plan: AttachPlan, num_new: int) -> Footing:
        """What a run that kept its blocks leaves, `num_new` rows past its plan's."""
        return Footing(
            parent=plan.keep_as,
            num_rows=plan.num_rows + num_new,
            num_mounted=plan.num_mounted,
            is_own=True,
        )

    def reads(self) -> set[int]:
        """Residencies that it rests on."""
        own = set() if self.parent is None else {self.parent}
        return own | {span.residency for span in self.mounts}


@dataclass(eq=False, slots=True)
class Entry:
    """What is known of one cursor under one version; identical roots share one."""

    trailing: Footing | None = None
    complete: Footing | None = None
    owners: set[Key] = field(default_factory=set)
    root: tuple[int, ...] | None = None

    def get(self, complete: bool) -> Footing | None:
        """One of the two footings."""
        return self.complete if complete else self.trailing

    def reads(self) -> set[int]:
        """Residencies that its footings rest on."""
        footings = (self.trailing, self.complete)
        return {r for footing in footings if footing is not None for r in footing.reads()}

    def residencies(self) -> list[int]:
        """Residencies that go with the entry."""
        footings = (self.trailing, self.complete)
        return [f.parent for f in footings if f is not None and f.is_own and f.parent is not None]


class FootingStore:
    """Entries by (policy version, cursor id)."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._entries: dict[Key, Entry] = {}
        self._roots: dict[tuple[int, tuple[int, ...]], Entry] = {}
        self._readers: dict[int, set[Entry]] = {}
        self._gone: dict[Key, str] = {}
        """What had a footing, and what took it."""
        self._ended: set[Key] = set()
        """Those known whose last token has been computed."""
        self._versions: set[int] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, version: int, cursor: Cursor, complete: bool) -> Footing | None:
        """A footing of `cursor`; adopts that of an identical root."""
        entry = self._find(version, cursor)
        return None if entry is None else entry.get(complete)

    def put(self, version: int, cursor: Cursor, footing: Footing, complete: bool) -> list[int]:
        """Hold a footing; returns residencies that it makes superfluous."""
        entry = self._find(version, cursor)
        if entry is not None and entry.get(complete) is not None:
            return [footing.parent] if footing.is_own and footing.parent is not None else []
        if entry is None:
            entry = Entry()
            self._own(entry, version, cursor)
            if is_root(cursor):
                entry.root = cursor.token_ids
                self._roots[version, cursor.token_ids] = entry
        if complete:
            entry.complete = footing
        else:
            entry.trailing = footing
        for residency in footing.reads():
            self._readers.setdefault(residency, set()).add(entry)
        return []

    def gone_by(self, version: int, cursor: Cursor) -> str:
        """What took the footing that the cursor had: `eviction`, `restart`; empty: nothing."""
        return self._gone.get((version, cursor.cursor_id), "")

    def succeed(self, before: FootingStore) -> None:
        """Know what `before` held, which went with its process."""
        self._gone = before._gone | dict.fromkeys(before._entries, "restart")
        self._ended |= before._ended
        self._versions |= before._versions

    def end(self, version: int, cursor: Cursor) -> str:
        """Note that a run has computed the cursor's last token.

        Returns:
            Why again: `last_token`, for one more that follows it; `refresh`, under another version.
            Empty for the first time.
        """
        key = (version, cursor.cursor_id)
        if key in self._ended:
            return "last_token"
        is_known = not self._ended.isdisjoint(self._keys([cursor]))
        if key in self._entries:
            self._ended |= self._entries[key].owners
        elif key in self._gone:
            self._ended.add(key)
        return "refresh" if is_known else ""

    def residencies_of(self, cursors: Iterable[Cursor]) -> list[int]:
        """Residencies of `cursors` under every version."""
        entries = {self._entries[key] for key in self._keys(cursors) if key in self._entries}
        return [residency for entry in entries for residency in entry.residencies()]

    def release(self, cursors: Iterable[Cursor]) -> list[int]:
        """Forget `cursors` under every version; returns residencies that nobody owns any more."""
        keys = self._keys(cursors)
        self._let_go(keys)
        self._ended.difference_update(keys)
        return self._disown(keys)

    def hand_over(self, turn: Cursor, shorter: Cursor) -> list[int]:
        """Hold for `shorter`, which lacks the turn's last token, what trails the turn by it.

        Returns:
            Residencies that cover the last token too: they cannot be cut.
        """
        superfluous: list[int] = []
        keys = self._keys([turn])
        self._ended.difference_update(keys)
        known = [key[0] for key in keys if key in self._entries or key in self._gone]
        self._ended |= {(version, shorter.cursor_id) for version in known}
        for key in [key for key in keys if key in self._entries]:
            entry = self._entries[key]
            trailing = entry.trailing
            superfluous += self._disown([key])
            if trailing is not None and trailing.is_own:
                superfluous = [r for r in superfluous if r != trailing.parent]
                superfluous += self.put(key[0], shorter, trailing, complete=True)
            else:
                self._gone[key[0], shorter.cursor_id] = "eviction"
        for key in [key for key in keys if key in self._gone]:
            self._gone[key[0], shorter.cursor_id] = self._gone.pop(key)
        return superfluous

    def drop_version(self, version: int) -> list[int]:
        """Forget everything of `version`; returns its residencies."""
        self._versions.discard(version)
        self._let_go([key for key in self._gone if key[0] == version])
        self._ended = {key for key in self._ended if key[0] != version}
        return self._disown([key for key in self._entries if key[0] == version])

    def forget(self, residencies: Iterable[int]) -> None:
        """Drop every footing that rests on residencies which the core no longer holds."""
        gone = set(residencies)
        for residency in gone:
            for entry in self._readers.pop(residency, set()):
                reads = entry.reads()
                if entry.trailing is not None and entry.trailing.reads() & gone:
                    entry.trailing = None
                if entry.complete is not None and entry.complete.reads() & gone:
                    entry.complete = None
                for other in reads - entry.reads():
                    self._forget_reader(other, entry)
                if entry.trailing is None and entry.complete is None:
                    self._gone |= dict.fromkeys(entry.owners, "eviction")
                    self._disown(list(entry.owners))

    def _forget_reader(self, residency: int, entry: Entry) -> None:
        readers = self._readers.get(residency)
        if readers is not None:
            readers.discard(entry)
            if not readers:
                del self._readers[residency]

    def _find(self, version: int, cursor: Cursor) -> Entry | None:
        entry = self._entries.get((version, cursor.cursor_id))
        if entry is None and is_root(cursor):
            entry = self._roots.get((version, cursor.token_ids))
            if entry is not None:
                self._own(entry, version, cursor)
        return entry

    def _keys(self, cursors: Iterable[Cursor]) -> list[Key]:
        """Keys of `cursors` under every version; there are few versions and many cursors."""
        return [(version, cursor.cursor_id) for cursor in cursors for version in self._versions]

    def _own(self, entry: Entry, version: int, cursor: Cursor) -> None:
        self._versions.add(version)
        key = (version, cursor.cursor_id)
        self._let_go([key])
        if not self._ended.isdisjoint(entry.owners):
            self._ended.add(key)
        entry.owners.add(key)
        self._entries[key] = entry

    def _let_go(self, keys: Iterable[Key]) -> None:
        """Forget that `keys` were held once."""
        for key in keys:
            self._gone.pop(key, None)

    def _disown(self, keys: list[Key]) -> list[int]:
        free: list[int] = []
        for key in keys:
            entry = self._entries.pop(key, None)
            if entry is None:
                continue
            entry.owners.discard(key)
            if entry.owners:
                continue
            if entry.root is not None:
                del self._roots[key[0], entry.root]
            for residency in entry.reads():
                self._forget_reader(residency, entry)
            free += entry.residencies()
        return free


def is_root(cursor: Cursor) -> bool:
    """Whether identical token ids make an identical residency."""
    return cursor.parent is None and not cursor.mounts


def new_mounts(cursor: Cursor) -> list[Mount]:
    """Mounts of `cursor` that its parent did not see."""
    inherited = cursor.parent.mounts if cursor.parent is not None else ()
    known = {_identity(mount) for mount in inherited}
    return [mount for mount in cursor.mounts if _identity(mount) not in known]


def hides_mounts(cursor: Cursor) -> bool:
    """Whether the parent sees a mount that `cursor` does not: rows cannot be taken out again."""
    inherited = cursor.parent.mounts if cursor.parent is not None else ()
    return len(cursor.mounts) - len(new_mounts(cursor)) < len({_identity(m) for m in inherited})


def _identity(mount: Mount) -> tuple[int, int, int]:
    return mount.source.cursor_id, mount.begin, mount.end
