"""The vLLM engine: cursors, forks, rewinds and mounts inside vLLM's own scheduler and pages.

Importing the package costs nothing: configuration and `octopus doctor` ask it which vLLM they need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout_service.engine.vllm.engine import VllmEngine

__all__ = ["VllmEngine"]


def __getattr__(name: str) -> Any:
    if name == "VllmEngine":
        from rollout_service.engine.vllm.engine import VllmEngine

        return VllmEngine
    raise AttributeError(name)
