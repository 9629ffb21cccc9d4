"""Messages to token ids and sampled ids to turns, by the model's own chat template."""

from rollout_service.chat.increments import WrittenTurn
from rollout_service.chat.renderer import ChatRenderer
from rollout_service.chat.template import Template, load_template
from rollout_service.chat.tokenizer import ChatTokenizer

__all__ = ["ChatRenderer", "ChatTokenizer", "Template", "WrittenTurn", "load_template"]
