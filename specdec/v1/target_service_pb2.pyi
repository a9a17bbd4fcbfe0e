from specdec.v1 import field_pb2 as _field_pb2
from specdec.v1 import open_item_pb2 as _open_item_pb2
from specdec.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerifyRequest(_message.Message):
    __slots__ = ("stamp", "items")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    stamp: _types_pb2.LinkStamp
    items: _containers.RepeatedCompositeFieldContainer[VerifyRequestItem]
    def __init__(self, stamp: _Optional[_Union[_types_pb2.LinkStamp, _Mapping]] = ..., items: _Optional[_Iterable[_Union[VerifyRequestItem, _Mapping]]] = ...) -> None: ...

class VerifyRequestItem(_message.Message):
    __slots__ = ("open", "extend", "verify", "close")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    EXTEND_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    open: _open_item_pb2.OpenItem
    extend: _types_pb2.ExtendItem
    verify: VerifyItem
    close: _types_pb2.CloseItem
    def __init__(self, open: _Optional[_Union[_open_item_pb2.OpenItem, _Mapping]] = ..., extend: _Optional[_Union[_types_pb2.ExtendItem, _Mapping]] = ..., verify: _Optional[_Union[VerifyItem, _Mapping]] = ..., close: _Optional[_Union[_types_pb2.CloseItem, _Mapping]] = ...) -> None: ...

class VerifyItem(_message.Message):
    __slots__ = ("session", "incarnation", "round_index", "base_position", "suffix_token_ids", "draft_token_ids", "draft_probs", "trace", "parents", "want_heads", "prompt_logprobs_start", "head_window", "head_nodes_per_step", "head_siblings")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROUND_INDEX_FIELD_NUMBER: _ClassVar[int]
    BASE_POSITION_FIELD_NUMBER: _ClassVar[int]
    SUFFIX_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PROBS_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    WANT_HEADS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_START_FIELD_NUMBER: _ClassVar[int]
    HEAD_WINDOW_FIELD_NUMBER: _ClassVar[int]
    HEAD_NODES_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    HEAD_SIBLINGS_FIELD_NUMBER: _ClassVar[int]
    session: int
    incarnation: int
    round_index: int
    base_position: int
    suffix_token_ids: _containers.RepeatedScalarFieldContainer[int]
    draft_token_ids: _containers.RepeatedScalarFieldContainer[int]
    draft_probs: _containers.RepeatedCompositeFieldContainer[_types_pb2.DraftProbs]
    trace: _types_pb2.TraceContext
    parents: _containers.RepeatedScalarFieldContainer[int]
    want_heads: bool
    prompt_logprobs_start: int
    head_window: int
    head_nodes_per_step: int
    head_siblings: int
    def __init__(self, session: _Optional[int] = ..., incarnation: _Optional[int] = ..., round_index: _Optional[int] = ..., base_position: _Optional[int] = ..., suffix_token_ids: _Optional[_Iterable[int]] = ..., draft_token_ids: _Optional[_Iterable[int]] = ..., draft_probs: _Optional[_Iterable[_Union[_types_pb2.DraftProbs, _Mapping]]] = ..., trace: _Optional[_Union[_types_pb2.TraceContext, _Mapping]] = ..., parents: _Optional[_Iterable[int]] = ..., want_heads: bool = ..., prompt_logprobs_start: _Optional[int] = ..., head_window: _Optional[int] = ..., head_nodes_per_step: _Optional[int] = ..., head_siblings: _Optional[int] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("stamp", "items", "load")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    stamp: _types_pb2.LinkStamp
    items: _containers.RepeatedCompositeFieldContainer[VerifyResponseItem]
    load: _types_pb2.Load
    def __init__(self, stamp: _Optional[_Union[_types_pb2.LinkStamp, _Mapping]] = ..., items: _Optional[_Iterable[_Union[VerifyResponseItem, _Mapping]]] = ..., load: _Optional[_Union[_types_pb2.Load, _Mapping]] = ...) -> None: ...

class VerifyResponseItem(_message.Message):
    __slots__ = ("result", "missing_tokens", "error", "prompt_logprobs")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    MISSING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    result: VerificationResultItem
    missing_tokens: _types_pb2.MissingTokensItem
    error: _types_pb2.ErrorItem
    prompt_logprobs: PromptLogprobsItem
    def __init__(self, result: _Optional[_Union[VerificationResultItem, _Mapping]] = ..., missing_tokens: _Optional[_Union[_types_pb2.MissingTokensItem, _Mapping]] = ..., error: _Optional[_Union[_types_pb2.ErrorItem, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobsItem, _Mapping]] = ...) -> None: ...

class PromptLogprobsItem(_message.Message):
    __slots__ = ("session", "incarnation", "logprobs")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    session: int
    incarnation: int
    logprobs: _types_pb2.PromptLogprobs
    def __init__(self, session: _Optional[int] = ..., incarnation: _Optional[int] = ..., logprobs: _Optional[_Union[_types_pb2.PromptLogprobs, _Mapping]] = ...) -> None: ...

class VerificationResultItem(_message.Message):
    __slots__ = ("session", "incarnation", "round_index", "recovered_token_ids", "target_probs", "logprobs", "queue_us", "forward_us", "sampling_us", "step_rows", "step_sessions", "active_sessions", "cached_prompt_tokens", "step_count", "preemptions", "server_us", "head_token_ids", "head_confidences", "head_nodes", "head_us")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROUND_INDEX_FIELD_NUMBER: _ClassVar[int]
    RECOVERED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TARGET_PROBS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    FORWARD_US_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_US_FIELD_NUMBER: _ClassVar[int]
    STEP_ROWS_FIELD_NUMBER: _ClassVar[int]
    STEP_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNT_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    SERVER_US_FIELD_NUMBER: _ClassVar[int]
    HEAD_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HEAD_CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    HEAD_NODES_FIELD_NUMBER: _ClassVar[int]
    HEAD_US_FIELD_NUMBER: _ClassVar[int]
    session: int
    incarnation: int
    round_index: int
    recovered_token_ids: _containers.RepeatedScalarFieldContainer[int]
    target_probs: bytes
    logprobs: Logprobs
    queue_us: int
    forward_us: int
    sampling_us: int
    step_rows: int
    step_sessions: int
    active_sessions: int
    cached_prompt_tokens: int
    step_count: int
    preemptions: int
    server_us: int
    head_token_ids: _containers.RepeatedScalarFieldContainer[int]
    head_confidences: bytes
    head_nodes: _containers.RepeatedCompositeFieldContainer[_types_pb2.TreeNode]
    head_us: int
    def __init__(self, session: _Optional[int] = ..., incarnation: _Optional[int] = ..., round_index: _Optional[int] = ..., recovered_token_ids: _Optional[_Iterable[int]] = ..., target_probs: _Optional[bytes] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., queue_us: _Optional[int] = ..., forward_us: _Optional[int] = ..., sampling_us: _Optional[int] = ..., step_rows: _Optional[int] = ..., step_sessions: _Optional[int] = ..., active_sessions: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ..., step_count: _Optional[int] = ..., preemptions: _Optional[int] = ..., server_us: _Optional[int] = ..., head_token_ids: _Optional[_Iterable[int]] = ..., head_confidences: _Optional[bytes] = ..., head_nodes: _Optional[_Iterable[_Union[_types_pb2.TreeNode, _Mapping]]] = ..., head_us: _Optional[int] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("draft", "recovered", "top_token_ids", "top")
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    RECOVERED_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    draft: bytes
    recovered: bytes
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top: bytes
    def __init__(self, draft: _Optional[bytes] = ..., recovered: _Optional[bytes] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top: _Optional[bytes] = ...) -> None: ...
