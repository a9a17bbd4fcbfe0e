"""`python -m bench.engine`: plain decoding of many sequences by the engine alone, without services, and its sampler.

Sequences decode greedily, a token of each in a step. What a step takes beside the forward pass and the sampler is
preparing feeds and cache and delivering results. The sampler is timed for one verification, also with large
vocabularies. One thread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bench.bars import Bar, worst_of
from bench.engine.sampler import ALL_PARAMS, made_up_logits, request_of, sampler_ms
from bench.engine.steps import BLOCK_SIZE, load
from bench.results import Cell, Results, Table, shown
from bench.runner import Contender, Prepared, Values, main
from specdec.decoding.verification import VerificationRequest, verify
from specdec.engine.cache.kv_cache import BlockTable
from specdec.engine.interface import CausalModel
from specdec.engine.scheduling.feed import Feed
from specdec.engine.scheduling.runner import StepReport
from specdec.engine.scheduling.scheduler import Engine
from specdec.errors import SpecdecError
from specdec.folders import CHAT_MODEL
from specdec.protocol.types import ResolvedSamplingParams, Rule, SamplerOutput
from tests.support.deepened import write_deepened

DEEPENED, CHAT = "deepened target, bfloat16", "chat model, 4 bits"
COUNTS = (1, 8, 16, 32)  # sequences at once
VOCABULARIES, ROWS = (4096, 49152, 151936), (1, 5)
CONTEXT, TOKENS = 64, 48  # of a sequence: its prompt, and what it decodes in a turn
PARAMS = ResolvedSamplingParams(Rule.GREEDY, 0, CONTEXT, temperature=0)
PARTS = ("forward", "sampler", "outside")  # of a step


class Sequences:
    """An engine, run by its caller's thread, whose sequences decode TOKENS tokens each and end."""

    def __init__(self, model: CausalModel, count_max: int) -> None:
        generator = torch.Generator().manual_seed(0)
        size = (count_max, CONTEXT)
        self._prompts = torch.randint(1, model.description.vocabulary_size, size, generator=generator).tolist()
        self._capacity = CONTEXT + TOKENS + 1
        block_count = 1 + count_max * -(-self._capacity // BLOCK_SIZE)
        self.engine = Engine(model, block_count, BLOCK_SIZE, verify)
        self.texts: list[list[int]] = []  # of the last turn: prompt and decoded tokens

    def decode(self, count: int) -> Values:
        """Prompts first, which are not timed, then all side by side. Raises the engine's error of a feed."""
        texts = {self.engine.cache.reserve(self._capacity): list(prompt) for prompt in self._prompts[:count]}
        for table, text in texts.items():
            self._step({table: text})
        began_s = time.perf_counter()
        reports = [self._step(texts) for _ in range(TOKENS)]
        step_ms = (time.perf_counter() - began_s) / TOKENS * 1e3
        for table in texts:
            self.engine.cache.release(table)
        self.texts = list(texts.values())
        forward_ms = statistics.fmean(own.forward_s for own in reports) * 1e3
        own_ms = statistics.fmean(own.sampling_s for own in reports) * 1e3
        parts = dict(zip(PARTS, (forward_ms, own_ms, step_ms - forward_ms - own_ms)))
        return {"tokens_per_s": count * 1e3 / step_ms, "step": step_ms, **parts}

    def _step(self, texts: dict[BlockTable, list[int]]) -> StepReport[SamplerOutput]:
        feeds: list[Feed[VerificationRequest, SamplerOutput]] = [
            Feed(table, table.length, text[table.length :], 1, VerificationRequest(PARAMS, len(text) - CONTEXT, text))
            for table, text in texts.items()
        ]
        report = self.engine.run(feeds)
        for text, outcome in zip(texts.values(), report.outcomes, strict=True):
            if not isinstance(outcome, SamplerOutput):
                raise outcome or SpecdecError("a step without logits")
            text.append(outcome.recovered_token_ids[0])
        return report


def name_of(count: int) -> str:
    return f"{count} sequence{'s' * (count > 1)}"


class EngineAlone:
    """See the module."""

    name = "engine"
    about = "plain decoding of many sequences by the engine alone, one thread, and its sampler"
    turns, quick_turns, minutes = 9, 2, 6

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        pass

    def cells(self, asked: argparse.Namespace) -> list[Cell]:
        models, sizes = ((DEEPENED,), VOCABULARIES[:1]) if asked.quick else ((DEEPENED, CHAT), VOCABULARIES)
        decoding: list[Cell] = [{"model": model} for model in models]
        return decoding + [{"vocabulary": size, "rows": rows} for size in sizes for rows in ROWS]

    @contextmanager
    def prepared(self, asked: argparse.Namespace) -> Iterator[Prepared]:
        torch.set_num_threads(1)
        with TemporaryDirectory() as scratch:
            folders = {DEEPENED: str(write_deepened(Path(scratch))), CHAT: CHAT_MODEL}

            def contenders(cell: Cell, results: Results) -> dict[str, Contender]:
                if "model" in cell:
                    sequences = Sequences(load(folders[str(cell["model"])], "bfloat16"), max(COUNTS))
                    return {name_of(count): partial(self._decoded, sequences, count) for count in COUNTS}
                logits = made_up_logits(int(cell["rows"]), int(cell["vocabulary"]))
                requests = {rule: request_of(params, logits) for rule, params in ALL_PARAMS.items()}
                return {rule: partial(self._sampled, request, logits) for rule, request in requests.items()}

            yield contenders

    def _decoded(self, sequences: Sequences, count: int, turn: int) -> Values:
        return sequences.decode(count)

    def _sampled(self, request: VerificationRequest, logits: torch.Tensor, turn: int) -> Values:
        return {"ms": sampler_ms(request, logits)}

    def tables(self, results: Results) -> list[Table]:
        decoding = [cell for cell in results.cells() if "model" in cell]
        measures = ("tokens_per_s", "step", *PARTS)
        rows = [
            [f"{cell['model']}, {variant}", *(shown(results.median(cell, variant, own)) for own in measures)]
            for cell in decoding
            for variant in map(name_of, COUNTS)
        ]
        columns = ["", "tokens/s", "a step, ms", "its forward", "its sampler", "around both"]
        sampling = [cell for cell in results.cells() if "vocabulary" in cell]
        names = [f"{cell['vocabulary']:,} × {cell['rows']}" for cell in sampling]
        lines = [[rule, *(shown(results.median(cell, rule, "ms")) for cell in sampling)] for rule in ALL_PARAMS]
        return [
            Table("sequences", "plain greedy decoding by the engine alone, one thread", columns, rows),
            Table("sampler", "one verification by the sampler, ms, by vocabulary × rows", ["", *names], lines),
        ]

    def bars(self, results: Results) -> Sequence[Bar]:
        cells = [cell for cell in results.cells() if "model" in cell]
        found = {str(cell["model"]): results.ratio(cell, name_of(16), name_of(1), "tokens_per_s") for cell in cells}
        gains = {model: ratio.median for model, ratio in found.items() if ratio}
        return [worst_of("plain decoding by the engine alone, 16 sequences / 1", 5.0, gains, stretch=8.0)]


BENCHMARK = EngineAlone()

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
