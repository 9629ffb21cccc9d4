"""The demo's shipped checkpoint still fits what the rollout service shows it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

from benchmarks.pretrain_demo.dry_episodes import DryEpisode
from harness_sdk.cli.demo.config import MODEL
from harness_sdk.cli.demo.task import DEMO_PRIMITIVES, draw_tasks
from harness_sdk.cli.demo.teacher import Script, play
from harness_sdk.record import EpisodeRecord
from harness_sdk.types import Message, SamplingOptions, Turn
from rollout_service.chat import ChatRenderer, ChatTokenizer
from rollout_service.engine.transformers import TransformersEngine
from rollout_service.sessions import Call, OpenRequest, Sessions


class _Forgetful:
    async def write(self, record: EpisodeRecord) -> str:
        return ""


class _CopyingSessions(Sessions):
    """The model itself writes each scripted turn that holds a number, greedily."""

    copied: list[Turn]

    async def turn(
        self,
        call: Call,
        messages: Sequence[Message] = (),
        *,
        demonstration: str | None = None,
        **options: Any,
    ) -> Turn:
        if demonstration is None or not any(letter.isdigit() for letter in demonstration):
            return await super().turn(call, messages, demonstration=demonstration, **options)
        if "read_thread" in demonstration:
            return await super().turn(call, messages, demonstration=demonstration, **options)
        sampling = SamplingOptions(max_tokens=64, temperature=0.0)
        turn = await super().turn(call, messages, sampling=sampling, **options)
        assert turn.raw_text == demonstration
        self.copied.append(turn)
        return turn


async def test_shipped_model_copies_numbers_out_of_prompts_mounts_and_answers() -> None:
    tokenizer = ChatTokenizer.load(MODEL)
    engine = TransformersEngine(str(MODEL), detokenize=tokenizer.decode)
    await engine.start()
    try:
        sessions = _CopyingSessions(
            engine, ChatRenderer(tokenizer, preamble="compact"), _Forgetful()
        )
        sessions.copied = []
        for task in islice(draw_tasks(20_261), 4):
            request = OpenRequest(task_id=task.task_id, primitives=DEMO_PRIMITIVES)
            opened = await sessions.open(request)
            episode = DryEpisode(sessions, opened.episode_id)
            await play(episode, task, Script(strategy="relay", guess="000"))
            await sessions.close(opened.episode_id)
    finally:
        await engine.close()
    # `a` off its shelf, `b` out of the mount and from behind the door, the root off `b`'s answer.
    assert len(sessions.copied) == 4 * 4
    logprobs = [value for turn in sessions.copied for value in turn.sampled_logprobs]
    # 0.99 and more each; texts that the model was not trained on bring some near 0.1.
    assert min(logprobs) > math.log(0.5), sorted(logprobs)[:5]
