"""`python -m bench.policy_bursts`: how long odd requests hold the policy back after they have ended.

A simulated coordinator (bench/policy_world.py) serves bursts of requests that are cancelled, whose text has one token,
whose tokens slow every step, that the draft refuses, whose draft tokens are always wrong or always right, that come by
the dozen or with long prompts, while target, draft and network have seconds of trouble. Then come ordinary requests
alone, and the time counts until their rate is near that of the best fixed plan.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from rich.console import Console
from rich.table import Table as Printed

from bench.bars import add_check_flag, conclude, worst_of
from bench.event_simulation import Stream
from bench.policy_cells import AutoService, Cell, many, one, run
from bench.policy_world import OnePlan, Session, Simulated, World
from specdec.protocol.plan import OFF_PLAN

WORLDS = {
    "near": one(0.7, network_s=0.0005),
    "on its cores": replace(one(0.7, network_s=0.001, draft_s=0.003), contention=1.25),
    "poor, on its cores": replace(one(0.6, network_s=0.001, draft_s=0.004, slope=0.05), contention=1.4),
    "2 streams, on its cores": replace(many(2, 0.7, (0.0, 0.0), network_s=0.001, draft_s=0.003), contention=1.25),
    "far": one(0.7, network_s=0.02),
}
KINDS = (
    *("cancels", "one token", "penalties", "refused", "wrong", "right", "flood", "prompts"),
    *("stalls", "slow draft", "slow network", "nothing"),
)
PHASE_S = 2.0, 12.0  # least and most seconds of two kinds together
COUNTS = (1, 2, 4, 8, 16)  # most requests at a time
FLOOD_COUNT = 32
ROW_S = (0.005, 0.02, 0.1)  # by which a row of a request with penalties slows its step
NEAR, WINDOW_S, STRIDE_S = 0.93, 20.0, 2.0  # share of the best fixed plan, over this time, from each of these steps on
MOST_S = 60.0  # bar


@dataclass(frozen=True, slots=True)
class Odd:
    """A request of a burst: acceptance and tokens of its text, seconds that each of its rows adds to a step, rows of
    its prompt, and whether the draft refuses it."""

    acceptance: float = 0.7
    tokens: int = 400
    row_s: float = 0.0
    prompt_rows: int = 4
    is_refused: bool = False


class Bursts(Simulated):
    """A run whose ordinary streams begin when the bursts end, at `bursts_s`."""

    def __init__(self, world: World, bursts_s: float, seed: int, kinds: tuple[str, ...] = KINDS) -> None:
        self.draft_factor = 1.0
        world = replace(world, begins_s=(bursts_s,) * len(world.texts), draft_factor=lambda now_s: self.draft_factor)
        service = AutoService(world)
        super().__init__(world, service, seed)
        self.bursts_s = bursts_s
        self._kinds, self._random, self._network_s = kinds, random.Random(seed), world.scenario.network_s
        self._odd: dict[Stream, Odd] = {}  # those that run
        self._reads: set[Stream] = set()  # those whose prompt was not read yet
        self._stall_s = 0.0
        self._after(0.0, self._phase)

    def share(self, best: float, from_s: float, seconds: float = WINDOW_S) -> float:
        """The rate of the ordinary streams from some seconds after the bursts on, as a share of `best`."""
        from_s += self.bursts_s
        return sum(self.rate(index, from_s, from_s + seconds) for index in range(len(self.world.texts))) / best

    def end(self, stream: Stream) -> None:
        """Ends a request of a burst in whatever state it is."""
        del self._odd[stream]
        if stream in self._running:
            self._running.remove(stream)
        self.verified = [entry for entry in self.verified if entry[0] is not stream]
        stream.waiting = False

    def _phase(self) -> None:
        """Begins some seconds of two kinds of trouble, or ends the bursts."""
        rng, left_s = self._random, self.bursts_s - self.now_s
        for stream in [own for own in self._odd if left_s <= 0 or rng.random() < 0.8]:
            self.end(stream)
        self.draft_factor, self._stall_s = 1.0, 0.0
        self._change({"network_s": self._network_s})
        if left_s <= 0:
            return
        kinds = {rng.choice(self._kinds), rng.choice(self._kinds)}
        if "slow draft" in kinds:
            self.draft_factor = 10 ** rng.uniform(1, 2.7)
        if "slow network" in kinds:
            self._change({"network_s": 10 ** rng.uniform(-1.5, 0.3)})
        count = FLOOD_COUNT if "flood" in kinds else 0 if "nothing" in kinds else rng.choice(COUNTS)
        end_s = self.now_s + min(left_s, rng.uniform(*PHASE_S))
        self._go_on(kinds, count, rng.choice(ROW_S) if "penalties" in kinds else 0.0, end_s)

    def _go_on(self, kinds: set[str], count: int, row_s: float, end_s: float) -> None:
        """Begins a request of a phase if there are fewer than `count`, and may end one; then waits for the next."""
        rng = self._random
        if self.now_s >= end_s:
            self._phase()
            return
        if "stalls" in kinds and rng.random() < 0.05:
            self._stall_s = 10 ** rng.uniform(-0.5, 0.7)
        if "cancels" in kinds and self._odd and rng.random() < 0.5:
            self.end(rng.choice([*self._odd]))
        if len(self._odd) < count:
            acceptance = 0.0 if "wrong" in kinds else 1.0 if "right" in kinds else rng.choice((0.0, 0.3, 0.7))
            tokens = 1 if "one token" in kinds else int(10 ** rng.uniform(0.3, 2.7))
            prompt_rows = int(10 ** rng.uniform(1, 2.4)) if "prompts" in kinds else 4
            self._add(Odd(acceptance, tokens, row_s, prompt_rows, "refused" in kinds))
        self._after(rng.uniform(0.005, 0.3), partial(self._go_on, kinds, count, row_s, end_s))

    def _add(self, odd: Odd) -> None:
        stream = Stream(OFF_PLAN, (odd.acceptance,))
        session = Session(OnePlan(OFF_PLAN), 0, is_refused=odd.is_refused)
        self._index[id(stream)] = len(self.streams)
        self.streams.append(stream)
        self.sessions.append(session)
        self.texts.append(stream.acceptance)
        self._odd[stream] = odd
        self._reads.add(stream)
        self._begin(stream)
        session.text_end = odd.tokens

    def _has_ended(self, stream: Stream) -> bool:
        return self._index[id(stream)] >= len(self.world.texts) and stream not in self._odd

    def _queue(self, stream: Stream, offered_count: int) -> None:
        if not self._has_ended(stream):
            super()._queue(stream, offered_count)

    def _load(self, batch: list[tuple[Stream, int]]) -> tuple[int, float]:
        more_rows, more_s, self._stall_s = 0, self._stall_s, 0.0
        for stream, offered_count in batch:
            if (odd := self._odd.get(stream)) is not None:
                more_rows += odd.prompt_rows - 1 if stream in self._reads else 0
                more_s += odd.row_s * (offered_count + 1)
                self._reads.discard(stream)
        return more_rows, more_s

    def _close_round(self, stream: Stream, offered: int, ranks: list[int], step: tuple[int, int, int, float]) -> None:
        if self._has_ended(stream):
            return
        if stream in self._odd and stream.committed_count + len(ranks) >= self._session(stream).text_end:
            self.end(stream)  # its last round reaches no policy
            return
        super()._close_round(stream, offered, ranks, step)


def held_back_s(world: World, best: float, bursts_s: float, seed: int, kinds: tuple[str, ...] = KINDS) -> float:
    """Returns the seconds from the end of the bursts until the rate of the ordinary streams is NEAR `best`; infinite if
    it does not come near in three times MOST_S."""
    simulated, from_s = Bursts(world, bursts_s, seed, kinds), 0.0
    while from_s <= 3 * MOST_S:
        simulated.run_until(bursts_s + from_s + WINDOW_S)
        if simulated.share(best, from_s) >= NEAR:
            return from_s
        from_s += STRIDE_S
    return math.inf


def best_of(name: str) -> float:
    """Tokens per second of the best fixed plan in a world without bursts."""
    streams = tuple(range(len(WORLDS[name].texts)))
    best = run(Cell(name, WORLDS[name], 2, 15, streams, pays=True), 2).best
    assert best is not None, "it was asked for"
    return best


def held_back_in(bursts_s: float, job: tuple[str, float, int]) -> float:
    """`held_back_s` of a world by name, its best rate and a seed; every other seed has texts without end."""
    name, best, seed = job
    tokens = 400 if seed % 2 else 1_000_000
    return held_back_s(replace(WORLDS[name], text_tokens=tokens), best, bursts_s, seed)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.policy_bursts", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10, help="runs of each world (10)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--bursts-s", type=float, default=1800.0, help="seconds of bursts (1800)")
    parser.add_argument("--only", default="", help="worlds whose names hold this")
    add_check_flag(parser)
    asked = parser.parse_args()
    names, seeds = [name for name in WORLDS if asked.only in name], range(asked.first, asked.first + asked.seeds)
    table = Printed(title="seconds until ordinary requests have the rate of the best fixed plan")
    for title in ("world", "best, tokens/s", "median", "most", "seed of the most"):
        table.add_column(title, justify="left" if title == "world" else "right")
    most = {}
    with ProcessPoolExecutor() as pool:
        for name, best in zip(names, pool.map(best_of, names)):
            held = [*pool.map(partial(held_back_in, asked.bursts_s), [(name, best, seed) for seed in seeds])]
            most[name] = max(held)
            middle = sorted(held)[len(held) // 2]
            worst = str(seeds[held.index(most[name])])
            table.add_row(name, f"{best:.1f}", f"{middle:.0f}", f"{most[name]:.0f}", worst)
    console = Console()
    console.print(table)
    bar = worst_of("simulated: seconds held back after bursts", MOST_S, most, is_limit=True)
    return conclude([bar], console, asked.check)


if __name__ == "__main__":
    sys.exit(main())
