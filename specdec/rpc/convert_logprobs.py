"""Log-probabilities, of a round and of a prompt, to messages and back."""

from __future__ import annotations

import math
from array import array

from specdec.errors import InvalidRequest
from specdec.protocol.limits import LOGPROBS_MAX, PROMPT_LOGPROBS_COUNT_MAX, TOKENS_MAX, check_integer
from specdec.protocol.types import PositionLogprobs, PromptLogprobs, SamplerOutput
from specdec.rpc.convert import numbers_from_bytes, numbers_to_bytes
from specdec.rpc.wire_fields import bounded
from specdec.v1 import target_service_pb2 as target_pb
from specdec.v1 import types_pb2 as types_pb


def logprobs_to_message(output: SamplerOutput) -> target_pb.Logprobs:
    """Returns the message of the log-probabilities in a sampler output."""
    positions = output.recovered_logprobs
    return target_pb.Logprobs(
        draft=numbers_to_bytes("f", output.draft_logprobs),
        recovered=numbers_to_bytes("f", [position.logprob for position in positions]),
        top_token_ids=[token_id for position in positions for token_id in position.top_token_ids],
        top=numbers_to_bytes("f", [value for position in positions for value in position.top_logprobs]),
    )


def positions_from_message(
    message: target_pb.Logprobs, count: int
) -> tuple[tuple[float, ...], tuple[PositionLogprobs, ...]]:
    """Returns (draft, recovered) logprobs of a verification with `count` positions. Raises InvalidRequest."""
    for name, size_max in (("draft", 4 * count), ("recovered", 4 * count), ("top", 4 * LOGPROBS_MAX * count)):
        bounded(f"logprobs.{name}", getattr(message, name), size_max)
    draft = numbers_from_bytes("f", message.draft, "logprobs.draft", -math.inf, 0.0)
    recovered = numbers_from_bytes("f", message.recovered, "logprobs.recovered", -math.inf, 0.0)
    top = numbers_from_bytes("f", message.top, "logprobs.top", -math.inf, 0.0)
    sizes = len(draft), len(recovered), len(top), len(message.top_token_ids)
    if len(draft) != count - 1 or len(recovered) != count or len(top) != sizes[3] or len(top) % count:
        raise InvalidRequest("logprobs", sizes, f"numbers for {count} positions")
    width = len(top) // count

    def at(index: int, logprob: float) -> PositionLogprobs:
        start, end = index * width, (index + 1) * width
        return PositionLogprobs(logprob, tuple(message.top_token_ids[start:end]), tuple(top[start:end]))

    return tuple(draft), tuple(map(at, range(count), recovered))


def prompt_logprobs_to_message(value: PromptLogprobs) -> types_pb.PromptLogprobs:
    """Returns the message of a part of a prompt's log-probabilities."""
    return types_pb.PromptLogprobs(
        first_prompt_index=value.first_index,
        token_ids=value.token_ids,
        logprobs=value.logprobs,
        ranks=value.ranks,
        top_token_ids=value.top_token_ids,
        top_logprobs=value.top_logprobs,
    )


def prompt_logprobs_from_message(message: types_pb.PromptLogprobs) -> PromptLogprobs:
    """Returns the checked value of a message, its numbers in arrays. Raises InvalidRequest."""
    count = len(bounded("token_ids", message.token_ids, PROMPT_LOGPROBS_COUNT_MAX))
    for name in ("logprobs", "ranks", "top_token_ids", "top_logprobs"):
        bounded(name, getattr(message, name), PROMPT_LOGPROBS_COUNT_MAX * (LOGPROBS_MAX if "top" in name else 1))
    check_integer("first_prompt_index", message.first_prompt_index, 1, TOKENS_MAX)
    ids, ranks, top_ids = (array("I", own) for own in (message.token_ids, message.ranks, message.top_token_ids))
    own, top = array("f", message.logprobs), array("f", message.top_logprobs)
    sizes = count, len(own), len(ranks), len(top_ids), len(top)
    if not count == len(own) == len(ranks) or len(top_ids) != len(top) or len(top) % max(count, 1) or not count:
        raise InvalidRequest("logprobs", sizes, "as many numbers as tokens, and as many likeliest of each")
    for name, numbers in (("token_ids", ids), ("ranks", ranks), ("top_token_ids", top_ids)):
        check_integer(name, max(numbers, default=0), 0, TOKENS_MAX)
    for name, values in (("logprobs", own), ("top_logprobs", top)):
        if not all(value <= 0 for value in values):  # also of a not-a-number
            raise InvalidRequest(name, max(values), f"from {-math.inf:g} to 0")
    return PromptLogprobs(message.first_prompt_index, ids, own, ranks, top_ids, top)
