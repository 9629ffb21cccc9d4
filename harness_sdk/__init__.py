"""Octopus SDK: agents that fork, rewind and read each other."""

from harness_sdk.client import OctopusClient
from harness_sdk.deltas import (
    AllWasReasoning,
    CallArguments,
    CallBegun,
    CallFinished,
    ReasoningDelta,
    ReplyEvent,
    TextDelta,
    TokenDelta,
)
from harness_sdk.episode import Episode, QueuedEvent
from harness_sdk.errors import HarnessError
from harness_sdk.options import RetryPolicy, Timeouts, TlsOptions
from harness_sdk.thread import Thread
from harness_sdk.tool_loop import (
    LoopEvent,
    LoopResult,
    ToolLoop,
    ToolLoopOptions,
    current_thread,
)
from harness_sdk.tools import Tool
from harness_sdk.types import (
    PRIMITIVES,
    BranchResult,
    Budget,
    EpisodeResult,
    Limits,
    Message,
    ReadResult,
    RewindResult,
    SamplingOptions,
    ServerInfo,
    ServerStatus,
    StopReason,
    StructuredOutput,
    ThreadStatus,
    ToolCall,
    Turn,
)

__all__ = [
    "PRIMITIVES",
    "AllWasReasoning",
    "BranchResult",
    "Budget",
    "CallArguments",
    "CallBegun",
    "CallFinished",
    "Episode",
    "EpisodeResult",
    "HarnessError",
    "Limits",
    "LoopEvent",
    "LoopResult",
    "Message",
    "OctopusClient",
    "QueuedEvent",
    "ReadResult",
    "ReasoningDelta",
    "ReplyEvent",
    "RetryPolicy",
    "RewindResult",
    "SamplingOptions",
    "ServerInfo",
    "ServerStatus",
    "StopReason",
    "StructuredOutput",
    "TextDelta",
    "Thread",
    "ThreadStatus",
    "Timeouts",
    "TlsOptions",
    "TokenDelta",
    "Tool",
    "ToolCall",
    "ToolLoop",
    "ToolLoopOptions",
    "Turn",
    "current_thread",
]
