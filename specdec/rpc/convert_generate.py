"""The public API, to values and back.

A request is counted before it is read: none of its fields makes the server walk more than that field's limit. A field
this version does not know is refused by number: no field that a user sets is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, Literal, cast

from specdec.config import SpeculationSettings
from specdec.errors import InvalidRequest
from specdec.protocol.fields import N_MAX, N_MIN, SpeculativeFields
from specdec.protocol.limits import REPLICA_COUNT_MAX, TOKENS_MAX, check_integer
from specdec.protocol.report import Delta, Event, Finished, Moved, Started, Statistics
from specdec.protocol.request import (
    GenerationRequest,
    SamplingParams,
    SpeculationMode,
    SpeculativePolicy,
)
from specdec.protocol.types import Description, PositionLogprobs, PromptLogprobs, Proposer, Rule
from specdec.rpc.convert import (
    check_known,
    check_sampling_counts,
    description_to_message,
    numerics_to_message,
    rule_from_number,
    rule_to_number,
    values_of,
)
from specdec.rpc.convert_logprobs import prompt_logprobs_to_message
from specdec.rpc.wire_fields import FIELD_LIMITS, bounded
from specdec.v1 import coordinator_service_pb2 as coordinator_pb

TIME_NAMES = [field.name for field in coordinator_pb.TimeSplit.DESCRIPTOR.fields]
COUNT_NAMES = [own.name for own in coordinator_pb.Statistics.DESCRIPTOR.fields if own.name not in ("time", "rule")]
TIMES, COUNTS = attrgetter(*TIME_NAMES), attrgetter(*COUNT_NAMES)  # of each delta, if asked for
PROPOSER_COUNT_MAX = int(FIELD_LIMITS["SpeculativePolicy.proposers"].high)
_SPECULATIVE = [own.name for own in fields(SpeculativeFields)]


def check_counts(message: coordinator_pb.GenerateRequest, positions_max: int) -> None:
    """Raises InvalidRequest for a repeated field with too many entries; reads none of them."""
    bounded("prompt.token_ids", message.token_ids.ids, positions_max)
    bounded("resume.output_token_ids", message.resume.output_token_ids, positions_max)
    bounded("prediction.token_ids", message.prediction.token_ids.ids, positions_max)
    bounded("decoder_prompt.token_ids", message.decoder_prompt.token_ids.ids, positions_max)
    check_sampling_counts(message.sampling, "sampling.")


def sampling_from_message(message: coordinator_pb.SamplingParams) -> SamplingParams:
    """Returns the checked sampling parameters; an absent field has its default. Raises InvalidRequest."""
    return SamplingParams(**values_of(message))


def speculative_from_message(message: coordinator_pb.SpeculativePolicy) -> SpeculativePolicy:
    """Returns the checked speculative policy; an absent field has its default. Raises InvalidRequest."""
    rule: Rule | None = None
    if message.rule:
        try:
            rule = rule_from_number(message.rule)
        except InvalidRequest as error:
            raise InvalidRequest("speculative.rule", message.rule, error.limit) from None
    try:
        mode = SpeculationMode(message.policy) if message.policy else None
    except ValueError:
        limit = ", ".join(f"{mode.value} ({mode.name})" for mode in SpeculationMode)
        raise InvalidRequest("speculative.policy", message.policy, limit) from None
    given = {name: getattr(message, name) for name in _SPECULATIVE if message.HasField(name)}
    return SpeculativePolicy(rule=rule, mode=mode, proposers=proposers_from_message(message), **given)


def proposers_from_message(message: coordinator_pb.SpeculativePolicy) -> tuple[Proposer, ...]:
    """Returns the proposers that a request names. Raises InvalidRequest."""
    named = []
    for index, number in enumerate(bounded("speculative.proposers", message.proposers, PROPOSER_COUNT_MAX)):
        if number not in (proposer.value for proposer in Proposer if proposer):
            limit = ", ".join(f"{one.value} ({one.name})" for one in Proposer if one)
            raise InvalidRequest(f"speculative.proposers[{index}]", number, limit)
        named.append(Proposer(number))
    return tuple(dict.fromkeys(named))


def request_from_message(message: coordinator_pb.GenerateRequest, positions_max: int = TOKENS_MAX) -> GenerationRequest:
    """Returns the checked request to a model of `positions_max` positions. Raises InvalidRequest."""
    check_counts(message, positions_max)
    check_known(message)
    prompt = message.WhichOneof("prompt")
    if prompt is None:
        raise InvalidRequest("prompt", "absent", "text or token_ids")
    predicted_text, predicted_token_ids = content_of(message, "prediction")
    decoder_text, decoder_token_ids = content_of(message, "decoder_prompt")
    return GenerationRequest(
        text=message.text if prompt == "text" else None,
        token_ids=tuple(message.token_ids.ids),
        sampling=sampling_from_message(message.sampling),
        speculative=speculative_from_message(message.speculative),
        resumed_token_ids=tuple(message.resume.output_token_ids),
        label=message.label,
        cache_salt=message.cache_salt,
        prompt_cache_key=message.prompt_cache_key,
        predicted_text=predicted_text,
        predicted_token_ids=predicted_token_ids or (),
        decoder_text=decoder_text,
        decoder_token_ids=decoder_token_ids,
    )


def content_of(
    message: coordinator_pb.GenerateRequest, name: Literal["prediction", "decoder_prompt"]
) -> tuple[str | None, tuple[int, ...] | None]:
    """Returns the text or the token ids of a field that has one of the two; None for what it does not have. Raises
    InvalidRequest for one that has neither."""
    if not message.HasField(name):
        return None, None
    own = message.prediction if name == "prediction" else message.decoder_prompt
    content = own.WhichOneof("content")
    if content is None:
        raise InvalidRequest(name, "absent", "text or token_ids")
    return (own.text, None) if content == "text" else (None, tuple(own.token_ids.ids))


def choice_count(message: coordinator_pb.GenerateRequest) -> int:
    """Returns the number of choices that a request asks for. Raises InvalidRequest for one that none may."""
    count = message.sampling.n if message.sampling.HasField("n") else 1
    check_integer("sampling.n", count, N_MIN, N_MAX)
    return count


def event_to_message(event: Event, target: Description, choice: int = 0) -> coordinator_pb.GenerateResponse:
    """Returns the message of one event of a choice; `started` describes the model of `target`."""
    response = _event_to_message(event, target)
    if choice:
        response.choice = choice
    return response


def _event_to_message(event: Event, target: Description) -> coordinator_pb.GenerateResponse:
    if isinstance(event, Delta):
        return coordinator_pb.GenerateResponse(delta=_delta_fields(event))
    if isinstance(event, PromptLogprobs):
        return coordinator_pb.GenerateResponse(prompt_logprobs=prompt_logprobs_to_message(event))
    if isinstance(event, Moved):
        numerics = numerics_to_message(event.target)
        moved = coordinator_pb.Moved(first_output_index=event.first_output_index, numerics=numerics)
        return coordinator_pb.GenerateResponse(moved=moved)
    if isinstance(event, Started):
        return coordinator_pb.GenerateResponse(started=_started_to_message(event, target))
    return coordinator_pb.GenerateResponse(finished=_finished_to_message(event))


def _started_to_message(event: Started, target: Description) -> coordinator_pb.Started:
    return coordinator_pb.Started(
        request_id=event.request_id,
        seed=event.seed,
        rule=rule_to_number(event.rule),
        model_digest=target.model_digest,
        numerics=numerics_to_message(target),
        prompt_length=event.prompt_length,
        max_tokens=event.max_tokens,
        rule_reason=event.rule_reason,
        encoder_length=event.encoder_length,
    )


def _delta_fields(event: Delta) -> dict[str, Any]:
    first_output_index, token_ids, kinds, text, text_lengths, logprobs, proposers, rounds, statistics = event
    fields: dict[str, Any] = {
        "first_output_index": first_output_index,
        "token_ids": token_ids,
        "kinds": kinds,
        "text": text,
        "text_lengths": text_lengths,
        "logprobs": list(map(_position_to_message, logprobs)),
        "proposers": proposers if any(proposer > Proposer.DRAFT for proposer in proposers) else (),
    }
    if rounds:
        fields["rounds"] = [coordinator_pb.Round(**own._asdict()) for own in rounds]
    if statistics is not None:
        fields["statistics"] = statistics_to_message(statistics)
    return fields


def _position_to_message(position: PositionLogprobs) -> coordinator_pb.TokenLogprobs:
    return coordinator_pb.TokenLogprobs(
        logprob=position.logprob, top_token_ids=position.top_token_ids, top_logprobs=position.top_logprobs
    )


def _finished_to_message(event: Finished) -> coordinator_pb.Finished:
    return coordinator_pb.Finished(
        reason=cast(coordinator_pb.FinishReason, event.reason.value),
        stop_string=event.stop_string,
        stop_token_id=event.stop_token_id,
        usage=coordinator_pb.Usage(
            prompt_tokens=event.prompt_tokens,
            output_tokens=event.output_tokens,
            encoder_tokens=event.encoder_tokens,
        ),
        statistics=statistics_to_message(event.statistics),
        trace_id=event.trace_id,
    )


def statistics_to_message(statistics: Statistics) -> coordinator_pb.Statistics:
    """Returns the message of statistics and of those derived from them; the fields have the same names."""
    time = coordinator_pb.TimeSplit(**{name: value for name, value in zip(TIME_NAMES, TIMES(statistics)) if value})
    counts = {name: value for name, value in zip(COUNT_NAMES, COUNTS(statistics)) if value}
    return coordinator_pb.Statistics(time=time, rule=rule_to_number(statistics.rule), **counts)


def coordinator_description_to_message(
    targets: Sequence[tuple[Description, int]],
    drafts: Sequence[tuple[Description, int]],
    draft_absent_reason: str,
    limits: SpeculationSettings,
) -> coordinator_pb.CoordinatorDescribeResponse:
    """Returns the message of a coordinator's description, with its limits; `targets` and `drafts`: models of those in
    use, and the number of each."""
    return coordinator_pb.CoordinatorDescribeResponse(
        target=description_to_message(targets[0][0]) if targets else None,
        draft=description_to_message(drafts[0][0]) if drafts else None,
        targets=[_group_to_message(*group) for group in targets[:REPLICA_COUNT_MAX]],
        drafts=[_group_to_message(*group) for group in drafts[:REPLICA_COUNT_MAX]],
        draft_absent_reason=draft_absent_reason,
        num_speculative_tokens=limits.num_speculative_tokens,
        num_speculative_tokens_max=limits.num_speculative_tokens_max,
        draft_window_max=limits.draft_window_max,
        draft_nodes_per_step_max=limits.draft_nodes_per_step_max,
        draft_siblings_max=limits.draft_siblings_max,
    )


def _group_to_message(model: Description, replica_count: int) -> coordinator_pb.ReplicaGroup:
    return coordinator_pb.ReplicaGroup(
        model_digest=model.model_digest,
        model_name=model.model_name,
        numerics=numerics_to_message(model),
        num_replicas=replica_count,
    )
