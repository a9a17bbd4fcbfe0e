"""The scenario of a run: rule, texts, policy, speeds and sizes, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from specdec.policy.fixed_policy import FixedPolicy
from specdec.protocol.types import Proposer, Rule
from tests.simulation.client import Choosing, Order
from tests.simulation.model import VOCABULARY_SIZE

TOKENS_MIN = 20
ENCODER_EVERY = 14  # the seed of a first text, which is even, is a multiple of it in one setting of seven
CRAMPED_FROM = 0.9  # of all settings the rest: texts of at most five blocks each, in a cache of five to seven


@dataclass(frozen=True, slots=True)
class Scenario:
    """One setting. Seconds are virtual; `extend_max` is the most tokens one item may carry, `run_positions` the
    growth of a target's session before it may be preempted, `has_heads` whether the first target has heads. `profiles`:
    the numerics of each target; `drafts`: the model of each draft; `places` of each replica; `wait_s`: for which a text
    waits for a target; `join_s`: when the last target and draft join; `has_alias`: the first target has two addresses;
    `has_encoder`: models are encoder-decoder models, and each prompt begins with an input.
    """

    table: int
    orders: tuple[Order, ...]
    target_step_s: float
    draft_step_s: float
    target_latency_s: float
    draft_latency_s: float
    target_blocks: int
    draft_blocks: int
    target_positions: int
    draft_positions: int
    chunk_size: int
    extend_max: int
    run_positions: int = 64
    has_heads: bool = True
    profiles: tuple[int, ...] = (0,)
    drafts: tuple[int, ...] = (1,)
    places: int = 64
    wait_s: float = 30.0
    join_s: float = 0.0
    has_alias: bool = False
    has_encoder: bool = False


def draw_scenario(rng: random.Random) -> Scenario:
    """A setting: mostly ordinary, now and then with too small a draft, a slow one, none requested, or several texts in
    a target's cache that holds hardly more than one."""
    table = rng.randrange(8)
    crowd = rng.random()
    is_cramped = crowd >= CRAMPED_FROM
    profiles, drafts = draw_pools(rng)
    is_shared = len(profiles) > 1 and rng.random() < 0.3
    count = rng.choice((2, 3)) if is_cramped else 2 if crowd >= 0.86 or is_shared else 1
    orders = tuple(draw_order(rng, table, number) for number in range(count))
    has_encoder = orders[0].seed % ENCODER_EVERY == 0 and all(len(order.prompt) > 1 for order in orders)
    return Scenario(
        table=table,
        orders=tuple(map(with_input, orders)) if has_encoder else orders,
        target_step_s=rng.choice((0.004, 0.006)),
        draft_step_s=rng.choice((0.002, 0.004)),
        target_latency_s=rng.choice((0.0002, 0.001)),
        draft_latency_s=rng.choice((0.0003, 0.0003, 0.002, 0.01)),
        target_blocks=rng.choice((6, 7, 8)) if is_cramped else 64,
        draft_blocks=rng.choice((64, 64, 64, 12)),
        target_positions=128,
        draft_positions=rng.choice((128, 128, 128, 24)),
        chunk_size=rng.choice((3, 64, 64)),
        extend_max=rng.choice((2, 5, 2048)),
        run_positions=rng.choice((1, 4, 8)) if is_cramped else 64,
        has_heads=rng.random() < 0.9,
        profiles=profiles,
        drafts=drafts,
        places=rng.choice((64, 64, 64, 2, 1)) if len(profiles) > 1 else 64,
        wait_s=rng.choice((0.0, 0.5, 30.0, 30.0, 30.0)),
        join_s=rng.choice((0.0, 0.0, 0.02, 0.1)),
        has_alias=rng.random() < 0.1,
        has_encoder=has_encoder,
    )


def with_input(order: Order) -> Order:
    """The order with an input of any length that leaves a token of the prompt."""
    return replace(order, encoder_length=1 + order.seed // ENCODER_EVERY % (len(order.prompt) - 1))


def draw_pools(rng: random.Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numerics of one to three targets, and the models of one to three drafts."""
    profiles = rng.choice(((0,), (0,), (0,), (0,), (0, 0), (0, 0), (0, 0, 0), (0, 1), (0, 1, 0)))
    drafts = rng.choice(((1,), (1,), (1, 1), (1, 1), (1, 2), (1, 2, 1)))
    return profiles, drafts


def draw_order(rng: random.Random, table: int, number: int) -> Order:
    """One text of 20 tokens or a few more."""
    output_length = TOKENS_MIN + rng.randrange(2)
    heads, local = (Proposer.HEADS,), (Proposer.NGRAM, Proposer.SUFFIX, Proposer.PREDICTION)
    proposers = rng.choice(((), (), (), (Proposer.NGRAM,), (Proposer.PREDICTION,), local, heads, heads, local + heads))
    return Order(
        table=table,
        rule=rng.choice(tuple(Rule)),
        seed=128 * (number // 2) + 2 * rng.randrange(64) + number % 2,
        prompt=tuple(rng.randrange(VOCABULARY_SIZE) for _ in range(rng.randint(1, 9))),
        output_length=output_length,
        max_tokens=output_length + rng.choice((0, 0, 1, 5)),
        policy=draw_policy(rng),
        proposers=proposers,
        prediction=tuple(rng.randrange(VOCABULARY_SIZE) for _ in range(rng.choice((3, 30)))),
    )


def draw_policy(rng: random.Random) -> FixedPolicy | Choosing:
    """Streamed trees and chains, rounds that wait, plain decoding, or a policy that chooses. Wide trees stay short."""
    choice = rng.random()
    if choice < 0.22:
        return Choosing.WANDERING
    if choice < 0.26:
        return Choosing.AUTO
    if choice < 0.28:
        return FixedPolicy(0)
    nodes_per_step = rng.choice((1, 1, 1, 2, 2, 3, 4))
    draft_length = rng.choice(((1, 2, 3, 4, 6), (1, 2, 3, 4), (1, 2, 3))[min(nodes_per_step, 3) - 1])
    window = draft_length + rng.choice((0, 1, 2) if nodes_per_step < 3 else (0, 1))
    siblings = rng.choice((0, 0, 1, 2))
    waits_s = rng.choice((0.0, 0.0, 0.003, 0.02, 0.1))
    return FixedPolicy(draft_length + 2 * siblings, window, nodes_per_step, waits_s, siblings=siblings)
