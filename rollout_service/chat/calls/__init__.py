"""Tool calls in sampled text, one module for each family of models that writes them alike.

A bad call is data that names its fault and shows the family's form; nothing here raises on what a
model wrote.
"""

from rollout_service.chat.calls.events import (
    AllWasReasoning,
    CallBegun,
    CallFinished,
    ParsedReply,
    ReasoningDelta,
    ReplyEvent,
    TextDelta,
)
from rollout_service.chat.calls.families import FAMILIES, family_of, opens_reasoning
from rollout_service.chat.calls.stream import ReplyStream, parse_reply

__all__ = [
    "FAMILIES",
    "AllWasReasoning",
    "CallBegun",
    "CallFinished",
    "ParsedReply",
    "ReasoningDelta",
    "ReplyEvent",
    "ReplyStream",
    "TextDelta",
    "family_of",
    "opens_reasoning",
    "parse_reply",
]
