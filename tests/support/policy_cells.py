"""Cells of the policy: worlds for the simulated service (tests/support/simulation.py), and what the policy must reach.

Five kinds. Where the draft is of no use, or ceases to be, the policy must reach nearly the rate of plain decoding from
2 s after the change on. Where speculation pays it must come near the best fixed plan, that plan chosen on other seeds,
and a minute after odd requests (tests/support/policy_bursts.py) too, whatever they taught. The first text of a service
with a feature head must be near plain decoding if the head is useless, else near the best plan. Steps jitter and now
and then pause. Tests run some of the cells, `python -m bench.policy_cells` all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from specdec.config import CoordinatorSettings
from specdec.coordinator.discovery import Member
from specdec.coordinator.fleet import Fleet
from specdec.protocol.heads import HEAD_PASSES_MAX
from specdec.protocol.items import Nodes
from specdec.protocol.plan import Plan
from specdec.protocol.policy import Policy
from specdec.protocol.request import GenerationRequest, SamplingParams
from specdec.protocol.types import Description, Rule
from tests.support.policy_bursts import with_bursts
from tests.support.simulation import FixedService, Simulation, Text, World, best_plan

TARGET_S, LENGTH_CAP = 0.018, 16
FIRST_TOKENS, FIRST_RUNS = 64, 8  # of a first text; runs of such a cell for each seed
BURSTS_S, BACK_S, COUNTED_S = 600.0, 60.0, 40.0
OTHER_SEED = 1000
NO_GAIN, GAIN, AFTER_ODD = "speculation gains nothing", "speculation pays", "a minute after odd requests"
USELESS_HEAD, GOOD_HEAD = "first text, useless head", "first text, good head"
BOUNDS = {NO_GAIN: 0.98, GAIN: 0.97, AFTER_ODD: 0.9, USELESS_HEAD: 0.96, GOOD_HEAD: 0.92}  # of off, or of the best plan
SETTINGS = CoordinatorSettings(
    target=("localhost:1",),
    draft=("localhost:2",),
    tokenizer="none",
    speculation_policy="auto",
    num_speculative_tokens_max=LENGTH_CAP,
    draft_siblings_max=0,
    proposers="draft",
)
SETTINGS_HEAD = SETTINGS.model_copy(update={"draft": (), "proposers": "heads"})
REQUEST = GenerationRequest(token_ids=(1,), sampling=SamplingParams(temperature=0))
REPLICA = Description("digest", "print", "simulated", 7, 1 << 20, (1,), "float32", "cpu", "none")


def _times(step_s: Callable[[int], float]) -> tuple[tuple[int, float], ...]:
    return tuple((count, step_s(count)) for count in (1, 2, 4, 8, 16))


def _head(pass_s: Callable[[int], float]) -> dict[str, Any]:
    return {"head_passes_max": HEAD_PASSES_MAX, "head_pass_times": _times(pass_s)}


class FleetService(FixedService):
    """The policies of a coordinator, as its `Fleet` makes them; it knows what its replicas measured when they had
    loaded. `plain`: streams that decode plainly."""

    def __init__(self, world: World, plain: Sequence[int] = ()) -> None:
        super().__init__()
        has_head, self._plain, self._turn = world.head_pass_s is not None, plain, 0
        self.fleet = Fleet(SETTINGS_HEAD if has_head else SETTINGS, "", lambda: None)
        replica = REPLICA if world.head_pass_s is None else replace(REPLICA, **_head(world.head_pass_s))
        pools = (self.fleet.targets, world.target_step_s), (self.fleet.drafts, world.draft_step_s)
        for pool, step_s in pools[: 2 - has_head]:
            pool.update((Member("localhost:1"),))
            pool.peers[0].found(replace(replica, step_times=_times(step_s)))
        self._draft = self.fleet.drafts.peers[0] if not has_head else None
        self.on_draft(world.network_s)

    def policy(self, stream_index: int) -> Policy | FixedService:
        if stream_index in self._plain:
            return super().policy(stream_index)
        self._turn += 1
        return self.fleet.choose(REQUEST, self._turn, REPLICA).policy

    def on_draft(self, network_s: float, node_count: int = 0, session_count: int = 0, step_s: float = 0.0) -> None:
        if self._draft is None:
            return
        self._draft.link.stamps.network_s = network_s
        if node_count:
            nodes = Nodes(0, 0, 0, 0, (), round(1e6 * step_s), node_count, active_sessions=session_count)
            self._draft.measure_step(nodes, Rule.GREEDY, 0)
        else:
            self._draft.measure_network()


@dataclass(frozen=True, slots=True)
class Cell:
    """A world, and the time that counts, from 2 s after what changes in it on. `streams`: those that count, by default
    all; with `is_beside`, off is those streams alone, the others speculate. `pays`: the bar is of the best fixed plan.
    `bursts_s`: seconds of odd requests before its own; the time counts from their end. `is_first`: instead of a time
    the first FIRST_TOKENS of a fresh service count."""

    name: str
    world: World
    from_s: float = 2.0
    to_s: float = 20.0
    pays: bool = False
    streams: Sequence[int] = ()
    is_beside: bool = False
    bursts_s: float = 0.0
    is_first: bool = False

    @property
    def kind(self) -> str:
        """One of BOUNDS, which has the least share of off, or of the best fixed plan where speculation pays."""
        if self.is_first:
            return GOOD_HEAD if self.pays else USELESS_HEAD
        return AFTER_ODD if self.bursts_s else GAIN if self.pays else NO_GAIN

    def seeds(self, turn: int) -> range:
        """Those of a turn, the first of which is 1: one, more of short texts."""
        count = FIRST_RUNS if self.is_first else 1
        return range((turn - 1) * count, turn * count)

    def rate(self, service: FixedService, seed: int) -> float:
        """Tokens per second of the streams that count."""
        if self.is_first:
            return first_rate(self.world, service, seed)
        world = with_bursts(self.world, self.bursts_s, seed) if self.bursts_s else self.world
        from_s, to_s, run = self.bursts_s + self.from_s, self.bursts_s + self.to_s, Simulation(world, service, seed)
        run.run_until(to_s)
        return sum(run.rate(index, from_s, to_s) for index in self.streams or range(len(self.world.texts)))


def first_rate(world: World, service: FixedService, seed: int) -> float:
    """Tokens per second of the first tokens of a service."""
    run = Simulation(world, service, seed)
    while len(run.streams[0].ranks) < FIRST_TOKENS:
        run.run_until(run.now_s + 1.0)
    at_s, count = next(own for own in run.streams[0].timeline if own[1] >= FIRST_TOKENS)
    return count / at_s


def _step_s(first_s: float, slope: float, rows: int) -> float:
    return first_s * (1 + slope * (rows - 1))


def _expert_step_s(rows: int) -> float:
    """Half of a step reads experts, 4 of 32 for each row: those that none of the rows chose stay unread."""
    return TARGET_S * (0.5 + 0.5 * (1 - (1 - 4 / 32) ** rows) * 32 / 4)


def steps_of(slope: float) -> Callable[[int], float]:
    """A target's step by rows: each row beyond the first adds a share."""
    return partial(_step_s, TARGET_S, slope)


def many(
    count: int,
    *acceptances: float,
    token_count: float = 400,
    slope: float = 0.02,
    draft_s: float = 0.0011,
    **fields: Any,
) -> World:
    """Streams whose texts have these acceptances in turn, on a near and fast draft unless said otherwise."""
    texts = tuple(Text((acceptances[index % len(acceptances)],), token_count) for index in range(count))
    usual = {"target_step_s": steps_of(slope), "draft_step_s": partial(_step_s, draft_s, 0.12), "network_s": 0.003}
    noise = {"begins_s": (0.0,) * count, "overhead_s": 0.0012, "gather_s": 0.0015, "jitter": 0.15, "pause_share": 0.005}
    return World(**{**usual, **noise, **fields}, texts=texts)


one = partial(many, 1)


def later(at_s: float, **fields: Any) -> dict[str, Any]:
    """A world's field for one change."""
    return {"changes": ((at_s, fields),)}


def headed(count: int, *acceptances: float, share: float = 0.1, **fields: Any) -> World:
    """The same with a feature head on the target, whose pass takes this share of a step, and no draft."""
    pass_s = partial(_step_s, share * TARGET_S, 0.05)
    return many(count, *acceptances, draft_factor=None, head_pass_s=pass_s, **fields)


def failing_cells() -> list[Cell]:
    """A draft that is of no use, or ceases to be; load under which nothing should be drafted."""
    jump = (0.0, *(10.0 + 0.01 * index for index in range(31)))
    mixed, steepens = many(4, 0.02, 0.98, 0.98, 0.98, slope=0.05), later(6, target_step_s=steps_of(0.25))
    crowds = {count: many(count, 0.3, contention=1.6) for count in (2, 4, 8)}
    poor = {ms: one(0.3, network_s=ms / 1e3, bonus_match=0.2) for ms in (0, 10, 30, 100)}
    moved = {ms: one(0.4, network_s=0.0005, bonus_match=0.2, **later(10, network_s=ms / 1e3)) for ms in (9, 20)}
    return [
        Cell("draft as slow as its target", one(0.7, draft_s=TARGET_S)),
        Cell("draft as slow, and on its cores", one(0.7, draft_s=TARGET_S, contention=1.4)),
        Cell("always wrong", one(0.0)),
        Cell("always wrong, on the target's cores", one(0.0, contention=1.3)),
        *(
            Cell(f"always wrong, texts of {count} tokens", one(0.0, token_count=count, contention=1.3))
            for count in (32, 100)
        ),
        Cell(
            "poor draft, RTT 10 ms, texts of 32 tokens",
            one(0.3, network_s=0.01, bonus_match=0.2, token_count=32, contention=1.3),
        ),
        Cell("silent", one(0.7, draft_factor=None)),
        Cell("100 times slower from the second minute on", one(0.7, **later(60, draft_factor=100.0)), 62, 80),
        Cell("silent from 10 s on", one(0.7, **later(10, draft_factor=None)), 12, 30),
        Cell("always wrong from 10 s on", one(0.7, **later(10, acceptance_factor=0.0)), 12, 30),
        Cell("gains on its own, loses by shared cores", one(0.5, network_s=0.03, contention=1.6)),
        *(Cell(f"{count} streams, poor draft on the target's cores", world, 2, 30) for count, world in crowds.items()),
        Cell("useless text beside three perfect ones", mixed, 2, 15, streams=(0,), is_beside=True),
        Cell("perfect texts beside a useless one", mixed, 2, 15, streams=(1, 2, 3)),
        Cell("1 stream, then 32, steep rows", many(32, 0.6, begins_s=jump, slope=0.25), 12, 30),
        Cell("32 streams, steep rows", many(32, 0.6, slope=0.25)),
        Cell("32 streams, rows steep from 6 s on", many(32, 0.7, slope=0.002, **steepens), 8),
        Cell("32 streams, flat rows", many(32, 0.7, slope=0.002), 2, 6),
        Cell("experts, acceptance 0.4", one(0.4, target_step_s=_expert_step_s)),
        *(Cell(f"poor draft, RTT {ms} ms", world) for ms, world in poor.items()),
        Cell("head, always wrong", headed(1, 0.0)),
        Cell("head as slow as its target", headed(1, 0.5, share=1.0)),
        Cell("8 streams, poor head, steep rows", headed(8, 0.2, slope=0.1)),
        Cell("head, always wrong from 10 s on", headed(1, 0.7, **later(10, acceptance_factor=0.0)), 12, 30),
        *(Cell(f"acceptance 0.4, RTT 0.5, then {ms} ms", world, 12) for ms, world in moved.items()),
    ]


def paying_cells() -> list[Cell]:
    """Where speculation pays: acceptance by round trip, steep rows, and drafts that are slower or become better."""
    cell, at = partial(Cell, pays=True), partial(one, 0.7)
    better, faster = later(20, acceptance_factor=1.0), later(20, draft_factor=1.0)
    grid = [(acceptance, ms) for acceptance in (0.5, 0.7, 0.85) for ms in (0, 3, 7, 30, 100)]
    wrong = {ms: at(network_s=ms / 1e3, acceptance_factor=0.0, **better) for ms in (3, 10)}
    slow = {ms: at(network_s=ms / 1e3, draft_factor=100.0, **faster) for ms in (3, 10)}
    moves = [(first, then, later(10, network_s=then / 1e3)) for first, then in ((0.5, 9), (0.5, 30), (30, 0.5))]
    experts = {of: many(*of, target_step_s=_expert_step_s) for of in ((1, 0.7), (1, 0.85), (8, 0.7))}
    return [
        *(cell(f"acceptance {share}, RTT {ms} ms", one(share, network_s=ms / 1e3)) for share, ms in grid),
        cell("acceptance 0.7, RTT 3 ms, draft 4 ms", at(draft_s=0.004)),
        *(cell(f"always wrong for 20 s, then 0.7, RTT {ms} ms", world, 60, 90) for ms, world in wrong.items()),
        *(cell(f"100 times slower for 20 s, then 0.7, RTT {ms} ms", world, 30, 60) for ms, world in slow.items()),
        *(cell(f"acceptance 0.7, RTT {a}, then {b} ms", at(network_s=a / 1e3, **own), 12) for a, b, own in moves),
        *(cell(f"{count} streams on experts, acceptance {of}", world, 2, 8) for (count, of), world in experts.items()),
        cell("8 streams, acceptance 0.7", many(8, 0.7), 2, 8),
        *(cell(f"head, acceptance {share}", headed(1, share)) for share in (0.5, 0.7, 0.85)),
        *(cell(f"head, acceptance 0.7, {share} of a step", headed(1, 0.7, share=share)) for share in (0.03, 0.25)),
        cell("8 streams, head, acceptance 0.7", headed(8, 0.7), 2, 8),
        *(
            cell(f"acceptance 0.7, RTT {ms} ms, texts of 32 tokens", at(network_s=ms / 1e3, token_count=32))
            for ms in (0, 7)
        ),
    ]


def burst_cells(bursts_s: float = BURSTS_S) -> list[Cell]:
    """A minute after odd requests have ended; some texts have no end."""
    worlds = {
        "near": one(0.7, network_s=0.0005),
        "far": one(0.7, token_count=math.inf, network_s=0.02),
        "on its cores": one(0.7, token_count=math.inf, network_s=0.001, draft_s=0.003, contention=1.25),
        "poor, on its cores": one(0.6, network_s=0.001, draft_s=0.004, slope=0.05, contention=1.4),
        "2 streams, on its cores": many(2, 0.7, network_s=0.001, draft_s=0.003, contention=1.25),
    }
    times = BACK_S, BACK_S + COUNTED_S, True, (), False, bursts_s
    return [Cell(f"after odd requests, {name}", world, *times) for name, world in worlds.items()]


def first_cells() -> list[Cell]:
    """The first text of a service whose target has a head, of no use or good, by the share of a step of its pass."""
    grid = [(acceptance, share) for acceptance in (0.0, 0.1, 0.5, 0.7) for share in (0.1, 0.14)]
    return [
        Cell(
            f"first text, head, acceptance {of}, {share} of a step",
            headed(1, of, share=share),
            pays=of > share,
            is_first=True,
        )
        for of, share in grid
    ]


CELLS = {cell.name: cell for cell in [*failing_cells(), *paying_cells(), *burst_cells(), *first_cells()]}


def mean(cell: Cell, service_of: Callable[[], FixedService], seeds: Sequence[int]) -> float:
    """Tokens per second of a cell over some seeds."""
    return sum(cell.rate(service_of(), seed) for seed in seeds) / len(seeds)


def auto_rate(cell: Cell, seeds: Sequence[int]) -> float:
    """Tokens per second under the coordinator's policy."""
    return mean(cell, lambda: FleetService(cell.world), seeds)


def off_rate(cell: Cell, seeds: Sequence[int]) -> float:
    """Tokens per second of plain decoding, of the streams that count if others are beside them."""
    plain = cell.streams if cell.is_beside else range(len(cell.world.texts))
    return mean(without_bursts(cell), lambda: FleetService(cell.world, plain=plain), seeds)


def fixed_rate(cell: Cell, plan: Plan, seeds: Sequence[int]) -> float:
    """Tokens per second of a fixed plan, which odd requests teach nothing."""
    return mean(without_bursts(cell), lambda: FixedService(plan), seeds)


def best_fixed_plan(cell: Cell) -> Plan:
    """Returns the plan with the highest rate, on seeds that no turn has."""
    seeds = range(OTHER_SEED, OTHER_SEED + len(cell.seeds(1)))
    return best_plan(lambda plan: fixed_rate(cell, plan, seeds), cell.world.head_pass_s is not None)[1]


def without_bursts(cell: Cell) -> Cell:
    """Returns the cell without odd requests before its own."""
    return replace(cell, bursts_s=0.0, from_s=2.0, to_s=20.0) if cell.bursts_s else cell


def share(cell: Cell, turn_count: int) -> float:
    """Returns the policy's share of the rate that its bound is of."""
    seeds = range(cell.seeds(turn_count).stop)
    own = auto_rate(cell, seeds)
    return own / (fixed_rate(cell, best_fixed_plan(cell), seeds) if cell.pays else off_rate(cell, seeds))
