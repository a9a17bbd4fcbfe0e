from google.protobuf import descriptor_pb2 as _descriptor_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor
WIRE_FIELD_NUMBER: _ClassVar[int]
wire: _descriptor.FieldDescriptor

class Field(_message.Message):
    __slots__ = ("limit", "low", "high", "reason", "is_above_low", "is_zero_allowed", "each", "absent", "is_resolved")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    IS_ABOVE_LOW_FIELD_NUMBER: _ClassVar[int]
    IS_ZERO_ALLOWED_FIELD_NUMBER: _ClassVar[int]
    EACH_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    IS_RESOLVED_FIELD_NUMBER: _ClassVar[int]
    limit: str
    low: float
    high: float
    reason: str
    is_above_low: bool
    is_zero_allowed: bool
    each: str
    absent: float
    is_resolved: bool
    def __init__(self, limit: _Optional[str] = ..., low: _Optional[float] = ..., high: _Optional[float] = ..., reason: _Optional[str] = ..., is_above_low: bool = ..., is_zero_allowed: bool = ..., each: _Optional[str] = ..., absent: _Optional[float] = ..., is_resolved: bool = ...) -> None: ...
