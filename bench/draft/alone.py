"""The draft service's step in this process and thread, without streams and messages: its own engine and handler.

Only `DraftAlone` knows the service's inside: items go into the handler, the service chooses a step, the engine runs it,
and answers come out. A step contains all of that except the handling of commits: choosing, feeding, forward pass,
guesses or draft distributions, the tree, the answers. Sessions read held-out texts, committed token by token.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from specdec.config import DraftSettings
from specdec.draft_service.service import DRAFT
from specdec.engine.loading.model import load_model
from specdec.engine.scheduling.scheduler import Engine
from specdec.errors import SpecdecError
from specdec.protocol.items import Close, Commit, DraftItem, Extend, Nodes, Open
from specdec.protocol.types import ResolvedSamplingParams
from specdec.replica.handler import ItemHandler
from specdec.replica.loading import describe
from specdec.telemetry.tracing import Tracing
from tests.support.harness import DRAFT_MODEL, heldout_prompts

STREAM = "benchmark"
WINDOW = 32
SPARE_TOKENS = 400  # tokens of a text beyond its context, committed during the measurement
NODES_A_COMMIT = {1: 12, 2: 12}  # by nodes per step
NODES_A_COMMIT_MAX = 16  # of wider trees: often hardly more nodes are likely enough to be evaluated
BLOCK_SIZE, CACHE_POSITIONS = 64, 1 << 16
FULL_SHARE = 0.75  # of a step's requested nodes: a tree with few likely nodes evaluates fewer
TRIES_PER_STEP = 8  # steps tried per full step needed, before the rest is given up


def texts_of(count: int, length: int) -> list[tuple[int, ...]]:
    """Returns `count` different pieces of held-out text of `length` tokens each. The text is real: below its own
    guesses a small model soon repeats itself with certainty, and its tree is a chain."""
    tokenizer = Tokenizer.from_file(str(DRAFT_MODEL / "tokenizer.json"))
    stock = list(itertools.chain.from_iterable(tokenizer.encode(prompt).ids for prompt in heldout_prompts().values()))
    shift = (len(stock) - length) // count
    return [tuple(stock[index * shift : index * shift + length]) for index in range(count)]


@dataclass(slots=True)
class Reader:
    """The coordinator's side of one session on a text, of which `length` tokens are committed; `fresh_count` nodes came
    since the last commit."""

    number: int
    text: Sequence[int]
    length: int
    nodes_per_step: int
    fresh_count: int = 0

    def opening(self, params: ResolvedSamplingParams, vocabulary_size: int) -> list[DraftItem]:
        """Opens the session with one node to grow, so that all is fed before anything is timed."""
        name, context = (self.number, 1), self.length
        own = replace(params, seed=self.number)  # no two sessions share their noise
        opened = Open(*name, own, len(self.text) + WINDOW, vocabulary_size)
        fed = Commit(*name, context, tuple(self.text[context - 1 : context]), window=1, wait_length=1)
        return [opened, Extend(*name, 0, tuple(self.text[: context - 1])), fed]

    def take(self, nodes: Nodes) -> int:
        """Counts an answer's evaluated nodes, each of which has one proposal child, and returns their number."""
        count = sum(node.proposal for node in nodes.nodes)
        self.fresh_count += count
        return count

    @property
    def is_grown(self) -> bool:
        """Whether the next token is due, before the draft runs out of likely nodes."""
        return self.fresh_count >= NODES_A_COMMIT.get(self.nodes_per_step, NODES_A_COMMIT_MAX)

    def commit(self) -> Commit:
        """The next token of the text; it tells of a wait: the nodes of every step come at once."""
        self.fresh_count = 0
        self.length += 1
        token_id = self.text[self.length - 1]
        return Commit(self.number, 1, self.length, (token_id,), WINDOW, self.nodes_per_step, wait_length=1)


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
