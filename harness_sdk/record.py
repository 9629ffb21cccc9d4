"""The episode record: written once by the rollout service, read by the trainer.

design.md section 8. Plain data and its protobuf form; nothing here touches Redis.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from harness_sdk.errors import ProtocolError
from harness_sdk.rpc.v1 import record_pb2

SCHEMA_VERSION = 1
BYTES_HASH = "bytes+chatml"
"""`tokenizer_hash` of records whose token ids are bytes and the two ChatML markers."""


class NodeKind(enum.IntEnum):
    """What a node's tokens are; the values are those of the wire."""

    CONTEXT = 1
    TURN = 2
    DEMONSTRATION = 3
    NOTE = 4
    STUB = 5
    TERMINATION = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class MountSpan:
    """Tokens `[begin, end)` of node `node_id`, visible beside the ancestors."""

    node_id: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A run of tokens with one parent, one mount set and one thread.

    Example:
        `Node(node_id=1, parent=0, thread_id="root", step=1, kind=NodeKind.TURN,
        token_ids=(7, 8, 9), sampled=(False, True, True), sampled_logprobs=(-0.5, -0.1),
        policy_version=3, position_start=12)` follows a 12-token prompt: token 7 is the
        generation prompt; 8 and 9 were sampled under version 3.
    """

    node_id: int
    parent: int
    """-1 at the root."""
    thread_id: str
    step: int
    """Turn that the node belongs to, from 1; 0 before the thread's first turn."""
    kind: NodeKind
    token_ids: tuple[int, ...]
    sampled: tuple[bool, ...]
    """One for each token."""
    sampled_logprobs: tuple[float, ...]
    """Nats, one for each sampled token, in order."""
    policy_version: int
    position_start: int
    """Rotary position of the first token; the rest follow without gaps."""
    mounts: tuple[MountSpan, ...] = ()
    """The complete visible set, own and inherited."""
    temperature: float = 1.0
    rewound: bool = False
    joined: tuple[str, ...] = ()
    """Threads whose end the node reports: it could not be appended before they had ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadSummary:
    """One thread of the record."""

    thread_id: str
    parent: str
    """Empty at the root."""
    depth: int
    status: str
    answer: str = ""
    num_turns: int = 0
    num_tokens: int = 0
    orphan: bool = False
    num_rewinds: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRecord:
    """A finished (or failed) episode as a DAG of nodes in topological order."""

    run: str
    episode_id: str
    group_id: str
    task_id: str
    replica_id: str
    nodes: tuple[Node, ...]
    threads: tuple[ThreadSummary, ...]
    reward: float | None
    """Outcome y in [0, 1]; None where the episode was never scored."""
    answer: str
    stop_reason: str
    opened_at_s: float
    closed_at_s: float
    mount_layers: tuple[int, ...]
    model_hash: str
    tokenizer_hash: str
    template_hash: str
    engine: str
    dtype: str = ""
    """Type of the weights that sampled, as bfloat16; empty where nothing says it."""
    head_dtype: str = ""
    """Type of the logits that were sampled from, as float32; empty where nothing says it."""
    error_kind: str = ""
    error_message: str = ""
    traceparent: str = ""
    """W3C trace context of the episode on its replica; empty where nobody traces."""

    @property
    def num_tokens(self) -> int:
        """Unique tokens: each node once."""
        return sum(len(node.token_ids) for node in self.nodes)

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled."""
        return sum(len(node.sampled_logprobs) for node in self.nodes)


def record_to_bytes(record: EpisodeRecord) -> bytes:
    """Serialise `record` for the stream."""
    proto = record_pb2.EpisodeRecord(
        schema_version=SCHEMA_VERSION,
        nodes=[_node_to_proto(node) for node in record.nodes],
        threads=[
            record_pb2.ThreadRecord(**{name: getattr(thread, name) for name in thread.__slots__})
            for thread in record.threads
        ],
        **{name: getattr(record, name) for name in record.__slots__ if name not in _NESTED},
    )
    return proto.SerializeToString()


def record_from_bytes(data: bytes) -> EpisodeRecord:
    """Parse a record.

    Raises:
        ProtocolError: The bytes are no record, or one of another schema version.
    """
    proto = record_pb2.EpisodeRecord()
    try:
        proto.ParseFromString(data)
    except DecodeError as error:
        raise ProtocolError("not an episode record", value=f"{len(data)} bytes") from error
    if proto.schema_version != SCHEMA_VERSION:
        raise ProtocolError(
            "episode record of another schema version",
            value=proto.schema_version,
            limit=SCHEMA_VERSION,
            remedy="run rollout and trainer services of one release",
        )
    return EpisodeRecord(
        nodes=tuple(_node_from_proto(node) for node in proto.nodes),
        threads=tuple(
            ThreadSummary(**{name: getattr(thread, name) for name in ThreadSummary.__slots__})
            for thread in proto.threads
        ),
        reward=proto.reward if proto.HasField("reward") else None,
        mount_layers=tuple(proto.mount_layers),
        **{
            name: getattr(proto, name)
            for name in EpisodeRecord.__slots__
            if name not in (*_NESTED, "reward", "mount_layers")
        },
    )


_NESTED = ("nodes", "threads")


def _node_to_proto(node: Node) -> record_pb2.NodeRecord:
    return record_pb2.NodeRecord(
        node_id=node.node_id,
        parent=node.parent,
        thread_id=node.thread_id,
        step=node.step,
        kind=record_pb2.NodeKind.Name(node.kind.value),
        token_ids=node.token_ids,
        sampled=bytes(node.sampled),
        sampled_logprobs=node.sampled_logprobs,
        policy_version=node.policy_version,
        position_start=node.position_start,
        mounts=[
            record_pb2.MountRecord(node_id=m.node_id, begin=m.begin, end=m.end) for m in node.mounts
        ],
        temperature=node.temperature,
        rewound=node.rewound,
        joined=node.joined,
    )


def _node_from_proto(proto: record_pb2.NodeRecord) -> Node:
    return Node(
        node_id=proto.node_id,
        parent=proto.parent,
        thread_id=proto.thread_id,
        step=proto.step,
        kind=NodeKind(proto.kind),
        token_ids=tuple(proto.token_ids),
        sampled=tuple(byte == 1 for byte in proto.sampled),
        sampled_logprobs=tuple(proto.sampled_logprobs),
        policy_version=proto.policy_version,
        position_start=proto.position_start,
        mounts=tuple(MountSpan(node_id=m.node_id, begin=m.begin, end=m.end) for m in proto.mounts),
        temperature=proto.temperature,
        rewound=proto.rewound,
        joined=tuple(proto.joined),
    )
