"""Messages that cost their sender little and a careless server much; each must be refused at once.

Two kinds: `LIST`, written by hand, and `entries`, made by descriptor: as many empty entries as a message may carry, in
every repeated field of every method.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from specdec.protocol.limits import ITEM_COUNT_MAX
from specdec.rpc.limits import MESSAGE_BYTES_MIN, MESSAGE_BYTES_SOFT, STREAM_REQUEST_BYTES_MAX
from specdec.v1 import coordinator_service_pb2 as pb
from specdec.v1 import draft_service_pb2 as draft_pb
from specdec.v1 import open_item_pb2 as open_item_pb
from specdec.v1 import target_service_pb2 as target_pb
from tests.chaos.traffic import DRAFT, GENERATE, VERIFY
from tests.chaos.wire import BYTES, VARINT, varint

HELPERS = {
    "health": "/grpc.health.v1.Health/Check",
    "health watch": "/grpc.health.v1.Health/Watch",
    "reflection": "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
}
GROUP, UNKNOWN = varint(1007 << 3 | 3), varint(1007 << 3) + b"\1"
MANY = MESSAGE_BYTES_MIN - 64  # bytes: with a frame around them they are just taken
REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNIMPLEMENTED)
NUMBERS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_MESSAGE)  # all others


@dataclass(frozen=True, slots=True)
class Bomb:
    """One message to a method of a service (`coordinator`, `target`, `draft`). `is_item`: a bad item in a stream, which
    is answered by an item or ends the stream; `is_valid`: it stays valid and is measured only; otherwise the call must
    end with one of REFUSALS."""

    name: str
    service: str
    method: str
    data: bytes
    is_item: bool = False
    is_valid: bool = False
    is_compressed: bool = False


def request(**changed: Any) -> bytes:
    """A valid Generate of one token with these fields changed; `sampling` adds to it."""
    sampling = {"max_tokens": 1, **changed.pop("sampling", {})}
    fields: dict[str, Any] = {"token_ids": {"ids": [1]}, "sampling": sampling, **changed}
    return pb.GenerateRequest(**fields).SerializeToString()


def opened(length_max: int = 9, **changed: Any) -> open_item_pb.OpenItem:
    """A valid Open with these sampling parameters changed."""
    params = dict(rule=3, seed=1, prompt_length=1, sampling=changed)
    return open_item_pb.OpenItem(session=1, incarnation=1, length_max=length_max, vocabulary_size=7, params=params)


def framed(field: FieldDescriptor, inner: bytes) -> bytes:
    """A length-delimited field."""
    return varint(field.number << 3 | BYTES) + varint(len(inner)) + inner


def paths(message: Descriptor, above: tuple[FieldDescriptor, ...] = ()) -> Iterator[tuple[FieldDescriptor, ...]]:
    """The paths of all repeated fields of a message and its parts, and of its fields that are messages."""
    for field in message.fields:
        if field.is_repeated or field.message_type is not None:
            yield (*above, field)
        if field.message_type is not None:
            yield from paths(field.message_type, (*above, field))


def hollow(message: Descriptor) -> Iterator[tuple[str, bytes]]:
    """Names and bytes of the parts that a message can have, each empty but for one part of its own: the parser makes
    most of them for a byte."""
    for field in message.fields:
        if field.message_type is not None:
            yield field.name, framed(field, b"")
            yield from ((f"{field.name}.{name}", framed(field, data)) for name, data in hollow(field.message_type))


def entries(service: str, method: str, message: Descriptor, size: int) -> Iterator[Bomb]:
    """One message for each path, of `size` bytes of empty entries; numbers packed and each for itself, entries with
    parts also with each empty part."""
    for path in paths(message):
        last, name = path[-1], ".".join(field.name for field in path)
        forms = {"empty": framed(last, b"")}
        if last.is_repeated and last.type not in NUMBERS:
            forms = {"single": varint(last.number << 3 | VARINT) + b"\1", "packed": b"\1"}
        elif last.is_repeated and last.message_type is not None:
            forms |= {f"with {part}": framed(last, data) for part, data in hollow(last.message_type)}
        for form, entry in forms.items():
            data = entry * (size // len(entry))
            for field in reversed(path if form == "packed" else path[:-1]):
                data = framed(field, data)
            yield Bomb(f"{name}, {form}", service, method, data, len(path) > 1, path[0].name == "stamp")


def by_hand() -> Iterator[Bomb]:
    """The bombs that are not entries."""
    requests = {
        "groups in groups, 10,000 deep": GROUP * 10_000,
        "4 MB of groups": (GROUP + varint(1007 << 3 | 4)) * (MANY // 4),
        "4 MB of unknown fields": UNKNOWN * (MANY // 3),
        "a message above 4 MiB": request(text="<1>" * (MANY // 2)),
        "4 MB of text": pb.GenerateRequest(text="<1>" * (MANY // 3)).SerializeToString(),
        "4 MB that are not UTF-8": b"\x0a" + varint(MANY) + b"\xff" * MANY,
        "a length beyond the end": b"\x0a" + varint(2**63),
        "no prompt": b"",
        "empty text": pb.GenerateRequest(text="").SerializeToString(),
        "no ids": pb.GenerateRequest(token_ids={}).SerializeToString(),
        "an id out of range": request(token_ids={"ids": [2**32 - 1]}),
        "4 billion tokens": request(sampling={"max_tokens": 2**32 - 1}),
        "NaN temperature": request(sampling={"temperature": math.nan}),
        "infinite bias": request(sampling={"logit_bias": [{"token_id": 1, "bias": math.inf}]}),
        "1025 biases": request(sampling={"logit_bias": [{"token_id": 1}] * 1025}),
        "a stop string of 4 MB": request(sampling={"stop": ["x" * (MANY - 64)]}),
        "17 stop strings": request(sampling={"stop": ["x"] * 17}),
        "a stop token out of range": request(sampling={"stop_token_ids": [2**31]}),
        "a label of 4 MB": request(label="x" * (MANY - 64)),
        "a salt of 4 MB": request(cache_salt="x" * (MANY - 64)),
        "21 log-probabilities": request(sampling={"logprobs": 21}),
        "70,000 texts": request(sampling={"n": 70_000}),
    }
    for name, data in requests.items():
        yield Bomb(name, "coordinator", GENERATE, data)
    yield Bomb("gzip", "coordinator", GENERATE, bytes(MANY), is_compressed=True)
    items = {
        "an Open with NaN": {"open": opened(temperature=math.nan)},
        "an Open of 1025 biases": {"open": opened(logit_bias=[{"token_id": 1}] * 1025)},
        "an Open for 4 billion tokens": {"open": opened(length_max=2**32 - 1)},
        "an Extend of 2049 tokens": {"extend": {"session": 1, "incarnation": 1, "token_ids": [1] * 2049}},
        "an empty item": {},
    }
    as_many = [{}] * ITEM_COUNT_MAX
    streams = (("target", VERIFY, target_pb.VerifyRequest), ("draft", DRAFT, draft_pb.DraftRequest))
    for service, method, message in streams:
        for name, item in items.items():
            yield Bomb(name, service, method, message(items=[item]).SerializeToString(), is_item=True)
        yield Bomb("1,024 empty items", service, method, message(items=as_many).SerializeToString(), is_item=True)
        yield Bomb("4 MB of items", service, method, b"\x12\x00" * (MANY // 2))
        yield Bomb("unknown fields, then garbage", service, method, UNKNOWN * 100_000 + b"\xff")
    for service in ("coordinator", "target", "draft"):
        yield Bomb("4 MB to Describe", service, f"/specdec.v1.{service.title()}Service/Describe", UNKNOWN * (MANY // 3))


def to_helpers() -> Iterator[Bomb]:
    """Bombs to the services that every server has: health and reflection."""
    for service in ("coordinator", "target", "draft"):
        largest = MANY if service == "coordinator" else STREAM_REQUEST_BYTES_MAX - 256
        for name, method in HELPERS.items():
            yield Bomb(
                f"a name of {largest:,} bytes to {name}", service, method, b"\x0a" + varint(largest) + b"x" * largest
            )
            yield Bomb(f"unknown fields to {name}", service, method, UNKNOWN * (largest // len(UNKNOWN)))
            yield Bomb(f"groups in groups to {name}", service, method, GROUP * (largest // len(GROUP)))


def all_bombs() -> list[Bomb]:
    """Every bomb. To a stream as large as one may be, whose fields are counted before it is parsed, and those of which
    the parser makes most also as large as one may be that is not counted."""
    largest = STREAM_REQUEST_BYTES_MAX - 256
    streams = (
        ("target", VERIFY, target_pb.VerifyRequest.DESCRIPTOR),
        ("draft", DRAFT, draft_pb.DraftRequest.DESCRIPTOR),
    )
    return [
        *by_hand(),
        *to_helpers(),
        *entries("coordinator", GENERATE, pb.GenerateRequest.DESCRIPTOR, MANY),
        *(bomb for stream in streams for bomb in entries(*stream, largest)),
        *(
            bomb
            for stream in streams
            for bomb in entries(*stream, MESSAGE_BYTES_SOFT)
            if bomb.name.startswith("items,")
        ),
    ]
