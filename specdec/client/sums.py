"""Statistics of the streams of one text: each was lost but the last."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from google.protobuf.descriptor import FieldDescriptor

from specdec.v1 import coordinator_service_pb2 as coordinator_pb

FIRST = ("cached_prompt_tokens",)  # of the first stream: the others read the text so far as their prompt
DERIVED = ("mean_acceptance_length", "draft_acceptance_rate", "predicted_tokens_per_s", "observed_tokens_per_s")
MAXIMA = {
    FieldDescriptor.CPPTYPE_UINT32: 2**32 - 1,
    FieldDescriptor.CPPTYPE_UINT64: 2**64 - 1,
    FieldDescriptor.CPPTYPE_DOUBLE: float("inf"),
}
ADDED = {  # each with its type's maximum, where its sum ends
    field.name: MAXIMA[field.cpp_type]
    for field in coordinator_pb.Statistics.DESCRIPTOR.fields
    if field.cpp_type in MAXIMA and field.name not in (*FIRST, *DERIVED, "acceptance_histogram")
}
TIMES = [own.name for own in coordinator_pb.TimeSplit.DESCRIPTOR.fields if own.name != "time_to_first_token_s"]


def summed(parts: Sequence[coordinator_pb.Statistics], output_tokens: int) -> coordinator_pb.Statistics:
    """Returns the statistics of a text of `output_tokens` from those of its streams, in their order: sums, but for the
    first stream's time to the first token and cached prompt tokens, and the last one's plan and rule. The time without
    any stream is in none."""
    whole = coordinator_pb.Statistics()
    whole.CopyFrom(parts[-1])
    for name, most in ADDED.items():
        setattr(whole, name, min(most, sum(getattr(part, name) for part in parts)))
    for name in TIMES:
        setattr(whole.time, name, sum(getattr(part.time, name) for part in parts))
    for name in FIRST:
        setattr(whole, name, getattr(parts[0], name))
    whole.time.time_to_first_token_s = parts[0].time.time_to_first_token_s
    del whole.acceptance_histogram[:]
    whole.acceptance_histogram.extend(
        map(sum, zip_longest(*(part.acceptance_histogram for part in parts), fillvalue=0))
    )
    steps, drafted, accepted = whole.num_spec_steps, whole.num_draft_tokens, whole.num_accepted_draft_tokens
    whole.mean_acceptance_length = 1 + accepted / steps if steps else 1.0
    whole.draft_acceptance_rate = accepted / drafted if drafted else 0.0
    seconds = whole.time.total_s - whole.time.time_to_first_token_s
    whole.observed_tokens_per_s = (output_tokens - 1) / seconds if seconds > 0 else 0.0
    return whole
