"""Grammars through the running services: valid text, whatever speculation, losses and resumptions do to it."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Iterator
from typing import Any

import grpc
import jsonschema
import pytest

from specdec.config import DraftSettings, TargetSettings
from specdec.launch.children import start
from specdec.v1 import coordinator_service_pb2 as pb
from tests.services.test_bad_input import details
from tests.services.test_failures import on_its_port
from tests.support.services import MODELS, SHAPES, Client, Outcome, Services, running

PROMPT = "# A person as JSON:\nperson = "
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "child": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/last"}]},
    },
    "required": ["name", "age", "tags", "child"],
    "additionalProperties": False,
    "$defs": {"last": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}},
}
OBJECT = {"json_schema": SCHEMA}
COMMON: dict[str, Any] = {"max_tokens": 200, "grammar": OBJECT}
LONG = {"json_schema": {"type": "array", "items": {"enum": ["red", {"x": "green"}]}, "minItems": 40, "maxItems": 60}}
RULES = {"greedy": {"temperature": 0}, "coupled": {"temperature": 1, "seed": 11}}


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    """The embedded pair, of equal numerics alone and together."""
    with running(MODELS / "target", MODELS / "draft", {"draft_wait_ms": 50.0}, threads=1) as started:
        yield started


def check_object(outcome: Outcome) -> None:
    """A text that ended with a stop is valid and compact; another is unfinished."""
    if outcome.finished.reason == pb.FINISH_REASON_STOP:
        value = json.loads(outcome.text)
        jsonschema.validate(value, SCHEMA)
        assert ": " not in re.sub(r'"(\\.|[^"\\])*"', '""', outcome.text)
    else:
        assert len(outcome.token_ids) == COMMON["max_tokens"]


@pytest.mark.parametrize("rule", RULES)
def test_on_equals_off_and_is_valid(services: Services, rule: str) -> None:
    """Claim: text, usage, finish reason and logprobs are those without speculation, for every way to speculate, alone
    and eight at once, and valid. Conclusive: compared in full; drafts were accepted and rejected."""
    asked = {**COMMON, **RULES[rule], "logprobs": 2}
    texts = [{**asked, "prompt": f"{PROMPT}{index} "} for index in range(3)]
    off = [services.client.generate(**own, speculative=SHAPES["off"]) for own in texts]
    drafted = accepted = 0
    for name in ("chain", "waiting tree", "waiting siblings", "all proposers", "auto"):
        on = services.client.generate_all([{**own, "speculative": SHAPES[name]} for own in texts], width=3)
        for one, other in zip(on, off):
            assert one.comparable == other.comparable, name
            check_object(one)
            drafted += one.finished.statistics.num_draft_tokens
            accepted += one.finished.statistics.num_accepted_draft_tokens
    assert 0 < accepted < drafted


@pytest.mark.more
@pytest.mark.parametrize("rule", RULES)
def test_a_draft_with_another_tokenizer(rule: str) -> None:
    """Claim: on = off with a draft that knows a part of the target's tokens, under other ids: it masks in the target's,
    and proposes nothing where it knows no legal one. Conclusive: compared in full; draft tokens were accepted."""
    asked = {"prompt": PROMPT, "max_tokens": 300, "grammar": LONG, **RULES[rule]}
    with running(MODELS / "target", MODELS / "smollm2-draft", threads=1) as services:
        off, on = (services.client.generate(**asked, speculative=SHAPES[name]) for name in ("off", "waiting tree"))
    assert on.comparable == off.comparable
    assert on.finished.statistics.num_accepted_draft_tokens > 0


def test_rejection_gives_valid_texts(services: Services) -> None:
    """Claim: under REJECTION each text that ends is valid, drafts on, with chains and trees of drawn siblings.
    Conclusive: most of 12 texts end with a stop, and draft tokens were accepted."""
    outcomes = []
    for name in ("chain", "siblings"):
        speculative = {**SHAPES[name], "rule": "rejection"}
        ask = [{**COMMON, "prompt": PROMPT, "temperature": 1, "speculative": speculative} for _ in range(6)]
        outcomes += services.client.generate_all(ask, width=3)
    for outcome in outcomes:
        check_object(outcome)
    assert sum(own.finished.reason == pb.FINISH_REASON_STOP for own in outcomes) > 6
    assert sum(own.finished.statistics.num_accepted_draft_tokens for own in outcomes) > 0


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ({"regex": "[0-9]{3}-[a-f]{2,4}"}, "[0-9]{3}-[a-f]{2,4}"),
        ({"choice": ["yes", "no", "perhaps not"]}, "yes|no|perhaps not"),
        ({"lark": 'start: "(" N ("," N)* ")"\nN: /[0-9]{1,3}/'}, r"\([0-9]{1,3}(,[0-9]{1,3})*\)"),
        ({"json_object": True}, r"\{.*\}"),
    ],
    ids=lambda own: next(iter(own)) if isinstance(own, dict) else "",
)
def test_every_kind_of_grammar(services: Services, grammar: dict[str, Any], pattern: str) -> None:
    """Claim: a text of each kind of grammar is one of its texts where it ends with a stop, and is the same with
    speculation. Conclusive: an independent expression matches the whole text."""
    ended = 0
    for seed in range(4):
        asked = {"max_tokens": 60, "temperature": 1, "seed": seed, "grammar": grammar}
        off = services.client.generate("Answer: ", **asked, speculative=SHAPES["off"])
        on = services.client.generate("Answer: ", **asked, speculative=SHAPES["siblings"])
        assert on.comparable == off.comparable
        if off.finished.reason == pb.FINISH_REASON_STOP:
            ended += 1
            assert re.fullmatch(pattern, off.text, re.DOTALL), off.text
            if "json_object" in grammar:
                assert isinstance(json.loads(off.text), dict)
    assert ended or "json_object" in grammar


def test_a_grammar_beats_min_tokens_and_stops_still_stop(services: Services) -> None:
    """Claim: where the grammar allows an end only, the text ends before `min_tokens`; where it allows more, not; a stop
    string ends it as without a grammar, and an end token's text within a string ends nothing."""
    generate = services.client.generate
    short = generate(PROMPT, max_tokens=40, min_tokens=30, temperature=0, grammar={"choice": ["ab"]})
    assert short.text == "ab" and short.finished.reason == pb.FINISH_REASON_STOP and len(short.token_ids) <= 3
    long = generate(PROMPT, max_tokens=40, min_tokens=30, temperature=0, grammar={"regex": "[a-z ]*"})
    assert len(long.token_ids) >= 30 and re.fullmatch("[a-z ]*", long.text)
    stopped = generate(PROMPT, max_tokens=60, temperature=0, grammar=OBJECT, stop=['"age"'])
    assert stopped.finished.stop_string == '"age"' and stopped.text.startswith('{"name":')
    spelt = generate(PROMPT, max_tokens=60, temperature=0, grammar={"regex": '"x<\\|end\\|>y"'})
    assert spelt.text == '"x<|end|>y"' and spelt.finished.reason == pb.FINISH_REASON_STOP


@pytest.mark.parametrize("rule", RULES)
def test_resume_at_every_token(services: Services, rule: str) -> None:
    """Claim: cut anywhere, resumed on a coordinator that knows nothing, the pieces concatenate to the whole.
    Conclusive: every place of the text, the one before its end token included, for text, tokens and finish."""
    asked = {**COMMON, **RULES[rule]}
    whole = services.client.generate(PROMPT, **asked, speculative=SHAPES["off"])
    assert whole.finished.reason == pb.FINISH_REASON_STOP
    with services.coordinator_with() as client:
        for cut in range(1, len(whole.token_ids)):
            resumed = client.generate(PROMPT, resume=whole.token_ids[:cut], **asked, speculative=SHAPES["tree"])
            assert whole.token_ids[:cut] + resumed.token_ids == whole.token_ids, f"cut at {cut}"
            assert whole.text.endswith(resumed.text) and resumed.finished.usage == whole.finished.usage
        ended = client.generate(PROMPT, resume=whole.token_ids, **asked)
        assert not ended.token_ids and ended.finished.reason == whole.finished.reason


@contextlib.contextmanager
def own_replica(services: Services, role: str) -> Iterator[tuple[Any, Client]]:
    """A replica that the test may kill, and a client of a coordinator that has it in place of the common one."""
    kind, model = (TargetSettings, "target") if role == "target" else (DraftSettings, "draft")
    with start(role, kind(model=str(MODELS / model), port=0, threads=1, log_level="warning")) as replica:
        with services.coordinator_with(**{role: (replica.wait_ready(),)}) as client:
            yield replica, client


def test_the_draft_is_killed_in_mid_object(services: Services) -> None:
    """Claim: SIGKILL of the draft in the midst of an object changes no token. Conclusive: the text is known; the draft
    was used before, and is gone after."""
    asked = {"max_tokens": 400, "grammar": LONG, **RULES["coupled"], "speculative": SHAPES["waiting tree"]}
    expected = services.client.generate(PROMPT, **{**asked, "speculative": SHAPES["off"]})
    with own_replica(services, "draft") as (draft, client):
        outcome, killed = Outcome(), False
        for response in client.stub.Generate(client.request(PROMPT, **asked), timeout=60):
            client.take(outcome, response)
            if not killed and len(outcome.token_ids) >= 5:
                killed = True
                draft.signal(signal.SIGKILL)
    assert killed and outcome.comparable == expected.comparable
    jsonschema.validate(json.loads(outcome.text), LONG["json_schema"])


@pytest.mark.more
def test_the_target_is_killed_in_mid_object(services: Services) -> None:
    """Claim: SIGKILL of the target in the midst of an object: the text goes on at the one that takes its place as if
    nothing had happened. Conclusive: the text is known, and the statistics tell of the change."""
    asked = {"max_tokens": 400, "grammar": LONG, **RULES["coupled"], "speculative": SHAPES["ahead"]}
    expected = services.client.generate(PROMPT, **{**asked, "speculative": SHAPES["off"]})
    settings = TargetSettings(model=str(MODELS / "target"), port=0, threads=1, log_level="warning")
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(start("target", settings))
        client = stack.enter_context(services.coordinator_with(target=(target.wait_ready(),), target_wait_s=60.0))
        outcome, killed = Outcome(), False
        for response in client.stub.Generate(client.request(PROMPT, **asked), timeout=100):
            client.take(outcome, response)
            if not killed and len(outcome.token_ids) >= 5:
                killed = True
                target.signal(signal.SIGKILL)
                target.stop()
                stack.enter_context(start("target", on_its_port(target, settings)))
    assert outcome.comparable == expected.comparable
    assert outcome.finished.statistics.num_target_changes > 0
    jsonschema.validate(json.loads(outcome.text), LONG["json_schema"])


REFUSED = {
    "unknown word": ({"grammar": {"json_schema": {"not": {}}}}, "grammar.json_schema", '"not"'),
    "no solution": ({"grammar": {"json_schema": {"$ref": "#"}}}, "grammar.json_schema", "finite length"),
    "too long": ({"grammar": {"regex": "a" * 65537}}, "regex", "65536"),
    "too deep": ({"grammar": {"json_schema": '{"a":' * 65 + "1" + "}" * 65}}, "grammar.json_schema", "64 levels"),
    "nothing": ({"grammar": {}}, "grammar", "one of"),
    "many choices": ({"grammar": {"choice": ["a"] * 513}}, "grammar.choice", "512"),
    "bad expression": ({"grammar": {"regex": "("}}, "grammar.regex", "unclosed"),
    "ignored ends": ({"grammar": {"choice": ["a"]}, "ignore_eos": True}, "sampling.ignore_eos", "grammar"),
    "resumed elsewhere": ({"grammar": {"choice": ["a"]}, "resume": [2]}, "resume.output_token_ids[0]", "legal"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_field_and_reason(services: Services, case: str) -> None:
    """Claim: what cannot be followed is INVALID_ARGUMENT with field and reason, and the service goes on.
    Conclusive: of the public service, over a real socket."""
    asked, field, word = REFUSED[case]
    with pytest.raises(grpc.RpcError) as caught:
        services.client.generate(PROMPT, max_tokens=20, temperature=0, **asked)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in caught.value.details() and word in caught.value.details()
    assert details(caught.value).code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert services.client.generate(PROMPT, max_tokens=5, temperature=0, grammar={"choice": ["a"]}).text == "a"
