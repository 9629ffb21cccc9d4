"""Messages to token ids and sampled ids to turns: ChatML with Hermes tool calls."""

from rollout_service.chat.chatml import ChatML
from rollout_service.chat.tokenizer import ChatTokenizer

__all__ = ["ChatML", "ChatTokenizer"]
