"""Mutations of real messages by descriptor: each changes one field, or the bytes, in a way that a sender could.

`Mutator.mutate` takes a message as recorded and returns bytes with the names of what was changed; equal seeds give
equal bytes.
"""

from __future__ import annotations

import math
import random
import struct
from collections import Counter
from collections.abc import Callable, Sequence

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from tests.chaos.wire import BYTES, FIXED32, FIXED64, VARINT, Node, fields_below, key_of, varint, write, written

NUMBERS = (0, 1, 2, 63, 64, 65, 127, 128, 1024, 1025, 2048, 2049, 2**16, 2**24, 2**24 + 1)
NUMBERS += (2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
FLOATS = (
    math.nan,
    -math.nan,
    math.inf,
    -math.inf,
    -0.0,
    5e-324,
    1e308,
    -1e308,
    0.001,
    0.01,
    1.0,
    1.0000001,
    -1.0,
    100.1,
)
COUNTS, COUNTS_LONG = (2, 17, 65, 66, 129), (1025, 2049, 20_000)
SIZES, SIZES_LONG = (129, 257, 1025), (4097, 70_000)
LONG_SHARE = 0.03  # of the fields made too long; long ones cost most of the time
LONG_BYTES = 4096  # of a field that is not made longer still
BAD_TEXTS = (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"a\xe2\x82", b"\x80" * 20)
DOUBLE, FLOAT = FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT
NEST_DEPTH = 150  # beyond the depth that parsers of protobuf allow
CHANGES_MAX = 3  # of one message, unless told


def wire_type_of(field: FieldDescriptor) -> int:
    """The wire type of one value of a field."""
    if field.type in (DOUBLE, FieldDescriptor.TYPE_FIXED64):
        return FIXED64
    if field.type == FLOAT:
        return FIXED32
    return BYTES if field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES) else VARINT


class Mutator:
    """A source of mutated messages of one kind, each with `changes_max` changes at most. `donors`: fields of other
    messages, to be copied into these."""

    def __init__(self, message: Descriptor, donors: Sequence[Node], seed: int, changes_max: int = CHANGES_MAX) -> None:
        self._changes_max = changes_max
        self.fields = fields_below(message)
        self.field_counts: Counter[str] = Counter()
        self._filled: Counter[str] = Counter()
        self.kind_counts: Counter[str] = Counter()
        self._message = message
        self._donors = donors
        self._random = random.Random(seed)
        self._repeated: set[int] = set()  # ids of nodes that are there many times: longer too, they were gigabytes
        self._kinds: tuple[tuple[str, Callable[[list[Node], Descriptor], str]], ...] = (
            ("drop", self._drop),
            ("duplicate", self._duplicate),
            ("reorder", self._reorder),
            ("extreme number", self._number),
            ("not a number", self._float),
            ("too long", self._lengthen),
            ("wire type", self._wire_type),
            ("unknown field", self._unknown),
            ("other of a oneof", self._swap),
            ("invalid UTF-8", self._text),
            ("nested groups", self._nest),
            ("field of another message", self._graft),
            ("absent field set", self._fill),
            ("emptied", self._empty),
        )

    def mutate(self, message: Sequence[Node]) -> bytes:
        """The bytes of a message after one to `changes_max` changes of its fields, or after a change of its bytes."""
        nodes = [node.copy() for node in message]
        self._repeated.clear()
        if self._random.random() < 0.06:
            return self._damaged(write(nodes))
        for _ in range(1 + self._random.randrange(self._changes_max)):
            while not self._change(nodes):
                pass
        return write(nodes)

    def _change(self, nodes: list[Node]) -> bool:
        """Makes one change at a place drawn among the message and its parts; False if there is nothing to change."""
        name, kind = self._random.choice(self._kinds)
        part, descriptor = self._part(nodes, self._message)
        key = kind(part, descriptor)
        if key:
            self.field_counts[key] += 1
            self.kind_counts[name] += 1
        return bool(key)

    def _part(self, nodes: list[Node], descriptor: Descriptor) -> tuple[list[Node], Descriptor]:
        """A message inside, or the message itself; the deeper of both half of the times."""
        inner = [node for node in nodes if isinstance(node.value, list) and node.known and node.known.message_type]
        inner = [node for node in inner if id(node) not in self._repeated]
        if not inner or self._random.random() < 0.25:
            return nodes, descriptor
        node = self._random.choice(inner)
        assert isinstance(node.value, list) and node.known is not None
        return self._part(node.value, node.known.message_type)

    def _damaged(self, data: bytes) -> bytes:
        """Bytes cut, flipped, or with a varint or a length that goes on beyond the end."""
        self.kind_counts["bytes"] += 1
        choice, at = self._random.randrange(5), self._random.randrange(len(data) + 1)
        if choice == 0:
            return data[:at]
        if choice == 1:
            return data + b"\x80" * self._random.randrange(1, 12)
        if choice == 2:
            return data + varint(self._random.randrange(1, 8) << 3 | BYTES) + varint(self._random.choice(NUMBERS))
        if choice == 3:
            return data[:at] + self._random.randbytes(self._random.randrange(1, 9)) + data[at:]
        changed = bytearray(data)
        for _ in range(min(len(data), 3)):
            changed[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        return bytes(changed)

    def _one(self, nodes: list[Node], *wire_types: int) -> Node | None:
        found = [node for node in nodes if not wire_types or node.wire_type in wire_types]
        return self._random.choice(found) if found else None

    def _drop(self, nodes: list[Node], _: Descriptor) -> str:
        node = self._one(nodes)
        if node is None:
            return ""
        nodes.remove(node)
        return node.key

    def _duplicate(self, nodes: list[Node], _: Descriptor) -> str:
        node = self._one(nodes)
        if node is None:
            return ""
        nodes.insert(self._random.randrange(len(nodes) + 1), node.copy())
        return node.key

    def _reorder(self, nodes: list[Node], _: Descriptor) -> str:
        self._random.shuffle(nodes)
        return nodes[0].key if len(nodes) > 1 else ""

    def _number(self, nodes: list[Node], _: Descriptor) -> str:
        node = self._one(nodes, VARINT, FIXED64, FIXED32)
        if node is None:
            return ""
        drawn = self._random.choice(NUMBERS)
        near = node.value + self._random.choice((-2, -1, 1, 2)) if isinstance(node.value, int) else drawn
        node.value = self._random.choice((drawn, drawn, near))
        return node.key

    def _float(self, nodes: list[Node], _: Descriptor) -> str:
        found = [node for node in nodes if node.known is not None and node.known.type in (DOUBLE, FLOAT)]
        if not found:
            return ""
        node = self._random.choice(found)
        value, is_double = self._random.choice(FLOATS), node.wire_type == FIXED64
        packed = struct.pack("<d", value) if is_double else struct.pack("<f", max(-3e38, min(3e38, value)))
        node.value = int.from_bytes(packed, "little")
        return node.key

    def _lengthen(self, nodes: list[Node], _: Descriptor) -> str:
        node = self._one(nodes)
        if node is None:
            return ""
        is_long = self._random.random() < LONG_SHARE
        size = self._random.choice(SIZES_LONG if is_long else SIZES)
        count = self._random.choice(COUNTS_LONG if is_long else COUNTS)
        if len(written(node)) > LONG_BYTES or id(node) in self._repeated:
            return ""
        if not isinstance(node.value, bytes):
            nodes.extend([node] * count)
            self._repeated.add(id(node))
        elif self._is_list(node):
            node.value = (node.value or b"\x01") * count
        else:
            node.value = (node.value or b"x") * (1 + size // max(1, len(node.value)))
        return node.key

    @staticmethod
    def _is_list(node: Node) -> bool:
        return node.known is not None and node.known.is_repeated

    def _wire_type(self, nodes: list[Node], _: Descriptor) -> str:
        node = self._one(nodes)
        if node is None:
            return ""
        node.wire_type = self._random.choice([kind for kind in range(8) if kind != node.wire_type])
        return node.key

    def _unknown(self, nodes: list[Node], _: Descriptor) -> str:
        number = self._random.choice((15, 16, 99, 1007, 18_999, 2**29 - 1))
        wire_type = self._random.choice((VARINT, FIXED64, BYTES, FIXED32))
        value = self._random.randbytes(self._random.randrange(40)) if wire_type == BYTES else 1
        nodes.insert(self._random.randrange(len(nodes) + 1), Node(None, number, wire_type, value))
        return "unknown"

    def _swap(self, nodes: list[Node], descriptor: Descriptor) -> str:
        found = [node for node in nodes if node.known is not None and node.known.containing_oneof is not None]
        found = [node for node in found if node.known is not None and len(node.known.containing_oneof.fields) > 1]
        if not found:
            return ""
        node = self._random.choice(found)
        assert node.known is not None
        other = self._random.choice(node.known.containing_oneof.fields)
        swapped = Node(other, other.number, node.wire_type, node.copy().value)
        if self._random.random() < 0.5:
            nodes.append(swapped)  # both are there
        else:
            nodes[nodes.index(node)] = swapped
        return swapped.key

    def _text(self, nodes: list[Node], descriptor: Descriptor) -> str:
        texts = [field for field in descriptor.fields if field.type == FieldDescriptor.TYPE_STRING]
        if not texts:
            return ""
        field = self._random.choice(texts)
        nodes.append(Node(field, field.number, BYTES, b"text" + self._random.choice(BAD_TEXTS)))
        return nodes[-1].key

    def _nest(self, nodes: list[Node], descriptor: Descriptor) -> str:
        number = self._random.choice([field.number for field in descriptor.fields] + [1007])
        begin, end = varint(number << 3 | 3), varint(number << 3 | 4)
        depth = self._random.choice((1, 20, NEST_DEPTH))
        closed = self._random.choice((depth, depth, depth - 1))
        nodes.append(Node(descriptor.fields_by_number.get(number), number, 3, begin * (depth - 1) + end * closed))
        return nodes[-1].key

    def _graft(self, nodes: list[Node], descriptor: Descriptor) -> str:
        if not self._donors:
            return ""
        donor = self._random.choice(self._donors).copy()
        if self._random.random() < 0.5 and descriptor.fields:
            donor.number = self._random.choice(descriptor.fields).number
        donor.known = descriptor.fields_by_number.get(donor.number)
        nodes.append(donor)
        return donor.key

    def _fill(self, nodes: list[Node], descriptor: Descriptor) -> str:
        present = {node.number for node in nodes}
        absent = [field for field in descriptor.fields if field.number not in present]
        if not absent:
            return ""
        self._random.shuffle(absent)
        field = min(absent, key=lambda own: self._filled[key_of(own)])  # in turn: some are in no real message
        self._filled[key_of(field)] += 1
        nodes.append(self._made(field))
        return nodes[-1].key

    def _made(self, field: FieldDescriptor) -> Node:
        """A field with a drawn value; a message with a field or two."""
        if field.message_type is not None:
            inner: list[Node] = []
            for own in self._random.sample(list(field.message_type.fields), min(2, len(field.message_type.fields))):
                inner.append(self._made(own))
            return Node(field, field.number, BYTES, inner)
        wire_type = wire_type_of(field)
        if wire_type == BYTES:
            return Node(field, field.number, BYTES, b"x" * self._random.choice((0, 1, 8, 16, 129)))
        if field.type == DOUBLE:
            bits = int.from_bytes(struct.pack("<d", self._random.choice(FLOATS)), "little")
            return Node(field, field.number, FIXED64, bits)
        return Node(field, field.number, wire_type, self._random.choice(NUMBERS))

    def _empty(self, nodes: list[Node], _: Descriptor) -> str:
        node = self._one(nodes, BYTES)
        if node is None:
            return ""
        node.value = b""
        return node.key
