"""Episodes into groups and groups into steps: who enters, who waits, who is dropped and why.

Nothing here touches Redis or a clock: callers pass deliveries and the time.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from harness_sdk.record import EpisodeRecord, NodeKind
from harness_sdk.types import StopReason

log = logging.getLogger(__name__)

CLOSED_GROUPS = 4096
"""Ids of finished groups remembered, so that a late episode does not open one anew."""

_POLICY_FAILURES = (StopReason.NO_DONE, StopReason.BUDGET, StopReason.MAX_TURNS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scored:
    """An episode that can enter a step."""

    entry_id: str
    record: EpisodeRecord
    reward: float
    """Outcome y in [0, 1]; 0 for the policy's own failures."""
    min_policy_version: int | None
    """Oldest version that sampled one of its tokens; None where nothing was sampled."""

    @classmethod
    def of(cls, entry_id: str, record: EpisodeRecord) -> Scored:
        """Score a record that has no `failure`."""
        versions = [
            node.policy_version
            for node in record.nodes
            if node.kind != NodeKind.DEMONSTRATION and any(node.sampled)
        ]
        return cls(
            entry_id=entry_id,
            record=record,
            reward=outcome(record),
            min_policy_version=min(versions, default=None),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """Finished episodes of one task, in the order of their entry ids."""

    group_id: str
    episodes: tuple[Scored, ...]
    failed: tuple[tuple[str, str], ...] = ()
    """Entry id and cause of those that fill the group and carry nothing; they are consumed with
    it, so that a restart finds the group whole."""

    @property
    def task_id(self) -> str:
        """Task of its episodes."""
        return self.episodes[0].record.task_id if self.episodes else ""


@dataclass(slots=True)
class _Open:
    first_s: float
    finished: list[Scored] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)


class GroupAssembler:
    """Collects groups until a step can be made of them.

    Args:
        group_size: Episodes of a complete group, G.
        min_group: Finished episodes that a group needs at its deadline.
        deadline_s: Seconds from a group's first episode to its deadline.
        max_policy_lag: Versions that an episode's oldest token may be behind; None lets all pass.
        refills: Failed episodes of a group that runners replace.
        drops_incomplete: Whether a group needs all of its episodes.
        closed: Ids of groups that were finished before, from the checkpoint.
    """

    def __init__(
        self,
        *,
        group_size: int,
        min_group: int,
        deadline_s: float,
        max_policy_lag: int | None,
        refills: int = 0,
        drops_incomplete: bool = False,
        closed: tuple[str, ...] = (),
    ) -> None:
        self._group_size = group_size
        self._min_group = min_group
        self._deadline_s = deadline_s
        self._max_policy_lag = max_policy_lag
        self._refills = refills
        self._drops_incomplete = drops_incomplete
        self._open: dict[str, _Open] = {}
        self._ready: deque[Group] = deque()
        self._closed = dict.fromkeys(closed)
        self._finished_entries: list[str] = []
        self.dropped_episodes: Counter[str] = Counter()
        self.dropped_groups: Counter[str] = Counter()

    @property
    def num_ready(self) -> int:
        """Complete groups that wait for a step."""
        return len(self._ready)

    @property
    def num_open(self) -> int:
        """Groups that wait for episodes."""
        return len(self._open)

    @property
    def num_waiting(self) -> int:
        """Groups that wait for episodes or for a step."""
        return self.num_open + self.num_ready

    @property
    def closed(self) -> tuple[str, ...]:
        """Ids of groups that were taken or dropped, for the checkpoint, oldest first."""
        waiting = {group.group_id for group in self._ready}
        return tuple(group_id for group_id in self._closed if group_id not in waiting)

    def add(self, entry_id: str, record: EpisodeRecord, now_s: float) -> None:
        """Take one episode; it joins its group or is dropped with a cause."""
        if not record.group_id:
            self._drop_episode(entry_id, "ungrouped")
            return
        if record.group_id in self._closed:
            self._drop_episode(entry_id, "late")
            return
        group = self._open.setdefault(record.group_id, _Open(first_s=now_s))
        cause = failure(record)
        if cause:
            group.failed.append((entry_id, cause))
        else:
            group.finished.append(Scored.of(entry_id, record))
        if self._is_whole(group):
            self._close(record.group_id)

    def overdue(self, now_s: float) -> list[str]:
        """Ids of the groups whose deadline has passed."""
        return [
            group_id
            for group_id, group in self._open.items()
            if now_s - group.first_s >= self._deadline_s
        ]

    def expire(self, now_s: float) -> None:
        """Close the groups whose deadline has passed."""
        for group_id in self.overdue(now_s):
            self._close(group_id)

    def take(self, num_groups: int, version: int) -> list[Group] | None:
        """The next `num_groups` groups for a step that starts from policy `version`.

        Tasks take turns: no task gets a second group while another waits with its first, so that
        quick tasks do not crowd out slow ones. Within that, groups come in the order in which they
        completed.

        Returns:
            None while fewer are ready; groups that have become too old are dropped on the way.
        """
        waiting, self._ready = self._ready, deque()
        for group in waiting:
            if len(self._fresh(group, version)) >= self._min_group:
                self._ready.append(group)
            else:
                self._drop_group(group, "stale")
        if len(self._ready) < num_groups:
            return None
        chosen = _in_turn(self._ready)[:num_groups]
        self._ready = deque(group for group in self._ready if group not in chosen)
        return [self._taken(group, version) for group in chosen]

    def pop_finished_entries(self) -> list[str]:
        """Entry ids of dropped episodes since the last call; the next checkpoint consumes them."""
        entries, self._finished_entries = self._finished_entries, []
        return entries

    def _is_whole(self, group: _Open) -> bool:
        """Whether nothing more is to come, as far as runners that live are concerned."""
        ended = len(group.finished) + len(group.failed)
        return len(group.finished) >= self._group_size or ended >= self._group_size + self._refills

    def _close(self, group_id: str) -> None:
        group = self._open.pop(group_id)
        self._closed[group_id] = None
        while len(self._closed) > CLOSED_GROUPS:
            del self._closed[next(iter(self._closed))]
        whole = Group(group_id=group_id, episodes=tuple(group.finished), failed=tuple(group.failed))
        if len(whole.episodes) < self._min_group:
            self._drop_group(whole, "too_few_finished")
        elif self._drops_incomplete and len(whole.episodes) < self._group_size:
            self._drop_group(whole, "incomplete")
        else:
            self._ready.append(whole)

    def _taken(self, group: Group, version: int) -> Group:
        """`group` without its stale episodes, which are consumed together with it."""
        fresh = self._fresh(group, version)
        for episode in group.episodes:
            if episode not in fresh:
                self._drop_episode(episode.entry_id, "stale")
        for entry_id, cause in group.failed:
            self._drop_episode(entry_id, cause)
        return replace(group, episodes=fresh)

    def _fresh(self, group: Group, version: int) -> tuple[Scored, ...]:
        if self._max_policy_lag is None:
            return group.episodes
        oldest = version - self._max_policy_lag
        return tuple(
            episode
            for episode in group.episodes
            if episode.min_policy_version is None or episode.min_policy_version >= oldest
        )

    def _drop_group(self, group: Group, cause: str) -> None:
        self.dropped_groups[cause] += 1
        for episode in group.episodes:
            self._drop_episode(episode.entry_id, cause)
        for entry_id, failed_cause in group.failed:
            self._drop_episode(entry_id, failed_cause)
        log.info("group %s dropped: %s", group.group_id, cause, extra={"group_id": group.group_id})

    def _drop_episode(self, entry_id: str, cause: str) -> None:
        self.dropped_episodes[cause] += 1
        self._finished_entries.append(entry_id)


def _in_turn(groups: Iterable[Group]) -> list[Group]:
    """`groups` with every task's first before any task's second, and so on; else in order."""
    seen: Counter[str] = Counter()
    turns = []
    for group in groups:
        turns.append((seen[group.task_id], group))
        seen[group.task_id] += 1
    return [group for _, group in sorted(turns, key=lambda turn: turn[0])]


def failure(record: EpisodeRecord) -> str:
    """Why the episode carries neither loss nor baseline; empty where it carries both."""
    reason = StopReason(record.stop_reason)
    if reason.is_infrastructure:
        return reason.value
    if not record.num_tokens:
        return "empty"
    if record.reward is None and reason not in _POLICY_FAILURES:
        return "unscored"
    return ""


def outcome(record: EpisodeRecord) -> float:
    """Outcome y: 0 where the policy never finished, whatever score came with it."""
    if StopReason(record.stop_reason) in _POLICY_FAILURES or record.reward is None:
        return 0.0
    return record.reward
