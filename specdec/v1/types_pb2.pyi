from specdec.v1 import field_pb2 as _field_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Rule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RULE_UNSPECIFIED: _ClassVar[Rule]
    RULE_GREEDY: _ClassVar[Rule]
    RULE_REJECTION: _ClassVar[Rule]
    RULE_COUPLED: _ClassVar[Rule]

class DraftVocabulary(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAFT_VOCABULARY_EQUAL: _ClassVar[DraftVocabulary]
    DRAFT_VOCABULARY_SUBSET: _ClassVar[DraftVocabulary]
    DRAFT_VOCABULARY_MAPPED: _ClassVar[DraftVocabulary]
RULE_UNSPECIFIED: Rule
RULE_GREEDY: Rule
RULE_REJECTION: Rule
RULE_COUPLED: Rule
DRAFT_VOCABULARY_EQUAL: DraftVocabulary
DRAFT_VOCABULARY_SUBSET: DraftVocabulary
DRAFT_VOCABULARY_MAPPED: DraftVocabulary

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class DraftProbs(_message.Message):
    __slots__ = ("token_id_steps", "weight_codes")
    TOKEN_ID_STEPS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_CODES_FIELD_NUMBER: _ClassVar[int]
    token_id_steps: _containers.RepeatedScalarFieldContainer[int]
    weight_codes: bytes
    def __init__(self, token_id_steps: _Optional[_Iterable[int]] = ..., weight_codes: _Optional[bytes] = ...) -> None: ...

class TreeNode(_message.Message):
    __slots__ = ("node_id", "parent_back", "token_id", "branch", "draft_probs", "confidence")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_BACK_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PROBS_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    node_id: int
    parent_back: int
    token_id: int
    branch: bool
    draft_probs: DraftProbs
    confidence: int
    def __init__(self, node_id: _Optional[int] = ..., parent_back: _Optional[int] = ..., token_id: _Optional[int] = ..., branch: bool = ..., draft_probs: _Optional[_Union[DraftProbs, _Mapping]] = ..., confidence: _Optional[int] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("first_prompt_index", "token_ids", "logprobs", "ranks", "top_token_ids", "top_logprobs")
    FIRST_PROMPT_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    first_prompt_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, first_prompt_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., ranks: _Optional[_Iterable[int]] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class LinkStamp(_message.Message):
    __slots__ = ("sequence", "sent_time_us", "echo_sequence", "echo_held_us", "wall_time_us")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SENT_TIME_US_FIELD_NUMBER: _ClassVar[int]
    ECHO_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ECHO_HELD_US_FIELD_NUMBER: _ClassVar[int]
    WALL_TIME_US_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    sent_time_us: int
    echo_sequence: int
    echo_held_us: int
    wall_time_us: int
    def __init__(self, sequence: _Optional[int] = ..., sent_time_us: _Optional[int] = ..., echo_sequence: _Optional[int] = ..., echo_held_us: _Optional[int] = ..., wall_time_us: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("sessions", "load_thousandths")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    LOAD_THOUSANDTHS_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    load_thousandths: int
    def __init__(self, sessions: _Optional[int] = ..., load_thousandths: _Optional[int] = ...) -> None: ...

class TraceContext(_message.Message):
    __slots__ = ("trace_id", "span_id", "sampled", "detailed")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    SPAN_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    DETAILED_FIELD_NUMBER: _ClassVar[int]
    trace_id: bytes
    span_id: bytes
    sampled: bool
    detailed: bool
    def __init__(self, trace_id: _Optional[bytes] = ..., span_id: _Optional[bytes] = ..., sampled: bool = ..., detailed: bool = ...) -> None: ...

class ExtendItem(_message.Message):
    __slots__ = ("session", "incarnation", "start_position", "token_ids")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    START_POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    session: int
    incarnation: int
    start_position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session: _Optional[int] = ..., incarnation: _Optional[int] = ..., start_position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CloseItem(_message.Message):
    __slots__ = ("session", "incarnation")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    session: int
    incarnation: int
    def __init__(self, session: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class MissingTokensItem(_message.Message):
    __slots__ = ("session", "incarnation", "known_length", "unknown")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    KNOWN_LENGTH_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    session: int
    incarnation: int
    known_length: int
    unknown: bool
    def __init__(self, session: _Optional[int] = ..., incarnation: _Optional[int] = ..., known_length: _Optional[int] = ..., unknown: bool = ...) -> None: ...

class ErrorItem(_message.Message):
    __slots__ = ("session", "incarnation", "code", "reason", "message", "field", "retry_after_ms")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    session: int
    incarnation: int
    code: int
    reason: str
    message: str
    field: str
    retry_after_ms: int
    def __init__(self, session: _Optional[int] = ..., incarnation: _Optional[int] = ..., code: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("model_digest", "tokenizer_fingerprint", "model_name", "vocabulary_size", "positions_max", "numerics", "protocol_version", "end_token_ids", "cache", "step_times", "trace_service", "draft_vocabulary_size", "draft_vocabulary", "draft_vocabulary_share", "num_heads", "head_times", "instance", "encoder_positions_max", "beginning_token_ids", "head_passes_max", "head_pass_times")
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_MAX_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMES_FIELD_NUMBER: _ClassVar[int]
    TRACE_SERVICE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    DRAFT_VOCABULARY_SHARE_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_TIMES_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ENCODER_POSITIONS_MAX_FIELD_NUMBER: _ClassVar[int]
    BEGINNING_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HEAD_PASSES_MAX_FIELD_NUMBER: _ClassVar[int]
    HEAD_PASS_TIMES_FIELD_NUMBER: _ClassVar[int]
    model_digest: str
    tokenizer_fingerprint: str
    model_name: str
    vocabulary_size: int
    positions_max: int
    numerics: NumericsProfile
    protocol_version: int
    end_token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache: CacheSize
    step_times: _containers.RepeatedCompositeFieldContainer[StepTime]
    trace_service: str
    draft_vocabulary_size: int
    draft_vocabulary: DraftVocabulary
    draft_vocabulary_share: float
    num_heads: int
    head_times: _containers.RepeatedCompositeFieldContainer[StepTime]
    instance: str
    encoder_positions_max: int
    beginning_token_ids: _containers.RepeatedScalarFieldContainer[int]
    head_passes_max: int
    head_pass_times: _containers.RepeatedCompositeFieldContainer[StepTime]
    def __init__(self, model_digest: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., model_name: _Optional[str] = ..., vocabulary_size: _Optional[int] = ..., positions_max: _Optional[int] = ..., numerics: _Optional[_Union[NumericsProfile, _Mapping]] = ..., protocol_version: _Optional[int] = ..., end_token_ids: _Optional[_Iterable[int]] = ..., cache: _Optional[_Union[CacheSize, _Mapping]] = ..., step_times: _Optional[_Iterable[_Union[StepTime, _Mapping]]] = ..., trace_service: _Optional[str] = ..., draft_vocabulary_size: _Optional[int] = ..., draft_vocabulary: _Optional[_Union[DraftVocabulary, str]] = ..., draft_vocabulary_share: _Optional[float] = ..., num_heads: _Optional[int] = ..., head_times: _Optional[_Iterable[_Union[StepTime, _Mapping]]] = ..., instance: _Optional[str] = ..., encoder_positions_max: _Optional[int] = ..., beginning_token_ids: _Optional[_Iterable[int]] = ..., head_passes_max: _Optional[int] = ..., head_pass_times: _Optional[_Iterable[_Union[StepTime, _Mapping]]] = ...) -> None: ...

class StepTime(_message.Message):
    __slots__ = ("rows", "step_us")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    STEP_US_FIELD_NUMBER: _ClassVar[int]
    rows: int
    step_us: int
    def __init__(self, rows: _Optional[int] = ..., step_us: _Optional[int] = ...) -> None: ...

class CacheSize(_message.Message):
    __slots__ = ("block_count", "block_size", "bytes")
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    block_count: int
    block_size: int
    bytes: int
    def __init__(self, block_count: _Optional[int] = ..., block_size: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class NumericsProfile(_message.Message):
    __slots__ = ("dtype", "tensor_parallel_size", "device", "libraries")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    LIBRARIES_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    tensor_parallel_size: int
    device: str
    libraries: str
    def __init__(self, dtype: _Optional[str] = ..., tensor_parallel_size: _Optional[int] = ..., device: _Optional[str] = ..., libraries: _Optional[str] = ...) -> None: ...
