"""Messages as trees of their wire fields, read by descriptor and written back, so that a mutation can also break the
wire format itself: a field is a number, a wire type and a value, whatever the descriptor says of that number.
"""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.descriptor import Descriptor, FieldDescriptor

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
VARINT_BITS = 64


@dataclass(slots=True)
class Node:
    """One field on the wire. `value`: a number, bytes, or the fields of a message; `known`: its descriptor, if any."""

    known: FieldDescriptor | None
    number: int
    wire_type: int
    value: int | bytes | list[Node]

    def copy(self) -> Node:
        """A copy that shares no list."""
        value = [node.copy() for node in self.value] if isinstance(self.value, list) else self.value
        return Node(self.known, self.number, self.wire_type, value)

    @property
    def key(self) -> str:
        """`Message.field`, or the number of a field without descriptor."""
        return f"field {self.number}" if self.known is None else key_of(self.known)


def key_of(field: FieldDescriptor) -> str:
    """`Message.field`."""
    return f"{field.containing_type.name}.{field.name}"


def fields_below(message: Descriptor) -> dict[str, FieldDescriptor]:
    """All fields that a message can hold, in itself and in its parts, by key."""
    found: dict[str, FieldDescriptor] = {}
    for field in message.fields:
        found[key_of(field)] = field
        if field.message_type is not None:
            found |= fields_below(field.message_type)
    return found


def read(message: Descriptor, data: bytes) -> list[Node]:
    """The fields of a valid message without groups."""
    nodes, at = [], 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        known = message.fields_by_number.get(tag >> 3)
        wire_type = tag & 7
        value: int | bytes | list[Node]
        if wire_type == VARINT:
            value, at = _read_varint(data, at)
        elif wire_type == BYTES:
            size, at = _read_varint(data, at)
            value, at = data[at : at + size], at + size
            if known is not None and known.message_type is not None:
                value = read(known.message_type, value)
        else:
            size = 8 if wire_type == FIXED64 else 4
            value, at = int.from_bytes(data[at : at + size], "little"), at + size
        nodes.append(Node(known, tag >> 3, wire_type, value))
    return nodes


def write(nodes: list[Node]) -> bytes:
    """The bytes of fields, as they are: with a wrong wire type they are no valid message."""
    parts: list[bytes] = []
    last: Node | None = None
    for node in nodes:  # one that is there many times is the same object, written once
        parts.append(parts[-1] if node is last else written(node))
        last = node
    return b"".join(parts)


def written(node: Node) -> bytes:
    """The bytes of one field."""
    tag, value = varint(node.number << 3 | node.wire_type), node.value
    if isinstance(value, list):
        value = write(value)
    if isinstance(value, bytes):
        if node.wire_type == BYTES:
            return tag + varint(len(value)) + value
        return tag + value  # the content of another wire type
    if node.wire_type == VARINT:
        return tag + varint(value)
    if node.wire_type in (FIXED64, FIXED32):
        size = 8 if node.wire_type == FIXED64 else 4
        return tag + (value % (1 << 8 * size)).to_bytes(size, "little")
    return tag + varint(value)


def varint(value: int) -> bytes:
    """A number on the wire, cut to 64 bits."""
    value %= 1 << VARINT_BITS
    if value < 128:
        return bytes((value,))
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
