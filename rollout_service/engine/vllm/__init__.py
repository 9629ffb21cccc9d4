"""The vLLM engine: cursors, forks, rewinds and mounts inside vLLM's own scheduler and pages."""

from rollout_service.engine.vllm.engine import VllmEngine

__all__ = ["VllmEngine"]
