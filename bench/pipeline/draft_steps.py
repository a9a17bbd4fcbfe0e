"""What one step of the draft takes as its service makes it: feeding, forward, guesses or rows, the tree.

The draft's own engine and handler in this process, without streams and messages, one session, nothing else running.
"""

from __future__ import annotations

import queue
import statistics
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from bench.deepened import load
from bench.engine.steps import BLOCK_SIZE
from bench.harness import DRAFT_MODEL, heldout_prompts
from bench.pipeline.ranks import rule_of
from draft_service.drafter import Drafter
from specdec.decoding.proposal import proposals
from specdec.engine.scheduler import Engine
from specdec.protocol.items import Close, Commit, Extend, Nodes, Open
from specdec.protocol.types import Description, Law
from specdec.replica.handler import ItemHandler

STREAM = "benchmark"
PROMPT_LENGTH, TEXT_LENGTH, WINDOW = 128, 256, 32
CACHE_POSITIONS = 8192
GROWTH_ITEMS = 12  # items of one tree before the next commit: as many steps as a deep tree is grown in
SILENCE_S = 0.05  # nothing likely enough is left to evaluate
TIMINGS = 15  # of each leaf count, as the draft tells them with every fourth step


def held_out_text(length: int) -> tuple[int, ...]:
    """So many tokens of held-out text."""
    tokenizer = Tokenizer.from_file(str(DRAFT_MODEL / "tokenizer.json"))
    return tuple(token_id for prompt in heldout_prompts().values() for token_id in tokenizer.encode(prompt).ids)[
        :length
    ]


class DraftAlone:
    """One draft in this process. Its thread runs where the thread that made it may."""

    def __init__(self, folder: Path, dtype: str) -> None:
        model = load(folder, dtype, has_stable_rows=False)
        self._vocabulary_size = model.description.vocabulary_size
        self._engine = Engine(model, 1 + CACHE_POSITIONS // BLOCK_SIZE, BLOCK_SIZE, proposals)
        own = model.description
        description = Description(
            model_digest=own.model_digest,
            tokenizer_fingerprint="",
            model_name=own.model_name,
            vocabulary_size=own.vocabulary_size,
            positions_max=own.positions_max,
            end_token_ids=(),
            dtype=own.dtype,
            device=own.device,
            libraries="",
        )
        drafter = Drafter(self._engine, description)
        self._handler = ItemHandler(drafter, 1)
        self._answers: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._engine.start(drafter.next_step)

    def stop(self) -> None:
        self._engine.stop()

    def _tell(self, *items: object) -> None:
        self._engine.post(lambda: self._handler.handle(STREAM, list(items), self._answers.put, 0.0))

    def steps_ms(self, rule: str, leaves: int, number: int) -> float:
        """Median milliseconds of a step that evaluates so many leaves for one session, named by its number."""
        text = held_out_text(TEXT_LENGTH)
        kind, temperature = rule_of(rule)
        law = Law(kind, number, PROMPT_LENGTH, temperature)
        times_ms: list[float] = []
        length = PROMPT_LENGTH
        self._tell(
            Open(number, 1, law, TEXT_LENGTH + WINDOW, self._vocabulary_size),
            Extend(number, 1, 0, text[: length - 1]),
            Commit(number, 1, length, text[length - 1 : length], WINDOW, leaves),
        )
        while len(times_ms) < TIMINGS and length < TEXT_LENGTH:
            times_ms += self._grown(number, leaves)
            length += 1
            self._tell(Commit(number, 1, length, text[length - 1 : length], WINDOW, leaves))
        self._tell(Close(number, 1))
        return statistics.median(times_ms)

    def _grown(self, number: int, leaves: int) -> list[float]:
        """Milliseconds the draft told of a session's steps of so many leaves, until its tree has grown a while."""
        times_ms = []
        for _ in range(GROWTH_ITEMS):
            try:
                answer = self._answers.get(timeout=SILENCE_S)
            except queue.Empty:
                break
            assert isinstance(answer, Nodes), answer
            if (answer.session, answer.step_rows) == (number, leaves) and answer.step_us:
                times_ms.append(answer.step_us / 1e3)
        return times_ms


def draft_steps_ms(
    folder: Path, dtype: str, rules: Sequence[str], leaf_counts: Sequence[int]
) -> dict[str, dict[int, float]]:
    """Milliseconds of a step by rule and by leaves."""
    draft = DraftAlone(folder, dtype)
    number = 0
    found: dict[str, dict[int, float]] = {}
    try:
        for rule in rules:
            found[rule] = {}
            for leaves in leaf_counts:
                number += 1
                found[rule][leaves] = draft.steps_ms(rule, leaves, number)
    finally:
        draft.stop()
    return found
