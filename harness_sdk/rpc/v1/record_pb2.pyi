from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodeKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_KIND_UNSPECIFIED: _ClassVar[NodeKind]
    NODE_KIND_CONTEXT: _ClassVar[NodeKind]
    NODE_KIND_TURN: _ClassVar[NodeKind]
    NODE_KIND_DEMONSTRATION: _ClassVar[NodeKind]
    NODE_KIND_NOTE: _ClassVar[NodeKind]
    NODE_KIND_STUB: _ClassVar[NodeKind]
    NODE_KIND_TERMINATION: _ClassVar[NodeKind]
NODE_KIND_UNSPECIFIED: NodeKind
NODE_KIND_CONTEXT: NodeKind
NODE_KIND_TURN: NodeKind
NODE_KIND_DEMONSTRATION: NodeKind
NODE_KIND_NOTE: NodeKind
NODE_KIND_STUB: NodeKind
NODE_KIND_TERMINATION: NodeKind

class EpisodeRecord(_message.Message):
    __slots__ = ("schema_version", "run", "episode_id", "group_id", "task_id", "replica_id", "nodes", "threads", "reward", "answer", "stop_reason", "error_kind", "error_message", "opened_at_s", "closed_at_s", "mount_layers", "model_hash", "tokenizer_hash", "template_hash", "engine", "traceparent", "head_dtype", "dtype")
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    EPISODE_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_KIND_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    OPENED_AT_S_FIELD_NUMBER: _ClassVar[int]
    CLOSED_AT_S_FIELD_NUMBER: _ClassVar[int]
    MOUNT_LAYERS_FIELD_NUMBER: _ClassVar[int]
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_HASH_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    HEAD_DTYPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    schema_version: int
    run: str
    episode_id: str
    group_id: str
    task_id: str
    replica_id: str
    nodes: _containers.RepeatedCompositeFieldContainer[NodeRecord]
    threads: _containers.RepeatedCompositeFieldContainer[ThreadRecord]
    reward: float
    answer: str
    stop_reason: str
    error_kind: str
    error_message: str
    opened_at_s: float
    closed_at_s: float
    mount_layers: _containers.RepeatedScalarFieldContainer[int]
    model_hash: str
    tokenizer_hash: str
    template_hash: str
    engine: str
    traceparent: str
    head_dtype: str
    dtype: str
    def __init__(self, schema_version: _Optional[int] = ..., run: _Optional[str] = ..., episode_id: _Optional[str] = ..., group_id: _Optional[str] = ..., task_id: _Optional[str] = ..., replica_id: _Optional[str] = ..., nodes: _Optional[_Iterable[_Union[NodeRecord, _Mapping]]] = ..., threads: _Optional[_Iterable[_Union[ThreadRecord, _Mapping]]] = ..., reward: _Optional[float] = ..., answer: _Optional[str] = ..., stop_reason: _Optional[str] = ..., error_kind: _Optional[str] = ..., error_message: _Optional[str] = ..., opened_at_s: _Optional[float] = ..., closed_at_s: _Optional[float] = ..., mount_layers: _Optional[_Iterable[int]] = ..., model_hash: _Optional[str] = ..., tokenizer_hash: _Optional[str] = ..., template_hash: _Optional[str] = ..., engine: _Optional[str] = ..., traceparent: _Optional[str] = ..., head_dtype: _Optional[str] = ..., dtype: _Optional[str] = ...) -> None: ...

class NodeRecord(_message.Message):
    __slots__ = ("node_id", "parent", "thread_id", "step", "kind", "token_ids", "sampled", "sampled_logprobs", "policy_version", "position_start", "mounts", "temperature", "rewound", "joined")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    THREAD_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    POSITION_START_FIELD_NUMBER: _ClassVar[int]
    MOUNTS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    REWOUND_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    node_id: int
    parent: int
    thread_id: str
    step: int
    kind: NodeKind
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampled: bytes
    sampled_logprobs: _containers.RepeatedScalarFieldContainer[float]
    policy_version: int
    position_start: int
    mounts: _containers.RepeatedCompositeFieldContainer[MountRecord]
    temperature: float
    rewound: bool
    joined: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node_id: _Optional[int] = ..., parent: _Optional[int] = ..., thread_id: _Optional[str] = ..., step: _Optional[int] = ..., kind: _Optional[_Union[NodeKind, str]] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampled: _Optional[bytes] = ..., sampled_logprobs: _Optional[_Iterable[float]] = ..., policy_version: _Optional[int] = ..., position_start: _Optional[int] = ..., mounts: _Optional[_Iterable[_Union[MountRecord, _Mapping]]] = ..., temperature: _Optional[float] = ..., rewound: bool = ..., joined: _Optional[_Iterable[str]] = ...) -> None: ...

class MountRecord(_message.Message):
    __slots__ = ("node_id", "begin", "end")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    node_id: int
    begin: int
    end: int
    def __init__(self, node_id: _Optional[int] = ..., begin: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class ThreadRecord(_message.Message):
    __slots__ = ("thread_id", "parent", "depth", "status", "answer", "num_turns", "num_tokens", "orphan", "num_rewinds")
    THREAD_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    NUM_TURNS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ORPHAN_FIELD_NUMBER: _ClassVar[int]
    NUM_REWINDS_FIELD_NUMBER: _ClassVar[int]
    thread_id: str
    parent: str
    depth: int
    status: str
    answer: str
    num_turns: int
    num_tokens: int
    orphan: bool
    num_rewinds: int
    def __init__(self, thread_id: _Optional[str] = ..., parent: _Optional[str] = ..., depth: _Optional[int] = ..., status: _Optional[str] = ..., answer: _Optional[str] = ..., num_turns: _Optional[int] = ..., num_tokens: _Optional[int] = ..., orphan: bool = ..., num_rewinds: _Optional[int] = ...) -> None: ...
