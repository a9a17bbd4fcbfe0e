"""The draft service's step in this process and thread, without streams and messages: its own engine and handler.

Only `DraftAlone` knows the service's inside: items go into the handler, the service chooses a step, the engine runs it,
and answers come out. A step contains all of that except the handling of commits: choosing, feeding, forward pass,
guesses or draft distributions, the tree, the answers.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.draft.reader import SPARE_TOKENS, Reader, texts_of
from specdec.config import DraftSettings
from specdec.draft_service.service import DRAFT
from specdec.engine.loading.model import load_model
from specdec.engine.scheduling.scheduler import Engine
from specdec.errors import SpecdecError
from specdec.protocol.items import Close, DraftItem, Nodes
from specdec.protocol.types import ResolvedSamplingParams
from specdec.replica.handler import ItemHandler
from specdec.replica.loading import describe
from specdec.telemetry.tracing import Tracing

STREAM = "benchmark"
BLOCK_SIZE, CACHE_POSITIONS = 64, 1 << 16
FULL_SHARE = 0.75  # of a step's requested nodes: a tree with few likely nodes evaluates fewer
TRIES_PER_STEP = 8  # steps tried per full step needed, before the rest is given up


class DraftAlone:
    """One draft, run by its caller's thread."""

    def __init__(self, folder: Path, dtype: str) -> None:
        model = load_model(str(folder), dtype, has_stable_rows=DRAFT.has_stable_rows)
        settings = DraftSettings(model=str(folder), port=0, threads=1, block_size=BLOCK_SIZE)
        self.dtype = model.description.dtype
        self.vocabulary_size = model.description.vocabulary_size
        self._engine = Engine(model, 1 + CACHE_POSITIONS // BLOCK_SIZE, BLOCK_SIZE, DRAFT.sampler)
        self._drafter = DRAFT.make_service(self._engine, describe(model, settings), settings, Tracing())
        self._handler = ItemHandler(self._drafter, settings.max_num_seqs)
        self._numbers = itertools.count(1)
        self._readers: dict[int, Reader] = {}
        self._answers: list[object] = []

    def step_ms(
        self, params: ResolvedSamplingParams, texts: Sequence[Sequence[int]], nodes_per_step: int, step_count: int
    ) -> float | None:
        """Mean milliseconds of a step of `nodes_per_step` nodes for each text, over about `step_count` full steps below
        the prompt of the sampling parameters; texts are longer by SPARE_TOKENS.

        None if the trees have no step that wide. Raises SpecdecError if the draft refuses an item."""
        context, node_count = params.prompt_length, len(texts) * nodes_per_step
        self._readers = {
            number: Reader(number, text, context, nodes_per_step) for text, number in zip(texts, self._numbers)
        }
        for reader in self._readers.values():
            self._tell(reader.opening(params, self.vocabulary_size))
        while self._step()[1] is not None:
            pass
        seconds = steps = 0.0
        for _ in range(TRIES_PER_STEP * step_count):
            step_s, evaluated = self._step()
            if evaluated is None:
                self._tell(reader.commit() for reader in self._readers.values())
            elif evaluated >= FULL_SHARE * node_count:
                seconds, steps = seconds + step_s, steps + evaluated / node_count
            self._tell(reader.commit() for reader in self._readers.values() if reader.is_grown)
            if steps >= step_count:
                break
        self._tell(Close(number, 1) for number in self._readers)
        return seconds / steps * 1e3 if steps else None

    def _tell(self, items: Iterable[DraftItem]) -> None:
        self._handler.handle(STREAM, list(items), self._answers.append)

    def _step(self) -> tuple[float, int | None]:
        """Runs one step of the draft; returns its seconds and its evaluated nodes, None for these without work."""
        began_s = time.perf_counter()
        turn = self._drafter.next_step()
        if turn.feeds:
            turn.done(self._engine.run(turn.feeds))
        took_s = time.perf_counter() - began_s
        evaluated = 0 if turn.feeds else None
        for answer in self._answers:
            if not isinstance(answer, Nodes) or evaluated is None:
                raise SpecdecError(f"the draft answered {answer}")
            evaluated += self._readers[answer.session].take(answer)
        self._answers.clear()
        return took_s, evaluated


def draft_steps_ms(
    folder: Path,
    dtype: str,
    all_params: Sequence[ResolvedSamplingParams],
    node_counts: Sequence[int],
    step_count: int = 24,
) -> list[dict[int, float]]:
    """Milliseconds of a step for one session by nodes, for each of `all_params`, after a text of its prompt's length;
    without node counts that no step reached."""
    draft = DraftAlone(folder, dtype)
    found = []
    for params in all_params:
        texts = texts_of(1, params.prompt_length + SPARE_TOKENS)
        steps = (
            (nodes_per_step, draft.step_ms(params, texts, nodes_per_step, step_count)) for nodes_per_step in node_counts
        )
        found.append({nodes_per_step: step_ms for nodes_per_step, step_ms in steps if step_ms is not None})
    return found
