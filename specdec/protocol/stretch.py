"""One stretch of the pipeline: from a commit that left what the draft was at, to the next such commit.

Until the first wrong guess shows, everything in a stretch is determined: when tokens arrive, what each verification
carries, when it ends. So one run of the timeline gives tokens, seconds and what is in hand afterwards for every index
N at which the first wrong guess may stand (cost_model.py says what is made of it). Times in seconds relative to the
commit that begins the stretch, as the coordinator sees it. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from specdec.protocol.pipeline import Heard, Landing, Pipeline

TOKENS_MAX = 64  # a stretch is cut there; at an acceptance of 0.9 one in 850 would be longer
SURVIVAL_MIN = 0.1  # and where only this share of stretches is longer: the rest goes on as a new one
LANDING_MIN = 0.005  # rarer ends on a branch are left out
CHAIN_SURVIVAL_MIN = 0.02  # a chain has few kinds of stretches, so longer ones are affordable


@dataclass(slots=True)
class Stretch:
    """The timeline of one stretch that begins with `start`.

    `late_s`: how long the draft is still busy with something else when it hears of the commit. `pace`: of the target's
    steps, which vary. Results: `tokens` and `seconds`, means over where it ends; `landings`, (probability, how) of
    those on a branch; `idle_share` and `busy_share`, the probability that the draft has nothing and is idle or not.
    """

    pipeline: Pipeline
    start: Landing
    late_s: float
    pace: float = 1.0
    tokens: float = 0.0
    seconds: float = 0.0
    idle_share: float = 0.0
    busy_share: float = 0.0
    landings: list[tuple[float, Landing]] = field(default_factory=list)
    _ends_s: list[float] = field(init=False)  # [k]: when the draft has token k
    _next: int = field(init=False)  # the token it will guess next
    _free_s: float = field(init=False)  # when its running step ends
    _steps: list[float] = field(init=False)  # seconds of its steps to come, the last one for all later ones, reversed
    _heard: list[Heard] = field(init=False)
    _heard_index: int = 0

    def __post_init__(self) -> None:
        pipeline, start = self.pipeline, self.start
        half_s = pipeline.half_network_s
        self._ends_s = [math.inf] * (TOKENS_MAX + len(pipeline.round_s) + pipeline.window + 2)
        self._free_s = half_s + self.late_s
        known_count = self._place_known() if start.evaluated else 0
        self._next = known_count + 1
        self._steps = [pipeline.draft_step_s]
        node_count = 0.0
        if known_count:
            level = max(start.level, (known_count - 1) * pipeline.chain_cost)
            node_count = pipeline.node_count(level, known_count)
        else:
            self._steps += [pipeline.second_step_s, pipeline.first_step_s]
            # Steps are counted from where it hears; the first two evaluate fewer nodes, and begin late.
            begun_s = self.late_s + pipeline.first_step_s + pipeline.second_step_s
            first_count = 1 + min(pipeline.leaves, 1 + len(pipeline.branches))
            node_count = first_count - begun_s * pipeline.leaves / pipeline.draft_step_s
        self._heard = [Heard(half_s if known_count else min(half_s, self._free_s), 0, node_count)]

    def _place_known(self) -> int:
        """Puts the tokens the draft has already, or is at, on the timeline; returns how many."""
        start, ends_s = self.start, self._ends_s
        half_s, step_s = self.pipeline.half_network_s, self.pipeline.draft_step_s
        first_s = half_s - (start.steps - 1) * step_s
        if start.is_sparse:
            held_count, known_count = round(start.in_hand), round(start.evaluated)
            first_s = max(first_s, -half_s)
            spacing_s = (half_s - first_s) / max(1, known_count - held_count)
            for index in range(known_count):
                late = index + 0.5 - held_count
                ends_s[index + 1] = first_s + late * spacing_s if late > 0 else -half_s
            return known_count
        known_count = min(self.pipeline.window, math.ceil(start.evaluated))
        for index in range(known_count):
            ends_s[index + 1] = first_s + index * step_s
        if start.evaluated > start.steps - 0.5:  # the running step is at these tokens
            self._free_s = max(half_s, ends_s[known_count])
        return known_count

    def run(self) -> None:
        """Round by round, until a longer stretch would be too rare to matter."""
        pipeline = self.pipeline
        committed, now_s, survival = 0, 0.0, 1.0
        survival_min = SURVIVAL_MIN if pipeline.branches else CHAIN_SURVIVAL_MIN
        while survival > survival_min and committed < TOKENS_MAX:
            offered, sent_s = self._offer(committed, now_s)
            now_s = sent_s + self.pace * pipeline.round_s[offered]
            hears_s = now_s + pipeline.half_network_s
            self._draft_until(hears_s)
            survival = self._miss(survival, committed, offered, now_s)
            committed += offered + 1
            self._hear(hears_s, committed)
        self.tokens += survival * committed
        self.seconds += survival * now_s
        self._go_on(survival, committed, now_s)

    def _offer(self, committed: int, now_s: float) -> tuple[int, float]:
        """How many tokens the next verification carries, and when it is sent."""
        pipeline = self.pipeline
        self._draft_until(now_s)
        offered = self._in_hand(committed, now_s)
        if offered >= pipeline.wait_length:
            return offered, now_s
        limit_s = now_s + pipeline.wait_s
        self._draft_until(limit_s)
        arrival_s = self._ends_s[committed + pipeline.wait_length] + pipeline.half_network_s
        if arrival_s <= limit_s:
            return max(pipeline.wait_length, self._in_hand(committed, arrival_s)), arrival_s
        return self._in_hand(committed, limit_s), limit_s

    def _in_hand(self, committed: int, now_s: float) -> int:
        """Tokens at the coordinator below `committed`, as many as a verification may carry."""
        ends_s, latest_s = self._ends_s, now_s - self.pipeline.half_network_s
        count, length_max = 0, len(self.pipeline.round_s) - 1
        while count < length_max and ends_s[committed + count + 1] <= latest_s:
            count += 1
        return count

    def _draft_until(self, until_s: float) -> None:
        """The draft begins every chain step it can before `until_s`."""
        steps = self._steps
        begin_s = self._next_step()
        while begin_s < until_s:
            self._free_s = self._ends_s[self._next] = begin_s + (steps.pop() if len(steps) > 1 else steps[0])
            self._next += 1
            begin_s = self._next_step()

    def _next_step(self) -> float:
        """When the draft can begin the step that gives its next token; inf while its window ends before that.

        A token it has heard of it need not guess. In a tree the step also waits until growth has come to its cost.
        """
        pipeline, heard = self.pipeline, self._heard
        begin_s = max(self._free_s, heard[self._heard_index].at_s)
        while True:
            while self._heard_index + 1 < len(heard) and heard[self._heard_index + 1].at_s <= begin_s:
                self._heard_index += 1
            heard_s, known, node_count = heard[self._heard_index]
            self._next = max(self._next, known + 1)
            depth = self._next - known
            earliest_s = begin_s if depth <= pipeline.window else math.inf
            if depth > 2 and pipeline.branches and earliest_s < math.inf:
                missing = pipeline.node_counts((depth - 1) * pipeline.chain_cost) - node_count
                earliest_s = max(begin_s, heard_s + missing * pipeline.draft_step_s / pipeline.leaves)
            if self._heard_index + 1 == len(heard) or earliest_s <= heard[self._heard_index + 1].at_s:
                return earliest_s
            begin_s = heard[self._heard_index + 1].at_s

    def _hear(self, hears_s: float, committed: int) -> None:
        """The draft will hear of a commit: nodes that are not below it count no more."""
        if not self.pipeline.branches:
            self._heard.append(Heard(hears_s, committed, 0.0))
            return
        level, known, depth = self._level(hears_s)
        depth -= committed - known
        cost = level - (committed - known) * self.pipeline.chain_cost
        self._heard.append(Heard(hears_s, committed, self.pipeline.node_count(cost, depth) if depth > 0 else 0.0))

    def _level(self, now_s: float) -> tuple[float, int, int]:
        """How costly a node growth has come to below the tokens the draft knows by then; those; the chain's depth."""
        heard, ends_s = self._heard, self._ends_s
        index = len(heard) - 1
        while index and heard[index].at_s > now_s:
            index -= 1
        heard_s, known, node_count = heard[index]
        if now_s < heard_s:  # before it knows of the stretch: evenly from the first token there on
            share = (now_s - ends_s[1]) / (heard_s - ends_s[1]) if ends_s[1] < now_s else 0.0
            return (self.start.level * share if share else -1.0), 0, 0
        last = self._next - 1
        while last > known and ends_s[last] > now_s:
            last -= 1
        pipeline = self.pipeline
        # A step's nodes are there when it ends: on the mean half a step's are not yet.
        node_count += ((now_s - heard_s) / pipeline.draft_step_s - 0.5) * pipeline.leaves
        return pipeline.level(node_count, last - known), known, last - known

    def _miss(self, survival: float, committed: int, offered: int, now_s: float) -> float:
        """The ends of the stretch in the round that ends at `now_s`. Returns the share of stretches that go on."""
        pipeline = self.pipeline
        branches = _Branches(self, now_s) if pipeline.branches else None
        for place in range(offered + 1):
            index = committed + place + 1
            if self._ends_s[index] == math.inf:
                continue  # the draft hears of this token before it would have guessed: nothing can be wrong
            passes = pipeline.acceptance[place]
            if place == offered and pipeline.bonus_match is not None:
                passes = pipeline.bonus_match
            missed = survival * (1 - passes)
            survival *= passes
            self.tokens += missed * index
            self.seconds += missed * now_s
            if branches is not None:
                self.busy_share += branches.land(index, missed)
            elif self._free_s > now_s + pipeline.half_network_s:
                self.busy_share += missed
            else:
                self.idle_share += missed
        return survival

    def _go_on(self, probability: float, committed: int, now_s: float) -> None:
        """Nothing was wrong so far: the next stretch begins with what is in hand and under way."""
        pipeline = self.pipeline
        begun = self._next - 1 - committed
        if begun <= 0:
            self.busy_share += probability
            return
        latest_s = now_s - pipeline.half_network_s
        in_hand = sum(end_s <= latest_s for end_s in self._ends_s[committed + 1 : self._next])
        left = (self._free_s - now_s - pipeline.half_network_s) / pipeline.draft_step_s
        evaluated = begun - max(0.0, left)
        level, known, _ = self._level(now_s + pipeline.half_network_s)
        level -= (committed - known) * pipeline.chain_cost
        self.landings.append((probability, Landing(in_hand, evaluated, begun - left, level)))


class _Branches:
    """What a round's end at `now_s` finds of branches: how costly nodes growth had come to, and how deep the window let
    it go, half a round trip before, which is in hand, and half a round trip after, when the draft hears of it. Costs
    and depths are counted from where the stretch begins."""

    def __init__(self, stretch: Stretch, now_s: float) -> None:
        pipeline = self._pipeline = stretch.pipeline
        self._stretch = stretch
        self._sent_s, self._hears_s = now_s - pipeline.half_network_s, now_s + pipeline.half_network_s
        level, known, _ = stretch._level(self._sent_s)
        self._level_sent = level + known * pipeline.chain_cost
        self._depth_sent = pipeline.window + (known or -stretch.start.ahead)
        level, self._known, _ = stretch._level(self._hears_s)
        self._level = level + self._known * pipeline.chain_cost

    def land(self, index: int, missed: float) -> float:
        """Adds where a wrong guess at `index` leads, with probability `missed`; returns the share left with nothing.

        A branch beside the wrong guess is evaluated from the step after on, as deep as time, level and window let it.
        """
        pipeline, stretch = self._pipeline, self._stretch
        since_s, chain_cost, left = stretch._ends_s[index], pipeline.chain_cost, missed
        steps = (self._hears_s - since_s) / pipeline.draft_step_s
        deepest = min(steps, pipeline.window + self._known - index)
        deepest_sent = min((self._sent_s - since_s) / pipeline.draft_step_s - 0.5, self._depth_sent - index)
        ahead = index - self._known
        for cost, share in pipeline.branches:
            cost += (index - 1) * chain_cost
            evaluated = (self._level - cost) / chain_cost + 1
            in_hand = (self._level_sent - cost) / chain_cost + 0.5
            is_sparse = evaluated < deepest or in_hand < deepest_sent
            evaluated = evaluated if evaluated < deepest else deepest
            if missed * share < LANDING_MIN:
                left -= missed * share
            elif evaluated > 0:
                in_hand = max(0.0, in_hand if in_hand < deepest_sent else deepest_sent)
                landing = Landing(in_hand, evaluated, steps, self._level - cost, ahead, is_sparse)
                stretch.landings.append((missed * share, landing))
                left -= missed * share
        return left
