"""Continuous batching: each step packs the next tokens of many runs into one forward pass.

Decodes go in every step of their version; prefills fill the rest of the step. Lives on the
engine's worker thread; a step's results are returned, delivering them is the engine's.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from harness_sdk.errors import EngineError, HarnessError, ResourceExhausted
from rollout_service.cursors import Cursor, child_cursor
from rollout_service.engine.base import EngineStats, Generated, SampledToken
from rollout_service.engine.checks import check_version
from rollout_service.engine.transformers.adapters import AdapterSlots
from rollout_service.engine.transformers.model import StripModel
from rollout_service.engine.transformers.requests import (
    GenerateRequest,
    Request,
    ScoreRequest,
)
from rollout_service.engine.transformers.residency import (
    ResidencyStore,
    cursor_needs,
    is_root,
    rebuild_order,
)
from rollout_service.engine.transformers.sampling import sample
from rollout_service.engine.transformers.strip import Run, Segment

_log = logging.getLogger(__name__)

Delivery = tuple[Request, Any]
"""A request and what it receives: a token, a result or an error."""

_DECODE_HEADROOM = 64
"""Rows that a run's K/V buffer starts with beyond its context and known tokens."""


@dataclass(eq=False, slots=True)
class _SharedRun:
    """A cursor being computed for everybody who needs it."""

    run: Run
    cursor: Cursor
    waiters: set[Request]
    cause: str
    """Why it is computed again: eviction, refresh; empty for the first time."""
    num_recomputed: int


class Scheduler:
    """Active requests, the runs they wait for, and the step that moves them."""

    def __init__(
        self,
        model: StripModel,
        adapters: AdapterSlots,
        store: ResidencyStore,
        *,
        max_num_seqs: int,
        max_step_tokens: int,
        detokenize: Callable[[Sequence[int]], str] | None,
    ) -> None:
        """Schedule over `model`.

        Args:
            model: Computes strips.
            adapters: Chooses the policy version of a forward pass.
            store: Holds residencies.
            max_num_seqs: Requests that are active at once; others wait in order.
            max_step_tokens: Tokens of one forward pass, decodes excepted.
            detokenize: Text of token ids, for stop strings.
        """
        self._model = model
        self._adapters = adapters
        self._store = store
        self._max_num_seqs = max_num_seqs
        self._max_step_tokens = max_step_tokens
        self._detokenize = detokenize
        self._waiting: deque[Request] = deque()
        self._active: list[Request] = []
        self._shared: dict[tuple[int, Any], _SharedRun] = {}
        self._last_served: dict[int, int] = {}
        self._num_steps = 0
        self._tokens_computed = 0
        self._tokens_sampled = 0
        self._recomputed: Counter[str] = Counter(eviction=0, refresh=0)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._active or self._waiting)

    def serves(self, version: int) -> bool:
        """Whether a request of `version` is active or waiting."""
        return any(r.version == version for r in (*self._active, *self._waiting))

    def add(self, request: Request) -> None:
        """Take a request.

        Raises:
            AdapterError: Its version is not loaded.
        """
        check_version(request.version, list(self._adapters.versions))
        self._waiting.append(request)

    def cancel(self, request: Request) -> None:
        """End a request without result; what it has left behind goes too."""
        if request in self._waiting:
            self._waiting.remove(request)
        elif request in self._active:
            self._end(request)
        else:
            kept = request.kept_cursor()
            if kept is not None:
                self._store.release([kept])

    def fail_all(self, error: HarnessError) -> list[Delivery]:
        """End every request with `error`."""
        requests = [*self._active, *self._waiting]
        for request in requests:
            self.cancel(request)
        return [(request, error) for request in requests]

    def step(self) -> list[Delivery]:
        """Compute one forward pass; returns what requests receive."""
        self._admit()
        deliveries = self._finish_ready()
        requests, work = self._choose()
        if not requests:
            return deliveries + (self._give_up() if self._active and not deliveries else [])
        self._num_steps += 1
        self._adapters.active = requests[0].version
        self._last_served[requests[0].version] = self._num_steps
        try:
            deliveries += self._compute(requests, work)
        except Exception as error:  # the boundary: a failed pass must not end the loop
            _log.exception("forward pass failed", extra={"requests": len(requests)})
            deliveries += self._fail(requests, error)
        return deliveries + self._finish_ready()

    def stats(self) -> EngineStats:
        """Occupancy and counters now."""
        runs = len(self._shared) + sum(request.run is not None for request in self._active)
        states = self._store.num_states + runs if self._model.is_recurrent else 0
        return EngineStats(
            resident_cursors=len(self._store),
            recurrent_slots=states,
            tokens_resident=self._store.tokens_used,
            tokens_capacity=self._store.max_tokens,
            running=len(self._active),
            tokens_computed=self._tokens_computed,
            tokens_recomputed=dict(self._recomputed),
            tokens_sampled=self._tokens_sampled,
        )

    def _admit(self) -> None:
        while self._waiting and len(self._active) < self._max_num_seqs:
            request = self._waiting.popleft()
            version = request.version
            reads = request.reads()
            plan = rebuild_order(reads, lambda c, v=version: self._store.is_complete(v, c))
            request.plan = deque(plan)
            needed = {*reads, *plan, *(need for cursor in plan for need in cursor_needs(cursor))}
            request.pinned = {(version, cursor.cursor_id) for cursor in needed}
            self._store.pin(request.pinned)
            # Leaves first: of a path, the root is what most others share.
            self._store.touch(version, reversed(reads))
            self._active.append(request)

    def _choose(self) -> tuple[list[Request], list[tuple[Run, int]]]:
        """The requests of one version that move in this step, and the tokens to compute."""
        ready: dict[int, list[tuple[Request, Run]]] = {}
        for request in self._active:
            run = self._next_run(request)
            if run is not None and self._has_room(run):
                ready.setdefault(request.version, []).append((request, run))
        if not ready:
            return [], []
        version = min(ready, key=lambda v: self._last_served.get(v, 0))
        work: dict[int, tuple[Run, int]] = {}
        moved = []
        left = self._max_step_tokens
        for request, run in sorted(ready[version], key=lambda item: item[1].num_left > 1):
            if id(run) not in work and run.num_left > 0:
                count = run.num_left if run.num_left == 1 else min(run.num_left, left)
                if count == 0:
                    continue
                left -= count if count > 1 else 0
                work[id(run)] = (run, count)
            moved.append(request)
        return moved, list(work.values())

    def _next_run(self, request: Request) -> Run | None:
        """The run that `request` waits for, opened where need be."""
        plan, version = request.plan, request.version
        while plan and self._store.is_complete(version, plan[0]):
            plan.popleft()
        if plan:
            return self._shared_run(request, plan[0])
        if request.run is None:
            own = request.own_cursor()
            if own is not None:
                request.run = self._open(version, own)
                if isinstance(request, ScoreRequest):
                    self._score_first(request)
        return request.run

    def _shared_run(self, request: Request, cursor: Cursor) -> Run:
        version = request.version
        key = _flight_key(version, cursor)
        shared = self._shared.get(key)
        if shared is None:
            cause, num_recomputed = self._cause(request, cursor)
            run = self._open(version, cursor)
            shared = _SharedRun(run, cursor, set(), cause, num_recomputed)
            self._shared[key] = shared
        shared.waiters.add(request)
        return shared.run

    def _open(self, version: int, cursor: Cursor) -> Run:
        """A run over `cursor`; all that it reads is resident."""
        store = self._store
        path = [store.get(version, a) for a in cursor.parent.path()] if cursor.parent else []
        mounts = [(store.get(version, m.source), m.begin, m.end) for m in cursor.mounts]
        known = [residency for residency in path if residency is not None]
        spans = [(r, begin, end) for r, begin, end in mounts if r is not None]
        assert len(known) == len(path) and len(spans) == len(mounts)
        return self._model.new_run(
            cursor,
            parent=known[-1] if known else None,
            path=known,
            mounts=spans,
            own=store.get(version, cursor),
            num_more=len(cursor.token_ids) + _DECODE_HEADROOM,
        )

    def _cause(self, request: Request, cursor: Cursor) -> tuple[str, int]:
        """Why a cursor is computed, and how many of its tokens were computed before."""
        if cursor is request.kept_cursor() or self._store.get(request.version, cursor):
            return "", 0
        num_evicted = self._store.num_evicted(request.version, cursor)
        if num_evicted:
            return "eviction", num_evicted
        if cursor.policy_version != request.version:
            return "refresh", len(cursor.token_ids)
        return "", 0

    def _has_room(self, run: Run) -> bool:
        more = len(run.token_ids) - run.num_resident - run.num_reserved
        if more > 0:
            if not self._store.reserve(more):
                return False
            run.num_reserved += more
        return True

    @torch.inference_mode()
    def _compute(self, requests: list[Request], work: list[tuple[Run, int]]) -> list[Delivery]:
        if work:
            segments, hidden = self._model.forward(work)
            self._tokens_computed += hidden.shape[0]
            self._score(requests, segments, hidden)
            self._settle_shared()
        sampling = [
            request
            for request in requests
            if isinstance(request, GenerateRequest) and request.run and not request.run.num_left
        ]
        return self._sample(sampling) if sampling else []

    def _score(
        self, requests: list[Request], segments: list[Segment], hidden: torch.Tensor
    ) -> None:
        """Log-probabilities of the scored tokens that this step's rows predict."""
        by_run = {id(segment.run): segment for segment in segments}
        for request in requests:
            if not isinstance(request, ScoreRequest) or request.run is None:
                continue
            segment = by_run.get(id(request.run))
            if segment is None:
                continue
            run = request.run
            done_before = run.num_done - (segment.end - segment.begin)
            first = max(request.score_from, done_before + 1)
            targets = run.token_ids[first : run.num_done + 1]
            if not targets:
                continue
            begin = segment.begin + first - 1 - done_before
            logits = self._model.logits(hidden[begin : begin + len(targets)])
            request.logprobs += _logprobs_of(logits, targets)

    @torch.inference_mode()
    def _score_first(self, request: ScoreRequest) -> None:
        """A cursor's first token is predicted by its parent's last row."""
        if request.score_from == 0:
            logits = self._model.logits(_last_hidden(request.run).unsqueeze(0))
            request.logprobs += _logprobs_of(logits, [request.target.token_ids[0]])

    def _settle_shared(self) -> None:
        """Hand finished shared runs to the store."""
        for key in [key for key, shared in self._shared.items() if not shared.run.num_left]:
            shared = self._shared.pop(key)
            self._keep(key[0], shared.cursor, shared.run)
            if shared.cause:
                self._recomputed[shared.cause] += shared.num_recomputed

    def _keep(self, version: int, cursor: Cursor, run: Run) -> None:
        self._drop_room(run)
        self._store.put(version, cursor, self._model.residency_of(run))

    def _drop_room(self, run: Run) -> None:
        self._store.num_reserved -= run.num_reserved
        run.num_reserved = 0

    def _sample(self, requests: list[GenerateRequest]) -> list[Delivery]:
        hidden = torch.stack([_last_hidden(request.run) for request in requests])
        token_ids, logprobs = sample(
            self._model.logits(hidden),
            [request.sampling for request in requests],
            [request.generator for request in requests],
        )
        self._tokens_sampled += len(token_ids)
        deliveries: list[Delivery] = []
        for request, token_id, logprob in zip(requests, token_ids, logprobs, strict=True):
            deliveries.append((request, SampledToken(token_id=token_id, logprob=logprob)))
            reason = request.take(token_id, logprob, self._detokenize)
            if reason is None:
                assert request.run is not None
                request.run.token_ids.append(token_id)
            else:
                deliveries.append((request, self._finish_turn(request, reason)))
        return deliveries

    def _finish_turn(self, request: GenerateRequest, reason: Any) -> Generated:
        """The turn's cursor; the last sampled token is not computed, so it trails by one."""
        prompt, run = request.prompt, request.run
        assert run is not None
        cursor = child_cursor(
            prompt.parent,
            prompt.token_ids + tuple(request.sampled_ids),
            mounts=prompt.mounts,
            policy_version=request.version,
            sampled=prompt.sampled + (True,) * len(request.sampled_ids),
            sampled_logprobs=tuple(request.sampled_logprobs),
        )
        self._keep(request.version, cursor, run)
        request.run = None
        request.result = cursor
        self._end(request)
        return Generated(cursor=cursor, finish_reason=reason)

    def _finish_ready(self) -> list[Delivery]:
        """End the requests whose cursor is resident."""
        deliveries: list[Delivery] = []
        for request in list(self._active):
            if isinstance(request, GenerateRequest):
                continue
            plan = request.plan
            while plan and self._store.is_complete(request.version, plan[0]):
                plan.popleft()
            if plan:
                continue
            if isinstance(request, ScoreRequest):
                run = request.run
                if run is None or run.num_left:
                    continue
                if request.is_probe:
                    self._drop_room(run)
                else:
                    self._keep(request.version, request.target, run)
                request.run = None
            self._end(request)
            deliveries.append((request, None))
        return deliveries

    def _end(self, request: Request) -> None:
        """Forget an active request and the runs that only it waits for."""
        self._active.remove(request)
        if request.run is not None:
            self._drop_room(request.run)
            request.run = None
        self._leave_shared(request)
        self._store.unpin(request.pinned)
        request.pinned = set()

    def _leave_shared(self, request: Request) -> None:
        for key, shared in list(self._shared.items()):
            if request not in shared.waiters:
                continue
            shared.waiters.discard(request)
            heads = [waiter.plan[0] for waiter in shared.waiters if waiter.plan]
            heirs = [cursor for cursor in heads if _flight_key(key[0], cursor) == key]
            if heirs:
                # An identical root may have been the leaver's, whom nobody releases any more: who
                # stays owns what comes of it.
                shared.cursor = heirs[0]
            else:
                self._drop_room(shared.run)
                del self._shared[key]

    def _fail(self, requests: list[Request], cause: Exception) -> list[Delivery]:
        deliveries: list[Delivery] = []
        for request in [request for request in requests if request in self._active]:
            self._end(request)
            error = EngineError(f"forward pass failed: {cause}", remedy="see the service's log")
            error.__cause__ = cause
            deliveries.append((request, error))
        return deliveries

    def _give_up(self) -> list[Delivery]:
        """No request can move for want of room: the newest one ends."""
        request = self._active[-1]
        self._end(request)
        error = ResourceExhausted(
            "no room for more tokens: running requests read all that is resident",
            value=self._store.tokens_used,
            limit=f"{self._store.max_tokens} tokens",
            remedy="run fewer episodes at once, or give the engine a larger max_tokens",
        )
        return [(request, error)]


def _flight_key(version: int, cursor: Cursor) -> tuple[int, Any]:
    """Identical roots are computed once even where two calls race."""
    return version, cursor.token_ids if is_root(cursor) else cursor.cursor_id


def _last_hidden(run: Run | None) -> torch.Tensor:
    assert run is not None and run.last_hidden is not None
    return run.last_hidden


def _logprobs_of(logits: torch.Tensor, targets: list[int]) -> list[float]:
    """Log-probability of each row's target, in nats."""
    index = torch.tensor(targets, device=logits.device).unsqueeze(1)
    return (logits.gather(1, index) - logits.logsumexp(-1, keepdim=True)).squeeze(1).tolist()
