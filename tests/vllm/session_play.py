"""Random use of the service over one engine: agents that leave, adapters that come, evictions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from pathlib import Path

from harness_sdk.errors import (
    AdapterError,
    BudgetExhausted,
    EpisodeNotFound,
    InvalidRequest,
    StaleHead,
    StepNotFound,
    ThreadEnded,
    ThreadNotFound,
    Unavailable,
)
from harness_sdk.types import Limits, Message, SamplingOptions
from rollout_service.cursors import Cursor
from rollout_service.engine.base import Engine
from rollout_service.sessions import Call, OpenRequest, SessionOptions, Sessions
from rollout_service.sessions.episode import Episode
from rollout_service.sessions.threads import Thread
from tests.engine_cases import save_adapter
from tests.session_cases import ALL, CHAT, LOOK, MemorySink
from tests.vllm.audit import check_blocks
from tests.vllm.conftest import MAX_ADAPTERS, Served
from tests.vllm.episodes import logprobs_of
from tests.vllm.models import MOE_FAMILIES

REFUSALS = (
    BudgetExhausted,
    EpisodeNotFound,
    InvalidRequest,
    StaleHead,
    StepNotFound,
    ThreadEnded,
    ThreadNotFound,
)
"""What a call may hear; anything else fails the test."""
LIMITS = Limits(thread_budget=1100, answer_reserve=100, max_threads=6, max_turns=40)
_MAX_OPEN = 6
_QUEUE_S = 0.2
_WEIGHTS = {
    "open_episode": 3,
    "say": 14,
    "sample": 14,
    "fork": 8,
    "rewind": 6,
    "read": 12,
    "finish_thread": 2,
    "cancel_thread": 2,
    "cancel_call": 4,
    "kill_client": 1,
    "close": 1,
    "push_adapter": 1,
    "evict": 5,
}


class World:
    """Episodes in the making, and what is known of those that have ended."""

    def __init__(
        self, served: Served, oracle: Engine, folder: Path, seed: int, kills: int = 0
    ) -> None:
        self.done: Counter[str] = Counter()
        """Operations that went through, and refusals by name."""
        self.turns: list[Cursor] = []
        self.newest = 0
        self._loaded = {0}
        self.served = served
        self._engine = served.engine
        self._oracle = oracle
        self._folder = folder
        self._rng = random.Random(seed)
        self._num_opened = 0
        self._pushing = asyncio.Lock()
        # vLLM-CPU has no LoRA for fused experts.
        self._weights = _WEIGHTS | {"push_adapter": served.family not in MOE_FAMILIES}
        self._weights["kill_engine"] = 5 if kills else 0
        self._kills = kills
        # A turn with a seed has to be sampled whole.
        self._refusals = (*REFUSALS, Unavailable) if kills else REFUSALS
        self.sessions = Sessions(
            served.engine,
            CHAT,
            MemorySink(),
            SessionOptions(run="r", replica_id="p", busy_grace_s=0.05, admission_poll_s=0.01),
            newest_version=lambda: self.newest,
        )

    async def play(self, num_operations: int, *, at_a_time: int = 4) -> None:
        """Random operations, several beside each other; then everything is closed.

        Refused ones come on top of `num_operations`.
        """
        await self.open_episode()
        while sum(self.done[name] for name in _WEIGHTS) < num_operations:
            async with asyncio.timeout(120):
                await asyncio.gather(*(self._step() for _ in range(at_a_time)))
            await check_blocks(self._engine)
        for episode in self._open():
            self._remember(episode)
        await self.sessions.shutdown()

    async def gaps(self, share: float) -> tuple[list[float], list[float]]:
        """Compare a share of all turns with the other engine.

        Returns:
            Differences in nats, one a token: under the base model, and under adapters.
        """
        gaps: tuple[list[float], list[float]] = [], []
        for turn in self._rng.sample(self.turns, int(share * len(self.turns))):
            expected = await logprobs_of(self._oracle, turn)
            pairs = zip(expected, turn.sampled_logprobs, strict=True)
            gaps[turn.policy_version > 0].extend(one - other for one, other in pairs)
        return gaps

    async def _step(self) -> None:
        name = self._rng.choices(list(self._weights), list(self._weights.values()))[0]
        if not self._open():
            name = "open_episode"
        elif any(episode.root.status.is_final for episode in self._open()):
            name = "close"
        try:
            await getattr(self, name)()
        except self._refusals as error:
            self.done[type(error).__name__] += 1
        else:
            self.done[name] += 1

    async def open_episode(self) -> None:
        """Open one and give it a prompt; gives up where it has to queue."""
        if len(self._open()) >= _MAX_OPEN:
            return
        self._num_opened += 1
        name = f"e{self._num_opened}"
        request = OpenRequest(
            episode_id=name,
            primitives=ALL,
            limits=LIMITS,
            version_policy=self._rng.choice(("keep", "refresh")),
        )
        try:
            async with asyncio.timeout(_QUEUE_S):
                await self.sessions.open(request)
        except TimeoutError:
            self.done["queued"] += 1
            return
        prompt = Message(role="user", content="q" * self._rng.randrange(5, 200))
        await self.sessions.turn(self._call(name, "root"), [prompt], demonstration=LOOK)

    async def say(self) -> None:
        """A demonstrated turn."""
        call = self._any_call()
        reply = LOOK if self._rng.random() < 0.8 else "plain"
        await self.sessions.turn(call, self._observations(), demonstration=reply)

    async def sample(self) -> None:
        """A sampled turn."""
        await self.sessions.turn(
            self._any_call(),
            self._observations(),
            sampling=self._sampling(self._rng.randint(1, 16)),
        )

    async def fork(self) -> None:
        """One to three children."""
        call = self._any_call()
        episode = self.sessions.episode(call.episode_id)
        first = len(episode.threads)
        names = [f"b{first + index}" for index in range(self._rng.randint(1, 3))]
        await self.sessions.fork(call, {name: f"do {name}" for name in names})

    async def rewind(self) -> None:
        """Back to a finished step."""
        call, thread = self._any_thread()
        await self.sessions.rewind(call, self._rng.randrange(len(thread.steps)), "n")

    async def read(self) -> None:
        """Mount steps of another thread of the episode."""
        call = self._any_call()
        threads = self.sessions.episode(call.episode_id).threads.values()
        told = [t for t in threads if t.thread_id != call.thread_id and t.last_finished > 0]
        if not told:
            raise StepNotFound("nobody else has finished a step")
        source = self._rng.choice(told)
        first = self._rng.randint(1, source.last_finished)
        last = first + self._rng.randrange(4)
        await self.sessions.read_thread(call, source.thread_id, first, last)

    async def finish_thread(self) -> None:
        """Close a thread with an answer."""
        call = self._any_call()
        if call.thread_id != "root":
            await self.sessions.done(call, "x")

    async def cancel_thread(self) -> None:
        """End a thread and its descendants, whatever they do."""
        call = self._any_call()
        if call.thread_id != "root":
            await self.sessions.cancel(call)

    async def cancel_call(self) -> None:
        """A caller that leaves in the middle of a turn."""
        sampling = self._sampling(80)
        task = asyncio.ensure_future(
            self.sessions.turn(self._any_call(), self._observations(), sampling=sampling)
        )
        await asyncio.sleep(self._rng.random() * 0.1)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def kill_client(self) -> None:
        """An agent's stream breaks."""
        episode = self._any_episode()
        self._remember(episode)
        await self.sessions.lost(episode.episode_id)

    async def close(self) -> None:
        """An agent is done: one whose root has ended, if there is such."""
        ended = [episode for episode in self._open() if episode.root.status.is_final]
        episode = self._rng.choice(ended) if ended else self._any_episode()
        self._remember(episode)
        await self.sessions.close(episode.episode_id, reward=1.0)

    async def push_adapter(self) -> None:
        """A new version comes while everything runs; an old one goes where nothing needs it."""
        async with self._pushing:
            if len(self._loaded) > MAX_ADAPTERS and not await self._unload_oldest():
                self.done["no slot"] += 1
                return
            version = self.newest + 1
            folder = self._folder / str(version)
            save_adapter(folder, self.served.folder, self.served.family, seed=version)
            await self._oracle.load_adapter(version, str(folder))
            await self._engine.load_adapter(version, str(folder))
            self._loaded.add(version)
            self.newest = version

    async def evict(self) -> None:
        """Pressure that picks at random."""
        cursors = [node.cursor for node in self._any_episode().nodes]
        await self._engine.evict(self._rng.sample(cursors, min(len(cursors), 4)))

    async def kill_engine(self) -> None:
        """What the kernel does to it where memory is short."""
        core = await self.served.engine._supervisor.running()
        if self._kills:
            self._kills -= 1
            os.kill(core.process._processes[0].pid, signal.SIGKILL)

    async def _unload_oldest(self) -> bool:
        for version in sorted(self._loaded - self.sessions.versions_in_use() - {0, self.newest}):
            try:
                await self._engine.unload_adapter(version)
            except AdapterError:
                # A turn of an episode that refreshes runs on it.
                continue
            self._loaded.discard(version)
            return True
        return False

    def _open(self) -> list[Episode]:
        return list(self.sessions._episodes.values())

    def _any_episode(self) -> Episode:
        if not self._open():
            raise EpisodeNotFound("the last one has just ended")
        return self._rng.choice(self._open())

    def _any_thread(self) -> tuple[Call, Thread]:
        live = [
            (self._call(episode.episode_id, thread.thread_id), thread)
            for episode in self._open()
            for thread in episode.threads.values()
            if not thread.status.is_final
        ]
        if not live:
            raise ThreadNotFound("none is live")
        return self._rng.choice(live)

    def _any_call(self) -> Call:
        return self._any_thread()[0]

    def _call(self, episode_id: str, thread_id: str) -> Call:
        return Call(episode_id=episode_id, thread_id=thread_id)

    def _observations(self) -> list[Message]:
        size = self._rng.choice((0, 5, 20, 60))
        return [Message(role="tool", content="o" * size)] if size else []

    def _sampling(self, max_tokens: int) -> SamplingOptions:
        return SamplingOptions(max_tokens=max_tokens, seed=self._rng.randrange(1 << 30))

    def _remember(self, episode: Episode) -> None:
        self.turns += [
            node.cursor for node in episode.nodes if node.cursor.sampled_logprobs and node.on_path
        ]
