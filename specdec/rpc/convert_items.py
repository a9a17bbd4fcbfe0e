"""Items of the two replica streams, to messages and back.

One table per stream message says which value stands in which field of its oneof. Reading checks everything a value
checks at construction; only nodes of a draft tree are read leniently, because what came before a malformed one is good.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

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


def _open_to_message(item: items.Open) -> types_pb.OpenItem:
    return types_pb.OpenItem(
        session=item.session,
        incarnation=item.incarnation,
        law=law_to_message(item.law),
        length_max=item.length_max,
        vocabulary_size=item.vocabulary_size,
        trace=trace_to_message(item.trace),
        cache_salt=item.cache_salt,
    )


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


def _verification_to_message(item: items.Verification) -> target_pb.VerifyItem:
    return target_pb.VerifyItem(
        session=item.session,
        incarnation=item.incarnation,
        round_index=item.round_index,
        base_position=item.base_position,
        suffix_token_ids=item.suffix_token_ids,
        draft_token_ids=item.draft_token_ids,
        rows=[row_to_message(row) for row in item.rows],
        trace=trace_to_message(item.trace),
    )


def _verification_from_message(message: target_pb.VerifyItem) -> items.Verification:
    return items.Verification(
        message.session,
        message.incarnation,
        message.round_index,
        message.base_position,
        tuple(message.suffix_token_ids),
        tuple(message.draft_token_ids),
        tuple(row_from_message(row) for row in message.rows),
        trace_from_message(message.trace),
    )


def _commit_to_message(item: items.Commit) -> draft_pb.CommitItem:
    return draft_pb.CommitItem(
        session=item.session,
        incarnation=item.incarnation,
        committed_length=item.committed_length,
        suffix_token_ids=item.suffix_token_ids,
        window=item.window,
        leaves=item.leaves,
        trace=trace_to_message(item.trace),
    )


def _commit_from_message(message: draft_pb.CommitItem) -> items.Commit:
    return items.Commit(
        message.session,
        message.incarnation,
        message.committed_length,
        tuple(message.suffix_token_ids),
        message.window,
        message.leaves or 1,
        trace_from_message(message.trace),
    )


def _close_from_message(message: types_pb.CloseItem) -> items.Close:
    return items.Close(message.session, message.incarnation)


def _same_fields_to(message_class, *names: str):
    """A converter for values whose fields are named and typed as the message's."""
    return lambda item: message_class(**{name: getattr(item, name) for name in names})


_NAME = ("session", "incarnation")
_FAILURE = (*_NAME, "code", "reason", "message", "field", "retry_after_ms")
_SHORT = (*_NAME, "known_length", "unknown")
_TIMES = ("queue_us", "forward_us", "evidence_us")
_COUNTS = ("step_rows", "step_sessions", "active_sessions", "cached_prompt_tokens", "step_count", "evictions")
_EVIDENCE_FIGURES = (*_TIMES, *_COUNTS, "server_us")  # in the order of EvidenceAnswer
_evidence_figures = attrgetter(*_EVIDENCE_FIGURES)
_extend_to_message = _same_fields_to(types_pb.ExtendItem, *_NAME, "start_position", "token_ids")
_close_to_message = _same_fields_to(types_pb.CloseItem, *_NAME)
_failure_to_message = _same_fields_to(types_pb.ErrorItem, *_FAILURE)
_short_to_message = _same_fields_to(types_pb.ShortItem, *_SHORT)


def _failure_from_message(message: types_pb.ErrorItem) -> items.Failure:
    return items.Failure(*(getattr(message, name) for name in _FAILURE))


def _short_from_message(message: types_pb.ShortItem) -> items.Short:
    return items.Short(*(getattr(message, name) for name in _SHORT))


def _nodes_to_message(item: items.Nodes) -> draft_pb.NodesItem:
    nodes = [
        draft_pb.TreeNode(
            node=node.node,
            parent_back=node.node - 1 - node.parent,
            token_id=node.token_id,
            branch=not node.proposal,
            row=None if node.row is None else row_to_message(node.row),
        )
        for node in item.nodes
    ]
    return draft_pb.NodesItem(
        session=item.session,
        incarnation=item.incarnation,
        epoch=item.epoch,
        root_length=item.root_length if any(node.parent == 0 for node in item.nodes) else 0,
        nodes=nodes,
        step_us=item.step_us,
        step_rows=item.step_rows,
        step_began_us=item.step_began_us,
    )


def _nodes_from_message(message: draft_pb.NodesItem) -> items.Nodes:
    """A malformed node ends the list and is counted: what came before it stays good."""
    nodes = []
    malformed_count = 0
    try:
        for node in message.nodes:
            row = row_from_message(node.row) if node.HasField("row") else None
            parent = node.node - 1 - node.parent_back
            nodes.append(items.DraftNode(node.node, parent, node.token_id, not node.branch, row))
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


def _logprobs_to_message(evidence: Evidence) -> target_pb.Logprobs | None:
    positions = evidence.replacement_logprobs
    if not positions:
        return None
    return target_pb.Logprobs(
        draft=numbers_to_bytes("f", [position.logprob for position in evidence.draft_logprobs]),
        replacement=numbers_to_bytes("f", [position.logprob for position in positions]),
        top_token_ids=[token_id for position in positions for token_id in position.top_token_ids],
        top=numbers_to_bytes("f", [value for position in positions for value in position.top_logprobs]),
    )


def _positions_from_message(message: target_pb.Logprobs, count: int):
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


def _evidence_to_message(item: items.EvidenceAnswer) -> target_pb.EvidenceItem:
    return target_pb.EvidenceItem(
        session=item.session,
        incarnation=item.incarnation,
        round_index=item.round_index,
        replacement_token_ids=item.evidence.replacement_token_ids,
        target_probs=numbers_to_bytes("d", item.evidence.target_probs),
        logprobs=_logprobs_to_message(item.evidence),
        **{name: getattr(item, name) for name in _EVIDENCE_FIGURES},
    )


def _evidence_from_message(message: target_pb.EvidenceItem) -> items.EvidenceAnswer:
    replacements = tuple(message.replacement_token_ids)
    draft_logprobs, replacement_logprobs = (), ()
    if message.HasField("logprobs"):
        draft_logprobs, replacement_logprobs = _positions_from_message(message.logprobs, len(replacements))
    target_probs = tuple(numbers_from_bytes("d", message.target_probs, "target_probs"))
    if target_probs and len(target_probs) != len(replacements) - 1:
        raise InvalidRequest("target_probs", len(target_probs), f"one per draft token, {len(replacements) - 1}")
    return items.EvidenceAnswer(
        message.session,
        message.incarnation,
        message.round_index,
        Evidence(replacements, target_probs, draft_logprobs, replacement_logprobs),
        *_evidence_figures(message),
    )


# Per stream message: the oneof's field, the value's type, to message, from message.
_COMMON_ASKS = (
    ("open", items.Open, _open_to_message, _open_from_message),
    ("extend", items.Extend, _extend_to_message, _extend_from_message),
    ("close", items.Close, _close_to_message, _close_from_message),
)
_COMMON_ANSWERS = (
    ("short", items.Short, _short_to_message, _short_from_message),
    ("error", items.Failure, _failure_to_message, _failure_from_message),
)
_TABLES = {
    target_pb.VerifyRequestItem: (
        *_COMMON_ASKS,
        ("verify", items.Verification, _verification_to_message, _verification_from_message),
    ),
    target_pb.VerifyResponseItem: (
        *_COMMON_ANSWERS,
        ("evidence", items.EvidenceAnswer, _evidence_to_message, _evidence_from_message),
    ),
    draft_pb.DraftRequestItem: (*_COMMON_ASKS, ("commit", items.Commit, _commit_to_message, _commit_from_message)),
    draft_pb.DraftResponseItem: (*_COMMON_ANSWERS, ("nodes", items.Nodes, _nodes_to_message, _nodes_from_message)),
}
_WRITERS = {message: {kind: (name, write) for name, kind, write, _ in table} for message, table in _TABLES.items()}
_READERS: dict[type, dict[str, Callable]] = {
    message: {name: read for name, _, _, read in table} for message, table in _TABLES.items()
}


def item_to_message(message_class: type, item):
    """The stream message's item (`VerifyRequestItem`, …) that carries `item`."""
    name, write = _WRITERS[message_class][type(item)]
    return message_class(**{name: write(item)})


def item_from_message(message):
    """The checked value an item carries. Raises InvalidRequest naming what is out of bounds, or that it is empty."""
    name = message.WhichOneof("item")
    if name is None:
        raise InvalidRequest("item", "empty", "one of " + ", ".join(_READERS[type(message)]))
    return _READERS[type(message)][name](getattr(message, name))


def item_name(message) -> tuple[int, int]:
    """(session, incarnation) an item names, unchecked; zeros when it is empty. For answering malformed items."""
    name = message.WhichOneof("item")
    return (0, 0) if name is None else (getattr(message, name).session, getattr(message, name).incarnation)
