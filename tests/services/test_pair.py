"""On = off on the shipped pair, through the running services.

The matrix of draft length × batch × temperature × dtype: 0 differing tokens, and equal text, usage, finish reason
and logprobs. The reference of every cell is one generation alone, without speculation; so the check covers rows beside
other rows, verifications of every width, rollbacks after real rejections, and stops and `min_tokens` inside a round.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import tokenizers

from tests.support.services import MODELS, SHAPES, Outcome, Services, fixed, running
from tests.support.tokenizer_kinds import common_length

MAX_TOKENS = 40
DRAFT_LENGTHS = (0, 1, 2, 4, 8)
BATCHES = (1, 3, 8)
PROMPTS = [json.loads(line)["prompt"] for line in (MODELS / "heldout_prompts.jsonl").read_text().splitlines()[:8]]
ENDINGS: list[dict[str, Any]] = [
    {},
    {"stop": ["\n\n"]},
    {"stop": ["self", "("], "min_tokens": 11},
    {"stop_token_ids": [199, 262], "min_tokens": 5},
    {"ignore_eos": True, "repetition_penalty": 1.2},
    {"stop": ["    "], "min_tokens": 17},
    {"top_p": 0.9, "top_k": 40, "stop": [")\n"]},
    {"frequency_penalty": 0.3, "min_tokens": 30},
]


@pytest.fixture(scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.more)])
def services(request: pytest.FixtureRequest) -> Iterator[Services]:
    if request.param == "float32":
        yield request.getfixturevalue("shipped_pair")
        return
    with running(MODELS / "target", MODELS / "draft", threads=1, dtype=request.param) as started:
        yield started


def requests(temperature: float, speculative: dict[str, Any]) -> list[dict[str, Any]]:
    """One generation per prompt, each with another way to end."""
    seeds = {} if temperature == 0 else {"seed": 1234}
    common = {"temperature": temperature, "max_tokens": MAX_TOKENS, "logprobs": 2, "speculative": speculative, **seeds}
    return [{"prompt": prompt, **common, **ending} for prompt, ending in zip(PROMPTS, ENDINGS)]


def differing(outcomes: list[Outcome], reference: list[Outcome]) -> list[int]:
    return [i for i, pair in enumerate(zip(outcomes, reference)) if pair[0].comparable != pair[1].comparable]


@pytest.mark.parametrize("siblings", [0, 2])
def test_waits_for_a_path_of_a_tree_end(services: Services, siblings: int) -> None:
    """Claim: rounds that wait for a path of 8 draft tokens in a tree get it, however unlikely its last ones are, and no
    wait expires. Conclusive: at temperature 1 nearly every such path is less likely than those a tree grows by itself,
    and nothing ends the wait but the path; only rounds begun in the last 8 tokens may offer fewer than 8. No round
    waits for a draft that has sent nothing yet: the first ones, fewer than half of this text's, have no draft tokens.
    The coordinator is a fresh one: under the load of the sessions before, this plan would shrink.
    """
    plan = fixed(8, draft_window=8, draft_nodes_per_step=4, draft_siblings=siblings, draft_wait_ms=20_000)
    asked = {"prompt": PROMPTS[0], "max_tokens": 300, "ignore_eos": True, "seed": 3, "temperature": 1.0}
    with services.coordinator_with() as client:
        found = client.generate(**asked, speculative=plan).finished.statistics
    assert found.draft_waits_expired == 0 and found.num_spec_steps > found.rounds / 2
    assert found.num_draft_tokens >= 8 * (found.num_spec_steps - 8) > 0


def test_a_prompt_that_ends_inside_a_character_gives_no_text(services: Services) -> None:
    """Claim: the ids of a prompt that end in half an emoji give the output no text of the prompt, and a stop string of
    the prompt does not match there; resumed after any token the text goes on as it was.

    Conclusive: the text is the library's decoding of prompt and output less that of the prompt, and the same with the
    stop string, which ended it after one token where the last words of the prompt came back.
    """
    library = tokenizers.Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
    prompt = library.encode("PROMPT ONLY: robot 🤖").ids[:-1]
    begun = library.decode(prompt)
    assert begun.startswith("PROMPT ONLY: robot \ufffd")
    asked = {"max_tokens": 16, "ignore_eos": True, "temperature": 0, "speculative": fixed(4)}
    found = services.client.generate(prompt, stop=["robot"], **asked)
    whole = library.decode([*prompt, *found.token_ids])
    assert len(found.token_ids) == 16 and whole.startswith(begun) and found.text == whole[len(begun) :]
    for count in range(0, 16, 3):
        resumed = services.client.generate(prompt, resume=found.token_ids[:count], **asked)
        certain = common_length(whole, library.decode([*prompt, *found.token_ids[:count]]))
        assert found.text[: certain - len(begun)] + resumed.text == found.text


@pytest.mark.parametrize(
    ("services", "temperature"),
    [
        pytest.param("bfloat16", 0, marks=pytest.mark.more),
        pytest.param("float32", 0, marks=pytest.mark.slow),
        *(pytest.param(dtype, each, marks=pytest.mark.slow) for dtype in ("float32", "bfloat16") for each in (0.7, 1)),
    ],
    indirect=["services"],
)
def test_speculation_changes_nothing(services: Services, temperature: float):
    """Claim: every cell equals its reference in full; draft tokens were offered, and both accepted and rejected."""
    client = services.client
    reference = [client.generate(**request) for request in requests(temperature, SHAPES["off"])]
    reasons = {outcome.finished.reason for outcome in reference}
    assert len({outcome.text for outcome in reference}) == len(PROMPTS) and len(reasons) == 2
    drafted = accepted = 0
    ways = [(fixed(draft_length), batch) for draft_length in DRAFT_LENGTHS for batch in BATCHES]
    ways += [(SHAPES[name], BATCHES[-1]) for name in ("chain", "tree", "auto")]
    for speculative, batch in ways:
        outcomes = client.generate_all(requests(temperature, speculative)[:batch], width=batch)
        assert not differing(outcomes, reference), f"{speculative}, batch {batch}"
        drafted += sum(outcome.finished.statistics.num_draft_tokens for outcome in outcomes)
        accepted += sum(outcome.finished.statistics.num_accepted_draft_tokens for outcome in outcomes)
    assert 0 < accepted < drafted


@pytest.mark.more
@pytest.mark.parametrize("services", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"], indirect=True)
def test_resume_at_every_token_of_real_text(services: Services):
    """Claim: cut at every token, on a freshly started coordinator, the pieces are the whole, text and logprobs too."""
    asked = requests(0.7, fixed(4))[5]
    whole = services.client.generate(**{**asked, "speculative": {"enabled": False}})
    coordinator, client = services.start_coordinator()
    try:
        for cut in range(len(whole.token_ids) + 1):
            resumed = client.generate(**asked, resume=whole.token_ids[:cut])
            assert whole.token_ids[:cut] + resumed.token_ids == whole.token_ids, f"cut at {cut}"
            assert "".join(whole.texts[:cut]) + resumed.text == whole.text, f"cut at {cut}"
            assert resumed.logprobs == whole.logprobs[cut:], f"cut at {cut}"
            assert resumed.finished.usage == whole.finished.usage
    finally:
        client.close()
        coordinator.stop()


@pytest.mark.more
@pytest.mark.parametrize("services", ["bfloat16"], indirect=True)
def test_unseeded_sampling_speculates_too(services: Services):
    """Claim: without a seed the rule is the server's choice, COUPLED before anything was measured, and says so; draft
    tokens pass under REJECTION too, if named, and every token lies in the vocabulary."""
    chosen = services.client.generate(PROMPTS[0], max_tokens=8, ignore_eos=True)
    assert chosen.started.rule == chosen.finished.statistics.rule == 3
    assert chosen.started.rule_reason.startswith("the server's choice")
    named = {"rule": "RULE_REJECTION"}
    outcome = services.client.generate(PROMPTS[0], max_tokens=200, ignore_eos=True, speculative=named)
    assert outcome.started.rule == 2 and outcome.started.rule_reason == "named by the request"
    assert outcome.finished.statistics.num_accepted_draft_tokens > 0
    assert len(outcome.token_ids) == 200 and max(outcome.token_ids) < 4096
