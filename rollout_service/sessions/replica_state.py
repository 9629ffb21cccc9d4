"""What a replica tells of itself: in the handshake, and as its state now."""

from __future__ import annotations

from collections.abc import Sequence

from harness_sdk.types import Limits, ServerInfo, ServerStatus
from rollout_service.sessions.episode import Episode, Service
from rollout_service.sessions.options import resolve_limits


def server_info(
    service: Service, policy_versions: tuple[int, ...], max_message_bytes: int
) -> ServerInfo:
    """What the handshake tells."""
    engine, options = service.engine.info, service.options
    return ServerInfo(
        replica_id=options.replica_id,
        run=options.run,
        model=engine.model,
        engine=engine.name,
        max_message_bytes=max_message_bytes,
        policy_versions=policy_versions,
        max_positions=engine.max_positions,
        limits=resolve_limits(options, Limits(), engine.max_positions).to_limits(),
    )


def server_status(
    service: Service,
    episodes: Sequence[Episode],
    *,
    num_queued: int,
    policy_versions: tuple[int, ...],
    uptime_s: float,
) -> ServerStatus:
    """The replica's state now, with `episodes` open and `num_queued` waiting."""
    stats, engine, options = service.engine.stats(), service.engine.info, service.options
    metrics = service.metrics.snapshot()
    metrics["tokens/computed"] = float(stats.tokens_computed)
    metrics["tokens/sampled"] = float(stats.tokens_sampled)
    metrics["engine/serving"] = float(stats.is_serving)
    metrics["engine/restarts"] = float(stats.restarts)
    for cause, count in stats.tokens_recomputed.items():
        metrics[f"tokens/recomputed_{cause}"] = float(count)
    live = [thread for episode in episodes for thread in episode.threads.values()]
    return ServerStatus(
        replica_id=options.replica_id,
        run=options.run,
        engine=engine.name,
        model=engine.model,
        open_episodes=len(episodes),
        queued_episodes=num_queued,
        live_threads=sum(not thread.status.is_final for thread in live),
        resident_cursors=stats.resident_cursors,
        recurrent_slots=stats.recurrent_slots,
        tokens_resident=stats.tokens_resident,
        tokens_capacity=stats.tokens_capacity,
        kv_use=stats.kv_use,
        policy_versions=policy_versions,
        uptime_s=uptime_s,
        metrics=metrics,
    )
