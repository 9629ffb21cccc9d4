"""Which cursors are resident, under which policy version: the store of K/V and recurrent states.

Counts tokens, pins what running requests read, evicts the rest by least recent use. Lives on the
engine's worker thread.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor

from rollout_service.cursors import Cursor
from rollout_service.engine.transformers.strip import State

Key = tuple[int, int]
"""Policy version and cursor id."""


@dataclass(eq=False, slots=True)
class Residency:
    """What the engine holds of a cursor's own tokens."""

    num_tokens: int
    """Tokens covered; may trail the cursor by its last sampled one."""
    keys_values: list[Tensor]
    """For each attention layer `[2, H, num_tokens, D]`, keys rotated at their own positions."""
    states: dict[int, State]
    """By recurrent decoder layer, after the last covered token."""
    last_hidden: Tensor
    """Final hidden state of the last covered token: it predicts the next cursor's first."""
    owners: set[Key] = field(default_factory=set)
    """Cursors that share it: identical roots of one version."""
    root: tuple[int, ...] | None = None
    """Token ids by which identical roots find it; None below the root."""


class ResidencyStore:
    """Residencies by (policy version, cursor id), least recently used first."""

    def __init__(self, max_tokens: int) -> None:
        """Hold at most `max_tokens` tokens, those reserved by running requests included.

        Identical roots share one residency, which counts once in `num_tokens` and `num_states`.
        """
        self.max_tokens = max_tokens
        self.num_reserved = 0
        self.num_tokens = 0
        self.num_states = 0
        self._entries: OrderedDict[Key, Residency] = OrderedDict()
        self._roots: dict[tuple[int, tuple[int, ...]], Residency] = {}
        self._pins: Counter[Key] = Counter()
        self._doomed: set[Key] = set()
        self._evicted: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def tokens_used(self) -> int:
        """Tokens resident and reserved."""
        return self.num_tokens + self.num_reserved

    def get(self, version: int, cursor: Cursor) -> Residency | None:
        """What is held of `cursor`, whole or trailing."""
        return self._entries.get((version, cursor.cursor_id))

    def is_complete(self, version: int, cursor: Cursor) -> bool:
        """Whether all of the cursor's tokens are covered; adopts an identical root's residency."""
        residency = self.get(version, cursor)
        if residency is None and is_root(cursor):
            residency = self._roots.get((version, cursor.token_ids))
            if residency is not None:
                self._own(version, cursor, residency)
        return residency is not None and residency.num_tokens == len(cursor.token_ids)

    def put(self, version: int, cursor: Cursor, residency: Residency) -> None:
        """Hold `residency` for `cursor`, in place of what was held before."""
        key = (version, cursor.cursor_id)
        self._evicted.pop(key, None)
        if is_root(cursor):
            shared = self._roots.get((version, cursor.token_ids))
            if shared is not None:
                self._own(version, cursor, shared)
                return
            residency.root = cursor.token_ids
            self._roots[version, cursor.token_ids] = residency
        self._drop(key)
        self.num_tokens += residency.num_tokens
        self.num_states += 1
        self._own(version, cursor, residency)

    def num_evicted(self, version: int, cursor: Cursor) -> int:
        """Tokens of the cursor that were resident under `version` and lost to eviction."""
        return self._evicted.get((version, cursor.cursor_id), 0)

    def touch(self, version: int, cursors: Iterable[Cursor]) -> None:
        """Mark as used, in order: the last is kept longest."""
        for cursor in cursors:
            if (version, cursor.cursor_id) in self._entries:
                self._entries.move_to_end((version, cursor.cursor_id))

    def pin(self, keys: Iterable[Key]) -> None:
        """Keep `keys` from eviction; they need not be resident yet."""
        self._pins.update(keys)

    def unpin(self, keys: Iterable[Key]) -> None:
        """Undo one `pin`; what was released meanwhile goes now."""
        for key in keys:
            self._pins[key] -= 1
            if self._pins[key] <= 0:
                del self._pins[key]
                if key in self._doomed:
                    self._doomed.discard(key)
                    self._drop(key)

    def reserve(self, num_tokens: int) -> bool:
        """Make room for `num_tokens`, evicting where needed; False where nothing may go."""
        while self.tokens_used + num_tokens > self.max_tokens:
            if not self._evict_oldest():
                return False
        self.num_reserved += num_tokens
        return True

    def evict(self, cursors: Iterable[Cursor]) -> None:
        """Drop what is held of `cursors` under every version, pinned ones excepted."""
        ids = {cursor.cursor_id for cursor in cursors}
        for key in [key for key in self._entries if key[1] in ids]:
            if not self._is_pinned(self._entries[key]):
                self._evict(key)

    def release(self, cursors: Iterable[Cursor]) -> None:
        """Forget `cursors` under every version; pinned ones go when their last reader ends."""
        ids = {cursor.cursor_id for cursor in cursors}
        pinned = {key for key in self._pins if key[1] in ids}
        self._doomed |= pinned
        for key in [key for key in self._entries if key[1] in ids and key not in pinned]:
            self._drop(key)
        for key in [key for key in self._evicted if key[1] in ids]:
            del self._evicted[key]

    def hand_over(self, cursor: Cursor, shorter: Cursor) -> None:
        """Hold for `shorter` what is held of `cursor`; neither is a root.

        What covers more tokens than `shorter` has cannot be cut: it is evicted.
        """
        for key in [key for key in self._entries if key[1] == cursor.cursor_id]:
            residency = self._entries[key]
            if residency.num_tokens > len(shorter.token_ids):
                self._evict(key)
                continue
            del self._entries[key]
            residency.owners.discard(key)
            self._own(key[0], shorter, residency)
        for key in [key for key in self._evicted if key[1] == cursor.cursor_id]:
            lost = min(self._evicted.pop(key), len(shorter.token_ids))
            self._evicted[key[0], shorter.cursor_id] = lost

    def drop_version(self, version: int) -> None:
        """Forget everything computed under `version`."""
        for key in [key for key in self._entries if key[0] == version]:
            self._drop(key)
        for key in [key for key in self._evicted if key[0] == version]:
            del self._evicted[key]

    def _own(self, version: int, cursor: Cursor, residency: Residency) -> None:
        key = (version, cursor.cursor_id)
        residency.owners.add(key)
        self._entries[key] = residency

    def _is_pinned(self, residency: Residency) -> bool:
        return any(self._pins[key] > 0 for key in residency.owners if key in self._pins)

    def _evict_oldest(self) -> bool:
        for residency in self._entries.values():
            if not self._is_pinned(residency):
                for owner in list(residency.owners):
                    self._evict(owner)
                return True
        return False

    def _evict(self, key: Key) -> None:
        self._evicted[key] = self._entries[key].num_tokens
        self._drop(key)

    def _drop(self, key: Key) -> None:
        residency = self._entries.pop(key, None)
        if residency is None:
            return
        residency.owners.discard(key)
        if residency.owners:
            return
        self.num_tokens -= residency.num_tokens
        self.num_states -= 1
        if residency.root is not None:
            del self._roots[key[0], residency.root]


def is_root(cursor: Cursor) -> bool:
    """Whether identical token ids make an identical residency."""
    return cursor.parent is None and not cursor.mounts


def rebuild_order(targets: Iterable[Cursor], is_complete: Callable[[Cursor], bool]) -> list[Cursor]:
    """Cursors to compute before `targets` can be read, dependencies first, `targets` included.

    A cursor needs the K/V of its ancestors and of what it itself mounted, so each node is rebuilt
    with its own mounts and never sees a later one.
    """
    order: list[Cursor] = []
    seen: set[int] = set()
    stack = [(cursor, False) for cursor in targets][::-1]
    while stack:
        cursor, expanded = stack.pop()
        if expanded:
            order.append(cursor)
            continue
        if cursor.cursor_id in seen:
            continue
        seen.add(cursor.cursor_id)
        if is_complete(cursor):
            continue
        stack.append((cursor, True))
        stack.extend((need, False) for need in reversed(cursor_needs(cursor)))
    return order


def cursor_needs(cursor: Cursor) -> list[Cursor]:
    """What a run over `cursor` reads: ancestors root first, then mounted sources."""
    ancestors = cursor.parent.path() if cursor.parent is not None else []
    return [*ancestors, *(mount.source for mount in cursor.mounts)]
