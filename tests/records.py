"""Small episode records for tests of the path from the stream to a step."""

from __future__ import annotations

from harness_sdk.record import EpisodeRecord, Node, NodeKind, ThreadSummary


def small_record(
    episode_id: str,
    *,
    group_id: str = "g",
    run: str = "r",
    token_ids: tuple[int, ...] = (5, 6, 7, 8),
    num_prompt: int = 2,
    reward: float | None = 1.0,
    stop_reason: str = "done",
    policy_version: int = 0,
    model_hash: str = "",
    demonstration: bool = False,
    logprob: float = -0.5,
) -> EpisodeRecord:
    """One thread: `num_prompt` tokens, then sampled (or demonstrated) ones."""
    sampled = tuple(index >= num_prompt for index in range(len(token_ids)))
    node = Node(
        node_id=0,
        parent=-1,
        thread_id="root",
        step=1,
        kind=NodeKind.DEMONSTRATION if demonstration else NodeKind.TURN,
        token_ids=token_ids,
        sampled=sampled,
        sampled_logprobs=(logprob,) * sum(sampled),
        policy_version=policy_version,
        position_start=0,
    )
    return EpisodeRecord(
        run=run,
        episode_id=episode_id,
        group_id=group_id,
        task_id="t",
        replica_id="replica",
        nodes=(node,),
        threads=(ThreadSummary(thread_id="root", parent="", depth=0, status="done"),),
        reward=reward,
        answer="",
        stop_reason=stop_reason,
        opened_at_s=0.0,
        closed_at_s=0.0,
        mount_layers=(),
        model_hash=model_hash,
        tokenizer_hash="",
        template_hash="",
        engine="",
    )
