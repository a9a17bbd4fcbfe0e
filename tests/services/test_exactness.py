"""On, off and resumed agree, through the running services, on table models.

The table models differ clearly, so most draft tokens are rejected and every path of the rule is taken. Under
GREEDY and COUPLED the text is a function of (model, prompt, policy, seed), so equality is the whole claim: a token
that depended on the draft, on timing or on a cut would differ.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from tests.support.services import SHAPES, Services, fixed

PROMPT = [1, 2, 3]
POLICIES = {
    "greedy": {"temperature": 0},
    "coupled": {"temperature": 1, "seed": 11, "min_tokens": 20},
    "cold": {"temperature": 0.5, "seed": 12},
    "top-k": {"temperature": 1, "seed": 13, "top_k": 3},
    "top-p": {"temperature": 1, "seed": 14, "top_p": 0.6},
    "min-p": {"temperature": 1, "seed": 15, "min_p": 0.3},
    "repetition": {"temperature": 1, "seed": 16, "repetition_penalty": 1.7},
    "presence": {"temperature": 1, "seed": 17, "presence_penalty": 1.5},
    "frequency": {"temperature": 1, "seed": 18, "frequency_penalty": -0.5},
    "bias": {"temperature": 1, "seed": 19, "logit_bias": {2: 2.0, 5: -100.0}},
    "min-tokens": {"temperature": 1, "seed": 20, "min_tokens": 20, "stop_token_ids": [3]},
    "stop-string": {"temperature": 1, "seed": 21, "stop": ["<2><2>", "<4><1>"]},
    "stop-after-min": {"temperature": 1, "seed": 22, "stop": ["<2>"], "min_tokens": 9},
    "bad-words": {"temperature": 1, "seed": 23, "bad_words": ["<2><2>", "<4><1><3>", "<5>"]},
    "greedy-bad-words": {"temperature": 0, "bad_words": ["<2><4>", "<4><1><3>"]},
    "allowed": {"temperature": 1, "seed": 24, "allowed_token_ids": [3, 1, 4], "bad_words": ["<3><1>"], "min_tokens": 9},
    "greedy-penalty": {"temperature": 0, "frequency_penalty": 1.0, "presence_penalty": 0.5},
}

SHORT = (
    "greedy",
    "coupled",
    "top-p",
    "repetition",
    "stop-string",
    "bad-words",
)  # the others run with the longer tests
SHORT_RESUMED = ("coupled", "stop-string", "bad-words")


def some(names: Iterable[str], short: Collection[str]) -> list[Any]:
    """Parameters, of which those that are not in `short` run with the longer tests."""
    return [name if name in short else pytest.param(name, marks=pytest.mark.more) for name in names]


@pytest.mark.parametrize("name", some(POLICIES, SHORT))
def test_speculation_changes_nothing(table_services: Services, name: str):
    """Claim: tokens, text, usage, finish reason and logprobs are equal with any draft length, any shape of the draft's
    tree, any way of waiting, and without."""
    policy = {"max_tokens": 60, "logprobs": 2, "ignore_eos": name != "coupled", **POLICIES[name]}
    client = table_services.client
    off = client.generate(PROMPT, speculative={"enabled": False}, **policy)
    assert off.token_ids and off.text
    drafted = 0
    for speculative in (*map(fixed, (0, 1, 2, 4, 8)), *SHAPES.values()):
        on = client.generate(PROMPT, speculative=speculative, **policy)
        assert on.comparable == off.comparable, speculative
        drafted += on.finished.statistics.num_draft_tokens
    assert drafted > 0, "nothing was drafted: the comparison would be empty"


@pytest.mark.parametrize(
    "policy", some(("greedy", *SHORT_RESUMED, "min-tokens", "repetition", "allowed"), SHORT_RESUMED)
)
def test_resume_at_every_token_on_a_fresh_coordinator(table_services: Services, policy: str):
    """Claim: cut anywhere, resumed on a coordinator that knows nothing, the pieces concatenate to the whole.

    The cut stream's text is the part final with its last token; the resumed stream has the part held back.
    """
    asked = {"max_tokens": 24, "ignore_eos": True, **POLICIES[policy]}
    whole = table_services.client.generate(PROMPT, speculative={"enabled": False}, **asked)
    coordinator, client = table_services.start_coordinator()
    try:
        for cut in range(len(whole.token_ids) + 1):
            resumed = client.generate(PROMPT, resume=whole.token_ids[:cut], **asked)
            assert whole.token_ids[:cut] + resumed.token_ids == whole.token_ids, f"cut at {cut}"
            assert "".join(whole.texts[:cut]) + resumed.text == whole.text, f"cut at {cut}"
            assert resumed.finished.reason == whole.finished.reason
            assert resumed.finished.usage == whole.finished.usage
            assert resumed.finished.stop_string == whole.finished.stop_string
    finally:
        client.close()
        coordinator.stop()


def test_many_streams_at_once_do_not_meet(table_services: Services):
    """Claim: 16 generations in one batch give what each gives alone."""
    requests = [{"prompt": [1 + i % 6, 2], "max_tokens": 40, "temperature": 1, "seed": i} for i in range(32)]
    alone = [table_services.client.generate(**request, speculative={"enabled": False}) for request in requests]
    together = table_services.client.generate_all(requests, width=16)
    assert [outcome.comparable for outcome in together] == [outcome.comparable for outcome in alone]


def test_the_kinds_tell_how_tokens_came_to_be(table_services: Services):
    """Claim: without speculation every token is a bonus token; with it, accepted tokens are as many as counted."""
    client = table_services.client
    off = client.generate(PROMPT, max_tokens=30, temperature=0, speculative={"enabled": False})
    assert set(off.kinds) == {3}
    on = client.generate(PROMPT, max_tokens=200, temperature=1, seed=3, ignore_eos=True)
    statistics = on.finished.statistics
    assert 0 < on.kinds.count(1) <= statistics.num_accepted_draft_tokens
    assert sum(statistics.acceptance_histogram) == statistics.num_spec_steps
    assert len(on.token_ids) <= statistics.rounds + statistics.num_accepted_draft_tokens


def test_a_seed_drawn_by_the_server_resumes_under_coupled(table_services: Services):
    """Claim: `started` gives the seed that was in force; with it the text repeats."""
    client = table_services.client
    first = client.generate(PROMPT, max_tokens=30, speculative={"rule": "RULE_COUPLED"})
    again = client.generate(PROMPT, max_tokens=30, seed=first.started.seed)
    assert first.token_ids == again.token_ids
