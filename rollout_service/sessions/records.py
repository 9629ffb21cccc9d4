"""An episode's threads and cursors as the record that the trainer reads (design.md section 8)."""

from __future__ import annotations

from harness_sdk import errors
from harness_sdk.errors import ERRORS_BY_NAME, BudgetExhausted, HarnessError
from harness_sdk.record import EpisodeRecord, MountSpan, Node, ThreadSummary
from harness_sdk.types import StopReason, ThreadStatus
from rollout_service.cursors import Cursor
from rollout_service.sessions.episode import Episode
from rollout_service.sessions.threads import NodeEntry, Thread

_REASON_BY_STATUS = {
    ThreadStatus.DONE: StopReason.DONE,
    ThreadStatus.NO_DONE: StopReason.NO_DONE,
    ThreadStatus.BUDGET: StopReason.BUDGET,
    ThreadStatus.MAX_TURNS: StopReason.MAX_TURNS,
    ThreadStatus.CANCELLED: StopReason.CANCELLED,
    ThreadStatus.FAILED: StopReason.ENGINE_ERROR,
}


def stop_reason(episode: Episode, error_kind: str = "") -> StopReason:
    """Why an episode that its agent closes has ended; the root alone decides.

    Args:
        episode: The episode.
        error_kind: Class name of what made the agent fail; empty where it did not.
    """
    root = episode.root
    exhausted = root.exhausted or ThreadStatus.BUDGET
    if error_kind:
        return _reason_by_error(error_kind, _REASON_BY_STATUS[exhausted])
    if root.status.is_final:
        return _REASON_BY_STATUS[root.status]
    return _REASON_BY_STATUS[exhausted] if root.exhausted else StopReason.AGENT_ENDED


def end_threads(episode: Episode, reason: StopReason) -> None:
    """End what the episode's end finds at work: as cancelled, the root as `reason` has it."""
    for thread in episode.threads.values():
        if not thread.status.is_final:
            thread.end(_last_status(thread, reason))


def _last_status(thread: Thread, reason: StopReason) -> ThreadStatus:
    if thread.parent is not None:
        return ThreadStatus.CANCELLED
    if reason in (StopReason.ENGINE_ERROR, StopReason.TOOL_ERROR):
        return ThreadStatus.FAILED
    return next(
        (status for status, named in _REASON_BY_STATUS.items() if named is reason),
        ThreadStatus.CANCELLED,
    )


def build_record(
    episode: Episode,
    reason: StopReason,
    *,
    reward: float | None = None,
    error_kind: str = "",
    error_message: str = "",
) -> EpisodeRecord:
    """The record of `episode` as it stands; changes nothing."""
    service, info = episode.service, episode.service.engine.info
    ids = {node.cursor: index for index, node in enumerate(episode.nodes)}
    return EpisodeRecord(
        run=service.options.run,
        episode_id=episode.episode_id,
        group_id=episode.request.group_id,
        task_id=episode.request.task_id,
        replica_id=service.options.replica_id,
        nodes=tuple(_node(index, node, ids) for index, node in enumerate(episode.nodes)),
        threads=tuple(_summary(episode, thread) for thread in episode.threads.values()),
        reward=reward,
        answer=episode.root.answer,
        stop_reason=reason,
        error_kind=error_kind,
        error_message=error_message,
        opened_at_s=episode.opened_at_s,
        closed_at_s=episode.now_s,
        mount_layers=info.mount_layers,
        model_hash=info.model_hash,
        tokenizer_hash=service.chat.tokenizer.digest,
        template_hash=service.chat.template_hash,
        engine=info.name,
        dtype=info.dtype,
        head_dtype=info.head_dtype,
        traceparent=episode.span.traceparent,
    )


def _reason_by_error(kind: str, exhausted: StopReason) -> StopReason:
    if kind in ("Cancelled", "CancelledError", "KeyboardInterrupt"):
        return StopReason.CANCELLED
    cls = ERRORS_BY_NAME.get(kind, HarnessError)
    if issubclass(cls, BudgetExhausted):
        return exhausted
    if issubclass(cls, errors.EngineError | errors.ServiceError | errors.AdapterError):
        return StopReason.ENGINE_ERROR
    # A tool that failed, or the agent's own code: neither is the policy's doing.
    return StopReason.TOOL_ERROR


def _node(index: int, node: NodeEntry, ids: dict[Cursor, int]) -> Node:
    cursor = node.cursor
    base = cursor.parent
    return Node(
        node_id=index,
        parent=ids[base] if base is not None else -1,
        thread_id=node.thread_id,
        step=node.step,
        kind=node.kind,
        token_ids=cursor.token_ids,
        sampled=cursor.sampled,
        sampled_logprobs=cursor.sampled_logprobs,
        policy_version=cursor.policy_version,
        position_start=cursor.position_start,
        mounts=tuple(
            MountSpan(node_id=ids[mount.source], begin=mount.begin, end=mount.end)
            for mount in cursor.mounts
        ),
        temperature=node.temperature,
        rewound=node.rewound,
        joined=tuple(sorted(node.joined)),
    )


def _summary(episode: Episode, thread: Thread) -> ThreadSummary:
    appended = [node for node in episode.nodes if node.thread_id == thread.thread_id]
    return ThreadSummary(
        thread_id=thread.thread_id,
        parent=thread.parent.thread_id if thread.parent is not None else "",
        depth=thread.depth,
        status=thread.status,
        answer=thread.answer,
        num_turns=thread.num_turns,
        num_tokens=sum(len(node.cursor.token_ids) for node in appended),
        orphan=thread.orphan,
        num_rewinds=thread.num_rewinds,
    )
