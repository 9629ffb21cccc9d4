"""Making cursors resident: what a run reads, runs shared by all who need them, rebuilds."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from rollout_service.cursors import Cursor, Mount
from rollout_service.engine.base import SampledToken
from rollout_service.engine.checks import check_version
from rollout_service.engine.vllm.core_client import CoreClient, RunEnd
from rollout_service.engine.vllm.flights import Flights
from rollout_service.engine.vllm.footing import Footing, FootingStore, new_mounts
from rollout_service.engine.vllm.gate import RebuildGate
from rollout_service.engine.vllm.lora import LoadedAdapter
from rollout_service.engine.vllm.pins import Pins
from rollout_service.engine.vllm.plan import AttachPlan, RowSpan
from rollout_service.engine.vllm.process import EngineProcess
from rollout_service.engine.vllm.room import NotReady, ResidencyMissing
from rollout_service.engine.vllm.turn import Turn

_T = TypeVar("_T")
_MAX_ALONE = 3
"""Attempts of a request that runs alone: what one lacks then is room, not luck."""
_ONE_TOKEN = {"max_tokens": 1, "temperature": 0.0}
"""vLLM always samples: a run that only computes throws one token away."""


@dataclass(frozen=True, slots=True)
class _Start:
    """Where a cursor's own run begins."""

    footing: Footing
    lead: tuple[int, ...]
    """The parent's last token, where the run computes it too."""
    position: int
    """Rotary position of the first row."""


class FootingBuilder:
    """Footings on demand, over one engine process."""

    def __init__(self, llm: Any, process: EngineProcess) -> None:
        """Build over vLLM's `AsyncLLM` and the process behind it."""
        self.store = FootingStore()
        self.client = CoreClient(llm, process, self.store.forget)
        self.adapters: dict[int, LoadedAdapter | None] = {0: None}
        """Loaded versions; the base model is none of vLLM's."""
        self.tokens_computed = 0
        self.tokens_recomputed: Counter[str] = Counter(eviction=0, refresh=0)
        self._gate = RebuildGate()
        self._ids = itertools.count(1)
        self._flights = Flights(self.store, self.release)

    async def close(self) -> None:
        """Cancel what runs."""
        await self._flights.cancel()

    async def extend(self, version: int, cursor: Cursor) -> None:
        """Make a new cursor resident; cancelled, it leaves nothing behind."""
        try:
            async with self._gate.entered():
                await self._rebuilt(
                    lambda: self._footing(version, cursor, complete=False, is_new=True)
                )
        except asyncio.CancelledError:
            await asyncio.shield(self.release([cursor]))
            raise

    async def score(
        self, version: int, cursor: Cursor, score_from: int, *, keep: bool
    ) -> tuple[float, ...]:
        """Log-probabilities of `cursor.token_ids[score_from:]`, from a run of their own."""
        try:
            async with self._gate.entered():
                return await self._rebuilt(
                    lambda: self._pinned_score(version, cursor, score_from, keep)
                )
        except asyncio.CancelledError:
            await asyncio.shield(self.release([cursor]))
            raise

    async def generate(self, version: int, turn: Turn) -> AsyncGenerator[SampledToken]:
        """Sample a turn; the turn's cursor is resident at the end, and nothing if closed early."""
        async with self._gate.entered(), AsyncExitStack() as alone:
            for attempt in itertools.count(1):
                try:
                    async with (
                        self._pins() as pins,
                        aclosing(self._turn(version, turn, pins)) as tokens,
                    ):
                        async for token in tokens:
                            # It runs, so others may begin.
                            await alone.aclose()
                            yield token
                    return
                except NotReady as cause:
                    if turn.token_ids:
                        raise cause.as_error() from cause
                    self.store.forget(cause.residencies)
                    if attempt == 1:
                        await alone.enter_async_context(self._gate.alone())
                    else:
                        await self._wait_for_room(cause, attempt)

    async def release(self, cursors: Sequence[Cursor]) -> None:
        """Forget `cursors`; their pages go with the last reader."""
        residencies = self.store.release(cursors)
        if residencies:
            await self.client.command("release", residencies)

    async def evict(self, cursors: Sequence[Cursor]) -> None:
        """Drop the residencies of `cursors` that no running request reads."""
        residencies = self.store.residencies_of(cursors)
        self.store.forget(await self.client.command("evict", residencies))

    async def hand_over(self, turn: Cursor, shorter: Cursor) -> None:
        """Keep for `shorter` what is held of `turn`; see `Engine.hand_over`."""
        superfluous = self.store.hand_over(turn, shorter)
        if superfluous:
            await self.client.command("release", superfluous)

    async def drop_version(self, version: int) -> None:
        """Forget everything computed under `version`."""
        await self.client.command("release", self.store.drop_version(version))

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
                lambda owner: self._compute(version, owner, complete, cause),
            )
            footing = self.store.get(version, cursor, complete)
        if footing is None:
            raise ResidencyMissing([])
        return footing

    async def _compute(self, version: int, cursor: Cursor, complete: bool, cause: str) -> None:
        async with self._pins() as pins:
            if complete:
                footing = await self._footing(version, cursor, complete=False)
                start = _Start(footing, (), cursor.next_position - 1)
                prompt = cursor.token_ids[-1:]
            else:
                start = await self._start(version, cursor, pins=pins)
                prompt = start.lead + cursor.token_ids[:-1]
            if not prompt:
                self.store.put(version, cursor, start.footing, complete)
                return
            await self._run(version, cursor, start, prompt, complete)
            if cause:
                self.tokens_recomputed[cause] += len(prompt)

    async def _start(
        self, version: int, cursor: Cursor, *, pins: Pins, with_lead: bool = False
    ) -> _Start:
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
        return _Start(footing, lead, position)

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
        start: _Start,
        prompt: Sequence[int],
        complete: bool,
        **sampling: Any,
    ) -> Any:
        """Compute `prompt` and keep it as the cursor's footing; returns the last output."""
        plan = start.footing.plan(position=start.position, keep_as=next(self._ids))
        last = None
        async for output in self.client.stream(
            plan, prompt, lora=self._lora(version), **{**_ONE_TOKEN, **sampling}
        ):
            last = output
        self.tokens_computed += len(prompt)
        await self._put(version, cursor, Footing.after(plan, len(prompt)), complete)
        return last

    async def _put(self, version: int, cursor: Cursor, footing: Footing, complete: bool) -> None:
        superfluous = self.store.put(version, cursor, footing, complete)
        if superfluous:
            await self.client.command("release", superfluous)

    async def _pinned_score(
        self, version: int, cursor: Cursor, score_from: int, keep: bool
    ) -> tuple[float, ...]:
        async with self._pins() as pins:
            return await self._score(version, cursor, score_from, keep, pins)

    async def _score(
        self, version: int, cursor: Cursor, score_from: int, keep: bool, pins: Pins
    ) -> tuple[float, ...]:
        tokens = cursor.token_ids
        logprobs: list[float] = []
        if score_from == 0 and new_mounts(cursor):
            assert cursor.parent is not None
            logprobs.append(await self._score_after(version, cursor.parent, tokens[0]))
        start = await self._start(version, cursor, with_lead=score_from == 0, pins=pins)
        prompt = start.lead + tokens[:-1]
        if not prompt:
            if keep:
                self.store.put(version, cursor, start.footing, complete=False)
            return tuple(logprobs)
        plan = start.footing.plan(
            position=start.position, keep_as=next(self._ids) if keep else None
        )
        predicted: list[float] = []
        async for output in self.client.stream(
            plan,
            prompt,
            lora=self._lora(version),
            score_prompt=True,
            logprob_token_ids=[tokens[-1]],
            **_ONE_TOKEN,
        ):
            predicted += output.prompt_logprobs
            predicted += [position[tokens[-1]] for position in output.logprobs]
        self.tokens_computed += len(prompt)
        if keep:
            await self._put(version, cursor, Footing.after(plan, len(prompt)), False)
        first = max(score_from, 0 if start.lead else 1)
        return tuple(logprobs + predicted[len(predicted) - (len(tokens) - first) :])

    async def _score_after(self, version: int, parent: Cursor, token: int) -> float:
        """Log-probability of `token` right after `parent`, before anything new is mounted."""
        footing = await self._footing(version, parent, complete=False)
        start = _Start(footing, (), parent.next_position - 1)
        output = await self._run(
            version, parent, start, parent.token_ids[-1:], True, logprob_token_ids=[token]
        )
        return output.logprobs[0][token]

    async def _turn(self, version: int, turn: Turn, pins: Pins) -> AsyncGenerator[SampledToken]:
        # Without a prompt the first token is predicted by the parent's last row.
        with_lead = not turn.prompt.token_ids
        start = await self._start(version, turn.prompt, with_lead=with_lead, pins=pins)
        residency = next(self._ids)
        prompt = start.lead + turn.prompt.token_ids
        plan = start.footing.plan(position=start.position, keep_as=residency)
        stream = self.client.stream(plan, prompt, lora=self._lora(version), **turn.vllm_sampling())
        end, is_over = None, False
        try:
            async for output in stream:
                for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
                    turn.take(token_id, entry[token_id])
                    yield SampledToken(token_id=token_id, logprob=entry[token_id])
                end = output.end
            is_over = True
        finally:
            await stream.aclose()
            if not is_over:
                self.tokens_computed += len(prompt) + max(len(turn.token_ids) - 1, 0)
                await self.client.command("release", [residency])
        assert end is not None
        turn.finish_reason = end.finish_reason
        turn.finished = turn.cursor()
        self.tokens_computed += end.num_computed - plan.num_rows
        await self._keep(version, turn.finished, plan, len(prompt) + len(turn.token_ids), end)

    async def _keep(
        self, version: int, cursor: Cursor, plan: AttachPlan, num_new: int, end: RunEnd
    ) -> None:
        """Hold what a turn left: it trails by the last token, or a step ahead has computed that."""
        num_trailing = plan.num_rows + num_new - 1
        num_kept = num_trailing if end.num_kept is None else end.num_kept
        complete = num_kept > num_trailing
        footing = Footing.after(plan, num_kept - plan.num_rows)
        await self._put(version, cursor, footing, complete)
        if end.num_kept is None:
            # Preempted at its very end.
            self.store.forget(footing.reads())

    def _lora(self, version: int) -> Any:
        check_version(version, list(self.adapters))
        loaded = self.adapters[version]
        return None if loaded is None else loaded.request

    def _cause(self, version: int, cursor: Cursor) -> str:
        """Why a cursor that existed before is computed."""
        if self.store.was_evicted(version, cursor):
            return "eviction"
        if self.store.get(version, cursor, True) is not None:
            return "lead"
        return "refresh" if cursor.policy_version != version else ""

    async def _rebuilt(self, run: Callable[[], Awaitable[_T]]) -> _T:
        """Run it; where what it reads was evicted meanwhile, again with nobody else beginning."""
        try:
            return await run()
        except NotReady as cause:
            self.store.forget(cause.residencies)
        async with self._gate.alone():
            for attempt in itertools.count(1):
                try:
                    return await run()
                except NotReady as cause:
                    self.store.forget(cause.residencies)
                    await self._wait_for_room(cause, attempt)
        raise AssertionError

    def _pins(self) -> Pins:
        """Pins for a run; needed only while somebody is alone because of evictions."""
        return Pins(self.client, is_active=self._gate.is_closed)

    async def _wait_for_room(self, cause: NotReady, attempt: int) -> None:
        """Wait for a running request's end, and give up where none runs."""
        if not await self._gate.another_end() and attempt >= _MAX_ALONE:
            raise cause.as_error() from cause
