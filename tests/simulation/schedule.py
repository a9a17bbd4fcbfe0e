"""Runs one schedule of faults: everything in it follows from its seed."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import structlog
import structlog.testing

from specdec.coordinator import deadlines, peers
from specdec.protocol import items
from specdec.protocol.report import PROPOSER_FIELDS
from specdec.target_service import admission
from tests.simulation.clock import Violation
from tests.simulation.faults import FAULTS, SOON_OVERDUE, NoFaults, Plan, RandomFaults
from tests.simulation.network import Message
from tests.simulation.scenario import Scenario, draw_scenario
from tests.simulation.transcript import Transcript
from tests.simulation.world import World

FAULTS_MIN = 3
SILENT = structlog.testing.ReturnLogger()  # faults make the driven classes log much


@dataclass(frozen=True, slots=True)
class Report:
    """How a run went. `problem` is empty when every property held; `points` names each point; `tree_count`: rounds
    that accepted tokens of a tree; `sources`: accepted draft tokens by proposer."""

    problem: str
    token_count: int
    offered_count: int
    accepted_count: int
    tree_count: int
    points: list[str]
    virtual_s: float
    faults: Counter
    cache: Counter
    sources: Counter
    moves: Counter
    scored_count: int = 0  # prompt tokens


@contextmanager
def made_repeatable(world: World, rng: random.Random) -> Iterator[None]:
    """Clocks, chance and links of the driven classes come from the run, items are small enough to be split, and an
    answer is overdue soon once one was muted."""
    clock, scenario = world.clock, world.scenario
    with ExitStack() as stack:
        stack.callback(asyncio._set_running_loop, None)
        for name in ("perf_counter", "monotonic"):
            stack.enter_context(patch.object(time, name, clock.perf_counter))
        stack.enter_context(patch.object(structlog, "get_logger", lambda *_, **__: SILENT))
        stack.enter_context(patch.object(logging.getLogger("specdec.engine"), "disabled", True))
        stack.enter_context(patch.multiple(secrets, randbits=rng.getrandbits, randbelow=rng.randrange))
        stack.enter_context(patch.object(items, "EXTEND_TOKEN_COUNT_MAX", scenario.extend_max))
        stack.enter_context(patch.multiple(admission, RUN_POSITIONS=scenario.run_positions, RUN_SHARE=0.0))
        bounds = {name: getattr(deadlines, name) for name in SOON_OVERDUE}  # as they are, until an answer is muted
        stack.enter_context(patch.multiple(deadlines, **bounds))
        carried = dict(item_to_bytes=lambda _, item: Message(item), item_from_message=lambda message: message.item)
        described = dict(description_from_message=lambda description: description)
        stack.enter_context(patch.multiple(peers, Link=world.make_link, **carried, **described))
        yield


def run(scenario: Scenario, plan: Plan, seed: int, rng: random.Random, transcript: Transcript | None = None) -> Report:
    """Runs a scenario under a plan of faults; a property that does not hold is the report's problem.

    `seed` is that of the draft's own draws, `rng` the chance of faults.
    """
    if transcript is not None:
        transcript.lines.append(str(scenario))
    world = World(scenario, rng, plan, transcript)
    problem = ""
    with made_repeatable(world, random.Random(seed)):
        try:
            world.run()
        except (Violation, AssertionError) as error:
            problem = f"{type(error).__name__}: {error}"
        except Exception as error:  # any error of the driven classes is a finding, and has a seed
            logging.getLogger(__name__).debug("a run failed", exc_info=True)
            problem = f"{type(error).__name__}: {error}"
    return Report(
        problem,
        sum(len(client.output) for client in world.clients),
        sum(watched.offered_count for watched in world.ledger.sessions.values()),
        sum(watched.accepted_count for watched in world.ledger.sessions.values()),
        sum(watched.tree_count for watched in world.ledger.sessions.values()),
        world.faults.points,
        world.clock.now_s,
        world.faults.counts,
        world.cache_counts,
        accepted_by_source(world),
        moves_of(world),
        world.ledger.scored_count,
    )


def accepted_by_source(world: World) -> Counter:
    """Accepted draft tokens by the name of their proposer."""
    return Counter(
        {
            proposer.name: sum(getattr(own.moves.statistics, accepted) for own in world.ledger.sessions.values())
            for proposer, (_, accepted) in PROPOSER_FIELDS.items()
        }
    )


def moves_of(world: World) -> Counter:
    """How often texts changed replicas, and what led to it."""
    counts: Counter = Counter()
    for watched in world.ledger.sessions.values():
        moves = watched.moves
        counts["changes of target"] += moves.target_changes
        counts["changes of draft"] += moves.draft_changes
        counts["suspects"] += moves.was_suspect
        counts["refusals"] += moves.refusal_count
        counts["other numerics"] += moves.profile_changes
        counts["errors"] += moves.has_failed
    return counts


def run_seed(seed: int, transcript: Transcript | None = None) -> Report:
    """The random schedule of a seed."""
    rng = random.Random(seed)
    scenario = draw_scenario(rng)
    kinds = FAULTS if rng.random() < 0.3 else tuple(rng.sample(FAULTS, rng.randint(2, 5)))
    plan = RandomFaults(rng, kinds, FAULTS_MIN + rng.randrange(5), rng.choice((3, 8, 15)))
    return run(scenario, plan, seed, rng, transcript)


def run_without_faults(seed: int, transcript: Transcript | None = None) -> Report:
    """The scenario of a seed with nothing going wrong."""
    rng = random.Random(seed)
    return run(draw_scenario(rng), NoFaults(), seed, rng, transcript)
