"""The rule of requests that name none: the service's choice, by its measurements; and limits of a request's plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specdec.config import CoordinatorSettings
from specdec.coordinator.fleet import REJECTION_EVERY, RULE_ROUNDS, Fleet
from specdec.errors import InvalidRequest
from specdec.policy.goodput_policy import GoodputPolicy
from specdec.protocol.policy import Policy
from specdec.protocol.request import GenerationRequest, SamplingParams, SpeculationMode, SpeculativePolicy
from specdec.protocol.types import Proposer, Rule
from tests.support import fleets
from tests.support.fleets import MODEL
from tests.support.records import round_record

SETTINGS = CoordinatorSettings(
    target=("localhost:1",), draft=("localhost:2",), tokenizer="none", speculation_policy="auto"
)
TURNS = 32 * REJECTION_EVERY
OPEN = GenerationRequest(token_ids=(1,))


def fleet_of(**settings: Any) -> Fleet:
    """A fleet of one target and one draft."""
    return fleets.fleet_of(SETTINGS.model_copy(update=settings))


def run_rounds(fleet: Fleet, rule: Rule, round_s: float) -> None:
    """A generation under a rule whose rounds all take `round_s` and accept all planned tokens."""
    policy = fleet.choose(GenerationRequest(token_ids=(1,), speculative=SpeculativePolicy(rule=rule)), 1, MODEL).policy
    run_policy(policy, range(round(3 * RULE_ROUNDS)), round_s)


def run_policy(policy: Policy, rounds: range, round_s: float, accepted_share: float = 1.0) -> None:
    """These rounds of a policy that all take `round_s` and accept a share of the planned tokens."""
    assert isinstance(policy, GoodputPolicy)
    for index in rounds:
        plan = policy.plan(1000)
        count, start_s = plan.draft_length_max, index * round_s
        accepted_count = round(accepted_share * count)
        tokens = {"offered_count": count, "accepted_count": accepted_count, "kept_count": accepted_count + 1}
        times = {"start_s": start_s, "end_s": start_s + round_s, "round_trip_s": round_s, "forward_s": round_s}
        policy.on_round(round_record(index, plan, was_looked_up=True, was_found=True, **tokens, **times))


@pytest.mark.parametrize(
    "settings, token_id",
    [
        ({}, 5),
        ({"ngram_length_min": 3}, 5),
        ({"ngram_length_min": 4}, None),
        ({"ngram_length_max": 2}, 6),
        ({"ngram_window": 8}, 6),
        ({"ngram_window": 5}, None),
        ({"proposers": "draft,suffix"}, None),
    ],
    ids=str,
)
def test_settings_of_the_ngram_proposer_are_those_of_the_service(
    settings: dict[str, int | str], token_id: int | None
) -> None:
    """Claim: `--ngram-length-min` is the least length of a match, `--ngram-length-max` that up to which matches are
    compared, `--ngram-window` the part of the prompt that is searched. The prompt ends with 2 3 4, which were followed
    by 5 first, and 3 4, which were followed by 6 later."""
    committed = [2, 3, 4, 5, 9, 3, 4, 6, 7, 2, 3, 4]
    fleet, request = fleet_of(**settings), GenerationRequest(token_ids=tuple(committed))
    made = fleet.local_proposers(fleet.choose(request, 1, MODEL), request, committed, ())
    runs = [run for proposer in made for run in proposer.propose(committed)]
    assert (runs[0].token_ids[0] if runs else None) == token_id


def test_who_sees_rounds_sees_no_text_of_others() -> None:
    """Claim: a request that reports rounds has every proposer of the service but that of earlier texts, unless it has a
    salt; naming that one without a salt is refused, naming others is not. Conclusive: without rounds it has all."""
    fleet = fleet_of()

    def proposers_of(salt: str, **own: Any) -> frozenset[Proposer]:
        request = GenerationRequest(token_ids=(1,), cache_salt=salt, speculative=SpeculativePolicy(**own))
        return fleet.choose(request, 1, MODEL).proposers

    every = proposers_of("")
    assert Proposer.SUFFIX in every and every == proposers_of("own", report_rounds=True)
    assert proposers_of("", report_rounds=True) == every - {Proposer.SUFFIX}
    named = {"proposers": (Proposer.NGRAM, Proposer.SUFFIX)}
    assert proposers_of("", report_rounds=True, proposers=(Proposer.NGRAM,)) == {Proposer.NGRAM}
    assert proposers_of("own", report_rounds=True, **named) == proposers_of("", **named) == {*named["proposers"]}
    with pytest.raises(InvalidRequest, match="speculative.report_rounds is True; it must be absent or false"):
        proposers_of("", report_rounds=True, **named)


def test_what_is_named_or_follows_is_not_chosen() -> None:
    """Claim: temperature 0 is GREEDY, a seed COUPLED, a rule named is that rule; each has its reason."""
    fleet = fleet_of()
    greedy = GenerationRequest(token_ids=(1,), sampling=SamplingParams(temperature=0))
    assert ruled(fleet, greedy) == (Rule.GREEDY, "temperature 0")
    seeded = GenerationRequest(token_ids=(1,), sampling=SamplingParams(seed=3))
    assert ruled(fleet, seeded) == (Rule.COUPLED, "the request has a seed")
    named = GenerationRequest(token_ids=(1,), speculative=SpeculativePolicy(rule=Rule.REJECTION))
    assert ruled(fleet, named) == (Rule.REJECTION, "named by the request")


def test_a_small_share_runs_rejection_to_measure_it() -> None:
    """Claim: COUPLED until both rules are measured, but for one request in REJECTION_EVERY; a resumed text needs
    neither rule nor seed. Conclusive: all requests of four such periods are counted."""
    fleet = fleet_of()
    resumed = GenerationRequest(token_ids=(1,), resumed_token_ids=(2, 3))
    rules = [fleet.choose(resumed, turn, MODEL).rule for turn in range(1, TURNS)]
    share = rules.count(Rule.REJECTION) / TURNS
    assert 0.7 < share * REJECTION_EVERY < 1.4 and set(rules) == {Rule.REJECTION, Rule.COUPLED}
    assert rules[0] is Rule.COUPLED


@pytest.mark.parametrize(
    "speculative",
    [
        SpeculativePolicy(enabled=False),
        SpeculativePolicy(mode=SpeculationMode.OFF),
        SpeculativePolicy(mode=SpeculationMode.FIXED),
        SpeculativePolicy(num_speculative_tokens=3),
        SpeculativePolicy(proposers=(Proposer.NGRAM,)),
    ],
    ids=str,
)
def test_a_request_that_measures_nothing_runs_no_rejection(speculative: SpeculativePolicy) -> None:
    """Claim: a request with a plan, a limit or proposers of its own is no measurement of a rule, so none runs REJECTION
    to measure it. Conclusive: two periods of such requests, and of others, of which one in each period does."""
    fleet = fleet_of()
    own = GenerationRequest(token_ids=(1,), speculative=speculative)
    rules = [fleet.choose(request, turn, MODEL).rule for turn in range(1, TURNS) for request in (own, OPEN)]
    assert set(rules[::2]) == {Rule.COUPLED} and Rule.REJECTION in rules[1::2]


def test_the_faster_rule_is_chosen() -> None:
    """Claim: once both are measured, the rule with more tokens/s runs, and the reason gives both measurements."""
    for rejection_s, chosen in ((0.01, Rule.REJECTION), (0.04, Rule.COUPLED)):
        fleet = fleet_of()
        run_rounds(fleet, Rule.COUPLED, 0.02)
        run_rounds(fleet, Rule.REJECTION, rejection_s)
        choice = fleet.choose(OPEN, 1, MODEL)
        assert choice.rule is chosen and "tokens/s measured" in choice.rule_reason, choice


def test_a_draft_model_that_comes_first_and_is_poor_is_left_soon() -> None:
    """Claim: of two draft models that nothing is known of each gets about every second text until both are measured,
    and then the better one all but one in REJECTION_EVERY (a finding of bench.fleet: the second was measured after 44
    texts). Conclusive: 64 texts of 25 rounds, all guesses of the first draft wrong, all of the second accepted."""
    fleet = fleet_of(draft=("localhost:2", "localhost:3"))
    for draft in fleet.drafts.peers:
        draft.found(replace(MODEL, model_name=draft.address, model_digest=draft.address))
    request, drafts = GenerationRequest(token_ids=(1,), sampling=SamplingParams(temperature=0)), []
    for turn in range(1, 65):
        choice = fleet.choose(request, turn, MODEL)
        assert choice.draft is not None
        drafts.append(choice.draft.address)
        is_good = choice.draft.address == "localhost:3"
        run_policy(choice.policy, range(25 * turn, 25 * (turn + 1)), 0.02, 1.0 if is_good else 0.0)
    assert drafts[0] == "localhost:2" and drafts[16:].count("localhost:2") <= 1, drafts


def ruled(fleet: Fleet, request: GenerationRequest) -> tuple[Rule, str]:
    choice = fleet.choose(request, 1, MODEL)
    return choice.rule, choice.rule_reason


def fixed(**asked: int) -> GenerationRequest:
    return GenerationRequest(token_ids=(1,), speculative=SpeculativePolicy(mode=SpeculationMode.FIXED, **asked))


@pytest.mark.parametrize("field", ["num_speculative_tokens", "draft_window", "draft_nodes_per_step"])
def test_a_request_may_not_ask_for_more_than_the_servers_maximum(field: str) -> None:
    """Claim: a plan named by a request obeys the server's maxima, each a setting (a finding by reading: 16 tokens and
    64 nodes of one client override load control). Conclusive: both sides of each limit."""
    limits = {"num_speculative_tokens": 4, "draft_window": 6, "draft_nodes_per_step": 2}
    maxima = {f"{name}_max": value for name, value in limits.items()}
    fleet = fleet_of(**maxima, num_speculative_tokens=2)
    plan = fleet.choose(fixed(**{field: limits[field]}), 1, MODEL).policy.plan(1000)
    assert (plan.draft_length_max, plan.window, plan.nodes_per_step)[list(limits).index(field)] == limits[field]
    with pytest.raises(
        InvalidRequest, match=f"speculative.{field} is {limits[field] + 1}; .* maximum, {limits[field]}"
    ):
        fleet.choose(fixed(**{field: limits[field] + 1}), 1, MODEL)


def test_the_window_by_default_obeys_the_maximum() -> None:
    """Claim: a request without a window gets one more than its draft tokens, or the server's maximum if that is less.
    Conclusive: both cases."""
    fleet = fleet_of(num_speculative_tokens_max=6, draft_window_max=6)
    windows = [fleet.choose(fixed(num_speculative_tokens=n), 1, MODEL).policy.plan(1000).window for n in (4, 6)]
    assert windows == [5, 6]
