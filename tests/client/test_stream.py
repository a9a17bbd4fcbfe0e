"""`specdec.client` before a coordinator that ends streams in every way there is.

The server is specdec's own with a scripted `Generate`, since no real service fails at a given message;
`tests/services/test_own_client.py` has real ones.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from specdec.client.events import Finished, Started
from specdec.client.request import make_request
from specdec.client.stream import Client
from specdec.errors import (
    CacheExhausted,
    DeliveryStalled,
    InvalidRequest,
    Mismatch,
    NumericsError,
    ReplicaUnavailable,
    SpecdecError,
)
from specdec.protocol.report import Delta
from specdec.rpc.server import Server, unary_stream
from specdec.settings import ServiceSettings
from specdec.v1 import coordinator_service_pb2 as pb
from specdec.v1 import types_pb2 as types_pb

RETRY_S = 0.05
LOST = ReplicaUnavailable("the target was lost", RETRY_S)
Step = pb.GenerateResponse | SpecdecError


def started(rule: int = types_pb.RULE_COUPLED, digest: str = "d", device: str = "cpu") -> pb.GenerateResponse:
    own = pb.Started(request_id="r", seed=7, rule=rule, model_digest=digest)
    own.numerics.device = device
    return pb.GenerateResponse(started=own)


def delta(first: int, *token_ids: int) -> pb.GenerateResponse:
    kinds = [pb.TOKEN_KIND_BONUS] * len(token_ids)
    text = "".join(map(str, token_ids))
    lengths = [1] * len(token_ids)
    own = pb.Delta(first_output_index=first, token_ids=token_ids, kinds=kinds, text=text, text_lengths=lengths)
    own.rounds.add(round_index=0, num_output_tokens=len(token_ids))
    return pb.GenerateResponse(delta=own)


FINISHED = pb.GenerateResponse(finished=pb.Finished(reason=pb.FINISH_REASON_STOP))


@asynccontextmanager
async def scripted(*calls: Sequence[Step]) -> AsyncIterator[tuple[str, list[pb.GenerateRequest]]]:
    """The address of a coordinator that answers each call by its steps, the last of them again and again; and the
    requests that it got."""
    requests: list[pb.GenerateRequest] = []

    async def generate(request, context):
        requests.append(request)
        for step in calls[min(len(requests), len(calls)) - 1]:
            if isinstance(step, SpecdecError):
                raise step
            yield step

    methods = {"Generate": unary_stream(pb.GenerateRequest, generate)}
    server = Server(ServiceSettings(port=0), {"specdec.v1.CoordinatorService": methods})
    address = await server.start()
    try:
        yield address, requests
    finally:
        await server.stop(0.0)


@pytest.mark.parametrize("error", [LOST, CacheExhausted("full", RETRY_S), DeliveryStalled("not read"), None])
async def test_a_lost_stream_goes_on(error: SpecdecError | None) -> None:
    """Claim: a stream that is lost twice after its start, or just ends, and refused once between, is one text for its
    reader: one start, each token once with its round, one end. Each further request has the tokens that came, the seed
    in force, and asks for rounds as the first did.

    Conclusive: the events are compared whole, and what the server was asked is what it got on the wire.
    """
    lost = [error] if error else []
    calls = [started(), delta(0, 1, 2), *lost], lost, [started(), delta(2, 3), *lost], [started(), FINISHED]
    request = make_request("x", [9], temperature=1.0, report_rounds=True)
    async with scripted(*calls) as (address, requests), Client(address) as client:
        events = [event async for event in client.generate(request)]
    assert [type(event) for event in events] == [Started, Delta, Delta, Finished]
    deltas = [event for event in events if isinstance(event, Delta)]
    assert [event.token_ids for event in deltas] == [(1, 2), (3,)]
    assert [own.num_output_tokens for event in deltas for own in event.rounds] == [2, 1]
    assert all(request.speculative.report_rounds for request in requests)
    received = [list(request.resume.output_token_ids) for request in requests]
    assert received == [[9], [9, 1, 2], [9, 1, 2], [9, 1, 2, 3]]
    assert [request.sampling.seed for request in requests] == [0, 7, 7, 7]
    assert not request.sampling.HasField("seed"), "the caller's own request is left as it was"


def statistics(**own: Any) -> pb.Statistics:
    time = own.pop("time", None)
    return pb.Statistics(time=pb.TimeSplit(**(time or {})), **own)


async def test_statistics_are_of_all_streams() -> None:
    """Claim: the end of a text that was lost twice has the sums over its streams, each as far as its last delta told;
    rates follow from the sums; the first stream's cached prompt tokens and time to the first token, and the last one's
    plan, stay. Without resuming they are not asked for.

    Conclusive: every part differs from the others, a stream was lost before its first delta, and sums are literal.
    """
    time = {"total_s": 1.0, "time_to_first_token_s": 0.5, "draft_wait_s": 0.25}
    first, second, third = delta(0, 1, 2), delta(2, 3), delta(3, 4)
    counts = {"num_spec_steps": 1, "num_draft_tokens": 3, "num_accepted_draft_tokens": 1}
    kept = {"cached_prompt_tokens": 7, "exploration_loss_s": 0.5, "draft_link_bytes": 1 << 40}
    first.delta.statistics.CopyFrom(statistics(rounds=1))
    second.delta.statistics.CopyFrom(
        statistics(rounds=2, acceptance_histogram=[0, 1], policy_reason="old", time=time, **counts, **kept)
    )
    third.delta.statistics.CopyFrom(statistics(rounds=(1 << 32) - 3, time=time, cached_prompt_tokens=9, **counts))
    last = statistics(rounds=3, acceptance_histogram=[2, 0, 1], policy_reason="new", time=time, **counts, **kept)
    end = pb.Finished(reason=pb.FINISH_REASON_STOP, usage=pb.Usage(output_tokens=5), statistics=last)
    finished = pb.GenerateResponse(finished=end)
    calls = [started(), first, second, LOST], [started(), LOST], [started(), third, LOST], [started(), finished]
    async with scripted(*calls) as (address, requests), Client(address) as client:
        whole = (await client.read(make_request("x"))).statistics
    assert all(request.speculative.report_statistics for request in requests)
    assert (whole.rounds, list(whole.acceptance_histogram), whole.policy_reason) == ((1 << 32) - 1, [2, 1, 1], "new")
    assert (whole.num_spec_steps, whole.num_draft_tokens, whole.num_accepted_draft_tokens) == (3, 9, 3)
    assert (whole.mean_acceptance_length, whole.draft_acceptance_rate) == (2.0, 3 / 9)
    assert (whole.cached_prompt_tokens, whole.draft_link_bytes, whole.exploration_loss_s) == (7, 2 << 40, 1.0)
    assert (whole.time.total_s, whole.time.time_to_first_token_s, whole.time.draft_wait_s) == (3.0, 0.5, 0.75)
    assert whole.observed_tokens_per_s == 4 / 2.5
    async with scripted([started(), finished]) as (address, requests), Client(address, resume_s=0.0) as client:
        assert (await client.read(make_request("x"))).statistics == last
    assert not requests[0].speculative.report_statistics


async def test_rejection_is_resumed_without_a_seed() -> None:
    """Claim: under REJECTION, which refuses a seed, none is sent. Conclusive: the request on the wire has none."""
    calls = [started(types_pb.RULE_REJECTION), LOST], [started(types_pb.RULE_REJECTION), FINISHED]
    async with scripted(*calls) as (address, requests), Client(address) as client:
        await client.read(make_request("x", rule="rejection"))
    assert len(requests) == 2 and not requests[1].sampling.HasField("seed")


@pytest.mark.parametrize(
    ("calls", "resume_s", "error"),
    [
        ([[LOST]], 60.0, ReplicaUnavailable),
        ([[CacheExhausted("full", RETRY_S)]], 60.0, CacheExhausted),
        ([[started(), delta(0, 1), LOST]], 0.0, ReplicaUnavailable),
        ([[started(), delta(0, 1), InvalidRequest("field", 1, "2")]], 60.0, InvalidRequest),
        ([[started(), delta(0, 1), NumericsError("not a number")]], 60.0, NumericsError),
    ],
    ids=["lost before its start", "full before its start", "resuming is off", "refused", "a model's error"],
)
async def test_other_errors_are_told_at_once(
    calls: list[list[Step]], resume_s: float, error: type[SpecdecError]
) -> None:
    """Claim: before a text has started, with resuming off, and for errors that waiting does not mend, the request is
    sent once and the coordinator's error raised. Conclusive: the server counts."""
    async with scripted(*calls) as (address, requests), Client(address, resume_s=resume_s) as client:
        with pytest.raises(error):
            await client.read(make_request("x"))
    assert len(requests) == 1


async def test_other_numerics_are_told_before_their_first_token() -> None:
    """Claim: a text that is resumed at a target of the same weights and other numerics goes on, and its reader is told
    `moved`, with the index of the next token, before it. Conclusive: the order of all messages is compared."""
    calls = [started(), delta(0, 1), LOST], [started(device="cuda"), delta(1, 2), FINISHED]
    async with scripted(*calls) as (address, _), Client(address) as client:
        messages = [message async for message in client.messages(make_request("x"))]
    assert [message.WhichOneof("event") for message in messages] == ["started", "delta", "moved", "delta", "finished"]
    assert messages[2].moved.first_output_index == 1 and messages[2].moved.numerics.device == "cuda"


def prompt_part(first: int, *token_ids: int) -> pb.GenerateResponse:
    """Log-probabilities of some prompt tokens, with two likeliest each; all numbers follow from the token."""
    tops = [number for token_id in token_ids for number in (token_id + 100, token_id + 200)]
    own = types_pb.PromptLogprobs(first_prompt_index=first, token_ids=token_ids, ranks=token_ids, top_token_ids=tops)
    own.logprobs.extend(-float(token_id) for token_id in token_ids)
    own.top_logprobs.extend(-float(number) for number in tops)
    return pb.GenerateResponse(prompt_logprobs=own)


async def test_each_prompt_token_is_told_once() -> None:
    """Claim: a stream that is lost among log-probabilities of its prompt, or after them, is one for its reader: each
    prompt token comes once, in order, with its own numbers, whatever the sizes of the parts that come again.

    Conclusive: parts that overlap by some, by all and by nothing are sent, and the messages compared whole."""
    calls = (
        [started(), prompt_part(1, 11, 12, 13), LOST],
        [started(), prompt_part(1, 11, 12), prompt_part(3, 13, 14, 15), LOST],
        [started(), prompt_part(1, 11), prompt_part(2, 12, 13, 14, 15), prompt_part(6, 16), delta(0, 1), LOST],
        [started(), delta(1, 2), FINISHED],
    )
    async with scripted(*calls) as (address, requests), Client(address) as client:
        messages = [message async for message in client.messages(make_request("x", prompt_logprobs=2))]
    parts = [message.prompt_logprobs for message in messages if message.HasField("prompt_logprobs")]
    whole = (prompt_part(1, 11, 12, 13), prompt_part(4, 14, 15), prompt_part(6, 16))
    assert parts == [own.prompt_logprobs for own in whole]
    assert [list(message.delta.token_ids) for message in messages if message.HasField("delta")] == [[1], [2]]
    assert len(requests) == 4


async def test_another_model_does_not_go_on_with_a_text() -> None:
    """Claim: if the target that is back has other weights, the text ends with an error that says so, and no token of it
    is shown. Source: docs/reliability.md. Conclusive: the second stream would have given one."""
    calls = [started(), delta(0, 1), LOST], [started(digest="e"), delta(1, 2), FINISHED]
    seen: list[int] = []
    async with scripted(*calls) as (address, _), Client(address) as client:
        with pytest.raises(Mismatch, match="cannot be resumed"):
            async for message in client.messages(make_request("x")):
                seen += message.delta.token_ids
    assert seen == [1]


@pytest.mark.parametrize(("resume_s", "timeout_s"), [(0.3, None), (60.0, 0.3)], ids=["resume_s", "timeout_s"])
async def test_resuming_ends(resume_s: float, timeout_s: float | None) -> None:
    """Claim: a coordinator that stays away is asked again until `resume_s` after the last token, or until the request's
    own `timeout_s`, and its error is raised. Conclusive: it was asked several times, and not for the other limit."""
    began_s = time.monotonic()
    async with scripted([started(), delta(0, 1), LOST], [LOST]) as (address, requests):
        async with Client(address, resume_s=resume_s) as client:
            with pytest.raises(ReplicaUnavailable):
                await client.read(make_request("x"), timeout_s)
    assert len(requests) > 2 and time.monotonic() - began_s < 30.0


async def test_what_is_lost_after_the_end_is_no_loss() -> None:
    """Claim: a text whose end was received has ended, whatever becomes of its stream. Conclusive: one request."""
    async with scripted([started(), delta(0, 1), FINISHED, LOST]) as (address, requests), Client(address) as client:
        run = await client.read(make_request("x"))
    assert run.token_ids == [1] and run.finished is not None and len(requests) == 1
