"""The number of fields, and the sizes of strings and packed numbers, in the bytes of a message that is not yet parsed.

Two bytes are enough for an empty entry, and the parser makes an object of some forty from it: a request of 4 MB would
hold the event loop for 80 ms and take 100 MB before the first of its counts could be checked; one string of
4 MB, 40 ms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from specdec.errors import InvalidRequest
from specdec.protocol.limits import Limit
from specdec.rpc.limits import (
    BYTES_PER_PART_MIN,
    MESSAGE_BYTES_SOFT,
    PACKED_BYTES_MAX,
    PART_COUNT_FREE,
    REQUEST_FIELD_COUNT_MAX,
    STAMP_BYTES_MAX,
)
from specdec.rpc.wire_fields import FIELD_LIMITS

_FIXED_SIZES = {1: 8, 5: 4}
_LENGTH_DELIMITED = 2
_SIZED = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
_UNLIMITED = Limit("", math.inf, "of another protocol", is_bytes=True)
_CHARACTER_BYTES = 4  # at most, in UTF-8
_ZERO_COUNT_MAX = 256  # of a message that is not walked: an empty part is two bytes, its tag and a zero


def check_field_count(message: Descriptor, data: bytes, bytes_max: Mapping[str, float] | None = None) -> None:
    """Raises InvalidRequest, naming a field, if a message and its parts have more than REQUEST_FIELD_COUNT_MAX fields
    on the wire, more parts than PART_COUNT_FREE and its size allow, more than PACKED_BYTES_MAX bytes of packed numbers,
    or a string far beyond its limit in the table, or beyond that of `bytes_max` (by `Message.field`). Malformed bytes
    are left to the parser."""
    _Walk(data, bytes_max or {}).count(_fields(message), 0, len(data), "")


def check_large(message_class: type[Message], data: bytes) -> None:
    """Raises InvalidRequest for a message of a stream that is larger than several items together may be, as
    `check_field_count` does, and for another that has more parts than its size allows. All else in it concerns one item
    only; few zeros are few empty parts, so most are not walked."""
    if len(data) > MESSAGE_BYTES_SOFT + STAMP_BYTES_MAX:
        check_field_count(message_class.DESCRIPTOR, data)
    elif data.count(0) > _ZERO_COUNT_MAX:
        _Walk(data, None).count(_fields(message_class.DESCRIPTOR), 0, len(data), "")


@dataclass(frozen=True, slots=True)
class _Field:
    """A field as the walk needs it. `part`: its message; `key`, `bytes_max` and `limit` (in words): of a string;
    neither: numbers."""

    name: str
    part: Descriptor | None
    key: str
    bytes_max: float | None
    limit: str


@cache
def _fields(message: Descriptor) -> dict[int, _Field]:
    """The fields of a message by number, read once: descriptors are slow to ask."""
    return {field.number: _field(message, field) for field in message.fields}


def _field(message: Descriptor, field: FieldDescriptor) -> _Field:
    choice = field.containing_oneof  # of a request: "prompt.text"; an optional field is the only one of its own
    is_of_request = choice is not None and len(choice.fields) > 1 and message.name == "GenerateRequest"
    name = f"{choice.name}.{field.name}" if is_of_request else field.name
    key = f"{message.name}.{field.name}" + "[]" * field.is_repeated
    if field.type not in _SIZED:
        return _Field(name, field.message_type, key, None, "")
    size = FIELD_LIMITS.get(key, _UNLIMITED)
    if size.is_bytes:
        return _Field(name, None, key, size.high, f"at most {size.high} bytes")
    return _Field(name, None, key, _CHARACTER_BYTES * size.high, f"at most {size.high} characters")


class _Walk:
    """One walk over the fields of a message; with `bytes_max` None it counts parts only. `fields_left`, `parts_left`,
    `bytes_left`: how many more fields, parts and packed bytes."""

    def __init__(self, data: bytes, bytes_max: Mapping[str, float] | None) -> None:
        self._data, self._bytes_max = data, bytes_max
        self._fields_left = REQUEST_FIELD_COUNT_MAX if bytes_max is not None else len(data)
        self._bytes_left = PACKED_BYTES_MAX
        self._parts_left = PART_COUNT_FREE + len(data) // BYTES_PER_PART_MIN

    def count(self, fields: dict[int, _Field], at: int, end: int, path: str) -> None:
        """Counts the fields in data[at:end]; stops at malformed bytes."""
        data = self._data
        while at < end:
            tag, at = (data[at], at + 1) if data[at] < 128 else _varint(data, at, end)
            wire_type, field = tag & 7, fields.get(tag >> 3)
            self._fields_left -= 1
            if self._fields_left < 0:
                limit = f"at most {REQUEST_FIELD_COUNT_MAX} fields with those of its parts; send token ids packed"
                raise InvalidRequest(path + (field.name if field else f"field {tag >> 3}"), "one field too many", limit)
            if wire_type == _LENGTH_DELIMITED:
                size, at = (data[at], at + 1) if at < end and data[at] < 128 else _varint(data, at, end)
                if field is None:
                    pass
                elif field.part is None:
                    self._check_size(field, size, path)
                else:
                    self._parts_left -= 1
                    if self._parts_left < 0:
                        most = PART_COUNT_FREE + len(data) // BYTES_PER_PART_MIN
                        limit = f"at most {most} parts in a message of {len(data)} bytes"
                        raise InvalidRequest(path + field.name, "one part too many", limit)
                    if size:
                        self.count(_fields(field.part), at, min(end, at + size), f"{path}{field.name}.")
                at += size
            elif wire_type == 0:
                _, at = _varint(data, at, end)
            else:
                at += _FIXED_SIZES.get(wire_type, 0)  # a group's own fields follow its tag

    def _check_size(self, field: _Field, size: int, path: str) -> None:
        """Checks the size of a string, or counts one of packed numbers."""
        if self._bytes_max is None:
            return
        if field.bytes_max is not None:
            high, limit = field.bytes_max, field.limit
            if field.key in self._bytes_max:
                high = self._bytes_max[field.key]
                limit = f"at most {high} bytes"
        else:
            self._bytes_left -= size
            high, limit = size + self._bytes_left, f"at most {PACKED_BYTES_MAX} bytes with the other lists of numbers"
        if size > high:
            raise InvalidRequest(path + field.name, f"{size} bytes", limit)


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Returns a number and the place after it; (0, end) if it does not end before."""
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    return 0, end
