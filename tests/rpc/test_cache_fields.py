"""Fields about the cache in messages: values survive the wire, and absent ones have their documented meaning."""

from __future__ import annotations

import pytest

from specdec.errors import InvalidRequest
from specdec.protocol.items import Open, VerificationResult
from specdec.protocol.limits import CACHE_SALT_LENGTH_MAX
from specdec.protocol.types import CacheSize, Description, ResolvedSamplingParams, Rule, SamplerOutput
from specdec.rpc.convert import description_from_message, description_to_message
from specdec.rpc.convert_generate import request_from_message
from specdec.rpc.convert_items import item_from_message, item_to_bytes
from specdec.v1 import coordinator_service_pb2 as coordinator_pb
from specdec.v1 import target_service_pb2 as target_pb

PARAMS = ResolvedSamplingParams(Rule.GREEDY, seed=1, prompt_length=2, temperature=0.0)


def through_the_wire(message_class: type, item: object) -> object:
    """The item as it is read from a message's bytes."""
    return item_from_message(message_class.FromString(item_to_bytes(message_class, item)).items[0])


def test_values_of_the_cache_come_back() -> None:
    """Claim: a salt, a result's cache counts and a replica's cache size survive the wire; absent ones are empty.

    Conclusive: every field has a value of its own, so two exchanged fields would show.
    """
    opened = Open(1, 2, PARAMS, 10, 7, cache_salt="tenant")
    assert through_the_wire(target_pb.VerifyRequest, opened) == opened
    answer = VerificationResult(1, 2, 3, SamplerOutput((4,)), 5, 6, 7, 8, 9, 10, 11, 12, 13)
    assert (answer.cached_prompt_tokens, answer.step_count, answer.preemptions) == (11, 12, 13)
    assert through_the_wire(target_pb.VerifyResponse, answer) == answer
    for size in (None, CacheSize(10, 64, 1 << 40)):
        description = Description("digest", "print", "name", 7, 100, (1,), "float32", "cpu", "torch", cache=size)
        assert description_from_message(description_to_message(description)) == description


def test_a_salt_has_a_limit_and_is_not_shown() -> None:
    """Claim: a request's salt is taken as it is up to its limit, absent means the common one, and beyond it is refused
    without being repeated. Conclusive: both sides of the limit."""

    def request(**fields: str):
        request = coordinator_pb.GenerateRequest(text="x", **fields)
        return request_from_message(request)

    assert request().cache_salt == "" and request(cache_salt="s" * CACHE_SALT_LENGTH_MAX).cache_salt[-1] == "s"
    with pytest.raises(InvalidRequest) as refused:
        request(cache_salt="secret" * CACHE_SALT_LENGTH_MAX)
    assert refused.value.field == "cache_salt" and "secret" not in str(refused.value)
