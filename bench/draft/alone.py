"""The draft service's step in this process, without streams and messages: its own engine and its own handler.

`DraftAlone` is all that is known here of the service's inside: how an engine and a handler are made, and that items go
in and answers come out. A step takes from one moment its answers were handed over to the next, while the sessions are
never out of work: choosing, feeding, forward, guesses or rows, the tree, the answers.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.draft.reader import ROOM, Reader, texts_of
from draft_service.service import DRAFT
from specdec.config import DraftSettings
from specdec.engine.model import load_model
from specdec.engine.scheduler import Engine
from specdec.errors import SpecdecError
from specdec.protocol.items import Close, DraftAsk, Nodes
from specdec.protocol.types import Law
from specdec.replica.handler import ItemHandler
from specdec.replica.loading import describe
from specdec.telemetry.tracing import Tracing

STREAM = "benchmark"
BLOCK_SIZE, CACHE_POSITIONS = 64, 1 << 16
FULL_SHARE = 0.75  # of the nodes a step was asked for: where a tree has few likely places, it evaluates fewer
OPENING_S_MAX, STEPS_S_MAX, SILENCE_S = 60.0, 10.0, 0.03
POLL_S = 0.004  # answers are looked at together, seldom: who looks takes time from the thread that is measured


@dataclass(frozen=True, slots=True)
class Arrival:
    """One answer: when it was handed over, whose it is, and how many nodes were evaluated for it."""

    moment_s: float
    session: int
    node_count: int


def steps_in(arrivals: Iterable[Arrival | None], node_count: int) -> Iterator[tuple[float, float]]:
    """(seconds, steps) from the end of one step to the end of the next, of those that evaluated about `node_count`
    nodes or more, all sessions together; counted in steps of exactly so many.

    A step ends where a session would have a second answer, and at None, where the draft was out of work.
    """
    group: list[Arrival] = []
    ended_s: float | None = None
    for arrival in [*arrivals, None]:
        if arrival is not None and arrival.session not in {own.session for own in group}:
            group.append(arrival)
            continue
        total = sum(own.node_count for own in group)
        if group and ended_s is not None and total >= FULL_SHARE * node_count:
            yield group[-1].moment_s - ended_s, total / node_count
        ended_s = group[-1].moment_s if group and arrival is not None else None
        group = [] if arrival is None else [arrival]


class DraftAlone:
    """One draft in this process. Its thread runs where the thread that made it may."""

    def __init__(self, folder: Path, dtype: str) -> None:
        model = load_model(str(folder), dtype, has_stable_rows=DRAFT.has_stable_rows)
        settings = DraftSettings(model=str(folder), port=0, threads=1, block_size=BLOCK_SIZE)
        self.dtype = model.description.dtype
        self.vocabulary_size = model.description.vocabulary_size
        self._engine = Engine(model, 1 + CACHE_POSITIONS // BLOCK_SIZE, BLOCK_SIZE, DRAFT.evidence)
        service = DRAFT.make_service(self._engine, describe(model, settings), settings, Tracing())
        self._handler = ItemHandler(service, settings.max_num_seqs)
        self._answers: queue.SimpleQueue[tuple[float, object]] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        self._engine.start(service.next_step)

    def stop(self) -> None:
        """Ends its thread."""
        self._engine.stop()

    def _tell(self, items: Sequence[DraftAsk]) -> None:
        def reply(answer: object) -> None:
            self._answers.put((time.perf_counter(), answer))

        if items:
            self._engine.post(lambda: self._handler.handle(STREAM, list(items), reply, 0.0))

    def step_ms(self, law: Law, texts: Sequence[Sequence[int]], leaves: int, step_count: int) -> float:
        """Mean milliseconds of a step that evaluates so many leaves for each text, over about so many steps, below the
        prompt of the law; texts are longer by ROOM. SpecdecError where it never takes such a step."""
        context = law.prompt_length
        readers = {number: Reader(number, text, context, leaves) for text, number in zip(texts, self._numbers)}
        for reader in readers.values():
            self._tell(reader.opening(law, self.vocabulary_size))
        self._read(readers, OPENING_S_MAX, len(readers))
        arrivals: list[Arrival | None] = []
        found: list[tuple[float, float]] = []
        deadline_s = time.perf_counter() + STEPS_S_MAX
        while sum(count for _, count in found) < step_count and time.perf_counter() < deadline_s:
            self._tell([reader.commit() for reader in readers.values()])
            arrivals += self._grown(readers)
            found = list(steps_in(arrivals, len(readers) * leaves))
        self._tell([Close(number, 1) for number in readers])
        if not found:
            raise SpecdecError(f"no step of the draft evaluated {leaves} nodes for each of {len(texts)} sessions")
        return sum(seconds for seconds, _ in found) / sum(count for _, count in found) * 1e3

    def _grown(self, readers: dict[int, Reader]) -> list[Arrival | None]:
        """The answers until half of the sessions have grown enough; None at the end where nothing came any more."""
        found: list[Arrival | None] = []
        latest_s = time.perf_counter()
        while 2 * sum(reader.is_grown for reader in readers.values()) < len(readers):
            came = self._read(readers, POLL_S)
            found += came
            latest_s = came[-1].moment_s if came else latest_s
            if time.perf_counter() > latest_s + SILENCE_S:
                return [*found, None]
        return found

    def _read(self, readers: dict[int, Reader], seconds: float, count: int | None = None) -> list[Arrival]:
        """The answers of some time, or as soon as they are so many."""
        found: list[Arrival] = []
        deadline_s = time.perf_counter() + seconds
        if count is None:
            time.sleep(seconds)
        while count is None or len(found) < count:
            try:
                wait_s = 0.0 if count is None else max(0.0, deadline_s - time.perf_counter())
                moment_s, answer = self._answers.get(wait_s > 0, wait_s)
            except queue.Empty:
                break
            if not isinstance(answer, Nodes):
                raise SpecdecError(f"the draft answered {answer}")
            if (reader := readers.get(answer.session)) is not None:
                found.append(Arrival(moment_s, answer.session, reader.take(answer)))
        return found


def draft_steps_ms(
    folder: Path, dtype: str, laws: Sequence[Law], leaf_counts: Sequence[int], step_count: int = 24
) -> list[dict[int, float]]:
    """Milliseconds of a step for one session by leaves, of each law, after a text of its prompt's length."""
    draft = DraftAlone(folder, dtype)
    try:
        return [
            {n: draft.step_ms(law, texts_of(1, law.prompt_length + ROOM), n, step_count) for n in leaf_counts}
            for law in laws
        ]
    finally:
        draft.stop()
