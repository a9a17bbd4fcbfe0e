"""Short forms of the malformed messages: some thousand for each service, and the mutator by itself."""

from __future__ import annotations

import argparse
import math

import pytest
from google.protobuf.message import DecodeError
from rich.console import Console

from specdec.v1 import coordinator_service_pb2 as pb
from tests.chaos.mutations import Mutator
from tests.chaos.proofs import malformed
from tests.chaos.wire import read, write

REQUEST = pb.GenerateRequest(
    token_ids={"ids": [1, 2]},
    sampling={
        "temperature": 1.0,
        "logit_bias": [{"token_id": 1, "bias": 2.0}],
        "stop": ["x"],
        "grammar": {"choice": {"texts": ["a"]}},
    },
    speculative={"num_speculative_tokens": 2},
    resume={"output_token_ids": [3]},
    prediction={"token_ids": {"ids": [4, 5]}},
    decoder_prompt={"token_ids": {"ids": [6]}},
)


def mutated(seed: int, count: int) -> tuple[Mutator, list[bytes]]:
    nodes = read(REQUEST.DESCRIPTOR, REQUEST.SerializeToString())
    mutator = Mutator(REQUEST.DESCRIPTOR, nodes, seed)
    return mutator, [mutator.mutate(nodes) for _ in range(count)]


def test_mutations_reach_every_field_and_return_with_their_seed() -> None:
    """Claim: a message is written as it was read; some thousand mutations touch every field that its descriptor holds,
    parse in part, and are the same for the same seed. Conclusive: the fields come from the descriptor."""
    data = REQUEST.SerializeToString()
    assert write(read(REQUEST.DESCRIPTOR, data)) == data
    mutator, messages = mutated(1, 8000)
    assert messages[:500] == mutated(1, 500)[1] != mutated(2, 500)[1]
    assert mutator.fields.keys() <= mutator.field_counts.keys()
    broken = 0
    for message in messages:
        try:
            pb.GenerateRequest.FromString(message)
        except DecodeError:
            broken += 1
    assert 0.05 < broken / len(messages) < 0.6


@pytest.mark.more
def test_malformed_messages_cost_themselves_only() -> None:
    """Claim: mutations of recorded traffic, at each service: no process ends, none is answered UNKNOWN or INTERNAL,
    health stays SERVING, texts generated afterwards are equal, no session or block is left; the same holds where a
    coordinator meets mutated answers, and a draft's fail no request and change no text (proof `malformed`, short).

    Conclusive: real processes, sockets and recorded messages, and every condition of the proof but full coverage.
    """
    asked = argparse.Namespace(messages=1000, answers=1000, minutes=math.inf, services=list(malformed.SERVICES), seed=3)
    bars = malformed.prove(asked, Console(quiet=True))
    assert [bar.claim for bar in bars if bar.state == "missed"] in ([], ["share of fields mutated"])
