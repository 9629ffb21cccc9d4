"""Calls on cursors: each enters in turn, and rebuilds alone what pressure took from it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from rollout_service.cursors import Cursor
from rollout_service.engine.base import SampledToken
from rollout_service.engine.vllm.core_client import RunEnd
from rollout_service.engine.vllm.footing import Footing, new_mounts
from rollout_service.engine.vllm.footing_runs import ONE_TOKEN, FootingRuns, Start
from rollout_service.engine.vllm.pins import Pins
from rollout_service.engine.vllm.plan import AttachPlan
from rollout_service.engine.vllm.retries import Retries
from rollout_service.engine.vllm.room import NotReady
from rollout_service.engine.vllm.turn import Turn

_T = TypeVar("_T")


class FootingBuilder(FootingRuns):
    """Serves calls in order; what one reads is there until it has begun."""

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
        """Sample a turn, from the tokens on that it has; its cursor is resident at the end.

        Closed early, nothing is.
        """
        num_before = len(turn.token_ids)
        async with self._gate.entered(), self._retries() as retries:
            while True:
                try:
                    async with (
                        self._pins() as pins,
                        aclosing(self._turn(version, turn, pins)) as tokens,
                    ):
                        async for token in tokens:
                            await retries.begun()
                            yield token
                    return
                except NotReady as cause:
                    if len(turn.token_ids) > num_before:
                        raise cause.as_error() from cause
                    await retries.after(cause)

    async def evict(self, cursors: Sequence[Cursor]) -> None:
        """Drop the residencies of `cursors` that no running request reads."""
        # Not what somebody who rebuilds alone has just made and not begun to read.
        await self._gate.opened()
        await self.client.command("evict", self.store.residencies_of(cursors))

    async def hand_over(self, turn: Cursor, shorter: Cursor) -> None:
        """Keep for `shorter` what is held of `turn`; see `Engine.hand_over`."""
        superfluous = self.store.hand_over(turn, shorter)
        if superfluous:
            await self.client.command("release", superfluous)

    async def drop_version(self, version: int) -> None:
        """Forget everything computed under `version`."""
        await self.client.command("release", self.store.drop_version(version))

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
            **ONE_TOKEN,
        ):
            predicted += output.prompt_logprobs
            predicted += [position[tokens[-1]] for position in output.logprobs]
        self.tokens_computed += len(prompt)
        self._count_lead(version, cursor, start)
        if keep:
            await self._put(version, cursor, Footing.after(plan, len(prompt)), False)
        first = max(score_from, 0 if start.lead else 1)
        return tuple(logprobs + predicted[len(predicted) - (len(tokens) - first) :])

    async def _score_after(self, version: int, parent: Cursor, token: int) -> float:
        """Log-probability of `token` right after `parent`, before anything new is mounted."""
        footing = await self._footing(version, parent, complete=False)
        start = Start(footing, (), parent.next_position - 1)
        output = await self._run(
            version, parent, start, parent.token_ids[-1:], True, logprob_token_ids=[token]
        )
        self._count_last(version, parent)
        return output.logprobs[0][token]

    async def _turn(self, version: int, turn: Turn, pins: Pins) -> AsyncGenerator[SampledToken]:
        # An earlier process may have sampled some.
        sampled = tuple(turn.token_ids)
        # Without a prompt the first token is predicted by the parent's last row.
        with_lead = not turn.prompt.token_ids and not sampled
        start = await self._start(version, turn.prompt, with_lead=with_lead, pins=pins)
        residency = next(self._ids)
        prompt = start.lead + turn.prompt.token_ids + sampled
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
                num_new = len(turn.token_ids) - len(sampled)
                if num_new:
                    self.tokens_computed += len(prompt) + num_new - 1
                    self._count_lead(version, turn.prompt, start)
                await self.client.command("release", [residency])
        assert end is not None
        turn.finish_reason = end.finish_reason
        turn.finished = turn.cursor()
        self.tokens_computed += end.num_computed - plan.num_rows
        self._count_lead(version, turn.prompt, start)
        if sampled:
            # The last of them had not been computed yet.
            num_again = len(turn.prompt.token_ids) + len(sampled) - 1
            self.tokens_recomputed["restart"] += num_again
        num_new = len(prompt) + len(turn.token_ids) - len(sampled)
        await self._keep(version, turn.finished, plan, num_new, end)

    async def _keep(
        self, version: int, cursor: Cursor, plan: AttachPlan, num_new: int, end: RunEnd
    ) -> None:
        """Hold what a turn left: it trails by the last token, or a step ahead has computed that."""
        num_trailing = plan.num_rows + num_new - 1
        num_kept = num_trailing if end.num_kept is None else end.num_kept
        complete = num_kept > num_trailing
        footing = Footing.after(plan, num_kept - plan.num_rows)
        await self._put(version, cursor, footing, complete)
        if end.num_computed > num_trailing:
            # A step ahead has; where it was a stop id, nothing of it was kept.
            self._count_last(version, cursor)
        if end.num_kept is None:
            # Preempted at its very end.
            self.store.forget(footing.reads())

    async def _rebuilt(self, run: Callable[[], Awaitable[_T]]) -> _T:
        """Run it; where what it reads was evicted meanwhile, again with nobody else beginning."""
        async with self._retries() as retries:
            while True:
                try:
                    return await run()
                except NotReady as cause:
                    await retries.after(cause)

    def _retries(self) -> Retries:
        return Retries(self._gate, self.store.forget)
