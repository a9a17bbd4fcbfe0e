"""Values shared by all messages, to messages and back: numbers, rows, laws, traces, descriptions.

Reading a message makes checked values, so InvalidRequest names whatever is out of bounds. Rows of numbers are
little-endian bytes whatever the machine. Generated types go no further than the `convert` modules.
"""

from __future__ import annotations

import operator
import sys
from array import array
from collections.abc import Iterable
from itertools import accumulate
from typing import Literal, TypeAlias, cast

from specdec.errors import InvalidRequest
from specdec.protocol.items import Trace
from specdec.protocol.types import ROW_WEIGHT_CODES, ROW_WEIGHTS, CacheSize, Description, Law, Row, Rule
from specdec.v1 import types_pb2 as types_pb

FloatCode: TypeAlias = Literal["d", "f"]


def numbers_to_bytes(code: FloatCode, values: Iterable[float]) -> bytes:
    """`values` as packed little-endian numbers of array type `code` (d float64, f float32)."""
    packed = array(code, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def numbers_from_bytes(code: FloatCode, data: bytes, field: str) -> array[float]:
    """The inverse; InvalidRequest when the bytes are not a whole number of numbers."""
    packed: array[float] = array(code)
    if len(data) % packed.itemsize:
        raise InvalidRequest(field, f"{len(data)} bytes", f"a multiple of {packed.itemsize} bytes")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed


def row_to_message(row: Row) -> types_pb.Row:
    """The message of a row; its weights are among ROW_WEIGHTS."""
    steps = list(map(operator.sub, row.token_ids, (0, *row.token_ids)))
    return types_pb.Row(token_id_steps=steps, weight_codes=bytes(map(ROW_WEIGHT_CODES.__getitem__, row.weights)))


def row_from_message(message: types_pb.Row) -> Row:
    """The checked row of a message. Raises InvalidRequest."""
    return Row(tuple(accumulate(message.token_id_steps)), tuple(map(ROW_WEIGHTS.__getitem__, message.weight_codes)))


def law_to_message(law: Law) -> types_pb.Law:
    """The message of a law."""
    return types_pb.Law(
        rule=rule_to_number(law.rule),
        seed=law.seed,
        temperature=law.temperature,
        top_k=law.top_k,
        top_p=law.top_p,
        min_p=law.min_p,
        repetition_penalty=law.repetition_penalty,
        presence_penalty=law.presence_penalty,
        frequency_penalty=law.frequency_penalty,
        logit_bias=[types_pb.LogitBias(token_id=token_id, bias=bias) for token_id, bias in law.logit_bias],
        min_tokens=law.min_tokens,
        stop_token_ids=law.stop_token_ids,
        logprobs=law.logprobs,
        prompt_length=law.prompt_length,
    )


def rule_to_number(rule: Rule) -> types_pb.Rule:
    """The wire number of a rule."""
    return cast(types_pb.Rule, rule.value)  # an int; its generated type has no instances


def rule_from_number(number: int) -> Rule:
    """The rule of a wire number; InvalidRequest for one this version does not know."""
    try:
        return Rule(number)
    except ValueError:
        raise InvalidRequest("rule", number, "GREEDY (1), REJECTION (2) or COUPLED (3)") from None


def law_from_message(message: types_pb.Law) -> Law:
    """The checked law of a message. Raises InvalidRequest naming the field."""
    return Law(
        rule=rule_from_number(message.rule),
        seed=message.seed,
        prompt_length=message.prompt_length,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
    )


def trace_to_message(trace: Trace) -> types_pb.TraceContext | None:
    """The message of a trace context; None for no trace, which sends nothing."""
    if not trace.trace_id:
        return None
    return types_pb.TraceContext(
        trace_id=trace.trace_id, span_id=trace.span_id, sampled=trace.sampled, detailed=trace.detailed
    )


def trace_from_message(message: types_pb.TraceContext) -> Trace:
    """The checked trace context of a message. Raises InvalidRequest."""
    return Trace(message.trace_id, message.span_id, message.sampled, message.detailed)


def description_to_message(description: Description) -> types_pb.DescribeResponse:
    """The message of what a replica serves."""
    size = description.cache
    return types_pb.DescribeResponse(
        model_digest=description.model_digest,
        tokenizer_fingerprint=description.tokenizer_fingerprint,
        model_name=description.model_name,
        vocabulary_size=description.vocabulary_size,
        positions_max=description.positions_max,
        numerics=numerics_to_message(description),
        protocol_version=description.protocol_version,
        end_token_ids=description.end_token_ids,
        cache=None if size is None else _cache_size_to_message(size),
        step_times=[
            types_pb.StepTime(rows=rows, step_us=round(seconds * 1e6)) for rows, seconds in description.step_times
        ],
    )


def _cache_size_to_message(size: CacheSize) -> types_pb.CacheSize:
    return types_pb.CacheSize(block_count=size.block_count, block_size=size.block_size, bytes=size.byte_count)


def numerics_to_message(description: Description) -> types_pb.NumericsProfile:
    """The numerics profile in a description, as a message of its own."""
    return types_pb.NumericsProfile(
        dtype=description.dtype,
        tensor_parallel_size=description.tensor_parallel_size,
        device=description.device,
        libraries=description.libraries,
    )


def description_from_message(message: types_pb.DescribeResponse) -> Description:
    """What a replica says it serves; nothing in it is checked here."""
    size = message.cache
    return Description(
        model_digest=message.model_digest,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        model_name=message.model_name,
        vocabulary_size=message.vocabulary_size,
        positions_max=message.positions_max,
        end_token_ids=tuple(message.end_token_ids),
        dtype=message.numerics.dtype,
        device=message.numerics.device,
        libraries=message.numerics.libraries,
        tensor_parallel_size=message.numerics.tensor_parallel_size,
        protocol_version=message.protocol_version,
        cache=CacheSize(size.block_count, size.block_size, size.bytes) if message.HasField("cache") else None,
        step_times=tuple((entry.rows, entry.step_us / 1e6) for entry in message.step_times),
    )
