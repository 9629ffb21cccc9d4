"""That a step used an episode, told in the episode's own trace."""

from __future__ import annotations

from harness_sdk.tracing import Span, add_past
from trainer_service.feed import Batch


def tell_episodes(batch: Batch, span: Span, begun_s: float, *, step: int) -> None:
    """Add the step to the trace of each episode that it used.

    Args:
        batch: What was trained on.
        span: The step's own.
        begun_s: Unix time of its begin.
        step: Its number.
    """
    for episode in batch.episodes:
        add_past(
            "octopus.train",
            episode.record.traceparent,
            begun_s=begun_s,
            links=[span.traceparent],
            kind="consumer",
            step=step,
            episode=episode.record.episode_id,
            reward=episode.reward,
        )
