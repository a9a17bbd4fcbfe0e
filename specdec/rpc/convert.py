"""Values shared by all messages, to messages and back: numbers, draft distributions, sampling parameters, traces.

Reading a message makes checked values, so InvalidRequest names any field out of bounds. Packed numbers are
little-endian bytes on every machine. Generated types are used in the `convert` modules only.
"""

from __future__ import annotations

import operator
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import accumulate
from operator import attrgetter
from typing import Any, Literal, TypeAlias, cast

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from specdec.errors import InvalidRequest
from specdec.protocol.fields import CommonSamplingParams
from specdec.protocol.grammar import Grammar
from specdec.protocol.items import Trace
from specdec.protocol.limits import (
    CHOICE_COUNT_MAX,
    DRAFT_PROBS_TOKEN_COUNT_MAX,
    PARAMS_BAD_WORD_COUNT_MAX,
    PARAMS_BAD_WORD_TOKEN_COUNT_MAX,
    PARAMS_STOP_TOKEN_COUNT_MAX,
    TOKENS_MAX,
    UINT32_MAX,
    check_ascending,
    check_integer,
    check_token_ids,
)
from specdec.protocol.types import (
    DRAFT_PROBS_WEIGHT_CODES,
    DRAFT_PROBS_WEIGHTS,
    CacheSize,
    Description,
    DraftProbs,
    DraftVocabulary,
    ResolvedSamplingParams,
    Rule,
)
from specdec.rpc.wire_fields import FIELD_LIMITS, bounded, check_limits
from specdec.v1 import coordinator_service_pb2 as coordinator_pb
from specdec.v1 import open_item_pb2 as open_item_pb
from specdec.v1 import types_pb2 as types_pb

UNKNOWN_BYTES_NAMED_MAX = 4096  # more bytes of unknown fields are refused without a look for their numbers
_COMMON = {own.name: own.default for own in fields(CommonSamplingParams)}
_common_of = attrgetter(*_COMMON)
_FIELDS = coordinator_pb.SamplingParams.DESCRIPTOR.fields
_PART_NAMES = {
    own.name: [part.name for part in own.message_type.fields] for own in _FIELDS if own.message_type and own.is_repeated
}
_PARTS = {name: attrgetter(*parts) for name, parts in _PART_NAMES.items()}
_COUNTS_MAX = {own.name: int(FIELD_LIMITS[f"SamplingParams.{own.name}"].high) for own in _FIELDS if own.is_repeated}
_NUMERICS = [own.name for own in types_pb.NumericsProfile.DESCRIPTOR.fields]
_DESCRIBED = [  # what a description has by the names and types of its message
    own.name
    for own in types_pb.DescribeResponse.DESCRIPTOR.fields
    if not (own.message_type or own.enum_type or own.is_repeated)
]
FloatCode: TypeAlias = Literal["d", "f"]


def check_known(message: Message) -> None:
    """Raises InvalidRequest for a field number this version does not know, anywhere in `message`."""
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    size = message.ByteSize() - known.ByteSize()
    if size > UNKNOWN_BYTES_NAMED_MAX:
        name = message.DESCRIPTOR.name
        raise InvalidRequest(name, f"{size} bytes of unknown fields", "of fields this server knows")
    if size:
        _name_unknown(message, "")


def _name_unknown(message: Message, path: str) -> None:
    for unknown in UnknownFieldSet(message):
        raise InvalidRequest(f"{path}field {unknown.field_number}", "set", "absent: this server does not know it")
    for descriptor, value in message.ListFields():
        if descriptor.type != descriptor.TYPE_MESSAGE:
            continue
        for part in value if descriptor.is_repeated else (value,):
            _name_unknown(part, f"{path}{descriptor.name}.")


def numbers_to_bytes(code: FloatCode, values: Iterable[float]) -> bytes:
    """Returns `values` as packed little-endian numbers of array type `code` (d float64, f float32)."""
    packed = array(code, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def numbers_from_bytes(code: FloatCode, data: bytes, field: str, low: float, high: float) -> array[float]:
    """The inverse; InvalidRequest when the bytes are not a whole number of numbers from `low` to `high`."""
    packed: array[float] = array(code)
    if len(data) % packed.itemsize:
        raise InvalidRequest(field, f"{len(data)} bytes", f"a multiple of {packed.itemsize} bytes")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    for value in packed:
        if not low <= value <= high:  # also of a not-a-number
            raise InvalidRequest(field, value, f"from {low:g} to {high:g}")
    return packed


def probs_to_message(row: DraftProbs) -> types_pb.DraftProbs:
    """Returns the message of a draft distribution; its weights are among DRAFT_PROBS_WEIGHTS."""
    steps = list(map(operator.sub, row.token_ids, (0, *row.token_ids)))
    return types_pb.DraftProbs(
        token_id_steps=steps, weight_codes=bytes(map(DRAFT_PROBS_WEIGHT_CODES.__getitem__, row.weights))
    )


def probs_from_message(message: types_pb.DraftProbs) -> DraftProbs:
    """Returns the checked draft distribution of a message. Raises InvalidRequest."""
    steps = bounded("draft_probs.token_ids", message.token_id_steps, DRAFT_PROBS_TOKEN_COUNT_MAX)
    codes = bounded("draft_probs.weights", message.weight_codes, DRAFT_PROBS_TOKEN_COUNT_MAX)
    return DraftProbs(tuple(accumulate(steps)), tuple(map(DRAFT_PROBS_WEIGHTS.__getitem__, codes)))


def params_to_message(params: ResolvedSamplingParams) -> open_item_pb.ResolvedSamplingParams:
    """Returns the message of sampling parameters: a field with its default is absent."""
    given = {name: own for name, own, default in zip(_COMMON, _common_of(params), _COMMON.values()) if own != default}
    for name, parts in _PART_NAMES.items():
        given[name] = [dict(zip(parts, entry)) for entry in given.get(name, ())]
    if params.grammar is not None:
        given["grammar"] = _grammar_fields(params.grammar)
    return open_item_pb.ResolvedSamplingParams(
        rule=rule_to_number(params.rule),
        seed=params.seed,
        stop_token_ids=params.stop_token_ids,
        prompt_length=params.prompt_length,
        encoder_length=params.encoder_length,
        sampling=given,
        end_token_ids=params.end_token_ids,
        bad_word_token_ids=[token_id for word in params.bad_words for token_id in word],
        bad_word_lengths=list(map(len, params.bad_words)),
    )


def _grammar_fields(grammar: Grammar) -> dict[str, Any]:
    """Returns the fields of the message of a grammar."""
    kind = grammar.kind
    value = {"texts": grammar.choice} if kind == "choice" else getattr(grammar, kind)
    return {kind: value, "allow_whitespace": grammar.allow_whitespace}


def _grammar_from_message(message: coordinator_pb.Grammar) -> Grammar:
    """Returns the grammar of a message, of correct form. Raises InvalidRequest."""
    given = {field.name: value for field, value in message.ListFields()}
    if "choice" in given:
        given["choice"] = tuple(bounded("grammar.choice", message.choice.texts, CHOICE_COUNT_MAX))
    return Grammar(**given)


def rule_to_number(rule: Rule) -> types_pb.Rule:
    """The wire number of a rule."""
    return cast(types_pb.Rule, rule.value)  # an int; its generated type has no instances


def rule_from_number(number: int) -> Rule:
    """The rule of a wire number; InvalidRequest for one this version does not know."""
    try:
        return Rule(number)
    except ValueError:
        raise InvalidRequest("rule", number, "GREEDY (1), REJECTION (2) or COUPLED (3)") from None


def _bad_words(message: open_item_pb.ResolvedSamplingParams) -> tuple[tuple[int, ...], ...]:
    lengths = bounded("bad_word_lengths", message.bad_word_lengths, PARAMS_BAD_WORD_COUNT_MAX)
    token_ids = bounded("bad_word_token_ids", message.bad_word_token_ids, PARAMS_BAD_WORD_TOKEN_COUNT_MAX)
    if sum(lengths) != len(token_ids):
        raise InvalidRequest("bad_word_token_ids", len(token_ids), f"the sum of bad_word_lengths, {sum(lengths)}")
    ends = list(accumulate(lengths))
    return tuple(tuple(token_ids[end - length : end]) for end, length in zip(ends, lengths))


def params_from_message(message: open_item_pb.ResolvedSamplingParams) -> ResolvedSamplingParams:
    """Returns the checked sampling parameters of a message. Raises InvalidRequest naming the field."""
    check_sampling_counts(message.sampling, "")
    check_known(message.sampling)
    given = values_of(message.sampling)
    for name in given.keys() - _COMMON.keys():
        raise InvalidRequest(f"sampling.{name}", "set", "absent: a replica does not need it")
    stop_token_ids = bounded("stop_token_ids", message.stop_token_ids, PARAMS_STOP_TOKEN_COUNT_MAX)
    end_token_ids = bounded("end_token_ids", message.end_token_ids, PARAMS_STOP_TOKEN_COUNT_MAX)
    return ResolvedSamplingParams(
        rule_from_number(message.rule),
        message.seed,
        message.prompt_length,
        stop_token_ids=tuple(stop_token_ids),
        end_token_ids=tuple(end_token_ids),
        bad_words=_bad_words(message),
        encoder_length=message.encoder_length,
        **given,
    )


def check_sampling_counts(message: coordinator_pb.SamplingParams, path: str) -> None:
    """Raises InvalidRequest, with `path` before the name, for a repeated field with too many entries; reads none."""
    for name, count_max in _COUNTS_MAX.items():
        bounded(path + name, getattr(message, name), count_max)


def values_of(message: coordinator_pb.SamplingParams) -> dict[str, Any]:
    """Returns the values of the fields that a message has, by name: repeated ones as tuples, messages in them as tuples
    of their own fields."""
    given = {field.name: value for field, value in message.ListFields()}
    for name in _COUNTS_MAX.keys() & given.keys():
        given[name] = tuple(map(_PARTS[name], given[name]) if name in _PARTS else given[name])
    if "grammar" in given:
        given["grammar"] = _grammar_from_message(given["grammar"])
    return given


def trace_to_message(trace: Trace) -> types_pb.TraceContext | None:
    """Returns the message of a trace context; None for no trace, which sends nothing."""
    if not trace.trace_id:
        return None
    return types_pb.TraceContext(
        trace_id=trace.trace_id, span_id=trace.span_id, sampled=trace.sampled, detailed=trace.detailed
    )


def trace_from_message(message: types_pb.TraceContext) -> Trace:
    """Returns the checked trace context of a message. Raises InvalidRequest."""
    return Trace(message.trace_id, message.span_id, message.sampled, message.detailed)


def description_to_message(description: Description) -> types_pb.DescribeResponse:
    """Returns the message of a replica's description."""
    size = description.cache
    return types_pb.DescribeResponse(
        numerics=numerics_to_message(description),
        end_token_ids=description.end_token_ids,
        cache=None if size is None else _cache_size_to_message(size),
        step_times=_step_times_to_message(description.step_times),
        draft_vocabulary=types_pb.DraftVocabulary.ValueType(description.draft_vocabulary.value),
        head_times=_step_times_to_message(description.head_times),
        head_pass_times=_step_times_to_message(description.head_pass_times),
        beginning_token_ids=description.beginning_token_ids,
        **{name: getattr(description, name) for name in _DESCRIBED},
    )


def _cache_size_to_message(size: CacheSize) -> types_pb.CacheSize:
    return types_pb.CacheSize(block_count=size.block_count, block_size=size.block_size, bytes=size.byte_count)


def _step_times_to_message(times: Sequence[tuple[int, float]]) -> list[types_pb.StepTime]:
    return [
        types_pb.StepTime(rows=rows, step_us=max(1, min(UINT32_MAX, round(seconds * 1e6)))) for rows, seconds in times
    ]


def _step_times_from_message(times: Sequence[types_pb.StepTime]) -> tuple[tuple[int, float], ...]:
    return tuple((entry.rows, entry.step_us / 1e6) for entry in times)


def numerics_to_message(description: Description) -> types_pb.NumericsProfile:
    """Returns the numerics profile of a description as a message of its own."""
    return types_pb.NumericsProfile(**{name: getattr(description, name) for name in _NUMERICS})


def description_from_message(message: types_pb.DescribeResponse) -> Description:
    """Returns the checked description in a message: a replica's numbers bound what a request may hold. Raises
    InvalidRequest."""
    check_limits(message)
    check_integer("draft_vocabulary_size", message.draft_vocabulary_size, 0, message.vocabulary_size)
    check_integer("draft_vocabulary", message.draft_vocabulary, 0, len(DraftVocabulary) - 1)
    size, end_token_ids = message.cache, tuple(message.end_token_ids)
    check_ascending("end_token_ids", end_token_ids)
    check_token_ids("end_token_ids", end_token_ids, TOKENS_MAX)
    check_integer("encoder_positions_max", message.encoder_positions_max, 0, message.positions_max)
    beginning, has_encoder = tuple(message.beginning_token_ids), message.encoder_positions_max > 0
    check_token_ids("beginning_token_ids", beginning, message.vocabulary_size)
    if bool(beginning) != has_encoder:
        limit = "at least one token id with an encoder" if has_encoder else "empty without an encoder"
        raise InvalidRequest("beginning_token_ids", list(beginning), limit)
    return Description(
        end_token_ids=end_token_ids,
        cache=CacheSize(size.block_count, size.block_size, size.bytes) if message.HasField("cache") else None,
        step_times=_step_times_from_message(message.step_times),
        draft_vocabulary=DraftVocabulary(message.draft_vocabulary),
        head_times=_step_times_from_message(message.head_times),
        head_pass_times=_step_times_from_message(message.head_pass_times),
        beginning_token_ids=beginning,
        **{name: getattr(message, name) for name in _DESCRIBED},
        **{name: getattr(message.numerics, name) for name in _NUMERICS},
    )
