"""The memory that parsing a message takes, before any of its items is read."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from specdec.errors import InvalidRequest
from specdec.rpc.field_count import check_field_count, check_large
from specdec.rpc.limits import MESSAGE_BYTES_MIN, MESSAGE_BYTES_SOFT
from specdec.v1 import coordinator_service_pb2 as coordinator_pb
from specdec.v1 import draft_service_pb2 as draft_pb
from specdec.v1 import target_service_pb2 as target_pb
from tests.chaos.bomb_list import entries

HELD_PER_BYTE_MAX, SMALL_HELD_BYTES_MAX = 20, 50_000


class Allocations(ctypes.Structure):
    """`struct mallinfo2` of the C library."""

    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


def held_bytes(message_class: Any, data: bytes) -> int:
    """What the C library has allocated more while a parsed message is held: its memory, without Python's own."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = Allocations
    before = library.mallinfo2()
    message = message_class.FromString(data)
    after = library.mallinfo2()
    del message
    return int(after.uordblks + after.hblkhd - before.uordblks - before.hblkhd)


def check_request(message_class: Any, data: bytes) -> None:
    """As a server checks each request."""
    check_field_count(message_class.DESCRIPTOR, data)


STREAM_SIZES = 1024, 4096, MESSAGE_BYTES_SOFT, 2 * MESSAGE_BYTES_SOFT
METHODS = (
    (coordinator_pb.GenerateRequest, check_request, (4096, MESSAGE_BYTES_SOFT, MESSAGE_BYTES_MIN)),
    (target_pb.VerifyRequest, check_large, STREAM_SIZES),
    (target_pb.VerifyResponse, check_large, STREAM_SIZES),
    (draft_pb.DraftRequest, check_large, STREAM_SIZES),
    (draft_pb.DraftResponse, check_large, STREAM_SIZES),
)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="this C library does not count allocations")
@pytest.mark.parametrize("message_class, check, sizes", METHODS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_parser_makes_little_of_what_passes(message_class: Any, check: Any, sizes: tuple[int, ...]) -> None:
    """Claim: of a message that passes the check before it is parsed, the parser makes 20 bytes a byte at most, or 50
    kB: the parts of small messages of a stream are not counted, since that would take as long as reading them.

    Source: 4 MB of empty entries took 100 MB before their number was checked. Conclusive: allocations are counted, of
    empty entries in every repeated field, and of entries with each empty part, which cost most for a byte.
    """
    refused, most = 0, 0.0
    for size in sizes:
        for bomb in entries("", "", message_class.DESCRIPTOR, size - 64):
            try:
                check(message_class, bomb.data)
                held = held_bytes(message_class, bomb.data)
            except (InvalidRequest, DecodeError):
                refused += 1
                continue
            assert held <= max(SMALL_HELD_BYTES_MAX, HELD_PER_BYTE_MAX * len(bomb.data)), (bomb.name, size, held)
            most = max(most, held / len(bomb.data))
    assert refused and most > 1
