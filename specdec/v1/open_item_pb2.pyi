from specdec.v1 import coordinator_service_pb2 as _coordinator_service_pb2
from specdec.v1 import field_pb2 as _field_pb2
from specdec.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ResolvedSamplingParams(_message.Message):
    __slots__ = ("rule", "seed", "stop_token_ids", "prompt_length", "sampling", "end_token_ids", "bad_word_token_ids", "bad_word_lengths", "encoder_length")
    RULE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORD_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORD_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    ENCODER_LENGTH_FIELD_NUMBER: _ClassVar[int]
    rule: _types_pb2.Rule
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_length: int
    sampling: _coordinator_service_pb2.SamplingParams
    end_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_word_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_word_lengths: _containers.RepeatedScalarFieldContainer[int]
    encoder_length: int
    def __init__(self, rule: _Optional[_Union[_types_pb2.Rule, str]] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., prompt_length: _Optional[int] = ..., sampling: _Optional[_Union[_coordinator_service_pb2.SamplingParams, _Mapping]] = ..., end_token_ids: _Optional[_Iterable[int]] = ..., bad_word_token_ids: _Optional[_Iterable[int]] = ..., bad_word_lengths: _Optional[_Iterable[int]] = ..., encoder_length: _Optional[int] = ...) -> None: ...

class OpenItem(_message.Message):
    __slots__ = ("session", "incarnation", "params", "length_max", "vocabulary_size", "trace", "cache_salt", "age_ms")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_MAX_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    session: int
    incarnation: int
    params: ResolvedSamplingParams
    length_max: int
    vocabulary_size: int
    trace: _types_pb2.TraceContext
    cache_salt: str
    age_ms: int
    def __init__(self, session: _Optional[int] = ..., incarnation: _Optional[int] = ..., params: _Optional[_Union[ResolvedSamplingParams, _Mapping]] = ..., length_max: _Optional[int] = ..., vocabulary_size: _Optional[int] = ..., trace: _Optional[_Union[_types_pb2.TraceContext, _Mapping]] = ..., cache_salt: _Optional[str] = ..., age_ms: _Optional[int] = ...) -> None: ...
