"""Items of the two replica streams, to messages and back.

One table per stream message says which value stands in which field of its oneof, and how: as the fields of a message by
name, and from one. Reading checks everything that a value must obey; only nodes of a draft tree are read leniently,
because what came before a malformed one is good.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from specdec.errors import InvalidRequest
from specdec.protocol import items
from specdec.protocol.types import Evidence, PositionLogprobs
from specdec.rpc.convert import (
    law_from_message,
    law_to_message,
    numbers_from_bytes,
    numbers_to_bytes,
    row_from_message,
    row_to_message,
    trace_from_message,
    trace_to_message,
)
from specdec.v1 import draft_service_pb2 as draft_pb
from specdec.v1 import target_service_pb2 as target_pb
from specdec.v1 import types_pb2 as types_pb

Fields = dict[str, Any]
_NAME = ("session", "incarnation")
_EXTEND = (*_NAME, "start_position")
_VERIFICATION = (*_NAME, "round_index", "base_position", "suffix_token_ids", "draft_token_ids")
_COMMIT = (*_NAME, "committed_length", "suffix_token_ids", "window", "leaves")
_FAILURE = (*_NAME, "code", "reason", "message", "field", "retry_after_ms")
_SHORT = (*_NAME, "known_length", "unknown")
_TIMES = ("queue_us", "forward_us", "evidence_us")
_COUNTS = ("step_rows", "step_sessions", "active_sessions", "cached_prompt_tokens", "step_count", "evictions")
_EVIDENCE = (*_TIMES, *_COUNTS, "server_us")  # in the order of EvidenceAnswer


def _fields_of(*names: str) -> Callable[[Any], Fields]:
    """A writer of fields that are named and typed as the value's."""
    get = attrgetter(*names)
    return lambda item: dict(zip(names, get(item)))


def _reader_of(made: type, *names: str) -> Callable[[Any], Any]:
    """A reader of values whose fields stand in the message in this order."""
    get = attrgetter(*names)
    return lambda message: made(*get(message))


_verification_fields = _fields_of(*_VERIFICATION)
_commit_fields = _fields_of(*_COMMIT)
_evidence_fields = _fields_of(*_NAME, "round_index", *_EVIDENCE)
_evidence_figures = attrgetter(*_EVIDENCE)


def _open_fields(item: items.Open) -> Fields:
    return {
        "session": item.session,
        "incarnation": item.incarnation,
        "law": law_to_message(item.law),
        "length_max": item.length_max,
        "vocabulary_size": item.vocabulary_size,
        "trace": trace_to_message(item.trace),
        "cache_salt": item.cache_salt,
    }


def _open_from_message(message: types_pb.OpenItem) -> items.Open:
    return items.Open(
        message.session,
        message.incarnation,
        law_from_message(message.law),
        message.length_max,
        message.vocabulary_size,
        trace_from_message(message.trace),
        message.cache_salt,
    )


def _extend_from_message(message: types_pb.ExtendItem) -> items.Extend:
    return items.Extend(message.session, message.incarnation, message.start_position, tuple(message.token_ids))


def _write_verification(item: items.Verification) -> Fields:
    fields = _verification_fields(item)
    if item.rows:
        fields["rows"] = list(map(row_to_message, item.rows))
    if item.trace.trace_id:
        fields["trace"] = trace_to_message(item.trace)
    return fields


def _verification_from_message(message: target_pb.VerifyItem) -> items.Verification:
    return items.Verification(
        message.session,
        message.incarnation,
        message.round_index,
        message.base_position,
        tuple(message.suffix_token_ids),
        tuple(message.draft_token_ids),
        tuple(map(row_from_message, message.rows)),
        trace_from_message(message.trace) if message.HasField("trace") else items.NO_TRACE,
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
        tuple(message.suffix_token_ids),
        message.window,
        message.leaves or 1,
        trace_from_message(message.trace) if message.HasField("trace") else items.NO_TRACE,
    ).checked()


def _node_fields(node: items.DraftNode) -> Fields:
    back = node.node - 1 - node.parent
    fields = {"node": node.node, "parent_back": back, "token_id": node.token_id, "branch": not node.proposal}
    if node.row is not None:
        fields["row"] = row_to_message(node.row)
    return fields


def _write_nodes(item: items.Nodes) -> Fields:
    return {
        "session": item.session,
        "incarnation": item.incarnation,
        "epoch": item.epoch,
        "root_length": item.root_length if any(node.parent == 0 for node in item.nodes) else 0,
        "nodes": list(map(_node_fields, item.nodes)),
        "step_us": item.step_us,
        "step_rows": item.step_rows,
        "step_began_us": item.step_began_us,
    }


def _nodes_from_message(message: draft_pb.NodesItem) -> items.Nodes:
    """A malformed node ends the list and is counted: what came before it stays good."""
    nodes = []
    malformed_count = 0
    try:
        for node in message.nodes:
            number = node.node
            row = row_from_message(node.row) if node.HasField("row") else None
            parent = number - 1 - node.parent_back
            nodes.append(items.DraftNode(number, parent, node.token_id, not node.branch, row).checked())
    except InvalidRequest:
        malformed_count = len(message.nodes) - len(nodes)
    return items.Nodes(
        message.session,
        message.incarnation,
        message.epoch,
        message.root_length,
        tuple(nodes),
        message.step_us,
        message.step_rows,
        malformed_count,
        message.step_began_us,
    )


def _logprobs_to_message(evidence: Evidence) -> target_pb.Logprobs:
    positions = evidence.replacement_logprobs
    return target_pb.Logprobs(
        draft=numbers_to_bytes("f", [position.logprob for position in evidence.draft_logprobs]),
        replacement=numbers_to_bytes("f", [position.logprob for position in positions]),
        top_token_ids=[token_id for position in positions for token_id in position.top_token_ids],
        top=numbers_to_bytes("f", [value for position in positions for value in position.top_logprobs]),
    )


def _positions_from_message(
    message: target_pb.Logprobs, count: int
) -> tuple[tuple[PositionLogprobs, ...], tuple[PositionLogprobs, ...]]:
    """(draft, replacement) logprobs of a verification with `count` positions."""
    draft = numbers_from_bytes("f", message.draft, "logprobs.draft")
    replacement = numbers_from_bytes("f", message.replacement, "logprobs.replacement")
    top = numbers_from_bytes("f", message.top, "logprobs.top")
    sizes = len(draft), len(replacement), len(top), len(message.top_token_ids)
    if len(draft) != count - 1 or len(replacement) != count or len(top) != sizes[3] or len(top) % count:
        raise InvalidRequest("logprobs", sizes, f"numbers for {count} positions")
    width = len(top) // count

    def at(index: int, logprob: float) -> PositionLogprobs:
        start, end = index * width, (index + 1) * width
        return PositionLogprobs(logprob, tuple(message.top_token_ids[start:end]), tuple(top[start:end]))

    return tuple(map(at, range(count), draft)), tuple(map(at, range(count), replacement))


def _write_evidence(item: items.EvidenceAnswer) -> Fields:
    fields, evidence = _evidence_fields(item), item.evidence
    fields["replacement_token_ids"] = evidence.replacement_token_ids
    if evidence.target_probs:
        fields["target_probs"] = numbers_to_bytes("d", evidence.target_probs)
    if evidence.replacement_logprobs:
        fields["logprobs"] = _logprobs_to_message(evidence)
    return fields


def _evidence_from_message(message: target_pb.EvidenceItem) -> items.EvidenceAnswer:
    replacements = tuple(message.replacement_token_ids)
    draft_logprobs: tuple[PositionLogprobs, ...] = ()
    replacement_logprobs: tuple[PositionLogprobs, ...] = ()
    target_probs: tuple[float, ...] = ()
    if message.HasField("logprobs"):
        draft_logprobs, replacement_logprobs = _positions_from_message(message.logprobs, len(replacements))
    if message.target_probs:
        target_probs = tuple(numbers_from_bytes("d", message.target_probs, "target_probs"))
        if len(target_probs) != len(replacements) - 1:
            raise InvalidRequest("target_probs", len(target_probs), f"one per draft token, {len(replacements) - 1}")
    return items.EvidenceAnswer(
        message.session,
        message.incarnation,
        message.round_index,
        Evidence(replacements, target_probs, draft_logprobs, replacement_logprobs),
        *_evidence_figures(message),
    )


# Per stream message: the oneof's field, the value's type, to fields of a message, from message.
_COMMON_ASKS = (
    ("open", items.Open, _open_fields, _open_from_message),
    ("extend", items.Extend, _fields_of(*_EXTEND, "token_ids"), _extend_from_message),
    ("close", items.Close, _fields_of(*_NAME), _reader_of(items.Close, *_NAME)),
)
_COMMON_ANSWERS = (
    ("short", items.Short, _fields_of(*_SHORT), _reader_of(items.Short, *_SHORT)),
    ("error", items.Failure, _fields_of(*_FAILURE), _reader_of(items.Failure, *_FAILURE)),
)
_VERIFY_ASKS = (*_COMMON_ASKS, ("verify", items.Verification, _write_verification, _verification_from_message))
_VERIFY_ANSWERS = (*_COMMON_ANSWERS, ("evidence", items.EvidenceAnswer, _write_evidence, _evidence_from_message))
_DRAFT_ASKS = (*_COMMON_ASKS, ("commit", items.Commit, _write_commit, _commit_from_message))
_DRAFT_ANSWERS = (*_COMMON_ANSWERS, ("nodes", items.Nodes, _write_nodes, _nodes_from_message))
_TABLES = {
    target_pb.VerifyRequest: (target_pb.VerifyRequestItem, _VERIFY_ASKS),
    target_pb.VerifyResponse: (target_pb.VerifyResponseItem, _VERIFY_ANSWERS),
    draft_pb.DraftRequest: (draft_pb.DraftRequestItem, _DRAFT_ASKS),
    draft_pb.DraftResponse: (draft_pb.DraftResponseItem, _DRAFT_ANSWERS),
}
_WRITERS: dict[type, dict[type, tuple[str, Callable[[Any], Fields]]]] = {
    message: {kind: (name, write) for name, kind, write, _ in table} for message, (_, table) in _TABLES.items()
}
_READERS: dict[type, dict[str, Callable[[Any], Any]]] = {
    message: {name: read for name, _, _, read in table} for message, table in _TABLES.values()
}


def item_to_bytes(message_class: type[Any], item: object) -> bytes:
    """A whole stream message (`VerifyRequest`, …) that carries `item` alone, serialised. Several in a row are one
    message that carries all of their items: that is how protobuf encodes repeated fields."""
    name, write = _WRITERS[message_class][type(item)]
    data: bytes = message_class(items=({name: write(item)},)).SerializeToString()
    return data


def item_from_message(message: Any) -> Any:
    """The checked value an item carries. Raises InvalidRequest naming what is out of bounds, or that it is empty."""
    name = message.WhichOneof("item")
    if name is None:
        raise InvalidRequest("item", "empty", "one of " + ", ".join(_READERS[type(message)]))
    return _READERS[type(message)][name](getattr(message, name))


def item_name(message: Any) -> tuple[int, int]:
    """(session, incarnation) an item names, unchecked; zeros when it is empty. For answering malformed items."""
    name = message.WhichOneof("item")
    return (0, 0) if name is None else (getattr(message, name).session, getattr(message, name).incarnation)
