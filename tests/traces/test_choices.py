"""The trace of a request with several choices: one root, and below it a generation for each."""

from __future__ import annotations

from specdec.protocol.report import TRACED
from tests.support.otlp_receiver import Receiver
from tests.support.services import Services, fixed
from tests.support.traces import INTERNAL, SERVER, ReadTrace, attributes, trace_of

COUNT = 3


def test_choices_are_generations_of_one_trace(services: Services, receiver: Receiver) -> None:
    """Claim: a request with n choices is one trace with a root `Choices` and n `Generate` below it, each with the
    statistics of its choice; the root has their sum of tokens, the prompt once.

    Conclusive: the spans are what a collector got, compared with what the responses say, statistic by statistic.
    """
    asked = {"max_tokens": 40, "ignore_eos": True, "seed": 5, "speculative": fixed(3)}
    found = services.client.choices([1, 2, 3], COUNT, **asked)
    trace = trace_of(receiver, found[0])
    receiver.wait_until(lambda: bool(ReadTrace(receiver, found[0].finished.trace_id).named("Choices")))
    trace = ReadTrace(receiver, found[0].finished.trace_id)
    (root,) = trace.named("Choices", SERVER)
    said = attributes(root)
    assert not root.parent_span_id and trace.orphans == []
    assert said["specdec.choices"] == COUNT and said["specdec.request_id"] == found[0].started.request_id
    counts = said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]
    assert counts == (3, sum(len(own.token_ids) for own in found)) and "specdec.cancelled" not in said
    generations = trace.named("Generate", INTERNAL)
    assert len(generations) == len(trace.named("Generate")) == COUNT
    assert {span.parent_span_id for span in generations} == {root.span_id}
    by_choice = {attributes(span)["specdec.choice"]: span for span in generations}
    for index, own in enumerate(found):
        told = attributes(by_choice[index])
        assert told["gen_ai.usage.output_tokens"] == len(own.token_ids)
        for name in TRACED:
            of = own.finished.usage if name == "encoder_tokens" else own.finished.statistics
            assert told[f"specdec.{name}"] == getattr(of, name), name
        groups = [span for span in trace.children[by_choice[index].span_id] if span.name == "prefill"]
        assert len(groups) == 1


def test_a_refused_request_has_one_root(services: Services, receiver: Receiver) -> None:
    """Claim: n choices that are cancelled are n generations that say so, below one root."""
    call = services.client.stub.Generate(services.client.request([1, 2], n=COUNT, max_tokens=4000, ignore_eos=True))
    while not next(call).HasField("delta"):
        pass
    before = {span.span_id for _, span in receiver.spans() if span.name == "Choices"}
    call.cancel()

    def roots() -> list:
        return [span for _, span in receiver.spans() if span.name == "Choices" and span.span_id not in before]

    receiver.wait_until(lambda: len(roots()) == 1)
    trace = ReadTrace(receiver, roots()[0].trace_id.hex())
    generations = trace.named("Generate")
    assert len(generations) == COUNT
    assert all(attributes(span)["specdec.cancelled"] is True for span in generations)
