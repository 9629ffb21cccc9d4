from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ConnectRequest(_message.Message):
    __slots__ = ("protocol_version", "client")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    client: str
    def __init__(self, protocol_version: _Optional[int] = ..., client: _Optional[str] = ...) -> None: ...

class ConnectReply(_message.Message):
    __slots__ = ("protocol_version", "replica_id", "run", "model", "engine", "max_message_bytes", "limits", "policy_versions", "max_positions")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    replica_id: str
    run: str
    model: str
    engine: str
    max_message_bytes: int
    limits: Limits
    policy_versions: _containers.RepeatedScalarFieldContainer[int]
    max_positions: int
    def __init__(self, protocol_version: _Optional[int] = ..., replica_id: _Optional[str] = ..., run: _Optional[str] = ..., model: _Optional[str] = ..., engine: _Optional[str] = ..., max_message_bytes: _Optional[int] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., policy_versions: _Optional[_Iterable[int]] = ..., max_positions: _Optional[int] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("thread_budget", "answer_reserve", "max_threads", "max_depth", "max_turns")
    THREAD_BUDGET_FIELD_NUMBER: _ClassVar[int]
    ANSWER_RESERVE_FIELD_NUMBER: _ClassVar[int]
    MAX_THREADS_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    MAX_TURNS_FIELD_NUMBER: _ClassVar[int]
    thread_budget: int
    answer_reserve: int
    max_threads: int
    max_depth: int
    max_turns: int
    def __init__(self, thread_budget: _Optional[int] = ..., answer_reserve: _Optional[int] = ..., max_threads: _Optional[int] = ..., max_depth: _Optional[int] = ..., max_turns: _Optional[int] = ...) -> None: ...

class CallContext(_message.Message):
    __slots__ = ("episode_id", "thread_id", "expected_head", "idempotency_key")
    EPISODE_ID_FIELD_NUMBER: _ClassVar[int]
    THREAD_ID_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_HEAD_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    episode_id: str
    thread_id: str
    expected_head: int
    idempotency_key: str
    def __init__(self, episode_id: _Optional[str] = ..., thread_id: _Optional[str] = ..., expected_head: _Optional[int] = ..., idempotency_key: _Optional[str] = ...) -> None: ...

class Budget(_message.Message):
    __slots__ = ("tokens_used", "tokens_left", "turns_left", "threads_left", "reserve_reached")
    TOKENS_USED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_LEFT_FIELD_NUMBER: _ClassVar[int]
    TURNS_LEFT_FIELD_NUMBER: _ClassVar[int]
    THREADS_LEFT_FIELD_NUMBER: _ClassVar[int]
    RESERVE_REACHED_FIELD_NUMBER: _ClassVar[int]
    tokens_used: int
    tokens_left: int
    turns_left: int
    threads_left: int
    reserve_reached: bool
    def __init__(self, tokens_used: _Optional[int] = ..., tokens_left: _Optional[int] = ..., turns_left: _Optional[int] = ..., threads_left: _Optional[int] = ..., reserve_reached: bool = ...) -> None: ...

class OpenEpisodeRequest(_message.Message):
    __slots__ = ("episode_id", "group_id", "task_id", "limits", "primitives", "version_policy", "idempotency_key", "run")
    EPISODE_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    PRIMITIVES_FIELD_NUMBER: _ClassVar[int]
    VERSION_POLICY_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    episode_id: str
    group_id: str
    task_id: str
    limits: Limits
    primitives: _containers.RepeatedScalarFieldContainer[str]
    version_policy: str
    idempotency_key: str
    run: str
    def __init__(self, episode_id: _Optional[str] = ..., group_id: _Optional[str] = ..., task_id: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., primitives: _Optional[_Iterable[str]] = ..., version_policy: _Optional[str] = ..., idempotency_key: _Optional[str] = ..., run: _Optional[str] = ...) -> None: ...

class EpisodeEvent(_message.Message):
    __slots__ = ("queued", "opened", "closed")
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    queued: EpisodeQueued
    opened: EpisodeOpened
    closed: EpisodeClosed
    def __init__(self, queued: _Optional[_Union[EpisodeQueued, _Mapping]] = ..., opened: _Optional[_Union[EpisodeOpened, _Mapping]] = ..., closed: _Optional[_Union[EpisodeClosed, _Mapping]] = ...) -> None: ...

class EpisodeQueued(_message.Message):
    __slots__ = ("ahead", "kv_use")
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    KV_USE_FIELD_NUMBER: _ClassVar[int]
    ahead: int
    kv_use: float
    def __init__(self, ahead: _Optional[int] = ..., kv_use: _Optional[float] = ...) -> None: ...

class EpisodeOpened(_message.Message):
    __slots__ = ("episode_id", "root_thread", "head", "policy_version", "limits")
    EPISODE_ID_FIELD_NUMBER: _ClassVar[int]
    ROOT_THREAD_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    episode_id: str
    root_thread: str
    head: int
    policy_version: int
    limits: Limits
    def __init__(self, episode_id: _Optional[str] = ..., root_thread: _Optional[str] = ..., head: _Optional[int] = ..., policy_version: _Optional[int] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ...) -> None: ...

class EpisodeClosed(_message.Message):
    __slots__ = ("stop_reason",)
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    stop_reason: str
    def __init__(self, stop_reason: _Optional[str] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("role", "content", "name", "tool_call_id")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    name: str
    tool_call_id: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., name: _Optional[str] = ..., tool_call_id: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_p", "top_k", "stop", "seed", "structured")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    seed: int
    structured: StructuredOutput
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., seed: _Optional[int] = ..., structured: _Optional[_Union[StructuredOutput, _Mapping]] = ...) -> None: ...

class StructuredOutput(_message.Message):
    __slots__ = ("json_schema", "regex", "choice", "grammar")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    choice: Choice
    grammar: str
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[Choice, _Mapping]] = ..., grammar: _Optional[str] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("call", "messages", "tools_json", "sampling", "demonstration", "with_events")
    CALL_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DEMONSTRATION_FIELD_NUMBER: _ClassVar[int]
    WITH_EVENTS_FIELD_NUMBER: _ClassVar[int]
    call: CallContext
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    tools_json: str
    sampling: Sampling
    demonstration: str
    with_events: bool
    def __init__(self, call: _Optional[_Union[CallContext, _Mapping]] = ..., messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., tools_json: _Optional[str] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., demonstration: _Optional[str] = ..., with_events: bool = ...) -> None: ...

class GenerateEvent(_message.Message):
    __slots__ = ("delta", "turn")
    DELTA_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    delta: TokenDelta
    turn: TurnReply
    def __init__(self, delta: _Optional[_Union[TokenDelta, _Mapping]] = ..., turn: _Optional[_Union[TurnReply, _Mapping]] = ...) -> None: ...

class TokenDelta(_message.Message):
    __slots__ = ("token_ids", "logprobs", "text", "events")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    text: str
    events: _containers.RepeatedCompositeFieldContainer[ReplyEvent]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., text: _Optional[str] = ..., events: _Optional[_Iterable[_Union[ReplyEvent, _Mapping]]] = ...) -> None: ...

class ReplyEvent(_message.Message):
    __slots__ = ("text", "reasoning", "call_begun", "call_arguments", "call_finished", "all_was_reasoning")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    CALL_BEGUN_FIELD_NUMBER: _ClassVar[int]
    CALL_ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    CALL_FINISHED_FIELD_NUMBER: _ClassVar[int]
    ALL_WAS_REASONING_FIELD_NUMBER: _ClassVar[int]
    text: str
    reasoning: str
    call_begun: str
    call_arguments: str
    call_finished: ToolCall
    all_was_reasoning: str
    def __init__(self, text: _Optional[str] = ..., reasoning: _Optional[str] = ..., call_begun: _Optional[str] = ..., call_arguments: _Optional[str] = ..., call_finished: _Optional[_Union[ToolCall, _Mapping]] = ..., all_was_reasoning: _Optional[str] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("call_id", "name", "arguments_json", "error")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    call_id: str
    name: str
    arguments_json: str
    error: str
    def __init__(self, call_id: _Optional[str] = ..., name: _Optional[str] = ..., arguments_json: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class TurnReply(_message.Message):
    __slots__ = ("head", "step", "text", "reasoning", "tool_calls", "finish_reason", "budget", "policy_version", "num_tokens", "raw_text", "thread_ended")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RAW_TEXT_FIELD_NUMBER: _ClassVar[int]
    THREAD_ENDED_FIELD_NUMBER: _ClassVar[int]
    head: int
    step: int
    text: str
    reasoning: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    finish_reason: str
    budget: Budget
    policy_version: int
    num_tokens: int
    raw_text: str
    thread_ended: str
    def __init__(self, head: _Optional[int] = ..., step: _Optional[int] = ..., text: _Optional[str] = ..., reasoning: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., budget: _Optional[_Union[Budget, _Mapping]] = ..., policy_version: _Optional[int] = ..., num_tokens: _Optional[int] = ..., raw_text: _Optional[str] = ..., thread_ended: _Optional[str] = ...) -> None: ...

class Branch(_message.Message):
    __slots__ = ("thread_id", "prompt")
    THREAD_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    thread_id: str
    prompt: str
    def __init__(self, thread_id: _Optional[str] = ..., prompt: _Optional[str] = ...) -> None: ...

class ForkRequest(_message.Message):
    __slots__ = ("call", "branches")
    CALL_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    call: CallContext
    branches: _containers.RepeatedCompositeFieldContainer[Branch]
    def __init__(self, call: _Optional[_Union[CallContext, _Mapping]] = ..., branches: _Optional[_Iterable[_Union[Branch, _Mapping]]] = ...) -> None: ...

class ForkReply(_message.Message):
    __slots__ = ("head", "threads", "budget")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    head: int
    threads: _containers.RepeatedCompositeFieldContainer[ForkedThread]
    budget: Budget
    def __init__(self, head: _Optional[int] = ..., threads: _Optional[_Iterable[_Union[ForkedThread, _Mapping]]] = ..., budget: _Optional[_Union[Budget, _Mapping]] = ...) -> None: ...

class ForkedThread(_message.Message):
    __slots__ = ("thread_id", "head")
    THREAD_ID_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    thread_id: str
    head: int
    def __init__(self, thread_id: _Optional[str] = ..., head: _Optional[int] = ...) -> None: ...

class RewindRequest(_message.Message):
    __slots__ = ("call", "step", "note")
    CALL_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    call: CallContext
    step: int
    note: str
    def __init__(self, call: _Optional[_Union[CallContext, _Mapping]] = ..., step: _Optional[int] = ..., note: _Optional[str] = ...) -> None: ...

class RewindReply(_message.Message):
    __slots__ = ("head", "step", "tokens_returned", "cancelled_threads", "budget")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_RETURNED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_THREADS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    head: int
    step: int
    tokens_returned: int
    cancelled_threads: _containers.RepeatedScalarFieldContainer[str]
    budget: Budget
    def __init__(self, head: _Optional[int] = ..., step: _Optional[int] = ..., tokens_returned: _Optional[int] = ..., cancelled_threads: _Optional[_Iterable[str]] = ..., budget: _Optional[_Union[Budget, _Mapping]] = ...) -> None: ...

class ReadThreadRequest(_message.Message):
    __slots__ = ("call", "branch", "first_step", "last_step")
    CALL_FIELD_NUMBER: _ClassVar[int]
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    call: CallContext
    branch: str
    first_step: int
    last_step: int
    def __init__(self, call: _Optional[_Union[CallContext, _Mapping]] = ..., branch: _Optional[str] = ..., first_step: _Optional[int] = ..., last_step: _Optional[int] = ...) -> None: ...

class ReadThreadReply(_message.Message):
    __slots__ = ("head", "first_step", "last_step", "tokens_mounted", "next_position", "stub", "budget")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_MOUNTED_FIELD_NUMBER: _ClassVar[int]
    NEXT_POSITION_FIELD_NUMBER: _ClassVar[int]
    STUB_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    head: int
    first_step: int
    last_step: int
    tokens_mounted: int
    next_position: int
    stub: str
    budget: Budget
    def __init__(self, head: _Optional[int] = ..., first_step: _Optional[int] = ..., last_step: _Optional[int] = ..., tokens_mounted: _Optional[int] = ..., next_position: _Optional[int] = ..., stub: _Optional[str] = ..., budget: _Optional[_Union[Budget, _Mapping]] = ...) -> None: ...

class WaitRequest(_message.Message):
    __slots__ = ("call", "branches", "timeout_s")
    CALL_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    call: CallContext
    branches: _containers.RepeatedScalarFieldContainer[str]
    timeout_s: float
    def __init__(self, call: _Optional[_Union[CallContext, _Mapping]] = ..., branches: _Optional[_Iterable[str]] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class WaitEvent(_message.Message):
    __slots__ = ("ended", "reply")
    ENDED_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    ended: BranchResult
    reply: WaitReply
    def __init__(self, ended: _Optional[_Union[BranchResult, _Mapping]] = ..., reply: _Optional[_Union[WaitReply, _Mapping]] = ...) -> None: ...

class WaitReply(_message.Message):
    __slots__ = ("head", "results", "note", "budget")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    head: int
    results: _containers.RepeatedCompositeFieldContainer[BranchResult]
    note: str
    budget: Budget
    def __init__(self, head: _Optional[int] = ..., results: _Optional[_Iterable[_Union[BranchResult, _Mapping]]] = ..., note: _Optional[str] = ..., budget: _Optional[_Union[Budget, _Mapping]] = ...) -> None: ...

class BranchResult(_message.Message):
    __slots__ = ("thread_id", "status", "answer", "evidence", "summary", "steps")
    THREAD_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    thread_id: str
    status: str
    answer: str
    evidence: str
    summary: str
    steps: _containers.RepeatedCompositeFieldContainer[StepSummary]
    def __init__(self, thread_id: _Optional[str] = ..., status: _Optional[str] = ..., answer: _Optional[str] = ..., evidence: _Optional[str] = ..., summary: _Optional[str] = ..., steps: _Optional[_Iterable[_Union[StepSummary, _Mapping]]] = ...) -> None: ...

class StepSummary(_message.Message):
    __slots__ = ("step", "num_tokens", "summary")
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    step: int
    num_tokens: int
    summary: str
    def __init__(self, step: _Optional[int] = ..., num_tokens: _Optional[int] = ..., summary: _Optional[str] = ...) -> None: ...

class DoneRequest(_message.Message):
    __slots__ = ("call", "answer", "evidence")
    CALL_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    call: CallContext
    answer: str
    evidence: str
    def __init__(self, call: _Optional[_Union[CallContext, _Mapping]] = ..., answer: _Optional[str] = ..., evidence: _Optional[str] = ...) -> None: ...

class DoneReply(_message.Message):
    __slots__ = ("head", "status")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    head: int
    status: str
    def __init__(self, head: _Optional[int] = ..., status: _Optional[str] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("call", "reason")
    CALL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    call: CallContext
    reason: str
    def __init__(self, call: _Optional[_Union[CallContext, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class CancelReply(_message.Message):
    __slots__ = ("cancelled_threads",)
    CANCELLED_THREADS_FIELD_NUMBER: _ClassVar[int]
    cancelled_threads: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, cancelled_threads: _Optional[_Iterable[str]] = ...) -> None: ...

class CloseEpisodeRequest(_message.Message):
    __slots__ = ("episode_id", "reward", "error_kind", "error_message", "idempotency_key")
    EPISODE_ID_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    ERROR_KIND_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    episode_id: str
    reward: float
    error_kind: str
    error_message: str
    idempotency_key: str
    def __init__(self, episode_id: _Optional[str] = ..., reward: _Optional[float] = ..., error_kind: _Optional[str] = ..., error_message: _Optional[str] = ..., idempotency_key: _Optional[str] = ...) -> None: ...

class CloseEpisodeReply(_message.Message):
    __slots__ = ("stop_reason", "entry_id", "num_nodes", "num_tokens")
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    stop_reason: str
    entry_id: str
    num_nodes: int
    num_tokens: int
    def __init__(self, stop_reason: _Optional[str] = ..., entry_id: _Optional[str] = ..., num_nodes: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("replica_id", "run", "engine", "model", "open_episodes", "queued_episodes", "live_threads", "resident_cursors", "recurrent_slots", "tokens_resident", "tokens_capacity", "kv_use", "policy_versions", "uptime_s", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    OPEN_EPISODES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_EPISODES_FIELD_NUMBER: _ClassVar[int]
    LIVE_THREADS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_CURSORS_FIELD_NUMBER: _ClassVar[int]
    RECURRENT_SLOTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_RESIDENT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    KV_USE_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    run: str
    engine: str
    model: str
    open_episodes: int
    queued_episodes: int
    live_threads: int
    resident_cursors: int
    recurrent_slots: int
    tokens_resident: int
    tokens_capacity: int
    kv_use: float
    policy_versions: _containers.RepeatedScalarFieldContainer[int]
    uptime_s: float
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, replica_id: _Optional[str] = ..., run: _Optional[str] = ..., engine: _Optional[str] = ..., model: _Optional[str] = ..., open_episodes: _Optional[int] = ..., queued_episodes: _Optional[int] = ..., live_threads: _Optional[int] = ..., resident_cursors: _Optional[int] = ..., recurrent_slots: _Optional[int] = ..., tokens_resident: _Optional[int] = ..., tokens_capacity: _Optional[int] = ..., kv_use: _Optional[float] = ..., policy_versions: _Optional[_Iterable[int]] = ..., uptime_s: _Optional[float] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("kind", "message", "retryable", "episode_id", "thread_id", "value", "limit", "remedy", "head")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    EPISODE_ID_FIELD_NUMBER: _ClassVar[int]
    THREAD_ID_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    kind: str
    message: str
    retryable: bool
    episode_id: str
    thread_id: str
    value: str
    limit: str
    remedy: str
    head: int
    def __init__(self, kind: _Optional[str] = ..., message: _Optional[str] = ..., retryable: bool = ..., episode_id: _Optional[str] = ..., thread_id: _Optional[str] = ..., value: _Optional[str] = ..., limit: _Optional[str] = ..., remedy: _Optional[str] = ..., head: _Optional[int] = ...) -> None: ...
