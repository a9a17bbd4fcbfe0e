"""The limits of the wire: every field of the proto files has one, and the readers hold it to it.

Messages are built from valid ones by enlarging one field, so a refusal can have no other cause.
"""

from __future__ import annotations

import importlib
import math
import tracemalloc
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from specdec.errors import InvalidRequest
from specdec.protocol import items
from specdec.protocol.heads import HEAD_CANDIDATES, HEADS_MAX, HeadProposals
from specdec.protocol.limits import LIMITS, TOKENS_MAX, UINT32_MAX
from specdec.protocol.request import GenerationRequest
from specdec.protocol.types import (
    DraftNode,
    DraftProbs,
    PositionLogprobs,
    PromptLogprobs,
    ResolvedSamplingParams,
    Rule,
    SamplerOutput,
)
from specdec.rpc.convert import description_from_message
from specdec.rpc.convert_generate import request_from_message
from specdec.rpc.convert_items import item_from_message, item_to_bytes
from specdec.rpc.field_count import check_field_count
from specdec.rpc.limits import (
    CALLS,
    MESSAGE_BYTES_SOFT,
    PACKED_BYTES_MAX,
    STREAM_REQUEST_BYTES_MAX,
    STREAM_RESPONSE_BYTES_MAX,
)
from specdec.rpc.wire_fields import FIELD_LIMITS
from specdec.v1 import coordinator_service_pb2 as coordinator_pb
from specdec.v1 import draft_service_pb2 as draft_pb
from specdec.v1 import target_service_pb2 as target_pb
from specdec.v1 import types_pb2 as types_pb
from tests.hygiene.sources import ROOT

PROTO = ROOT / "proto"
FILES = tuple(
    importlib.import_module(".".join(path.relative_to(PROTO).with_suffix("").parts) + "_pb2")
    for path in sorted(PROTO.rglob("*.proto"))
    if path.name != "field.proto"  # says what the fields are, and never travels
)
NO_SIZE = (FieldDescriptor.TYPE_BOOL, FieldDescriptor.TYPE_ENUM, FieldDescriptor.TYPE_MESSAGE)
SIZED = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
LARGEST = {  # of the whole numbers that a peer chooses, by type
    FieldDescriptor.TYPE_UINT32: (1 << 32) - 1,
    FieldDescriptor.TYPE_INT32: (1 << 31) - 1,
    FieldDescriptor.TYPE_UINT64: (1 << 64) - 1,
    FieldDescriptor.TYPE_INT64: (1 << 63) - 1,
    FieldDescriptor.TYPE_FIXED64: (1 << 64) - 1,
}
POSITIONS_MAX = 100  # of the model in these tests: the limit of a request's token ids
OF_VOCABULARY = {  # token ids that a replica holds to its model's vocabulary, before it uses an item
    "ResolvedSamplingParams.stop_token_ids[]",
    "ResolvedSamplingParams.bad_word_token_ids[]",
    "SamplingParams.allowed_token_ids[]",
    "ExtendItem.token_ids[]",
    "VerifyItem.suffix_token_ids[]",
    "VerifyItem.draft_token_ids[]",
    "CommitItem.suffix_token_ids[]",
}
PACKED = {"VerificationResultItem.target_probs", "Logprobs.draft", "Logprobs.recovered", "Logprobs.top"}  # numbers
STREAM_LIMITS = ("items_bytes", "unhandled_bytes", "untaken_items", "messages_per_s")
OF_SERVERS = {
    f"Server.{what}"
    for what in (
        *("connections", "handshake_s", "idle_s", "pings_per_s"),
        *("calls_per_s", "waiting_calls", "wasted_calls_per_s"),
    )
}
MANY = 200_000
WALK_BYTES_MAX = 1 << 20  # reading 200,000 entries takes several times as much


def key_of(field: FieldDescriptor) -> str:
    return f"{field.containing_type.name}.{field.name}"


def with_nested(messages: Iterable[Descriptor]) -> Iterator[Descriptor]:
    """Messages and those declared in them: entries of maps too."""
    for message in messages:
        yield message
        yield from with_nested(message.nested_types)


def limited_fields() -> Iterator[str]:
    """Every field of the wire that must have a limit."""
    for file in FILES:
        for message in with_nested(file.DESCRIPTOR.message_types_by_name.values()):
            for field in message.fields:
                if field.is_repeated:
                    yield key_of(field)
                if key_of(field) in PACKED:
                    yield key_of(field) + "[]"
                if field.type not in NO_SIZE:
                    yield key_of(field) + ("[]" if field.is_repeated else "")


def test_every_field_has_a_limit() -> None:
    """Claim: each repeated, string, bytes and number field of every proto file has a limit with a name and a reason
    (style: a limit on everything, with a name and the reason for its value), and every limit by name is that of some
    field. Conclusive: the fields come from the files in `proto/`, so a new field without a limit fails, and so does a
    limit that no field has."""
    assert sorted(FIELD_LIMITS) == sorted(limited_fields())
    assert all(limit.name and limit.reason and limit.low <= limit.high for limit in FIELD_LIMITS.values())
    assert set(LIMITS) <= {limit.name for limit in FIELD_LIMITS.values()}


def limited_calls() -> Iterator[str]:
    """What must have a limit of every method that a server has: the size of a request and the number of calls; of our
    streams also the size of an answer and a silence, of the internal ones what is not handled and not taken."""
    for file in (*FILES, health_pb2, reflection_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                name = f"{service.name}/{method.name}"
                yield f"{name}.request_bytes"
                yield f"{name}.calls"
                if not method.server_streaming:
                    continue
                yield f"{name}.silence_s"
                if file is reflection_pb2:
                    continue
                if file is not health_pb2:
                    yield from (f"{name}.{what}" for what in ("response_bytes", "request_fields", "request_parts"))
                if method.client_streaming:
                    yield from (f"{name}.{what}" for what in STREAM_LIMITS)


def test_every_method_has_its_limits() -> None:
    """Claim: each method of the proto files, of health and of reflection has limits of sizes, numbers and times, in
    the same table. Conclusive: the methods come from the descriptors, so one without a limit fails, and so does a limit
    of a method that is gone."""
    more = {"CoordinatorService/Generate.request_packed_bytes"}
    more |= {f"{service}/Describe.response_bytes" for service in ("TargetService", "DraftService")}
    more |= OF_SERVERS | {
        "Server.metadata_bytes",
        "Probes.calls",
        "Probes.connection_s",
        "Probes.request_bytes",
    }
    named = [call for limit in CALLS for call in limit.field_names()]
    assert sorted(named) == sorted((*limited_calls(), *more))
    assert all(limit.name and limit.reason and limit.low <= limit.high for limit in CALLS)


TOKENS = {"stop_token_ids": (1,), "allowed_token_ids": (1,), "bad_words": ((1,),)}
PARAMS = ResolvedSamplingParams(Rule.REJECTION, seed=1, prompt_length=2, logit_bias=((1, 1.0),), **TOKENS)
PROBS = DraftProbs((1, 2), (65535, 32767))
POSITION = PositionLogprobs(-1.0, (1,), (-1.0,))
HEADS = HeadProposals((1, 2, 3, 4), bytes(4))
TRACE = items.Trace(bytes(16), bytes(8))
VALID = (
    (target_pb.VerifyRequest, items.Open(1, 1, PARAMS, 10, 7, TRACE, "salt")),
    (target_pb.VerifyRequest, items.Extend(1, 1, 0, (1,))),
    (target_pb.VerifyRequest, items.Verification(1, 1, 0, 9, (1,), (2,), (PROBS,), TRACE)),
    (target_pb.VerifyResponse, items.Failure(1, 1, 3, "reason", "message", "field")),
    (
        target_pb.VerifyResponse,
        items.VerificationResult(
            1,
            1,
            0,
            SamplerOutput((1, 2), (0.5,), (-1.0,), (POSITION, POSITION), HEADS),
        ),
    ),
    (target_pb.VerifyResponse, items.PromptPart(1, 1, PromptLogprobs(1, [1], [-1.0], [1], [1], [-1.0]))),
    (draft_pb.DraftRequest, items.Commit(1, 1, 9, (1,), 3, trace=TRACE, wait_length=3)),
    (draft_pb.DraftResponse, items.Nodes(1, 1, 1, 9, (DraftNode(1, 0, 2, True, PROBS),))),
)
REQUEST = coordinator_pb.GenerateRequest(token_ids={"ids": [1]}, sampling={"logit_bias": [{"token_id": 1}]})

DESCRIPTION: dict[str, Any] = {
    "vocabulary_size": 7,
    "positions_max": POSITIONS_MAX,
    "end_token_ids": [0, 3],
    "numerics": {"dtype": "float32", "tensor_parallel_size": 1},
    "step_times": [{"rows": 1, "step_us": 100}],
}
MANY_IDS = {"token_ids": "ids", "resume": "output_token_ids"}
BAD_DESCRIPTIONS: tuple[dict[str, Any], ...] = (
    {"vocabulary_size": 0},
    {"vocabulary_size": TOKENS_MAX + 1},
    {"positions_max": 0},
    {"positions_max": 2**32 - 1},
    {"end_token_ids": [3, 0]},
    {"end_token_ids": [2**32 - 1]},
    {"numerics": {"tensor_parallel_size": 0}},
    {"step_times": [{"rows": 0, "step_us": 1}]},
    {"step_times": [{"rows": 1, "step_us": 0}]},
    {"head_times": [{"rows": 0, "step_us": 1}]},
    {"head_times": [{"rows": 1, "step_us": 0}]},
)


@pytest.mark.parametrize("field", sorted(PACKED))
def test_packed_numbers_have_a_range(field: str) -> None:
    """Claim: numbers packed in bytes are refused outside their limits of the table by field, value and limit, a
    not-a-number always, as the first or the last of several; the limits themselves pass. Source: no limit of a number's
    own field sees them. Conclusive: the limits are read from the table, and the numbers next to them are tried."""
    valid = next(item for _, item in VALID if isinstance(item, items.VerificationResult))
    message = target_pb.VerifyResponse.FromString(item_to_bytes(target_pb.VerifyResponse, valid)).items[0]
    result = getattr(message, message.WhichOneof("item"))
    part, name = (result if "target_probs" in field else result.logprobs), field.partition(".")[2]
    code, limit = ("d" if "target_probs" in field else "f"), FIELD_LIMITS[f"{field}[]"]
    count = len(getattr(part, name)) // array(code).itemsize

    def read(value: float, place: int) -> None:
        numbers = array(code, [limit.high] * count)
        numbers[place] = value
        setattr(part, name, numbers.tobytes())
        item_from_message(message)

    outside = [math.nan, math.inf, limit.high + 1e-6, *([limit.low - 1e-6] if limit.low > -math.inf else [])]
    for place in {0, count - 1}:
        for value in (limit.low, limit.high):
            read(value, place)
        for value in outside:
            with pytest.raises(InvalidRequest, match=f"{name} is .*; it must be from"):
                read(value, place)


@pytest.mark.parametrize(
    "token_ids, confidences", [((1, 2, 3), bytes(3)), ((1, 2), bytes(4)), ((1, 2, 3, 4), bytes(2)), ((), bytes(2))]
)
def test_proposals_of_heads_are_two_tokens_of_each(token_ids: tuple[int, ...], confidences: bytes) -> None:
    """Claim: a result with a part of a head's tokens, or with another number of confidences, is refused."""
    valid = next(item for _, item in VALID if isinstance(item, items.VerificationResult))
    message = target_pb.VerifyResponse.FromString(item_to_bytes(target_pb.VerifyResponse, valid)).items[0]
    assert item_from_message(message).output.head_proposals
    result = getattr(message, message.WhichOneof("item"))
    result.head_token_ids[:], result.head_confidences = token_ids, confidences
    with pytest.raises(InvalidRequest, match="head_token_ids"):
        item_from_message(message)


def valid_messages() -> Iterator[tuple[Any, Any, Callable[[Any], Any]]]:
    """(message, the part with the fields, reader) of all that a peer sends."""
    yield REQUEST, REQUEST, lambda message: request_from_message(message, POSITIONS_MAX)
    description = types_pb.DescribeResponse(**DESCRIPTION)
    yield description, description, description_from_message
    for message_class, item in VALID:
        message = message_class.FromString(item_to_bytes(message_class, item)).items[0]
        yield message, getattr(message, message.WhichOneof("item")), item_from_message


def enlarge(part: Any, path: tuple[FieldDescriptor, ...], count: int) -> None:
    """Adds `count` entries, characters or bytes to the field at the end of a path; in lists to the first entry."""
    for field in path[:-1]:
        inner = getattr(part, field.name)
        part = inner if not field.is_repeated else inner[0] if len(inner) else inner.add()
    field = path[-1]
    if field.is_repeated and field.type in (*SIZED, FieldDescriptor.TYPE_MESSAGE):
        key = (field.number << 3) | 2
        tag = bytes((key,)) if key < 128 else bytes((key & 127 | 128, key >> 7))
        part.MergeFromString((tag + b"\0") * count)
    elif field.is_repeated:
        getattr(part, field.name).extend([1] * count)
    else:
        unit = "x" if field.type == FieldDescriptor.TYPE_STRING else b"\0"
        setattr(part, field.name, unit * count)


def enlarged(count: int | None) -> Iterator[tuple[str, float, Any, Callable[[Any], Any]]]:
    """(field, its limit, message with `count` entries there (None: one above the limit), reader)."""
    for message, part, read in valid_messages():
        for path in fields_of(part.DESCRIPTOR, lambda field: field.is_repeated or field.type in SIZED):
            limit = FIELD_LIMITS[key_of(path[-1])]
            high = POSITIONS_MAX if limit.name == "TOKENS_MAX" else limit.high
            if limit.name == "message size":
                continue
            copy = type(message)()
            copy.CopyFrom(message)
            inner = copy if part is message else getattr(copy, copy.WhichOneof("item"))
            enlarge(inner, path, int(high) + 1 if count is None else count)
            yield key_of(path[-1]), high, copy, read


def refusal(message: Any, read: Callable[[Any], Any]) -> InvalidRequest | Any:
    try:
        found = read(message)
        if isinstance(found, GenerationRequest):  # what depends on the model is checked against it
            found.check_model(found.token_ids, description_from_message(types_pb.DescribeResponse(**DESCRIPTION)))
        return found
    except InvalidRequest as error:
        return error


def test_a_size_one_above_its_limit_is_refused() -> None:
    """Claim: every field whose size a peer chooses is held to the table's limit when it is read (security: limits are
    checked before any allocation); nodes beyond it count as malformed, and texts of a failure are cut.

    Conclusive: the fields are all those of the descriptors, and the same messages are read without the enlargement.
    """
    for message, _, read in valid_messages():
        assert not isinstance(refusal(message, read), InvalidRequest)
    seen = 0
    for field, high, message, read in enlarged(None):
        found, seen = refusal(message, read), seen + 1
        if isinstance(found, items.Nodes | items.VerificationResult):
            assert found.malformed_count, field
        elif isinstance(found, items.Failure):
            assert max(len(found.reason), len(found.message), len(found.field)) == high, field
        else:
            assert isinstance(found, InvalidRequest), field
            assert found.limit and found.field, field
    assert seen > 40


def fields_of(
    message: Descriptor, is_wanted: Callable[[FieldDescriptor], bool], path: tuple[FieldDescriptor, ...] = ()
) -> Iterator[tuple[FieldDescriptor, ...]]:
    """Paths of the wanted fields, in a message and in its parts."""
    for field in message.fields:
        own = (*path, field)
        if is_wanted(field):
            yield own
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            yield from fields_of(field.message_type, is_wanted, own)


def beyond(field: FieldDescriptor, high: float) -> tuple[float, ...]:
    """The numbers next to a limit that a field could hold; of a float also not-a-number."""
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return *([math.nextafter(high, math.inf)] if math.isfinite(high) else []), math.nan
    return (int(high) + 1,) if high < LARGEST[field.type] else ()


def raised_numbers() -> Iterator[tuple[str, Any, Callable[[Any], Any]]]:
    """(field, message with a number above its limit there, reader) of every number with a limit below the largest of
    its type."""
    for message, part, read in valid_messages():
        for path in fields_of(part.DESCRIPTOR, lambda field: field.type in (*LARGEST, FieldDescriptor.TYPE_DOUBLE)):
            field = path[-1]
            name = key_of(field) + ("[]" if field.is_repeated else "")
            for number in beyond(field, FIELD_LIMITS[name].high):
                copy = type(message)()
                copy.CopyFrom(message)
                inner = copy if part is message else getattr(copy, copy.WhichOneof("item"))
                for step in path[:-1]:
                    own = getattr(inner, step.name)
                    inner = own if not step.is_repeated else own[0] if len(own) else own.add()
                if field.is_repeated:
                    del getattr(inner, field.name)[:]
                    getattr(inner, field.name).append(number)
                else:
                    setattr(inner, field.name, number)
                yield name, copy, read


def test_a_number_next_to_its_limit_is_refused() -> None:
    """Claim: every number of the wire, internal answers included, is held to the table's limit when it is read, and
    none is not-a-number.

    Conclusive: the fields are all those of the descriptors with a limit below the largest number of their type, and
    the same messages are read without the change (the test above).
    """
    seen = []
    for field, message, read in raised_numbers():
        seen.append(field)
        found = refusal(message, read)
        is_refused = isinstance(found, InvalidRequest) or getattr(found, "malformed_count", 0)
        assert is_refused or field in OF_VOCABULARY, field
    assert {*OF_VOCABULARY, "SamplingParams.frequency_penalty"} < set(seen) and len(set(seen)) > 25


@pytest.mark.parametrize("bad", BAD_DESCRIPTIONS, ids=str)
def test_a_number_of_a_description_is_checked(bad: dict[str, Any]) -> None:
    """Claim: a replica whose description has a number outside its limits is not used (security: a byzantine replica;
    positions bound what a request may hold, step times what a policy computes). Conclusive: one number each differs
    from a description that is read."""
    description_from_message(types_pb.DescribeResponse(**DESCRIPTION))
    (name,) = bad
    with pytest.raises(InvalidRequest, match=name):
        description_from_message(types_pb.DescribeResponse(**{**DESCRIPTION, **bad}))


def largest_items() -> Iterator[tuple[int, bytes]]:
    """(cap of the stream, the largest message of one item that obeys every limit)."""
    many, probs = (TOKENS_MAX - 1,), DraftProbs(tuple(range(0, TOKENS_MAX, TOKENS_MAX >> 10)), (1,) * 1024)
    name, long = (UINT32_MAX,) * 2, "x" * 128
    biases = tuple((TOKENS_MAX - 1024 + index, 1.5) for index in range(1024))
    lists = {"stop_token_ids": tuple(range(9000, 9128)), "bad_words": (many * 32,) * 128}
    lists["allowed_token_ids"] = tuple(range(TOKENS_MAX - 4096, TOKENS_MAX))
    params = ResolvedSamplingParams(Rule.REJECTION, 1, 1, logit_bias=biases, **lists)
    verification = items.Verification(*name, UINT32_MAX, TOKENS_MAX, many * 2048, many * 64, (probs,) * 64, TRACE)
    nodes = []
    for first in range(1000, 1320, 5):  # an evaluated node that the coordinator did not know, and its four children
        nodes.append(DraftNode(first, 0, TOKENS_MAX - 1, False, None, 17))
        own = DraftProbs(probs.token_ids, probs.weights)
        nodes += [DraftNode(first + index, first, TOKENS_MAX - index, True, own) for index in range(1, 5)]
    for item in (items.Open(*name, params, TOKENS_MAX, TOKENS_MAX, TRACE, long), verification):
        yield STREAM_REQUEST_BYTES_MAX, item_to_bytes(target_pb.VerifyRequest, item)
    yield STREAM_REQUEST_BYTES_MAX, item_to_bytes(draft_pb.DraftRequest, items.Commit(*name, 9000, many * 2048, 64))
    yield STREAM_RESPONSE_BYTES_MAX, item_to_bytes(draft_pb.DraftResponse, items.Nodes(*name, 1, 1, tuple(nodes)))
    position = PositionLogprobs(-1.0, many * 20, (-1.0,) * 20)
    candidate_count = HEADS_MAX * HEAD_CANDIDATES
    heads = HeadProposals(many * candidate_count, bytes(candidate_count))
    output = SamplerOutput(many * 65, (0.5,) * 64, (-1.0,) * 64, (position,) * 65, heads)
    yield STREAM_RESPONSE_BYTES_MAX, item_to_bytes(target_pb.VerifyResponse, items.VerificationResult(*name, 1, output))
    own, tops = [-1.0] * 1024, [-1.0] * 1024 * 20
    part = PromptLogprobs(TOKENS_MAX, many * 1024, own, [*many] * 1024, [*many] * 1024 * 20, tops)
    yield STREAM_RESPONSE_BYTES_MAX, item_to_bytes(target_pb.VerifyResponse, items.PromptPart(*name, part))


def test_streams_carry_the_largest_item_and_little_more() -> None:
    """Claim: a message of the largest item within the table's limits passes the cap of its stream and the count of its
    fields, and no cap is above twice what the largest needs (each byte beyond it is an attacker's only)."""
    sizes: dict[int, list[int]] = {}
    for cap, data in largest_items():
        message_class = target_pb.VerifyRequest if cap == STREAM_REQUEST_BYTES_MAX else draft_pb.DraftResponse
        check_field_count(message_class.DESCRIPTOR, data)
        sizes.setdefault(cap, []).append(len(data))
    for cap, own in sizes.items():
        assert cap / 2 < max(own) < cap - MESSAGE_BYTES_SOFT / 2


def test_the_largest_request_passes_the_count_of_its_fields() -> None:
    """Claim: a Generate with every list at its limit has fewer fields than are counted, and one of empty entries is
    refused by the name of their field, as are more packed numbers than any prompt has. Conclusive: the lists are those
    of the table."""
    message = coordinator_pb.GenerateRequest(token_ids={"ids": [1] * 300_000}, resume={"output_token_ids": [1]})
    message.sampling.logit_bias.extend(
        coordinator_pb.SamplingParams(logit_bias=[{"token_id": 1, "bias": 1}] * 1024).logit_bias
    )
    message.sampling.stop.extend(["x"] * 16)
    message.sampling.stop_token_ids.extend([1] * 64)
    message.sampling.bad_words.extend(["x"] * 64)
    message.sampling.allowed_token_ids.extend([1] * 4096)
    check_field_count(message.DESCRIPTOR, message.SerializeToString())
    message.sampling.MergeFromString(b"\x52\0" * 5000)
    with pytest.raises(InvalidRequest, match=r"^sampling.logit_bias"):
        check_field_count(message.DESCRIPTOR, message.SerializeToString())
    for name in ("token_ids", "resume"):
        long = coordinator_pb.GenerateRequest(token_ids={"ids": [1]}, resume={"output_token_ids": [1]})
        long.MergeFrom(coordinator_pb.GenerateRequest(**{name: {MANY_IDS[name]: [1] * PACKED_BYTES_MAX}}))
        with pytest.raises(InvalidRequest, match=f"{name}.{MANY_IDS[name]} is .* bytes"):
            check_field_count(long.DESCRIPTOR, long.SerializeToString())


@pytest.mark.parametrize("name", ["cache_salt", "label", "prompt.text", "sampling.stop"])
def test_a_string_far_beyond_its_limit_is_refused_before_it_is_parsed(name: str) -> None:
    """Claim: a string of more bytes than its limit, or than the characters of its limit take, is refused by its name
    and limit, as is a text beyond the limit of the served model; one within them passes. Conclusive: only its length
    differs."""
    field = {"prompt.text": "GenerateRequest.text", "sampling.stop": "SamplingParams.stop[]"}.get(
        name, f"GenerateRequest.{name}"
    )
    high, limit = 1000, "1000 bytes"
    if name != "prompt.text":
        size = FIELD_LIMITS[field]
        high = int(size.high) * (1 if size.is_bytes else 4)
        limit = f"{size.high} {'bytes' if size.is_bytes else 'characters'}"

    def check(size: int) -> None:
        message = coordinator_pb.GenerateRequest(text="x")
        if name == "sampling.stop":
            message.sampling.stop.append("x" * size)
        else:
            setattr(message, name.rpartition(".")[2], "x" * size)
        check_field_count(message.DESCRIPTOR, message.SerializeToString(), {"GenerateRequest.text": 1000})

    check(high)
    with pytest.raises(InvalidRequest, match=rf"^{name} is '{high + 1} bytes'; it must be at most {limit}"):
        check(high + 1)


def python_bytes(message: Any, read: Callable[[Any], Any]) -> int:
    """The most bytes that Python objects took while a message was read."""
    tracemalloc.start()
    try:
        refusal(message, read)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_what_is_too_long_is_not_walked() -> None:
    """Claim: a field of 200,000 entries is refused by its count, not by a walk over its entries: megabytes of empty
    entries froze the event loop for seconds, and all generations with it (a finding by attack).

    Conclusive: each entry that is read becomes an object of Python, and these are counted; message memory is not.
    """
    for field, _, message, read in enlarged(MANY):
        taken = python_bytes(message, read)
        assert taken < WALK_BYTES_MAX, f"{field}: {taken} bytes"


def test_many_unknown_fields_are_not_walked() -> None:
    """Claim: a request is refused for its unknown fields whatever their number, by number where they are few.

    Conclusive: as above; one unknown field and 200,000 of them, at the top and inside."""
    data, unknown = REQUEST.SerializeToString(), b"\xf8\x3e\x01"  # field 1007
    inside = coordinator_pb.GenerateRequest(resume=coordinator_pb.Resume.FromString(unknown * MANY))
    for few in (unknown, coordinator_pb.GenerateRequest(resume=coordinator_pb.Resume.FromString(unknown))):
        message = coordinator_pb.GenerateRequest.FromString(data)
        message.MergeFromString(few if isinstance(few, bytes) else few.SerializeToString())
        with pytest.raises(InvalidRequest, match="field 1007"):
            request_from_message(message)
    for more in (unknown * MANY, inside.SerializeToString()):
        message = coordinator_pb.GenerateRequest.FromString(data)
        message.MergeFromString(more)
        assert python_bytes(message, request_from_message) < WALK_BYTES_MAX
        with pytest.raises(InvalidRequest, match="unknown fields"):
            request_from_message(message)
