"""The target writes texts and its distributions along them: many at a time, on the engine that serves it.

A text is made of passages: given tokens, then tokens that the target writes. A chat text is the template's beginning,
a question the target makes up as the user, the template's middle, and its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from specdec.decoding.proposal import ProposalRequest, propose
from specdec.distill.features import RecordingModel
from specdec.distill.texts import LabelledTexts, label
from specdec.engine.cache.kv_cache import BlockTable
from specdec.engine.interface import CausalModel, ModelDescription
from specdec.engine.loading.devices import default_block_size, find_device, free_memory_bytes
from specdec.engine.readback import Readback
from specdec.engine.scheduling.feed import Feed
from specdec.engine.scheduling.scheduler import Engine
from specdec.errors import ConfigError, SpecdecError
from specdec.protocol.types import ResolvedSamplingParams, Rule

ROWS_MAX = 512  # of a step: its logits take vocabulary x 4 bytes each


@dataclass(frozen=True, slots=True)
class Passage:
    """Given tokens, then at most `max_tokens` of the target's at a temperature; an end token ends a passage."""

    given: tuple[int, ...]
    max_tokens: int
    temperature: float


@dataclass(frozen=True, slots=True)
class TextOrder:
    """The passages of one text, the position it is learned from, and the seed of its draws. `answered_from`: of an
    answer that is given. `encoder_length`: the first tokens of the first passage, which are an encoder's input."""

    passages: tuple[Passage, ...]
    learned_from: int
    seed: int
    answered_from: int | None = None
    encoder_length: int = 0

    @property
    def length_max(self) -> int:
        """The most tokens it can have."""
        return sum(len(passage.given) + passage.max_tokens for passage in self.passages)


@dataclass(eq=False)
class _Writing:
    """A text being written: the tokens so far, and the labels of those that were fed."""

    plan: TextOrder
    table: BlockTable
    tokens: list[int] = field(default_factory=list)
    fed_count: int = 0
    passage_index: int = -1
    written_count: int = 0  # in this passage
    answered_from: int = 0  # of this passage
    ids: list[Tensor] = field(default_factory=list)
    log_probs: list[Tensor] = field(default_factory=list)

    @property
    def passage(self) -> Passage:
        return self.plan.passages[self.passage_index]

    def begin_passage(self) -> bool:
        """Goes to the next passage; returns whether there is one."""
        self.passage_index, self.written_count = self.passage_index + 1, 0
        if self.passage_index == len(self.plan.passages):
            return False
        self.tokens += self.passage.given
        given_from = self.plan.answered_from
        self.answered_from = max(0, len(self.tokens) - 1) if given_from is None else given_from
        return True

    def add(self, token_id: int, end_token_ids: Sequence[int]) -> bool:
        """Takes the target's next token; returns whether the text goes on. The end token of a text is kept, that of a
        passage before is not: what follows has its own."""
        is_last = self.passage_index == len(self.plan.passages) - 1
        is_end = token_id in end_token_ids
        if not is_end or is_last:
            self.tokens.append(token_id)
        self.written_count += 1
        if is_end or self.written_count == self.passage.max_tokens:
            return self.begin_passage()
        return True


@dataclass(frozen=True, slots=True)
class _Row:
    """The sampler's input for one feed: the request for the token after its last row."""

    request: ProposalRequest


def check_lengths(lengths: Iterable[tuple[int, int]], text_tokens: int, target: ModelDescription) -> int:
    """Returns the most tokens of texts of these lengths, each with that of its encoder's input. Raises ConfigError if
    the target has fewer positions."""
    whole, inputs = zip(*lengths)
    longest, longest_input = max(whole), max(inputs)
    if longest_input and longest_input > target.encoder_positions_max:
        limit = f"the target's encoder has {target.encoder_positions_max} positions"
        raise ConfigError(f"the longest input has {longest_input} tokens; {limit}")
    if longest > target.positions_max:
        limit = f"the target has {target.positions_max} positions"
        raise ConfigError(f"the longest prompt with --text-tokens {text_tokens} has {longest}; {limit}")
    return int(longest)


Written = tuple[int, Tensor, Tensor]  # token, likeliest ids and log-probabilities of all rows


def _sample(
    payloads: Sequence[_Row], row_counts: Sequence[int], logits: Tensor, readback: Readback | None
) -> list[Written]:
    """Labels all rows, and draws the token after the last row of each feed."""
    ids, log_probs = label(logits)
    ends = torch.tensor(row_counts).cumsum(0) - 1
    drawn = propose([payload.request for payload in payloads], logits[ends])
    parts = zip(drawn, ids.cpu().split(list(row_counts)), log_probs.cpu().split(list(row_counts)))
    return [(proposal.token_id, its_ids, its_probs) for proposal, its_ids, its_probs in parts]


class TextWriter:
    """Writes texts with a model; at most `text_count` at a time, of at most `length_max` tokens, as far as half of the
    free memory has their caches. `features`: of the texts of the last `write`, of a `RecordingModel`."""

    def __init__(self, model: CausalModel, text_count: int, length_max: int, device: str = "cpu") -> None:
        self._model = model
        self.features: Tensor | None = None  # [tokens, layers * hidden] bfloat16
        self._end_token_ids = model.description.end_token_ids
        block_size = default_block_size(find_device(device))
        blocks_per_text = -(-length_max // block_size)
        text_bytes = blocks_per_text * block_size * model.cache_bytes_per_position
        self._text_count = max(1, min(text_count, free_memory_bytes(find_device(device)) // 2 // text_bytes))
        block_count = 1 + self._text_count * blocks_per_text  # one more: the zero block
        self._engine: Engine[_Row, Written] = Engine(model, block_count, block_size, _sample)

    def __enter__(self) -> TextWriter:
        self._engine.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.stop()

    def write(self, plans: Sequence[TextOrder], told: Callable[[int], None] = lambda count: None) -> LabelledTexts:
        """Returns the texts in the order of their plans; `told(n)` after each step of n written tokens.

        Raises SpecdecError if the model fails. A plan's text does not depend on the others, but for rounding.
        """
        waiting = iter(enumerate(plans))
        done: dict[int, _Writing] = {}
        running: dict[int, _Writing] = {}
        features: dict[int, Tensor] = {}
        while True:
            self._admit(waiting, running)
            if not running:
                order = sorted(done)
                self.features = torch.cat([features[index] for index in order]) if features else None
                return _joined([done[index] for index in order])
            chosen = self._chosen(running)
            report = self._engine.call(partial(self._engine.run, [feed for _, feed in chosen]))
            for (index, feed), outcome in zip(chosen, report.outcomes):
                if isinstance(outcome, SpecdecError) or outcome is None:
                    raise outcome or SpecdecError("a step of the target gave no token")
                own = running[index]
                own.fed_count += len(feed.token_ids)
                own.ids.append(outcome[1])
                own.log_probs.append(outcome[2])
                if own.fed_count == len(own.tokens) and not own.add(outcome[0], self._end_token_ids):
                    done[index] = running.pop(index)
                    if isinstance(self._model, RecordingModel):
                        features[index] = self._model.take(own.table.block_ids[0])
                    self._engine.call(partial(self._engine.cache.release, own.table))
            told(len(chosen))

    def _admit(self, waiting: Iterator[tuple[int, TextOrder]], running: dict[int, _Writing]) -> None:
        while len(running) < self._text_count and (following := next(waiting, None)) is not None:
            index, plan = following
            own_input = plan.passages[0].given[: plan.encoder_length]
            table = self._engine.call(partial(self._engine.cache.reserve, plan.length_max, own_input))
            running[index] = _Writing(plan, table)
            running[index].begin_passage()

    def _chosen(self, running: dict[int, _Writing]) -> list[tuple[int, Feed[_Row, Written]]]:
        """Returns a step: of every text its tokens not fed yet, as far as they fit; an encoder's input runs whole, with
        a token at least of what begins the output, and the first one also beyond the rows."""
        chosen: list[tuple[int, Feed[_Row, Written]]] = []
        left, has_input = ROWS_MAX, False
        for index, own in running.items():
            input_count = 0 if own.fed_count else own.plan.encoder_length
            if left <= 0 or (has_input and input_count >= left):
                break
            has_input |= input_count > 0
            token_ids = own.tokens[own.fed_count : own.fed_count + max(left, input_count + 1)]
            left -= len(token_ids)
            params = params_of(own.plan, own.passage)
            request = ProposalRequest(params, own.tokens[: own.fed_count + len(token_ids)], self._vocabulary_size)
            logit_count = len(token_ids) - input_count
            feed: Feed[_Row, Written] = Feed(own.table, own.fed_count, token_ids, logit_count, _Row(request))
            chosen.append((index, feed))
        return chosen

    @property
    def _vocabulary_size(self) -> int:
        return self._model.description.vocabulary_size


def params_of(plan: TextOrder, passage: Passage) -> ResolvedSamplingParams:
    """The sampling parameters that give a passage of a text."""
    length, temperature = plan.encoder_length, passage.temperature
    rule = Rule.COUPLED if temperature else Rule.GREEDY
    return ResolvedSamplingParams(rule, plan.seed, 1 + length, temperature=temperature, encoder_length=length)


def _joined(texts: Sequence[_Writing]) -> LabelledTexts:
    """Returns finished texts, without their last token: it was not fed."""
    starts = [own.plan.encoder_length for own in texts]
    read = [own.tokens[start : own.fed_count] for own, start in zip(texts, starts)]
    inputs = [own.tokens[:start] for own, start in zip(texts, starts) if start]
    learned_from = [own.plan.learned_from - start for own, start in zip(texts, starts)]
    answered_from = [own.answered_from - start for own, start in zip(texts, starts)]
    return LabelledTexts(
        token_ids=torch.tensor([token for own in read for token in own], dtype=torch.int32),
        likeliest_ids=torch.cat([part for own in texts for part in own.ids]),
        log_probs=torch.cat([part for own in texts for part in own.log_probs]),
        lengths=torch.tensor([len(own) for own in read], dtype=torch.int32),
        learned_from=torch.tensor(learned_from, dtype=torch.int32),
        answered_from=torch.tensor(answered_from, dtype=torch.int32),
        temperatures=torch.tensor([own.plan.passages[-1].temperature for own in texts], dtype=torch.float32),
        input_ids=torch.tensor([token for own in inputs for token in own], dtype=torch.int32),
        input_lengths=torch.tensor([len(own) for own in inputs], dtype=torch.int32),
    )
