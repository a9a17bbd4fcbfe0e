"""The simulated service against closed formulas, where there are some."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from specdec.protocol.plan import OFF_PLAN, Plan
from tests.support.policy_bursts import with_bursts
from tests.support.simulation import FixedService, Simulation, Text, World, rate_of

TARGET_S, DRAFT_S, NETWORK_S, OVERHEAD_S, TOKENS = 0.02, 0.003, 0.01, 0.001, 4000
LENGTHS = (1, 2, 4)


def world_of(*acceptance: float, **fields: float) -> World:
    """One stream without end, whose next token is never one of the draft's candidates."""
    text = Text(acceptance, token_count=math.inf)
    steps = (lambda rows: TARGET_S * (1 + 0.1 * (rows - 1))), (lambda nodes: DRAFT_S)
    world = World(*steps, NETWORK_S, (text,), branches=(), bonus_match=0.0, overhead_s=OVERHEAD_S)
    return replace(world, **fields)


def test_plain_decoding_takes_a_step_and_the_overhead() -> None:
    """Claim: without speculation a token takes a step of one row and the overhead of a round; jitter averages out."""
    assert rate_of(world_of(0.7), OFF_PLAN, TOKENS) == pytest.approx(1 / (TARGET_S + OVERHEAD_S), rel=0.01)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_chain_that_waits_has_the_rate_of_the_formula(length: int) -> None:
    """Claim: rounds that wait for `length` tokens take E / (T + length x d + r + overhead), E the expected tokens of
    acceptance by place. Conclusive: no tree outlives its round, as the next token is never a candidate; the acceptances
    differ by place, so that one counted at another place, or a draft step or half a round trip more or less, shows."""
    acceptance = (0.9, 0.6, 0.5, 0.2)
    expected = 1 + sum(math.prod(acceptance[:count]) for count in range(1, length + 1))
    round_s = TARGET_S * (1 + 0.1 * length) + length * DRAFT_S + NETWORK_S + OVERHEAD_S
    plan = Plan(length, length, 1, length, 1.0)
    assert rate_of(world_of(*acceptance), plan, TOKENS) == pytest.approx(expected / round_s, rel=0.02)


def test_a_branch_that_is_right_keeps_the_tree() -> None:
    """Claim: where the second candidate is right whenever the first is wrong, a tree with it has its tokens in hand at
    once, and a chain begins anew. Conclusive: both wait for one token, with a window of 4 and a draft without cost, and
    only the chain waits for a round trip, in the share of rounds whose next token is not its first candidate."""
    world = world_of(0.5, branches=(1.0,), first_probability=0.6, draft_step_s=lambda nodes: 1e-5, bonus_match=0.5)
    step_s = TARGET_S * 1.1 + OVERHEAD_S
    tree, chain = (rate_of(world, Plan(1, 6, nodes, 1, 1.0), TOKENS) for nodes in (8, 1))
    assert tree == pytest.approx(1.5 / step_s, rel=0.03)
    assert chain == pytest.approx(1.5 / (step_s + (1 - 0.5 * 0.5) * NETWORK_S), rel=0.03)


def test_a_silent_draft_holds_nothing_back_and_a_change_comes_in_time() -> None:
    """Claim: with a draft that falls silent after 10 s, a plan that waits up to a second is as fast as plain decoding
    from 12 s on, and faster before."""
    world = replace(world_of(0.9), changes=((10.0, {"draft_factor": None}),))
    run = Simulation(world, FixedService(Plan(2, 2, 1, 2, 1.0)))
    run.run_until(30.0)
    plain = 1 / (TARGET_S + OVERHEAD_S)
    assert run.rate(0, 1.0, 10.0) > 1.2 * plain
    assert run.rate(0, 12.0, 30.0) == pytest.approx(plain, rel=0.03)


def test_odd_requests_end_before_the_ordinary_ones_begin() -> None:
    """Claim: bursts leave the world as it was: when they end no odd request runs, draft and network are as before, and
    the ordinary text has its usual rate. Conclusive: until then more than ten requests have run."""
    world = world_of(0.7)
    run = Simulation(with_bursts(world, 20.0, 3), FixedService())
    run.run_until(40.0)
    assert sum(bool(stream.ranks) for stream in run.streams) > 10
    assert all(stream.is_over for stream in run.streams[1:])
    assert run.rate(0, 22.0, 40.0) == pytest.approx(1 / (TARGET_S + OVERHEAD_S), rel=0.03)
