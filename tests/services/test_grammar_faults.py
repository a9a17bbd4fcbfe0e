"""Faults under a grammar, through the running services: drafts that break it, targets without space, targets that are
lost; and what is guessed because of it, in statistics and traces."""

from __future__ import annotations

import json
import re
import signal
from contextlib import ExitStack
from typing import Any

import jsonschema
import pytest

from specdec.config import TargetSettings
from specdec.launch.children import start
from specdec.v1 import coordinator_service_pb2 as pb
from tests.chaos.fleets import Stream, wait_under_way
from tests.services.test_grammars import COMMON, LONG, OBJECT, PROMPT, RULES, check_object
from tests.support.otlp_receiver import Receiver
from tests.support.pages import free_address
from tests.support.services import MODELS, SHAPES, Client, Outcome, Services, fixed
from tests.support.traces import attributes, trace_of, traced
from tests.support.unlawful_draft import LIES, lying

# A draft that is late once is not waited for again, since nothing that it sends is of use.
WAITING = {name: {**SHAPES[name], "draft_wait_ms": 10_000} for name in ("chain", "waiting tree", "waiting siblings")}
GUESSES = fixed(8, proposers=["PROPOSER_NGRAM", "PROPOSER_GRAMMAR"])
COLOURS = {"enum": ["red", {"x": "green"}]}
LIST = {"json_schema": {"type": "array", "items": COLOURS, "minItems": 20, "maxItems": 24}}
WIDTH, LENGTH_MAX = 4, 330
MEANWHILE = 2  # tokens that each text has when a target is lost
TRIES = 5  # of what needs texts beside each other
KEYS = {
    "type": "object",
    "properties": {f"the_{name}_of_the_house": {"type": "boolean"} for name in ("colour", "street", "number")},
    "required": [f"the_{name}_of_the_house" for name in ("colour", "street", "number")],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def receiver() -> Any:
    """A collector of traces."""
    with Receiver() as started:
        yield started


@pytest.fixture(scope="module")
def services(receiver: Receiver) -> Any:
    """The embedded pair, traced, of equal numerics alone and together."""
    with traced((MODELS / "target", MODELS / "draft"), receiver.endpoint, {"draft_wait_ms": 50.0}) as started:
        yield started


@pytest.fixture(scope="module", params=LIES)
def liar(request: pytest.FixtureRequest, services: Services) -> Any:
    """A lie, and a client of a coordinator with the draft that tells it."""
    with lying(request.param, MODELS / "draft", MODELS / "target") as address:
        with services.coordinator_with(draft=(address,)) as client:
            yield request.param, client


def told(lie: str, client: Client, asks: list[dict[str, Any]]) -> list[Outcome]:
    """The texts, asked for again until draft tokens were offered in each one: a draft that reads its prompt is not
    waited for, and a short text may be over before. None was accepted, but for an end token as the last of a text."""
    for _ in range(20):
        outcomes = client.generate_all(asks, len(asks))
        found = [outcome.finished.statistics for outcome in outcomes]
        for outcome, statistics in zip(outcomes, found, strict=True):
            has_ended = outcome.finished.reason == pb.FINISH_REASON_STOP
            assert statistics.num_model_accepted_tokens <= (lie == "ends" and has_ended)
        if all(statistics.num_model_draft_tokens > 10 for statistics in found):
            return outcomes
    raise AssertionError(f"texts without draft tokens: {[own.num_model_draft_tokens for own in found]}")


@pytest.mark.parametrize("grammar", [OBJECT, pytest.param(LONG, marks=pytest.mark.more)], ids=["object", "list"])
@pytest.mark.parametrize("rule", RULES)
def test_unlawful_draft_tokens_change_no_text(
    liar: tuple[str, Client], services: Services, rule: str, grammar: dict[str, Any]
) -> None:
    """Claim: a draft that sends illegal tokens only, or end tokens only, changes nothing of a text under a grammar.
    Conclusive: compared in full with the text without speculation; every draft token that was sent breaks the grammar
    or ends the text, they were offered by chains and trees, and none but a last end token was accepted."""
    lie, client = liar
    asked = {"grammar": grammar, "max_tokens": 300, "logprobs": 1, **RULES[rule]}
    expected = services.client.generate(PROMPT, **asked, speculative=SHAPES["off"])
    assert expected.finished.reason == pb.FINISH_REASON_STOP
    jsonschema.validate(json.loads(expected.text), grammar["json_schema"])
    outcomes = told(lie, client, [{"prompt": PROMPT, **asked, "speculative": own} for own in WAITING.values()])
    assert all(outcome.comparable == expected.comparable for outcome in outcomes)


def test_unlawful_draft_tokens_leave_drawn_texts_valid(liar: tuple[str, Client]) -> None:
    """Claim: the same drafts, with their own distributions, leave each text under REJECTION valid. Conclusive: each
    of the texts that are drawn until one ends is checked by `jsonschema`, and no draft token but a last end token was
    accepted."""
    lie, client = liar
    speculative = {**WAITING["waiting siblings"], "rule": "rejection"}
    ask = {**COMMON, "prompt": PROMPT, "temperature": 1, "speculative": speculative}
    for _ in range(10):
        outcomes = told(lie, client, [ask] * 4)
        for outcome in outcomes:
            check_object(outcome)
        if any(own.finished.reason == pb.FINISH_REASON_STOP for own in outcomes):
            return
    raise AssertionError("no text ended")


def long_texts() -> list[dict[str, Any]]:
    """Requests of texts of some hundred tokens, GREEDY and COUPLED in turn."""
    asked = {"max_tokens": LENGTH_MAX, "grammar": LIST, "speculative": GUESSES}
    return [{"prompt": f"{PROMPT}{seed}", "temperature": seed % 2, "seed": seed, **asked} for seed in range(WIDTH)]


@pytest.fixture(scope="module")
def undisturbed(services: Services) -> list[tuple]:
    """The long texts, one by one, without speculation."""
    found = [services.client.generate(**{**own, "speculative": SHAPES["off"]}) for own in long_texts()]
    for outcome in found:
        jsonschema.validate(json.loads(outcome.text), LIST["json_schema"])
    return [outcome.comparable for outcome in found]


@pytest.mark.more
def test_texts_under_a_grammar_are_preempted(services: Services, undisturbed: list[tuple]) -> None:
    """Claim: texts under a grammar that take each other's cache blocks are those that they are alone, with space.
    Conclusive: the cache holds the beginnings of four and not their ends, the statistics count preemptions, and guesses
    were accepted; compared in full. On a busy machine texts may follow each other: then all are asked for again."""
    cache = services.client.described().target.cache
    size = cache.bytes // cache.block_count * (4 + LENGTH_MAX // cache.block_size)
    settings = TargetSettings(model=str(MODELS / "target"), port=0, threads=1, kv_cache_bytes=size, log_level="error")
    with start("target", settings) as target, services.coordinator_with(target=(target.wait_ready(),)) as client:
        for _ in range(TRIES):
            outcomes = client.generate_all(long_texts(), WIDTH)
            assert [outcome.comparable for outcome in outcomes] == undisturbed
            assert all(outcome.finished.statistics.num_grammar_accepted_tokens > 0 for outcome in outcomes)
            if preemption_count := sum(outcome.finished.statistics.preemptions for outcome in outcomes):
                break
    assert preemption_count > 0


@pytest.mark.more
def test_texts_under_a_grammar_change_targets(services: Services, undisturbed: list[tuple]) -> None:
    """Claim: texts under a grammar whose target is killed in the midst of an object go on at another one, and are those
    of one target. Conclusive: all are under way at the strike, the other target starts after it, each text says that it
    changed targets and none ended with an error; compared in full."""
    own = {"model": str(MODELS / "target"), "threads": 1, "log_level": "error"}
    other = free_address()
    with ExitStack() as stack:
        target = stack.enter_context(start("target", TargetSettings(port=0, **own)))
        addresses = target.wait_ready(), other
        client = stack.enter_context(services.coordinator_with(target=addresses, target_wait_s=60.0))
        streams = [Stream(client, client.request(**asked)) for asked in long_texts()]
        wait_under_way(streams, MEANWHILE)
        target.signal(signal.SIGKILL)
        stack.enter_context(start("target", TargetSettings(port=int(other.rpartition(":")[2]), **own)))
        outcomes = [stream.join().outcome for stream in streams]
        assert not any(stream.error for stream in streams)
        assert all(stream.statistics.num_target_changes for stream in streams)
    assert [outcome.comparable for outcome in outcomes] == undisturbed


def test_forced_tokens_are_counted_and_named(services: Services, receiver: Receiver) -> None:
    """Claim: under a schema of long names the grammar's guesses are offered and accepted, alone and beside a draft; the
    statistics count them, the deltas name their proposer, and so does the trace, in sums and in words. Conclusive: the
    names are most of the text; the three accounts are compared number by number."""
    asked = {"grammar": {"json_schema": KEYS}, "temperature": 1, "seed": 3, "max_tokens": 200}
    expected = services.client.generate(PROMPT, **asked, speculative=SHAPES["off"])
    assert expected.finished.statistics.num_grammar_draft_tokens == 0
    for proposers in (["PROPOSER_GRAMMAR"], ["PROPOSER_GRAMMAR", "PROPOSER_DRAFT"]):
        outcome = services.client.generate(PROMPT, **asked, speculative=fixed(8, proposers=proposers))
        assert outcome.comparable == expected.comparable
        told = outcome.finished.statistics
        counts = told.num_grammar_accepted_tokens, told.num_grammar_draft_tokens
        assert counts[0] == outcome.proposers.count(pb.PROPOSER_GRAMMAR)
        assert len(proposers) > 1 or told.num_draft_tokens == counts[1]
        least = 0.4 * len(outcome.token_ids) if len(proposers) == 1 else 0  # a draft that is ahead leaves it fewer
        assert least < counts[0] <= counts[1]
        trace = trace_of(receiver, outcome)
        root = attributes(trace.named("Generate")[0])
        names = "specdec.num_grammar_accepted_tokens", "specdec.num_grammar_draft_tokens"
        assert tuple(root[name] for name in names) == counts
        groups = map(attributes, [*trace.named("prefill"), *trace.groups])
        pairs = [re.search(r"grammar (\d+)/(\d+)", own.get("specdec.proposed", "")) for own in groups]
        assert tuple(sum(int(pair[own]) for pair in pairs if pair) for own in (1, 2)) == counts
