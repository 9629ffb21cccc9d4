"""Episodes, threads, budgets, mounts, guardrails and records; the engine only computes."""

from rollout_service.sessions.options import Call, OpenRequest, RecordSink, SessionOptions
from rollout_service.sessions.service import Sessions

__all__ = ["Call", "OpenRequest", "RecordSink", "SessionOptions", "Sessions"]
