"""Traces of three real processes, sent by the real exporter over real sockets into a real OTLP collector."""

from __future__ import annotations

import re
import secrets
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from specdec.traces.facts import facts_of
from specdec.traces.reader import TraceTree, spans_of
from tests.support.otlp_receiver import Receiver
from tests.support.services import Client, Outcome, Services, fixed
from tests.support.traces import CLIENT, INTERNAL, SERVER, SOON, ReadTrace, attributes, environment, trace_of, traced

ROUNDING_NS = 100_000  # the target's times arrive in microseconds
TREE = fixed(4, draft_window=8, draft_nodes_per_step=4, draft_wait_ms=2000)
ROW_COUNTS_MAX = {10: 75, 300: 160, 2000: 550}  # by rounds
PROPOSERS = ("model", "ngram", "suffix", "prediction", "heads", "grammar")  # as statistics name them
SUMS = {
    *(("coordinator", f"{part}, summed") for part in ("wait", "network", "rule")),
    *(("target", f"{part}, summed") for part in ("queue", "forward", "sampling")),
    ("draft", "draft, summed"),
}
# What may stand below what, with kinds: a child not named here is a mistake.
SHAPE = {
    ("coordinator", "prefill", INTERNAL): ("Generate",),
    ("coordinator", "round group", INTERNAL): ("Generate",),
    ("coordinator", "round", INTERNAL): ("round group",),
    ("coordinator", "verify", CLIENT): ("prefill", "round", "round group"),  # there, one without answer
    ("target", "verify", SERVER): ("verify",),
    ("target", "queue", INTERNAL): ("verify",),
    ("target", "chunks", INTERNAL): ("verify",),
    ("target", "forward", INTERNAL): ("verify",),
    ("target", "sampling", INTERNAL): ("verify",),
    ("coordinator", "wait", INTERNAL): ("round",),
    ("draft", "draft", SERVER): ("prefill", "round group"),
    **{(service, name, INTERNAL): ("prefill", "round group") for service, name in SUMS},
}


def generate(services: Services, token_count: int, **more) -> Outcome:
    """A generation of exactly `token_count` tokens."""
    asked = {"temperature": 0.7, "seed": 5, "speculative": TREE, "ignore_eos": True, **more}
    return services.client.generate([1, 2, 3], max_tokens=token_count, **asked)


def drafted(services: Services, token_count: int, **more) -> Outcome:
    """The same, again until the draft does not begin too late for it: until tokens of the draft were accepted."""
    for _ in range(50):
        outcome = generate(services, token_count, **more)
        if outcome.finished.statistics.num_model_accepted_tokens:
            return outcome
    raise AssertionError("the draft is not used")


def plain_name(span) -> str:
    """A span's name; of a round group without how it speculated."""
    return "round group" if span.name.startswith("round group") else span.name


def check_shape(trace: ReadTrace) -> None:
    """One root; every span below one of a name that may hold it, in the other process where it is a hop."""
    assert trace.count.pop(("coordinator", "Generate", SERVER)) == 1
    assert trace.orphans == []
    for service, span in trace.spans:
        if span.name != "Generate":
            key = (service.removeprefix("specdec-"), plain_name(span), span.kind)
            parent = trace.parent(span)
            assert plain_name(parent) in SHAPE[key], key
            if span.kind == SERVER:
                assert trace.services[parent.span_id] != service


def check_times(trace: ReadTrace) -> None:
    """No span starts before its parent or ends before it starts; spans other than the draft's also end within their
    parent, sums within the rounding of their parts.

    One machine and one clock, so the comparison needs no tolerance.
    """
    for _, span in trace.spans:
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        if span.name == "Generate":
            continue
        parent = trace.parent(span)
        assert parent.start_time_unix_nano <= span.start_time_unix_nano, span.name
        if span.name.startswith("draft"):
            continue
        if span.name.endswith(", summed"):
            assert span.end_time_unix_nano <= parent.end_time_unix_nano + ROUNDING_NS, span.name
        else:
            assert span.end_time_unix_nano <= parent.end_time_unix_nano, span.name


@pytest.fixture(scope="module")
def short(services: Services, receiver: Receiver) -> tuple[Outcome, ReadTrace]:
    """A generation of some dozen rounds, and its trace."""
    outcome = drafted(services, 40)
    return outcome, trace_of(receiver, outcome)


def test_one_generation_is_one_trace_over_three_services(short: tuple[Outcome, ReadTrace]):
    """Claim: all spans of a generation have its trace id and one root, through both hops; each has a parent in the
    trace and does not start before it."""
    _, trace = short
    assert {service for service, _ in trace.spans} == {"specdec-coordinator", "specdec-target", "specdec-draft"}
    check_shape(trace)
    check_times(trace)
    assert {(own, name) for own, name, _ in trace.count} >= {("target", "forward"), ("draft", "draft")}


def test_the_root_has_request_and_statistics(short: tuple[Outcome, ReadTrace]):
    """Claim: the root's gen_ai and specdec attributes are the values of the request and of the statistics; the six
    kinds of time fit into the call."""
    outcome, trace = short
    root, statistics = trace.named("Generate")[0], outcome.finished.statistics
    said = attributes(root)
    assert said["gen_ai.operation.name"] == "text_completion"
    assert said["gen_ai.request.max_tokens"] == 40 and said["gen_ai.request.temperature"] == 0.7
    assert said["gen_ai.request.seed"] == "5" and said["specdec.rule"] == "COUPLED"
    assert [value.string_value for value in said["gen_ai.response.finish_reasons"].values] == ["length"]
    usage = outcome.finished.usage
    counts = (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"])
    assert counts == (usage.prompt_tokens, usage.output_tokens) == (3, 40)
    assert said["specdec.rounds"] == statistics.rounds
    assert said["specdec.num_draft_tokens"] == statistics.num_draft_tokens
    assert said["specdec.num_accepted_draft_tokens"] == statistics.num_accepted_draft_tokens
    kinds = ("wait", "network", "queue", "forward", "sampling", "rule")
    spent_ms = sum(said[f"specdec.{kind}_ms"] for kind in kinds)
    took_ms = (root.end_time_unix_nano - root.start_time_unix_nano) / 1e6
    assert 0.5 * took_ms < spent_ms <= took_ms + 0.01
    assert outcome.started.request_id == outcome.finished.trace_id


def test_the_root_tells_the_proposers_apart(services: Services, receiver: Receiver):
    """Claim: the root has the draft tokens and the accepted ones of each proposer, as the statistics have them, and
    they add up; rounds and round groups tell them in words, unless only the draft model proposed. Conclusive: the draft
    model, n-grams, earlier text and a prediction each offered some, alone, and the words add up to the statistics."""
    predicted: list[int] = []
    for name, own_name in (("DRAFT", "model"), ("NGRAM", "ngram"), ("SUFFIX", "suffix"), ("PREDICTION", "prediction")):
        speculative = fixed(6, proposers=[f"PROPOSER_{name}"])
        begin = drafted if name == "DRAFT" else generate
        outcome = begin(services, 60, speculative=speculative, prediction=predicted)
        trace, statistics = trace_of(receiver, outcome), outcome.finished.statistics
        said = attributes(trace.named("Generate")[0])
        groups = [*trace.named("prefill"), *trace.groups]
        for parts in (groups, [event for group in groups for event in group.events if event.name == "round"]):
            words = [said["specdec.proposed"] for said in map(attributes, parts) if "specdec.proposed" in said]
            pairs = [re.fullmatch(rf"{own_name} (\d+)/(\d+)", own) for own in words]
            sums = tuple(sum(int(pair[own]) for pair in pairs if pair) for own in (1, 2))
            counts = statistics.num_accepted_draft_tokens, statistics.num_draft_tokens
            assert all(pairs) and sums == ((0, 0) if name == "DRAFT" else counts)
        predicted = outcome.token_ids
        for kind, total in (("draft", "num_draft_tokens"), ("accepted", "num_accepted_draft_tokens")):
            counts = {own: said[f"specdec.num_{own}_{kind}_tokens"] for own in PROPOSERS}
            assert counts == {own: getattr(statistics, f"num_{own}_{kind}_tokens") for own in PROPOSERS}
            assert sum(counts.values()) == said[f"specdec.{total}"]
            assert {own for own, count in counts.items() if count} == {own_name}


def test_every_round_is_an_event_of_its_round_group(short: tuple[Outcome, ReadTrace]):
    """Claim: rounds 0, 1, 2, … each have one event, in order; counts and parts of the time add up to the round group's
    and the root's."""
    outcome, trace = short
    groups = [*trace.named("prefill"), *trace.groups]
    events = [attributes(event) for group in groups for event in group.events if event.name == "round"]
    assert [event["specdec.round"] for event in events] == list(range(outcome.finished.statistics.rounds))
    for name, total in (("offered", "num_draft_tokens"), ("accepted", "num_accepted_draft_tokens")):
        counted = sum(event[f"specdec.{name}"] for event in events)
        assert counted == sum(attributes(group)[f"specdec.{name}"] for group in groups)
        assert counted == attributes(trace.named("Generate")[0])[f"specdec.{total}"]
    for kind in ("network", "queue", "forward", "sampling", "rule"):
        told_ms = [re.search(rf"{kind} ([\d.]+)", event["specdec.parts_ms"]) for event in events]
        of_groups_ms = sum(attributes(group)[f"specdec.{kind}_ms"] for group in groups)
        assert sum(float(one[1]) for one in told_ms if one) == pytest.approx(of_groups_ms, abs=0.005 * len(events))
    assert {event["specdec.next"] for event in events} == {"bonus", "recovered"}
    assert sum(event.get("specdec.discarded", 0) for event in events) > 0, "a weak draft's work is partly wasted"


@pytest.mark.parametrize(
    "speculative",
    [
        pytest.param(fixed(2, draft_window=2, draft_wait_ms=2000), id="chain"),
        pytest.param(fixed(6, draft_window=2, draft_wait_ms=2000, draft_siblings=2), id="tree"),
    ],
)
def test_rounds_name_the_draft_messages_they_live_on(
    services: Services, receiver: Receiver, speculative: dict[str, Any]
):
    """Claim: a round in detail links to the draft messages that brought its tokens, all before it was sent, with their
    lead and the fate of their tokens; of a tree too. Conclusive: with a window of two no step after a commit goes
    unrecorded, so the links account for every token offered and accepted, also where a sibling was accepted."""
    trace = trace_of(receiver, drafted(services, 300, speculative=speculative))
    groups = (*trace.named("prefill"), *trace.groups)
    events = [event for group in groups for event in group.events]
    arrivals = [event.time_unix_nano for event in events if event.name == "draft tokens arrived"]
    speculating = [span for span in trace.named("round") if attributes(span)["specdec.offered"]]
    assert speculating
    for round_span in speculating:
        sent = next((span for span in trace.children[round_span.span_id] if span.name == "verify"), None)
        for link in round_span.links:
            assert sent is not None
            message, said = trace.by_id[link.span_id], attributes(link)
            assert message.name == "draft" and message.kind == SERVER
            arrived_ns = sent.start_time_unix_nano - 1e6 * said["specdec.arrival_lead_ms"]
            assert min(abs(arrival - arrived_ns) for arrival in arrivals) < 10_000, "no message arrived then"
            assert message.end_time_unix_nano <= arrived_ns + 10_000 and said["specdec.arrival_lead_ms"] >= 0
            assert 0 <= said["specdec.accepted"] <= said["specdec.offered"]
        for name in ("offered", "accepted"):
            linked = [attributes(link)[f"specdec.{name}"] for link in round_span.links]
            assert sum(linked) == attributes(round_span)[f"specdec.{name}"]


def test_hops_are_timed_by_each_side_own_clock(short: tuple[Outcome, ReadTrace]):
    """Claim: on every verification the round trip is the target's own stay, the network, and what both sides took to
    hand the messages on; the stay is that of the target's span; and the clocks, which are one, are found close."""
    _, trace = short
    clients = trace.named("verify", CLIENT)
    assert len(clients) >= 2
    for client in clients:
        said = attributes(client)
        server = next(span for span in trace.children[client.span_id] if span.kind == SERVER)
        parts = sum(said[f"specdec.{name}_ms"] for name in ("server", "network", "handling"))
        assert parts == pytest.approx(said["specdec.round_trip_ms"], abs=0.001)
        stay_ms = (server.end_time_unix_nano - server.start_time_unix_nano) / 1e6
        assert said["specdec.server_ms"] == pytest.approx(stay_ms, abs=0.01)
        assert said["specdec.network_ms"] > 0 and said["specdec.handling_ms"] >= 0
        assert abs(said["specdec.clock_offset_ms"]) < 10


@pytest.mark.parametrize("round_count", [10, 300, pytest.param(2000, marks=pytest.mark.more)])
def test_a_long_generation_stays_readable(services: Services, receiver: Receiver, round_count: int):
    """Claim: at most 160 spans in all services for 300 rounds and 550 for 2,000, in round groups of 32 and 64; no
    span lacks its parent, and every span that sums says over how many rounds."""
    outcome = generate(services, round_count, speculative={"policy": "POLICY_OFF"})
    trace = trace_of(receiver, outcome)
    rounds = outcome.finished.statistics.rounds
    check_shape(trace)
    check_times(trace)
    assert len(trace.spans) <= ROW_COUNTS_MAX[round_count]
    counts = [attributes(group)["specdec.rounds"] for group in trace.groups]
    assert sum(counts) == rounds - 1
    assert counts[:-1] == [*[32] * 10, *[64] * len(counts)][: len(counts) - 1]
    summed = [span for _, span in trace.spans if span.name == "forward, summed"]
    in_detail = len(trace.named("round"))
    assert sum(attributes(span)["specdec.rounds"] for span in summed) == rounds - 1 - in_detail


def test_a_shared_forward_has_a_link_to_every_round(services: Services, receiver: Receiver):
    """Claim: of a forward that served several rounds the span below the first round in detail is linked to each round;
    those below the others link to that one. Conclusive: the links are as many as the sessions the step had."""
    with ThreadPoolExecutor(6) as pool:
        outcomes = list(pool.map(lambda index: generate(services, 60, seed=index), range(6)))
    traces = [trace_of(receiver, outcome) for outcome in outcomes]
    everything = {span.span_id: span for trace in traces for _, span in trace.spans}
    forwards = [span for trace in traces for span in trace.named("forward")]
    shared = [span for span in forwards if attributes(span)["specdec.step_sessions"] > 1]
    assert shared, "six sessions at once never met in a step"
    firsts = [span for span in forwards if everything[span.links[0].span_id].name != "forward"]
    for span in forwards:
        assert span in firsts or [everything[link.span_id] in firsts for link in span.links] == [True]
    for span in firsts:
        assert len(span.links) == attributes(span)["specdec.step_sessions"]
        assert {plain_name(everything[link.span_id]) for link in span.links} <= {"round", "prefill", "round group"}
        assert len({(link.trace_id, link.span_id) for link in span.links}) == len(span.links)
    for trace in traces:
        check_shape(trace)
        for own in trace.named("verify", SERVER):
            below = [child for child in trace.children[own.span_id] if child.name == "forward"]
            assert len(below) == 1


def test_texts_and_token_ids_never_leave(services: Services, receiver: Receiver):
    """Claim: no attribute, event or name of any service holds the prompt, the output or a stop string.

    Conclusive: every string that came is searched; table models' tokens are written like <7>, which nothing else is.
    """
    request = services.client.request("<4><9>", stop=["<1><1><1>"], max_tokens=30, temperature=0.0)
    request.label = "my-label"
    outcome = Outcome()
    for response in services.client.stub.Generate(request, timeout=30):
        services.client.take(outcome, response)
    trace = trace_of(receiver, outcome)
    holders = [holder for _, span in trace.spans for holder in (span, *span.events, *span.links)]
    everything = " ".join(str(attributes(holder)) + getattr(holder, "name", "") for holder in holders)
    assert "specdec.rule" in everything and outcome.text
    assert "<" not in everything and "my-label" not in everything


def generated_within(client: Client, flags: str, trace_id: str, span_id: str) -> Outcome:
    """A generation whose client sends a trace context."""
    metadata, outcome = (("traceparent", f"00-{trace_id}-{span_id}-{flags}"),), Outcome()
    request = client.request([1, 2], max_tokens=5, temperature=0.0)
    for response in client.stub.Generate(request, metadata=metadata, timeout=30):
        client.take(outcome, response)
    assert outcome.finished.trace_id == trace_id != outcome.started.request_id
    return outcome


def roots_of(receiver: Receiver, trace_ids: list[str]) -> list[str]:
    """The traces among these that have a root."""
    return [span.trace_id.hex() for _, span in receiver.spans() if span.trace_id.hex() in trace_ids and span.kind == 2]


def test_a_followed_caller_decides(services: Services, receiver: Receiver):
    """Claim: with --trace-parent-sampling the root is the caller's child in the caller's trace, and a caller that does
    not sample is respected: no span of that trace is sent."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    with environment(**SOON), services.coordinator_with(trace_parent_sampling=True) as client:
        for flags in ("00", "01"):
            outcome = generated_within(client, flags, trace_id, span_id)
        trace = trace_of(receiver, outcome)
    roots = trace.named("Generate")
    assert len(roots) == 1 and roots[0].parent_span_id == bytes.fromhex(span_id)
    assert attributes(roots[0])["specdec.request_id"] == outcome.started.request_id


@pytest.mark.more
def test_a_caller_does_not_override_the_ratio(services: Services, table_models, receiver: Receiver):
    """Claim: without --trace-parent-sampling the operator's sampler decides: at a ratio of 0.001 no sampled flag and no
    chosen trace id records a trace, at a ratio of 1 no cleared flag prevents it, and the caller's span is the parent.

    Conclusive: real services and a real collector; the ids are the lowest, which a ratio by the caller's id would take,
    and the last request, of services that record everything, arrives after the others would have.
    """
    unwanted = [f"{secrets.token_hex(8)}{number:016x}" for number in range(1, 4)]
    variables = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.001"}
    with traced(table_models, receiver.endpoint, **variables) as few:
        for trace_id in unwanted:
            generated_within(few.client, "01", trace_id, secrets.token_hex(8))
    span_id = secrets.token_hex(8)
    trace = trace_of(receiver, generated_within(services.client, "00", secrets.token_hex(16), span_id))
    assert [root.parent_span_id for root in trace.named("Generate")] == [bytes.fromhex(span_id)]
    assert roots_of(receiver, unwanted) == []


def test_refused_and_broken_off_requests_have_one_root_each(services: Services, receiver: Receiver):
    """Claim: every request has exactly one root with its end: a refusal is no failure, a cancelled one says so."""

    def roots() -> list:
        return [span for _, span in receiver.spans() if span.name == "Generate"]

    before = len(roots())
    with pytest.raises(grpc.RpcError):
        services.client.generate([1, 2], max_tokens=5, top_p=7.0)
    receiver.wait_until(lambda: len(roots()) == before + 1)
    refused = roots()[-1]
    assert attributes(refused)["error.type"] == "INVALID_FIELD" and refused.status.code == 0
    call = services.client.stub.Generate(services.client.request([1, 2], max_tokens=4000, ignore_eos=True))
    next(call)
    call.cancel()
    receiver.wait_until(lambda: len(roots()) == before + 2)
    cancelled = roots()[-1]
    assert attributes(cancelled)["specdec.cancelled"] is True and cancelled.status.code == 0
    receiver.wait_until(lambda: not ReadTrace(receiver, cancelled.trace_id.hex()).orphans)


def test_nothing_is_recorded_unless_sampled(table_models, receiver: Receiver):
    """Claim: with OTEL_TRACES_SAMPLER a trace is recorded whole or not at all: of requests at a ratio of 0 no
    service sends a span, though responses have trace ids."""
    variables = {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}
    with traced(table_models, receiver.endpoint, **variables) as quiet:
        before = len(list(receiver.spans()))
        outcomes = [generate(quiet, 20) for _ in range(3)]
        loud = ReadTrace(receiver, outcomes[0].finished.trace_id)
    assert len(list(receiver.spans())) == before and not loud.spans  # the services have ended: nothing is under way
    assert all(len(outcome.finished.trace_id) == 32 for outcome in outcomes)


@pytest.mark.more
def test_a_lost_draft_is_seen_at_a_glance(table_models, receiver: Receiver):
    """Claim: when the draft dies in a generation the trace has an event of it, one failed span for the time without a
    draft, here to the end, and root attributes to search for; the groups after it say in their names that they are
    plain. The root has not failed, and nothing is orphaned. Conclusive: the failed spans are all counted."""
    with traced(table_models, receiver.endpoint) as services, environment():
        call = services.client.stub.Generate(
            services.client.request(
                [1, 2], fixed(4, draft_wait_ms=2000), max_tokens=3000, temperature=0.0, ignore_eos=True
            )
        )
        outcome = Outcome()
        for response in call:
            services.client.take(outcome, response)
            if len(outcome.token_ids) > 100 and services.draft is not None and services.draft.is_running:
                services.draft.process.kill()
        trace = trace_of(receiver, outcome)
    events = [event for group in trace.groups for event in group.events if event.name == "draft lost"]
    assert len(events) == 1
    assert trace.orphans == []
    (hole,) = [span for _, span in trace.spans if span.status.code]
    assert hole.name == "draft unavailable" and attributes(hole)["error.type"] == "draft lost"
    assert abs(hole.start_time_unix_nano - events[0].time_unix_nano) < 1e6
    root = trace.named("Generate")[0]
    assert trace.services[hole.span_id] == "specdec-draft"  # its absence is no time of the coordinator
    assert trace.parent(hole) is root and hole.end_time_unix_nano <= root.end_time_unix_nano
    assert attributes(root)["specdec.draft_lost"] == 1
    length_ms = (hole.end_time_unix_nano - hole.start_time_unix_nano) / 1e6
    assert attributes(root)["specdec.draft_unavailable_ms"] == pytest.approx(length_ms, abs=0.01)
    names = [group.name for group in trace.groups]
    assert names[0] == "round group, speculative" and names[-1] == "round group, plain"
    facts = facts_of(TraceTree(spans_of(receiver.as_json(bytes.fromhex(outcome.finished.trace_id))["resourceSpans"])))
    (loss,) = [one for one in facts.happened if "lost" in one.sentence]
    assert loss.sentence == "the draft was lost, not back before the end"
    assert loss.at_ms == pytest.approx((hole.start_time_unix_nano - root.start_time_unix_nano) / 1e6, abs=0.01)
    with receiver.serve_http() as jaeger:
        listed = subprocess.run(
            [sys.executable, "-m", "specdec.cli", "trace", "--errors", "--jaeger", jaeger],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
    assert outcome.finished.trace_id[:8] in listed and "lost" in listed
