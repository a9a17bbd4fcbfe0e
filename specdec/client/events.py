"""The messages of a stream as values: its start, its tokens, its end.

A `Delta` is the coordinator's own value. Numerics and statistics stay the messages that they came as: their fields are
documented there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from specdec.errors import Mismatch
from specdec.protocol.report import Delta, Round
from specdec.protocol.types import FinishReason, PositionLogprobs, PromptLogprobs, Proposer, Rule, TokenKind
from specdec.v1 import coordinator_service_pb2 as coordinator_pb
from specdec.v1 import types_pb2 as types_pb

Statistics = coordinator_pb.Statistics
# A coordinator may be newer than its client: a value that is not known here is None, or that of a plain token.
_RULES = {rule.value: rule for rule in Rule}
_REASONS = {reason.value: reason for reason in FinishReason}
_KINDS = {kind.value: kind for kind in TokenKind}
_PROPOSERS = {proposer.value: proposer for proposer in Proposer}


@dataclass(frozen=True, slots=True)
class Started:
    """The request was admitted; `seed` and `rule` are those in force. Texts of the same digest, numerics, prompt,
    parameters and seed are the same."""

    request_id: str
    seed: int
    rule: Rule | None
    rule_reason: str
    prompt_length: int
    max_tokens: int
    model_digest: str
    numerics: types_pb.NumericsProfile
    encoder_length: int = 0  # of the prompt's tokens, those that are an encoder's input


@dataclass(frozen=True, slots=True)
class Moved:
    """Output tokens from `first_output_index` on come from another target of the same weights and other numerics."""

    first_output_index: int
    numerics: types_pb.NumericsProfile


@dataclass(frozen=True, slots=True)
class Finished:
    """The text ended. Counts and statistics are of the whole text, also of one that was resumed (`client.sums`)."""

    reason: FinishReason | None
    stop_string: str
    stop_token_id: int | None
    prompt_tokens: int
    output_tokens: int
    statistics: Statistics
    trace_id: str
    encoder_tokens: int = 0  # of the prompt's, those that are an encoder's input


Event = Started | PromptLogprobs | Delta | Moved | Finished


def event_of(response: coordinator_pb.GenerateResponse) -> Event:
    """Returns the event of a message. Raises Mismatch for one that only another version knows."""
    if response.HasField("delta"):
        return _delta(response.delta)
    if response.HasField("started"):
        own = response.started
        rule = _RULES.get(own.rule), own.rule_reason
        counts = own.prompt_length, own.max_tokens
        return Started(own.request_id, own.seed, *rule, *counts, own.model_digest, own.numerics, own.encoder_length)
    if response.HasField("finished"):
        end, usage = response.finished, response.finished.usage
        stop = end.stop_string, end.stop_token_id if end.HasField("stop_token_id") else None
        counts = usage.prompt_tokens, usage.output_tokens
        return Finished(_REASONS.get(end.reason), *stop, *counts, end.statistics, end.trace_id, usage.encoder_tokens)
    if response.HasField("prompt_logprobs"):
        part = response.prompt_logprobs
        numbers = [list(getattr(part, name)) for name in PromptLogprobs._fields[1:]]
        return PromptLogprobs(part.first_prompt_index, *numbers)
    if response.HasField("moved"):
        return Moved(response.moved.first_output_index, response.moved.numerics)
    raise Mismatch("the coordinator is of another version: it sent an unknown event")


def _delta(message: coordinator_pb.Delta) -> Delta:
    kinds = tuple(_KINDS.get(kind, TokenKind.BONUS) for kind in message.kinds)
    if message.proposers:
        proposers = _proposers(message.proposers)
    else:  # the draft model alone proposed
        proposers = tuple(Proposer.DRAFT if kind is TokenKind.ACCEPTED else Proposer.NONE for kind in kinds)
    logprobs = tuple(
        PositionLogprobs(entry.logprob, tuple(entry.top_token_ids), tuple(entry.top_logprobs))
        for entry in message.logprobs
    )
    ids, lengths = tuple(message.token_ids), tuple(message.text_lengths)
    rounds = tuple(map(_round, message.rounds))
    return Delta(message.first_output_index, ids, kinds, message.text, lengths, logprobs, proposers, rounds)


def _proposers(numbers: Iterable[int]) -> tuple[Proposer, ...]:
    return tuple(_PROPOSERS.get(number, Proposer.NONE) for number in numbers)


def _round(message: coordinator_pb.Round) -> Round:
    shape = tuple(message.draft_token_ids), tuple(message.parents)
    proposers, accepted, count = _proposers(message.proposers), tuple(message.accepted), message.num_output_tokens
    times = [getattr(message, name) for name in Round._fields if name.endswith("_s")]
    return Round(message.round_index, *shape, proposers, accepted, count, *times)


def pieces_of(delta: Delta) -> list[str]:
    """Returns each token's part of the delta's text."""
    ends = itertools.accumulate(delta.text_lengths, initial=0)
    return [delta.text[start:end] for start, end in itertools.pairwise(ends)]
