"""What the proto files say of each field beside its type (field.proto): the limit that readers hold it to.

`FIELD_LIMITS` has it by `Message.field`, and that of the entries of a repeated field, or of numbers packed in bytes, by
`Message.field[]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import replace
from typing import TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from specdec.errors import InvalidRequest
from specdec.protocol.limits import LIMITS, Limit, check_integer, check_number
from specdec.v1 import coordinator_service_pb2 as coordinator_pb
from specdec.v1 import draft_service_pb2 as draft_pb
from specdec.v1 import field_pb2 as field_pb
from specdec.v1 import open_item_pb2 as open_item_pb
from specdec.v1 import target_service_pb2 as target_pb
from specdec.v1 import types_pb2 as types_pb

Value = TypeVar("Value", bound=Sized)


def bounded(field: str, value: Value, size_max: int) -> Value:
    """Returns a repeated field, a string or bytes as it is. Raises InvalidRequest if it has more than `size_max`
    entries, characters or bytes: it is counted before it is walked."""
    if len(value) > size_max:
        unit = {str: "characters", bytes: "bytes"}.get(type(value), "entries")
        raise InvalidRequest(field, len(value), f"at most {size_max} {unit}")
    return value


def _key(field: FieldDescriptor) -> str:
    return f"{field.containing_type.name}.{field.name}"


def _limits_of(message: Descriptor) -> Iterator[tuple[str, Limit]]:
    for field in message.fields:
        key, option = _key(field), field.GetOptions().Extensions[field_pb.wire]
        if option.HasField("high"):
            is_bytes = field.type == FieldDescriptor.TYPE_BYTES
            high = int(option.high) if option.high.is_integer() else option.high
            yield key, Limit(field.name, high, option.reason, low=option.low, is_bytes=is_bytes)
        elif option.limit:
            limit = LIMITS[option.limit]
            yield key, replace(limit, low=option.low) if option.HasField("low") else limit
        if option.each:
            yield f"{key}[]", LIMITS[option.each]


FIELD_LIMITS = {
    key: limit
    for file in (types_pb, coordinator_pb, open_item_pb, draft_pb, target_pb)
    for message in file.DESCRIPTOR.message_types_by_name.values()
    for key, limit in _limits_of(message)
}


def check_limits(message: Message, path: str = "") -> None:
    """Raises InvalidRequest for a number or size outside its limit, in the parts of a message too; an absent number is
    0. Token ids in it, and enums, are left to the reader."""
    for field in message.DESCRIPTOR.fields:
        name, value, limit = path + field.name, getattr(message, field.name), FIELD_LIMITS.get(_key(field))
        if limit is not None and isinstance(value, float):
            check_number(name, value, limit.low, limit.high)
        elif limit is not None and isinstance(value, int):
            check_integer(name, value, int(limit.low), int(limit.high))
        elif limit is not None:
            bounded(name, value, int(limit.high))
        for part in (value if field.is_repeated else (value,)) if field.message_type else ():
            check_limits(part, f"{name}.")
