"""Tool calls in sampled text, one module for each family of models that writes them alike.

A bad call is data that names its fault and shows the family's form; nothing here raises on what a
model wrote.
"""

from rollout_service.chat.calls.families import FAMILIES, family_of, opens_reasoning
from rollout_service.chat.calls.reply import ParsedReply
from rollout_service.chat.calls.stream import ReplyStream, parse_reply

__all__ = [
    "FAMILIES",
    "ParsedReply",
    "ReplyStream",
    "family_of",
    "opens_reasoning",
    "parse_reply",
]
