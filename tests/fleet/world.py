"""A fleet on discrete events: coordinators that route conversations to targets and drafts by the product's code.

Each turn of a conversation reaches a random coordinator. A text holds its session for a random time; then, after a
pause, the next turn follows. A tenth of the targets is lost at once, their texts move, and later they return with
empty caches. Nothing here decides where a text goes: `specdec.protocol.routing` and the retry budget do.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from specdec.coordinator.ejection import RetryBudget
from specdec.protocol.routing import BLOCK_SIZE, Keys, choose, choose_draft
from tests.fleet.replicas import DRAFT_PLACES, PLACES, Replica, Reports, View, step_s
from tests.fleet.traffic import TURNS_MEAN, Text, Traffic

HELD_S, PAUSE_S = 8.0, 5.0  # of a text, and until the next turn; means
SEND_S, REPORT_EVERY_S, REPORT_AGE_S, SAMPLE_EVERY_S = 0.01, 0.01, 0.02, 0.1
WAIT_S = 0.25  # of a moved text that three targets refused
WARM_S, AWAY_S = 20.0, 10.0  # until measurements begin; for which lost targets are away
NETWORK_S = (0.0002, 0.001, 0.003)  # round trips from coordinators to drafts, each as likely


@dataclass(frozen=True, slots=True)
class Size:
    """How many of each, the mean of texts a target, and for how many seconds before the loss and after it."""

    targets: int = 100
    drafts: int = 300
    coordinators: int = 20
    texts_mean: int = 40
    steady_s: float = 30.0
    after_s: float = 20.0

    @property
    def lost(self) -> int:
        """The targets that are lost at once."""
        return max(1, self.targets // 10)


@dataclass(slots=True)
class Measured:
    """What happened. Balances are texts of the fullest target over the mean, sampled; `moved`: texts that each
    survivor got at the loss; `refused_with_space`: texts refused while a target had a free place."""

    prompt_tokens: int = 0
    uncached_tokens: int = 0
    unseen_tokens: int = 0  # in no cache, were all caches one without a bound
    text_count: int = 0
    refused: int = 0
    refused_with_space: int = 0
    refusals: int = 0  # by targets, most of which another target took
    waited: int = 0  # waits of moved texts, which are tried again where new ones are refused
    steady: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    moved: dict[Replica, int] = field(default_factory=dict)
    draft_wait_s: list[float] = field(default_factory=list)
    random_draft_wait_s: list[float] = field(default_factory=list)
    draft_balance: list[float] = field(default_factory=list)


class Coordinator:
    """One coordinator: its keys, its view of the pools, its retry budget."""

    def __init__(self, world: World) -> None:
        self.keys, self.budget = Keys(), RetryBudget()
        self.targets = [View(one, index, world.target_reports) for index, one in enumerate(world.targets)]
        self.drafts = [
            View(one, index, world.draft_reports, world.rng.choice(NETWORK_S)) for index, one in enumerate(world.drafts)
        ]


@dataclass(slots=True, eq=False)
class Running:
    """A text under way, or on its way to a target. `refused_by`: those that refused it since it was opened or moved."""

    text: Text
    coordinator: Coordinator
    key: bytes
    draft: Replica
    is_moved: bool = False
    refused_by: list[Replica] = field(default_factory=list)


class World:
    """The fleet, the events to come, and what is measured. `is_keyed`: texts go by their keys, else to the less loaded
    of two random targets."""

    def __init__(self, size: Size, seed: int, is_keyed: bool) -> None:
        self.size, self.is_keyed = size, is_keyed
        self.rng, self.traffic = random.Random(seed), Traffic(random.Random(seed))
        self.targets = [Replica(f"10.0.0.{index}:50052", PLACES) for index in range(size.targets)]
        self.drafts = [Replica(f"10.1.0.{index}:50053", DRAFT_PLACES) for index in range(size.drafts)]
        self.target_reports, self.draft_reports = Reports(self.targets), Reports(self.drafts)
        self.coordinators = [Coordinator(self) for _ in range(size.coordinators)]
        self.measured = Measured()
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._event_count = 0
        self._on_the_way: deque[tuple[float, list[int], list[int]]] = deque()
        self._seen: set[bytes] = set()

    def run(self, progress: Callable[[float], None] = lambda share: None) -> Measured:
        """Runs to the end; `progress` is told the share that is done."""
        loss_s = WARM_S + self.size.steady_s
        end_s = loss_s + self.size.after_s
        rate = self.size.targets * self.size.texts_mean / HELD_S / TURNS_MEAN  # new conversations a second
        running_s, paused_s = TURNS_MEAN * HELD_S, (TURNS_MEAN - 1) * PAUSE_S  # of a conversation
        for _ in range(round(rate * (running_s + paused_s))):
            is_running = self.rng.random() < running_s / (running_s + paused_s)
            starts_s = self.rng.random() if is_running else self.rng.expovariate(1 / PAUSE_S)
            self._at(starts_s, lambda: self._begin(self.traffic.under_way()))
        self._every(lambda: self.rng.expovariate(rate), lambda: self._begin(self.traffic.first()))
        self._every(lambda: REPORT_EVERY_S, self._report)
        self._every(lambda: SAMPLE_EVERY_S, lambda: self._sample(loss_s))
        self._every(lambda: 1.0, lambda: progress(self.now_s / end_s))
        self._at(loss_s, self._lose)
        while self._events[0][0] < end_s:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        return self.measured

    def _at(self, time_s: float, event: Callable[[], None]) -> None:
        self._event_count += 1
        heapq.heappush(self._events, (time_s, self._event_count, event))

    def _every(self, interval_s: Callable[[], float], event: Callable[[], None]) -> None:
        def again() -> None:
            event()
            self._at(self.now_s + interval_s(), again)

        self._at(self.now_s + interval_s(), again)

    def _report(self) -> None:
        counts = [one.session_count for one in self.targets], [one.session_count for one in self.drafts]
        self._on_the_way.append((self.now_s + REPORT_AGE_S, *counts))
        while self._on_the_way[0][0] <= self.now_s:
            _, targets, drafts = self._on_the_way.popleft()
            self.target_reports.take(targets, self.targets)
            self.draft_reports.take(drafts, self.drafts)

    def _sample(self, loss_s: float) -> None:
        if self.now_s < WARM_S:
            return
        measured = self.measured
        balances = measured.steady if self.now_s < loss_s else measured.after
        balances.append(balance([one.session_count for one in self.targets if one.is_up]))
        measured.draft_balance.append(balance([one.session_count for one in self.drafts]))

    def _begin(self, text: Text) -> None:
        coordinator = self.rng.choice(self.coordinators)
        key = coordinator.keys.key(text.prompt, "") if self.is_keyed else b""
        running = Running(text, coordinator, key, self._draft_for(coordinator))
        coordinator.budget.opened(self.now_s)
        self._open(running)

    def _draft_for(self, coordinator: Coordinator) -> Replica:
        view = choose_draft(coordinator.drafts, View.wait_s, self.rng.randrange)
        if self.now_s >= WARM_S:
            other = self.rng.choice(coordinator.drafts)
            self.measured.draft_wait_s.append(view.network_s + step_s(view.replica.session_count + 1))
            self.measured.random_draft_wait_s.append(other.network_s + step_s(other.replica.session_count + 1))
        view.open()
        view.replica.session_count += 1
        return view.replica

    def _open(self, running: Running) -> None:
        views, tried = running.coordinator.targets, running.refused_by
        candidates = [view for view in views if view.replica.is_up and view.replica not in tried]
        view = choose(running.key, candidates, self.rng.randrange, self.target_reports.session_load)
        view.open()
        self._at(self.now_s + SEND_S, lambda: self._arrive(running, view))

    def _arrive(self, running: Running, view: View) -> None:
        target = view.replica
        if not target.is_up:
            self._open(running)
        elif target.session_count >= target.places:
            view.refuse()
            self._refused(running, target)
        else:
            target.session_count += 1
            target.running[running] = None
            self._count(running, target)
            target.cache(running.text.digests)
            self._at(self.now_s + self.rng.expovariate(1 / HELD_S), lambda: self._end(running, target))

    def _count(self, running: Running, target: Replica) -> None:
        text, measured = running.text, self.measured
        if running.is_moved:
            measured.moved[target] = measured.moved.get(target, 0) + 1
        elif self.now_s >= WARM_S:
            cached = target.cached_count(text.digests)
            unseen = sum(digest not in self._seen for digest in text.digests)
            rest = len(text.prompt) % BLOCK_SIZE
            measured.text_count += 1
            measured.prompt_tokens += len(text.prompt)
            measured.uncached_tokens += len(text.prompt) - cached * BLOCK_SIZE
            measured.unseen_tokens += unseen * BLOCK_SIZE + rest
        self._seen.update(text.digests)

    def _refused(self, running: Running, target: Replica) -> None:
        measured = self.measured
        measured.refusals += 1
        running.refused_by.append(target)
        if running.coordinator.budget.retry(len(running.refused_by), self.now_s):
            self._at(self.now_s + SEND_S, lambda: self._open(running))
        elif running.is_moved:
            measured.waited += 1
            running.refused_by = []
            self._at(self.now_s + WAIT_S, lambda: self._open(running))
        else:
            running.draft.session_count -= 1
            measured.refused += 1
            measured.refused_with_space += any(one.is_up and one.session_count < one.places for one in self.targets)

    def _end(self, running: Running, target: Replica) -> None:
        if running not in target.running:  # it moved, and ends elsewhere
            return
        del target.running[running]
        target.session_count -= 1
        running.draft.session_count -= 1
        text = running.text
        answered = text.answered_digests()
        target.cache(answered)
        self._seen.update(answered)
        if text.turns_left:
            pause_s = self.rng.expovariate(1 / PAUSE_S)
            self._at(self.now_s + pause_s, lambda: self._begin(self.traffic.following(text)))

    def _lose(self) -> None:
        lost = self.targets[: self.size.lost]
        texts = [running for target in lost for running in target.lose()]
        self.measured.moved = {target: 0 for target in self.targets if target.is_up}
        for running in texts:
            running.is_moved, running.refused_by = True, []
            self._open(running)
        self._at(self.now_s + AWAY_S, lambda: self._return(lost))

    def _return(self, lost: list[Replica]) -> None:
        for target in lost:
            target.is_up = True


def balance(counts: list[int]) -> float:
    """The largest over the mean."""
    return max(counts) * len(counts) / max(1, sum(counts))
