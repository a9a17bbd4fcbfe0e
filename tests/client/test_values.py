"""Requests and events of `specdec.client` against the messages of the wire."""

from __future__ import annotations

from dataclasses import fields
from enum import Enum

import pytest

from specdec.client.events import Finished, Started, event_of
from specdec.client.request import FIELDS, make_request
from specdec.client.run import Run, acceptance_of, rate_of
from specdec.errors import ConfigError, Mismatch, ReplicaUnavailable
from specdec.protocol.report import Delta, Round
from specdec.protocol.types import Description, PositionLogprobs, Proposer, TokenKind
from specdec.rpc.convert_generate import event_to_message, request_from_message
from specdec.v1 import coordinator_service_pb2 as pb
from specdec.v1 import types_pb2 as types_pb

TARGET = Description("d", "t", "m", 7, 64, (0,), "float32", "cpu", "torch")
A, R, B = TokenKind.ACCEPTED, TokenKind.RECOVERED, TokenKind.BONUS


@pytest.mark.parametrize(
    "proposers", [(Proposer.DRAFT, Proposer.NONE, Proposer.NONE), (Proposer.HEADS, Proposer.NONE, Proposer.NONE)]
)
@pytest.mark.parametrize("logprobs", [(), (PositionLogprobs(-0.5, (1, 2), (-0.5, -1.5)),) * 3])
def test_a_delta_is_the_coordinators_own(
    proposers: tuple[Proposer, ...], logprobs: tuple[PositionLogprobs, ...]
) -> None:
    """Claim: a delta comes out of the message that the coordinator makes of it, and nothing is lost. Conclusive: both
    are the same value, logprobs, proposers and rounds included, of whose values no two are alike; without a local
    proposer the wire has none, and they are known all the same."""
    tree = (5, 6, 9), (0, 1, 0), (Proposer.DRAFT, Proposer.NGRAM, Proposer.HEADS)
    rounds = Round(2, *tree, (0, 1), 2, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6), Round(3, (), (), (), (), 1, 0.7)
    delta = Delta(4, (5, 6, 7), (A, R, B), "añb", (1, 2, 0), logprobs, proposers)
    for own in (delta, delta._replace(rounds=rounds)):
        assert event_of(event_to_message(own, TARGET)) == own


def test_every_field_of_a_message_is_in_its_event() -> None:
    """Claim: start and end have all that their messages have. Conclusive: fields of messages and events are compared by
    name, those of `usage` one by one, so a new one is found, and by value, of which no two are alike."""
    start = pb.Started(request_id="r", seed=1, rule=types_pb.RULE_COUPLED, prompt_length=4, max_tokens=5)
    start.encoder_length = 3
    start.model_digest, start.rule_reason, start.numerics.device = "d", "reason", "cpu"
    end = pb.Finished(reason=pb.FINISH_REASON_LENGTH, stop_string="s", stop_token_id=6, trace_id="t")
    end.statistics.rounds, end.usage.prompt_tokens, end.usage.output_tokens = 7, 8, 9
    end.usage.encoder_tokens = 2
    for event, *messages in (
        (event_of(pb.GenerateResponse(started=start)), start),
        (event_of(pb.GenerateResponse(finished=end)), end, end.usage),
    ):
        names = {field.name: message for message in messages for field in message.DESCRIPTOR.fields}
        names.pop("usage", None)
        assert isinstance(event, Started | Finished) and set(names) == {field.name for field in fields(event)}
        for name, message in names.items():
            value = getattr(event, name)
            assert (value.value if isinstance(value, Enum) else value) == getattr(message, name), name
    absent = event_of(pb.GenerateResponse(finished=pb.Finished(reason=pb.FINISH_REASON_STOP)))
    assert isinstance(absent, Finished) and absent.stop_token_id is None


def test_other_versions() -> None:
    """Claim: a kind or proposer that this version does not know is shown as that of a plain token, an unknown rule or
    reason is None; an event without a meaning here is refused. Source: a coordinator may be newer than its client."""
    own = {"token_ids": [1, 2], "kinds": [1, 9], "proposers": [1, 99], "rounds": [pb.Round(proposers=[99])]}
    event = event_of(pb.GenerateResponse(delta=pb.Delta(**own)))
    assert isinstance(event, Delta) and event.kinds == (A, B) and event.proposers == (Proposer.DRAFT, Proposer.NONE)
    assert event.rounds[0].proposers == (Proposer.NONE,)
    start = event_of(pb.GenerateResponse(started=pb.Started(rule=9)))
    end = event_of(pb.GenerateResponse(finished=pb.Finished(reason=9)))
    assert isinstance(start, Started) and isinstance(end, Finished) and start.rule is end.reason is None
    with pytest.raises(Mismatch, match="another version"):
        event_of(pb.GenerateResponse())


def test_a_request_of_plain_values() -> None:
    """Claim: words and names of the wire make the same request, an absent value is absent, and the coordinator reads
    what was given. Conclusive: its own reader does."""
    own = {"max_tokens": 8, "temperature": 0.5, "stop": ["a"], "top_k": None}
    words = make_request("x", rule="coupled", policy="fixed", proposers=["draft", "ngram"], logit_bias={3: 1.5}, **own)
    named = make_request(
        "x",
        rule="RULE_COUPLED",
        policy="POLICY_FIXED",
        proposers=["PROPOSER_DRAFT", "PROPOSER_NGRAM"],
        logit_bias=[(3, 1.5)],
        **own,
    )
    assert words == named and not words.sampling.HasField("top_k") and not words.HasField("resume")
    read = request_from_message(make_request((1, 2), (3,), (4, 5), "label", "salt", enabled=False, max_tokens=8))
    assert (read.token_ids, read.resumed_token_ids, read.predicted_token_ids) == ((1, 2), (3,), (4, 5))
    assert (read.label, read.cache_salt, read.sampling.max_tokens, read.speculative.enabled) == (
        "label",
        "salt",
        8,
        False,
    )
    assert {"max_tokens", "seed", "draft_window", "enabled"} <= set(FIELDS)


@pytest.mark.parametrize(
    ("prompt", "given"),
    [
        ("\udcff", {}),
        ("x", {"stop": ["\udcff"]}),
        ("x", {"max_tokens": -1}),
        ([1 << 32], {}),
        ("x", {"resumed": [-1]}),
        ("x", {"policy": "no"}),
    ],
)
def test_values_that_do_not_fit_are_refused(prompt: str | list[int], given: dict[str, object]) -> None:
    """Claim: what no message can hold is refused before anything is sent, in one line."""
    with pytest.raises(ConfigError, match="the request cannot be sent") as refused:
        make_request(prompt, **given)
    assert len(str(refused.value).splitlines()) == 1


def test_rates_and_acceptance() -> None:
    """Claim: a rate counts from each first delta on, acceptance is of all generations together; before anything has
    ended or begun they are 0, and the statistics are refused. By hand: 5 tokens in 2.5 s; 3 of 8 in 4 rounds."""
    runs = [Run(deltas=[(1.0, 2), (2.0, 3)]), Run(deltas=[(7.0, 1), (8.5, 2)])]
    assert rate_of(runs) == 2.0 and rate_of([]) == rate_of([Run()]) == 0.0
    own = [
        pb.Statistics(num_draft_tokens=n, num_accepted_draft_tokens=m, num_spec_steps=2) for n, m in ((6, 3), (2, 0))
    ]
    assert acceptance_of(own) == (3 / 8, 7 / 4) and acceptance_of([]) == (0.0, 1.0)
    with pytest.raises(ReplicaUnavailable, match="ended before the text"):
        _ = runs[0].statistics
