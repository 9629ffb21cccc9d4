"""The cursor: an immutable node of an episode's DAG, host side (design.md section 4).

Owns token ids, positions and mount sets; residency (pages, recurrent state) belongs to the engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

_next_id = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mount:
    """Tokens `[begin, end)` that cursor `source` itself appended."""

    source: Cursor
    begin: int
    end: int

    @property
    def next_position(self) -> int:
        """One past the highest rotary position in the span."""
        return self.source.position_start + self.end

    @property
    def num_tokens(self) -> int:
        """Length of the span."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cursor:
    """A run of appended tokens, its parent and all that it can see.

    Compared and hashed by identity.
    """

    parent: Cursor | None
    token_ids: tuple[int, ...]
    position_start: int
    """Rotary position of `token_ids[0]`; the rest follow without gaps."""
    mounts: tuple[Mount, ...]
    """Every span visible beside the ancestors, own and inherited, without overlap."""
    policy_version: int
    sampled: tuple[bool, ...]
    """One for each token."""
    sampled_logprobs: tuple[float, ...] = ()
    """Nats, one for each sampled token, in order."""
    num_before: int = 0
    """Tokens of all ancestors."""
    cursor_id: int = field(default_factory=lambda: next(_next_id))

    @property
    def next_position(self) -> int:
        """Rotary position that a child without new mounts starts at."""
        return self.position_start + len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens from the root to the end of this cursor."""
        return self.num_before + len(self.token_ids)

    @property
    def num_visible(self) -> int:
        """Tokens that a child attends to beside itself: path and mounts."""
        return self.num_tokens + sum(mount.num_tokens for mount in self.mounts)

    def ancestors(self) -> Iterator[Cursor]:
        """This cursor, then its parent, up to the root."""
        cursor: Cursor | None = self
        while cursor is not None:
            yield cursor
            cursor = cursor.parent

    def path(self) -> list[Cursor]:
        """Root first, this cursor last."""
        return list(self.ancestors())[::-1]


def child_cursor(
    parent: Cursor | None,
    token_ids: tuple[int, ...],
    *,
    mounts: tuple[Mount, ...],
    policy_version: int,
    sampled: tuple[bool, ...] | None = None,
    sampled_logprobs: tuple[float, ...] = (),
) -> Cursor:
    """The cursor that appends `token_ids` to `parent` with `mounts` visible.

    Positions follow Octopus Eq. 2: past the parent's own and past the highest mounted one.
    """
    own = parent.next_position if parent is not None else 0
    return Cursor(
        parent=parent,
        token_ids=token_ids,
        position_start=max([own, *(mount.next_position for mount in mounts)]),
        mounts=mounts,
        policy_version=policy_version,
        sampled=sampled if sampled is not None else (False,) * len(token_ids),
        sampled_logprobs=sampled_logprobs,
        num_before=parent.num_tokens if parent is not None else 0,
    )
