"""The engine over Hugging Face transformers."""

from rollout_service.engine.transformers.engine import TransformersEngine

__all__ = ["TransformersEngine"]
