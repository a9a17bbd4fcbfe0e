"""The number of fields in the bytes of a message, counted before it is parsed.

Two bytes are enough for an empty entry, and the parser makes an object of some forty from it: a request of 4 MB would
hold the event loop for 80 ms and take 100 MB before the first of its counts could be checked.
"""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from specdec.errors import InvalidRequest
from specdec.rpc.limits import MESSAGE_BYTES_SOFT, REQUEST_FIELD_COUNT_MAX

_FIXED_SIZES = {1: 8, 5: 4}
_LENGTH_DELIMITED = 2


def check_field_count(message: Descriptor, data: bytes, count_max: int) -> None:
    """Raises InvalidRequest, naming a field, if a message and its parts have more than `count_max` fields on the wire.

    Malformed bytes are left to the parser. Packed numbers are one field, whatever their number.
    """
    _count(message, data, 0, len(data), "", count_max, count_max)


def check_large(message_class: type[Message], data: bytes) -> None:
    """Raises InvalidRequest for a message of a stream that is beyond what several items take together and has more
    fields than the largest single item."""
    if len(data) > 2 * MESSAGE_BYTES_SOFT:
        check_field_count(message_class.DESCRIPTOR, data, REQUEST_FIELD_COUNT_MAX)


def _count(message: Descriptor, data: bytes, at: int, end: int, path: str, left: int, count_max: int) -> int:
    """Returns how many of `left` fields remain after those in data[at:end]; stops at malformed bytes."""
    while at < end:
        tag, at = (data[at], at + 1) if data[at] < 128 else _varint(data, at, end)
        number, wire_type = tag >> 3, tag & 7
        field = message.fields_by_number.get(number)
        left -= 1
        if left < 0:
            name = f"{path}{field.name if field else f'field {number}'}"
            limit = f"at most {count_max} fields with those of its parts; send token ids packed"
            raise InvalidRequest(name, "one field too many", limit)
        if wire_type == _LENGTH_DELIMITED:
            size, at = (data[at], at + 1) if at < end and data[at] < 128 else _varint(data, at, end)
            if field is not None and field.message_type is not None:
                inner_end = min(end, at + size)
                left = _count(field.message_type, data, at, inner_end, f"{path}{field.name}.", left, count_max)
            at += size
        elif wire_type == 0:
            _, at = _varint(data, at, end)
        else:
            at += _FIXED_SIZES.get(wire_type, 0)  # a group's own fields follow its tag
    return left


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
