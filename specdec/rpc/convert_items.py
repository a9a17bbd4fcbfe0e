"""Items of the two replica streams, to messages and back.

One table per stream message maps each field of its oneof to a value's type, a writer (fields by name) and a reader.
Reading checks every limit of a value; only nodes of a draft tree are read leniently, because the nodes before a
malformed one are valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any, TypeVar

from specdec.errors import InvalidRequest
from specdec.protocol import items
from specdec.protocol.heads import HEAD_CANDIDATES, HEADS_MAX, HeadPlan, HeadProposals
from specdec.protocol.limits import (
    CONFIDENCE_MAX,
    DRAFT_LENGTH_LIMIT,
    EXTEND_TOKEN_COUNT_MAX,
    FAILURE_TEXT_LENGTH_MAX,
    FAILURE_WORD_LENGTH_MAX,
    NODES_PER_ITEM_MAX,
    TOKENS_MAX,
    check_integer,
)
from specdec.protocol.types import DraftNode, DraftProbs, PositionLogprobs, SamplerOutput
from specdec.rpc.convert import (
    numbers_from_bytes,
    numbers_to_bytes,
    params_from_message,
    params_to_message,
    probs_from_message,
    probs_to_message,
    trace_from_message,
    trace_to_message,
)
from specdec.rpc.convert_logprobs import (
    logprobs_to_message,
    positions_from_message,
    prompt_logprobs_from_message,
    prompt_logprobs_to_message,
)
from specdec.rpc.wire_fields import bounded
from specdec.v1 import draft_service_pb2 as draft_pb
from specdec.v1 import open_item_pb2 as open_item_pb
from specdec.v1 import target_service_pb2 as target_pb
from specdec.v1 import types_pb2 as types_pb

Fields = dict[str, Any]
Value = TypeVar("Value")

SAME = types_pb.DraftProbs()  # the distribution of the sibling before
_NAME = ("session", "incarnation")
_EXTEND = (*_NAME, "start_position")
_VERIFICATION = (*_NAME, "round_index", "base_position", "suffix_token_ids", "draft_token_ids")
_COMMIT = (*_NAME, "committed_length", "suffix_token_ids", "window", "nodes_per_step", "siblings", "wait_length")
_HEAD_PLAN = ("head_window", "head_nodes_per_step", "head_siblings")  # in the order of HeadPlan
_FAILURE = (*_NAME, "code", "reason", "message", "field", "retry_after_ms")
_MISSING = (*_NAME, "known_length", "unknown")
_TIMES = ("queue_us", "forward_us", "sampling_us")
_COUNTS = ("step_rows", "step_sessions", "active_sessions", "cached_prompt_tokens", "step_count", "preemptions")
_RESULT = (*_TIMES, *_COUNTS, "server_us", "head_us")  # in the order of VerificationResult


def _fields_of(*names: str) -> Callable[[Any], Fields]:
    """Returns a writer of fields that have the value's names and types."""
    get = attrgetter(*names)
    return lambda item: dict(zip(names, get(item)))


def _reader_of(made: type, *names: str) -> Callable[[Any], Any]:
    """Returns a reader of values from the message's fields in this order."""
    get = attrgetter(*names)
    return lambda message: made(*get(message))


_verification_fields = _fields_of(*_VERIFICATION)
_commit_fields = _fields_of(*_COMMIT)
_result_fields = _fields_of(*_NAME, "round_index", *_RESULT)
_sampler_measurements = attrgetter(*_RESULT)


def _open_fields(item: items.Open) -> Fields:
    return {
        "session": item.session,
        "incarnation": item.incarnation,
        "params": params_to_message(item.params),
        "length_max": item.length_max,
        "vocabulary_size": item.vocabulary_size,
        "trace": trace_to_message(item.trace),
        "cache_salt": item.cache_salt,
        "age_ms": item.age_ms,
    }


def _open_from_message(message: open_item_pb.OpenItem) -> items.Open:
    return items.Open(
        message.session,
        message.incarnation,
        params_from_message(message.params),
        message.length_max,
        message.vocabulary_size,
        trace_from_message(message.trace),
        message.cache_salt,
        message.age_ms,
    )


def _extend_from_message(message: types_pb.ExtendItem) -> items.Extend:
    token_ids = bounded("token_ids", message.token_ids, EXTEND_TOKEN_COUNT_MAX)
    return items.Extend(message.session, message.incarnation, message.start_position, tuple(token_ids))


def _suffix(message: Any) -> tuple[int, ...]:
    return tuple(bounded("suffix_token_ids", message.suffix_token_ids, EXTEND_TOKEN_COUNT_MAX))


def _write_verification(item: items.Verification) -> Fields:
    fields = _verification_fields(item)
    if item.draft_probs:
        before = before_siblings(item.parents, item.draft_probs)
        pairs = zip(item.draft_probs, before)
        fields["draft_probs"] = [SAME if probs is other else probs_to_message(probs) for probs, other in pairs]
    if item.parents:
        fields["parents"] = item.parents
    if item.trace.trace_id:
        fields["trace"] = trace_to_message(item.trace)
    if item.wants_heads:
        fields["want_heads"] = True
    if item.prompt_logprobs_start:
        fields["prompt_logprobs_start"] = item.prompt_logprobs_start
    if item.head_plan.window:
        fields |= zip(_HEAD_PLAN, item.head_plan)
    return fields


def before_siblings(parents: Sequence[int], values: Sequence[Value]) -> list[Value | None]:
    """Returns for each draft token the value of the sibling before it, None for a first child."""
    last: dict[int, Value] = {}
    before: list[Value | None] = []
    for parent, value in zip(parents or range(len(values)), values):
        before.append(last.get(parent))
        last[parent] = value
    return before


def _draft_probs_from_message(message: target_pb.VerifyItem, parents: Sequence[int]) -> tuple[DraftProbs, ...]:
    """Returns the draft distributions; an empty one is that of the sibling before."""
    messages = bounded("draft_probs", message.draft_probs, DRAFT_LENGTH_LIMIT)
    if not messages or not parents:
        return tuple(map(probs_from_message, messages))
    read: list[DraftProbs] = []
    last: dict[int, DraftProbs] = {}
    for parent, own in zip(parents, messages):
        is_same = parent in last and not own.token_id_steps and not own.weight_codes
        last[parent] = last[parent] if is_same else probs_from_message(own)
        read.append(last[parent])
    return tuple(read)


def _verification_from_message(message: target_pb.VerifyItem) -> items.Verification:
    parents = tuple(bounded("parents", message.parents, DRAFT_LENGTH_LIMIT))
    return items.Verification(
        message.session,
        message.incarnation,
        message.round_index,
        message.base_position,
        _suffix(message),
        tuple(bounded("draft_token_ids", message.draft_token_ids, DRAFT_LENGTH_LIMIT)),
        _draft_probs_from_message(message, parents),
        trace_from_message(message.trace) if message.HasField("trace") else items.NO_TRACE,
        parents,
        wants_heads=message.want_heads,
        prompt_logprobs_start=message.prompt_logprobs_start,
        head_plan=HeadPlan(message.head_window, message.head_nodes_per_step or 1, message.head_siblings),
    ).checked()


def _write_commit(item: items.Commit) -> Fields:
    fields = _commit_fields(item)
    if item.trace.trace_id:
        fields["trace"] = trace_to_message(item.trace)
    return fields


def _commit_from_message(message: draft_pb.CommitItem) -> items.Commit:
    return items.Commit(
        message.session,
        message.incarnation,
        message.committed_length,
        _suffix(message),
        message.window,
        message.nodes_per_step or 1,
        trace_from_message(message.trace) if message.HasField("trace") else items.NO_TRACE,
        message.siblings,
        message.wait_length,
    ).checked()


def _node_fields(nodes: Sequence[DraftNode]) -> Iterator[Fields]:
    drawn = None  # the distribution that the proposal child before was drawn from
    for node_id, parent_id, token_id, is_proposal, probs, confidence in nodes:
        back = node_id - 1 - parent_id
        fields = {"node_id": node_id, "parent_back": back, "token_id": token_id, "branch": not is_proposal}
        if confidence:
            fields["confidence"] = confidence
        if probs is not None and probs is not drawn:
            fields["draft_probs"] = probs_to_message(probs)
        drawn = probs
        yield fields


def _write_nodes(item: items.Nodes) -> Fields:
    return {
        "session": item.session,
        "incarnation": item.incarnation,
        "epoch": item.epoch,
        "root_length": item.root_length if any(node.parent_id == 0 for node in item.nodes) else 0,
        "nodes": list(_node_fields(item.nodes)),
        "step_us": item.step_us,
        "step_rows": item.step_rows,
        "detailed": item.is_detailed,
        "worked_us": item.worked_us,
        "active_sessions": item.active_sessions,
    }


def _read_nodes(messages: Sequence[types_pb.TreeNode]) -> tuple[tuple[DraftNode, ...], int]:
    """Returns the nodes before the first malformed one; counts it and those after it, also those beyond the limit."""
    nodes: list[DraftNode] = []
    drawn: tuple[int, DraftProbs | None] = 0, None  # parent and distribution of the proposal child before
    try:
        for node in islice(messages, NODES_PER_ITEM_MAX):
            number, confidence = node.node_id, node.confidence
            parent = number - 1 - node.parent_back
            if parent < 0 or confidence > CONFIDENCE_MAX or node.token_id > TOKENS_MAX:
                break
            probs = probs_from_message(node.draft_probs) if node.HasField("draft_probs") else None
            if probs is None and not node.branch and parent == drawn[0]:
                probs = drawn[1]
            drawn = parent, probs
            nodes.append(DraftNode(number, parent, node.token_id, not node.branch, probs, confidence))
    except InvalidRequest:
        pass
    return tuple(nodes), len(messages) - len(nodes)


def _nodes_from_message(message: draft_pb.NodesItem) -> items.Nodes:
    check_integer("root_length", message.root_length, 0, TOKENS_MAX)
    nodes, malformed_count = _read_nodes(message.nodes)
    return items.Nodes(
        message.session,
        message.incarnation,
        message.epoch,
        message.root_length,
        nodes,
        message.step_us,
        message.step_rows,
        malformed_count,
        message.detailed,
        message.worked_us,
        message.active_sessions,
    )


def _heads_from_message(message: target_pb.VerificationResultItem) -> HeadProposals | None:
    """Returns the proposals of heads in a result; None without any."""
    size_max = HEADS_MAX * HEAD_CANDIDATES
    token_ids = tuple(bounded("head_token_ids", message.head_token_ids, size_max))
    confidences = bounded("head_confidences", message.head_confidences, size_max)
    if not (token_ids or confidences):
        return None
    if len(confidences) != len(token_ids) or len(token_ids) % HEAD_CANDIDATES:
        sizes = len(token_ids), len(confidences)
        raise InvalidRequest("head_token_ids", sizes, f"as many ids as bytes, {HEAD_CANDIDATES} of each head")
    return HeadProposals(token_ids, confidences)


def _write_result(item: items.VerificationResult) -> Fields:
    fields, output = _result_fields(item), item.output
    fields["recovered_token_ids"] = output.recovered_token_ids
    if output.target_probs:
        fields["target_probs"] = numbers_to_bytes("d", output.target_probs)
    if output.recovered_logprobs:
        fields["logprobs"] = logprobs_to_message(output)
    if output.head_proposals is not None:
        fields["head_token_ids"] = output.head_proposals.token_ids
        fields["head_confidences"] = output.head_proposals.confidences
    if output.head_nodes:
        fields["head_nodes"] = list(_node_fields(output.head_nodes))
    return fields


def _result_from_message(message: target_pb.VerificationResultItem) -> items.VerificationResult:
    most = DRAFT_LENGTH_LIMIT + 1
    recovered = tuple(bounded("recovered_token_ids", message.recovered_token_ids, most))
    check_integer("recovered_token_ids", max(recovered, default=0), 0, TOKENS_MAX)
    check_integer("cached_prompt_tokens", message.cached_prompt_tokens, 0, TOKENS_MAX)
    draft_logprobs: tuple[float, ...] = ()
    recovered_logprobs: tuple[PositionLogprobs, ...] = ()
    target_probs: tuple[float, ...] = ()
    if message.HasField("logprobs"):
        draft_logprobs, recovered_logprobs = positions_from_message(message.logprobs, len(recovered))
    if message.target_probs:
        packed = bounded("target_probs", message.target_probs, 8 * DRAFT_LENGTH_LIMIT)
        target_probs = tuple(numbers_from_bytes("d", packed, "target_probs", 0.0, 1.0))
        if len(target_probs) != len(recovered) - 1:
            raise InvalidRequest("target_probs", len(target_probs), f"one per draft token, {len(recovered) - 1}")
    nodes, malformed_count = _read_nodes(message.head_nodes) if message.head_nodes else ((), 0)
    logprobs = draft_logprobs, recovered_logprobs
    return items.VerificationResult(
        message.session,
        message.incarnation,
        message.round_index,
        SamplerOutput(recovered, target_probs, *logprobs, _heads_from_message(message), nodes),
        *(*_sampler_measurements(message), malformed_count),
    )


def _write_prompt_part(item: items.PromptPart) -> Fields:
    return {**dict(zip(_NAME, item)), "logprobs": prompt_logprobs_to_message(item.logprobs)}


def _prompt_part_from_message(message: target_pb.PromptLogprobsItem) -> items.PromptPart:
    return items.PromptPart(message.session, message.incarnation, prompt_logprobs_from_message(message.logprobs))


def _missing_from_message(message: types_pb.MissingTokensItem) -> items.MissingTokens:
    check_integer("known_length", message.known_length, 0, TOKENS_MAX)
    return items.MissingTokens(message.session, message.incarnation, message.known_length, message.unknown)


def _failure_from_message(message: types_pb.ErrorItem) -> items.Failure:
    """Returns the failure; texts beyond their limit are cut, so that it ends what it names and not the stream."""
    return items.Failure(
        message.session,
        message.incarnation,
        message.code,
        message.reason[:FAILURE_WORD_LENGTH_MAX],
        message.message[:FAILURE_TEXT_LENGTH_MAX],
        message.field[:FAILURE_WORD_LENGTH_MAX],
        message.retry_after_ms,
    )


# Per stream message: the oneof's field, the value's type, to fields of a message, from message.
_COMMON_ITEMS = (
    ("open", items.Open, _open_fields, _open_from_message),
    ("extend", items.Extend, _fields_of(*_EXTEND, "token_ids"), _extend_from_message),
    ("close", items.Close, _fields_of(*_NAME), _reader_of(items.Close, *_NAME)),
)
_COMMON_ANSWERS = (
    ("missing_tokens", items.MissingTokens, _fields_of(*_MISSING), _missing_from_message),
    ("error", items.Failure, _fields_of(*_FAILURE), _failure_from_message),
)
_VERIFY_ITEMS = (*_COMMON_ITEMS, ("verify", items.Verification, _write_verification, _verification_from_message))
_VERIFY_ANSWERS: tuple[tuple[str, type, Callable[[Any], Fields], Callable[[Any], Any]], ...] = (
    *_COMMON_ANSWERS,
    ("result", items.VerificationResult, _write_result, _result_from_message),
    ("prompt_logprobs", items.PromptPart, _write_prompt_part, _prompt_part_from_message),
)
_DRAFT_ITEMS = (*_COMMON_ITEMS, ("commit", items.Commit, _write_commit, _commit_from_message))
_DRAFT_ANSWERS = (*_COMMON_ANSWERS, ("nodes", items.Nodes, _write_nodes, _nodes_from_message))
_TABLES = {
    target_pb.VerifyRequest: (target_pb.VerifyRequestItem, _VERIFY_ITEMS),
    target_pb.VerifyResponse: (target_pb.VerifyResponseItem, _VERIFY_ANSWERS),
    draft_pb.DraftRequest: (draft_pb.DraftRequestItem, _DRAFT_ITEMS),
    draft_pb.DraftResponse: (draft_pb.DraftResponseItem, _DRAFT_ANSWERS),
}
_WRITERS: dict[type, dict[type, tuple[str, Callable[[Any], Fields]]]] = {
    message: {kind: (name, write) for name, kind, write, _ in table} for message, (_, table) in _TABLES.items()
}
_READERS: dict[type, dict[str, Callable[[Any], Any]]] = {
    message: {name: read for name, _, _, read in table} for message, table in _TABLES.values()
}


def item_to_bytes(message_class: type[Any], item: object) -> bytes:
    """Returns a serialised stream message (`VerifyRequest`, …) with `item` alone. Several concatenated are one message
    with all their items, by protobuf's encoding of repeated fields."""
    name, write = _WRITERS[message_class][type(item)]
    data: bytes = message_class(items=({name: write(item)},)).SerializeToString()
    return data


def item_from_message(message: Any) -> Any:
    """Returns the checked value of an item. Raises InvalidRequest for a field out of bounds or an empty item."""
    name = message.WhichOneof("item")
    if name is None:
        raise InvalidRequest("item", "empty", "one of " + ", ".join(_READERS[type(message)]))
    return _READERS[type(message)][name](getattr(message, name))


def item_name(message: Any) -> tuple[int, int]:
    """Returns (session, incarnation) of an item, unchecked; zeros if it is empty. For answers to malformed items."""
    name = message.WhichOneof("item")
    return (0, 0) if name is None else (getattr(message, name).session, getattr(message, name).incarnation)
