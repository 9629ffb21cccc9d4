"""Computes footings: what a run reads, where it begins, what it leaves; each run once at a time."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollout_service.cursors import Cursor, Mount
from rollout_service.engine.checks import check_version
from rollout_service.engine.vllm.core_client import CoreClient
from rollout_service.engine.vllm.flights import Flights
from rollout_service.engine.vllm.footing import Footing, FootingStore, new_mounts
from rollout_service.engine.vllm.gate import RebuildGate
from rollout_service.engine.vllm.lora import LoadedAdapter
from rollout_service.engine.vllm.pins import Pins
from rollout_service.engine.vllm.plan import RowSpan
from rollout_service.engine.vllm.process import EngineProcess
from rollout_service.engine.vllm.room import ResidencyMissing

ONE_TOKEN = {"max_tokens": 1, "temperature": 0.0}
"""vLLM always samples: a run that only computes throws one token away."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where a cursor's own run begins."""

    footing: Footing
    lead: tuple[int, ...]
    """The parent's last token, where the run computes it too."""
    position: int
    """Rotary position of the first row."""


class FootingRuns:
    """Footings of cursors under loaded versions, over one engine process."""

    def __init__(self, llm: Any, process: EngineProcess) -> None:
        """Build over vLLM's `AsyncLLM` and the process behind it."""
        self.store = FootingStore()
        self.client = CoreClient(llm, process, self.store.forget)
        self.adapters: dict[int, LoadedAdapter | None] = {0: None}
        """Loaded versions; the base model is none of vLLM's."""
        self.tokens_computed = 0
        self.tokens_recomputed: Counter[str] = Counter(
            eviction=0, refresh=0, lead=0, last_token=0, restart=0
        )
        self._gate = RebuildGate()
        self._ids = itertools.count(1)
        self._flights = Flights(self.store, self.release)

    def succeed(self, before: FootingRuns) -> None:
        """Count on from `before`, whose process has ended, and know what it held."""
        self.store.succeed(before.store)
        self.tokens_computed += before.tokens_computed
        self.tokens_recomputed.update(before.tokens_recomputed)

    async def close(self) -> None:
        """Cancel what runs."""
        await self._flights.cancel()

    async def release(self, cursors: Sequence[Cursor]) -> None:
        """Forget `cursors`; their pages go with the last reader."""
        residencies = self.store.release(cursors)
        if residencies:
            await self.client.command("release", residencies)

    async def _footing(
        self, version: int, cursor: Cursor, *, complete: bool, is_new: bool = False
    ) -> Footing:
        """A cursor's footing, computed where need be, once for all who ask at a time."""
        footing = self.store.get(version, cursor, complete)
        if footing is None:
            cause = "" if is_new or complete else self._cause(version, cursor)
            await self._flights.join(
                version,
                cursor,
                complete,
                lambda owner: self._compute(version, owner, complete, cause, cursor),
            )
            footing = self.store.get(version, cursor, complete)
        if footing is None:
            raise ResidencyMissing([])
        return footing

    async def _compute(
        self, version: int, cursor: Cursor, complete: bool, cause: str, asked: Cursor
    ) -> None:
        """Make a footing of `cursor`, which is `asked` or an identical root of it."""
        async with self._pins() as pins:
            if complete:
                footing = await self._footing(version, cursor, complete=False)
                await pins.add(footing.reads())
                start = Start(footing, (), cursor.next_position - 1)
                prompt = cursor.token_ids[-1:]
            else:
                start = await self._start(version, cursor, pins=pins)
                prompt = start.lead + cursor.token_ids[:-1]
            if not prompt:
                self.store.put(version, cursor, start.footing, complete)
                return
            await self._run(version, cursor, start, prompt, complete)
            if complete:
                self._count_last(version, asked, cursor)
            else:
                self._count_lead(version, cursor, start, is_counted=bool(cause))
            if cause:
                self.tokens_recomputed[cause] += len(prompt)

    async def _start(
        self, version: int, cursor: Cursor, *, pins: Pins, with_lead: bool = False
    ) -> Start:
        """What the cursor's own run stands on: its parent, and the mounts new to it.

        Args:
            version: Policy version.
            cursor: The cursor to compute.
            pins: Keep what is ready while the rest is made.
            with_lead: Whether the run needs the parent's last row, to predict from it.
        """
        parent, added = cursor.parent, new_mounts(cursor)
        footing, lead, position = Footing(), (), cursor.position_start
        if parent is not None and not added:
            whole = None if with_lead else self.store.get(version, parent, True)
            footing = whole or await self._footing(version, parent, complete=False)
            if whole is None:
                lead, position = parent.token_ids[-1:], parent.next_position - 1
        elif parent is not None:
            # The parent's last token does not see the mount, so it comes before.
            footing = await self._footing(version, parent, complete=True)
        await pins.add(footing.reads())
        for mount in added:
            mounted = Footing().with_mounts([await self._span(version, mount)])
            await pins.add(mounted.reads())
            footing = footing.with_mounts(mounted.mounts)
        return Start(footing, lead, position)

    async def _span(self, version: int, mount: Mount) -> RowSpan:
        """Where a mount's rows lie: a cursor's own rows are the last of its table."""
        source = mount.source
        num_own = len(source.token_ids)
        complete = mount.end == num_own or self.store.get(version, source, False) is None
        if complete and mount.end < num_own:
            complete = self.store.get(version, source, True) is not None
        footing = await self._footing(version, source, complete=complete)
        first = footing.num_rows - (num_own if complete else num_own - 1)
        assert footing.is_own and footing.parent is not None
        return RowSpan(residency=footing.parent, begin=first + mount.begin, end=first + mount.end)

    async def _run(
        self,
        version: int,
        cursor: Cursor,
        start: Start,
        prompt: Sequence[int],
        complete: bool,
        **sampling: Any,
    ) -> Any:
        """Compute `prompt` and keep it as the cursor's footing; returns the last output."""
        plan = start.footing.plan(position=start.position, keep_as=next(self._ids))
        last = None
        async for output in self.client.stream(
            plan, prompt, lora=self._lora(version), **{**ONE_TOKEN, **sampling}
        ):
            last = output
        self.tokens_computed += len(prompt)
        await self._put(version, cursor, Footing.after(plan, len(prompt)), complete)
        return last

    async def _put(self, version: int, cursor: Cursor, footing: Footing, complete: bool) -> None:
        superfluous = self.store.put(version, cursor, footing, complete)
        if superfluous:
            await self.client.command("release", superfluous)

    def _lora(self, version: int) -> Any:
        check_version(version, list(self.adapters))
        loaded = self.adapters[version]
        return None if loaded is None else loaded.request

    def _count_lead(
        self, version: int, cursor: Cursor, start: Start, *, is_counted: bool = False
    ) -> None:
        """Once a run over `cursor` has computed its lead."""
        if start.lead:
            assert cursor.parent is not None
            self._count_last(version, cursor.parent, is_counted=is_counted)

    def _count_last(
        self, version: int, cursor: Cursor, twin: Cursor | None = None, *, is_counted: bool = False
    ) -> None:
        """Once a run has computed the last token of `cursor`; counts it where it did so again.

        Args:
            version: Policy version.
            cursor: Whose last token.
            twin: Holds the same footing.
            is_counted: Whether the token is among those counted for another cause.
        """
        cause = self.store.end(version, cursor)
        if twin is not None and twin is not cursor:
            cause = self.store.end(version, twin) or cause
        if cause and not is_counted:
            self.tokens_recomputed[cause] += 1

    def _cause(self, version: int, cursor: Cursor) -> str:
        """Why a cursor that existed before is computed."""
        gone_by = self.store.gone_by(version, cursor)
        if gone_by:
            return gone_by
        if self.store.get(version, cursor, True) is not None:
            return "lead"
        return "refresh" if cursor.policy_version != version else ""

    def _pins(self) -> Pins:
        """Pins for a run; needed only while somebody is alone because of evictions."""
        return Pins(self.client, lambda: self._gate.is_closed)
