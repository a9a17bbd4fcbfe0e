"""Speculation in answers: vLLM's `metrics.speculative_decoding`, and gRPC's statistics, kinds and rounds as JSON."""

from __future__ import annotations

from typing import Any

from google.protobuf import json_format

from specdec.gateway.prompts import Prompts
from specdec.v1 import coordinator_service_pb2 as coordinator_pb

AT_TARGET = "target_queue_s", "target_forward_s", "target_sampling_s", "target_heads_s"
TIMES = ("round_s", "draft_wait_s", *AT_TARGET, "target_link_s")
KINDS = {value: name.removeprefix("TOKEN_KIND_").lower() for name, value in coordinator_pb.TokenKind.items()}
PROPOSERS = {value: name.removeprefix("PROPOSER_").lower() for name, value in coordinator_pb.Proposer.items()}
NO_PROPOSER = coordinator_pb.PROPOSER_UNSPECIFIED


def speculative_decoding(statistics: coordinator_pb.Statistics, draft_length_max: int) -> dict[str, Any]:
    """Returns the metrics in vLLM's form; the histogram has an entry for each number of accepted tokens there can be,
    which is what AIPerf reads."""
    length = max(draft_length_max + 1, len(statistics.acceptance_histogram))
    counts = list(statistics.acceptance_histogram)
    return {
        "mean_acceptance_length": statistics.mean_acceptance_length,
        "draft_acceptance_rate": statistics.draft_acceptance_rate,
        "acceptance_histogram": counts + [0] * (length - len(counts)),
        "num_spec_steps": statistics.num_spec_steps,
        "num_spec_tokens": length - 1,
        "num_draft_tokens": statistics.num_draft_tokens,
        "num_accepted_draft_tokens": statistics.num_accepted_draft_tokens,
    }


def statistics_of(statistics: coordinator_pb.Statistics) -> dict[str, Any]:
    """Returns all statistics of gRPC, by their names there; 64-bit counts are numbers here."""
    fields: dict[str, Any] = json_format.MessageToDict(
        statistics, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return {
        name: int(value) if name.endswith("_bytes") or name.endswith("_sessions") else value
        for name, value in fields.items()
    }


def rounds_of(delta: coordinator_pb.Delta, prompts: Prompts, round_count: int) -> dict[str, Any]:
    """Returns the kind and proposer of each token of a delta, and its rounds, numbered from `round_count` on; each
    offered token with its text."""
    proposers = list(delta.proposers)
    if not proposers:
        accepted = coordinator_pb.TOKEN_KIND_ACCEPTED
        proposers = [coordinator_pb.PROPOSER_DRAFT if kind == accepted else NO_PROPOSER for kind in delta.kinds]
    return {
        "token_ids": list(delta.token_ids),
        "text_lengths": list(delta.text_lengths),
        "kinds": [KINDS.get(kind, "bonus") for kind in delta.kinds],
        "proposers": [proposer_of(own) for own in proposers],
        "rounds": [_round(own, prompts, round_count + at) for at, own in enumerate(delta.rounds)],
    }


def proposer_of(number: int) -> str | None:
    """Returns a proposer's name; None for none."""
    return None if number == NO_PROPOSER else PROPOSERS.get(number)


def _round(own: coordinator_pb.Round, prompts: Prompts, index: int) -> dict[str, Any]:
    offered = list(own.draft_token_ids)
    return {
        "round_index": index,
        "draft_token_ids": offered,
        "draft_texts": [prompts.piece(token_id)[0] for token_id in offered],
        "parents": list(own.parents) or list(range(len(offered))),
        "proposers": [proposer_of(number) for number in own.proposers],
        "accepted": list(own.accepted),
        "num_output_tokens": own.num_output_tokens,
        **{name: getattr(own, name) for name in TIMES},
    }
