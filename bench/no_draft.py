"""`python -m bench.no_draft`: proposers that need no draft, over plain decoding, on the chat model.

Prompts whose answers copy, greedy, and prose with a seed: greedy prose of so small a model ends in cycles, which are
easy to guess. A prediction is the answer itself with some tokens replaced, or that to another prompt.
"""

from __future__ import annotations

import argparse
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc

from bench.bars import Bar, never_slower, of_ratio
from bench.prompts import copying_prompts, prose_prompts
from bench.results import Cell, Ratio, Results, Table, shown
from bench.runner import Contender, Prepared, Values, main
from bench.texts import generate, pooled
from specdec.chat.template import ChatTemplate
from specdec.folders import CHAT_MODEL
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from tests.support.harness import running
from tests.support.unpacked import write_unpacked
from tests.support.variants import OFF, RULES_DEFAULT, Variant, request_of

COPYING, PROSE = "copying", "prose"
PROMPTS = {COPYING: copying_prompts(), PROSE: prose_prompts()}
LOCAL, WARM = "n-gram and earlier text", "the same, prompt asked before"
RIGHT, WRONG, ANOTHER = "prediction, 90 % right", "prediction, wholly wrong", "prediction, another answer"
GAINS = {LOCAL: 1.8, RIGHT: 2.5}  # of copying; what cannot help must not be slower
REPLACED = {RIGHT: 10, WRONG: 1}  # one token of ten, every one


def spoiled(token_ids: Sequence[int], every: int) -> list[int]:
    """The text with every `every`-th token replaced by another."""
    return [token_id ^ 1 if index % every == every - 1 else token_id for index, token_id in enumerate(token_ids)]


class Measured:
    """The running service, and prompts of one kind with their plain answers."""

    def __init__(self, stub: pb_grpc.CoordinatorServiceStub, rule: str, tokens: int, prompts: list[tuple[int, ...]]):
        self._stub, self._rule, self._tokens, self._prompts = stub, rule, tokens, prompts
        self._answers = [self._generate(OFF, ids)[1] for ids in prompts]

    def _generate(
        self, variant: Variant, ids: Sequence[int], prediction: Sequence[int] = (), salt: str = ""
    ) -> tuple[Values, tuple[int, ...]]:
        request = request_of(variant, self._rule, ids, self._tokens, ignore_eos=False)
        if prediction:
            request.prediction.token_ids.ids.extend(prediction)
        return generate(self._stub, request, salt)

    def ours(self, name: str, turn: int) -> Values:
        """One text of a variant."""
        place = turn % len(self._prompts)
        ids, answer, other = self._prompts[place], self._answers[place], self._answers[place - 1]
        if name == OFF.name:
            return self._generate(OFF, ids)[0]
        if name in (LOCAL, WARM):
            local, salt = Variant(name, None, proposers=("ngram", "suffix")), uuid.uuid4().hex
            if name == WARM:
                self._generate(local, ids, salt=salt)
            return self._generate(local, ids, salt=salt)[0]
        prediction = other if name == ANOTHER else spoiled(answer, REPLACED[name])
        return self._generate(Variant(name, None, proposers=("prediction",)), ids, prediction)[0]


class NoDraft:
    """See the module."""

    name = "no_draft"
    about = "the chat model without a draft service, over plain decoding of the same service, by prompts"
    turns, quick_turns, minutes = 16, 2, 12

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--max-tokens", type=int, default=80, help="of an answer (%(default)s)")

    def cells(self, asked: argparse.Namespace) -> list[Cell]:
        return [{"prompts": kind} for kind in PROMPTS]

    @contextmanager
    def prepared(self, asked: argparse.Namespace) -> Iterator[Prepared]:
        with TemporaryDirectory() as scratch:
            folder = write_unpacked(CHAT_MODEL, Path(scratch))
            template = ChatTemplate.read(folder)
            assert template is not None
            own = {"speculation_policy": "auto"}
            with (
                running(folder, None, own, threads=1, dtype="bfloat16") as services,
                grpc.insecure_channel(services.coordinator.address) as channel,
            ):
                stub = pb_grpc.CoordinatorServiceStub(channel)

                def contenders(cell: Cell, results: Results) -> dict[str, Contender]:
                    kind = str(cell["prompts"])
                    prompts = [prompt.ids(template) for prompt in PROMPTS[kind][: max(2, asked.turns)]]
                    found = Measured(stub, RULES_DEFAULT[kind == PROSE], asked.max_tokens, prompts)
                    names = (OFF.name, LOCAL, WARM, RIGHT, WRONG, ANOTHER)
                    return {name: partial(found.ours, name) for name in names}

                yield contenders

    def over_plain(self, results: Results, kind: str, name: str) -> Ratio | None:
        """Tokens per second of a way over plain decoding."""
        return results.ratio({"prompts": kind}, name, OFF.name, "tokens_per_s")

    def tables(self, results: Results) -> list[Table]:
        rows = []
        for name in results.samples({"prompts": COPYING}):
            steps = shown(pooled(results, {"prompts": COPYING}, name, "tokens", "steps"))
            rates = [shown(results.median({"prompts": kind}, name, "tokens_per_s")) for kind in PROMPTS]
            ratios = [ratio.short() if (ratio := self.over_plain(results, kind, name)) else "" for kind in PROMPTS]
            rows.append([name, steps, rates[0], ratios[0], rates[1], ratios[1]])
        columns = ["", "copying: tokens a step", "tokens/s", "over plain", "prose, 0.7: tokens/s", "over plain"]
        return [Table("over_plain", self.about, columns, rows)]

    def bars(self, results: Results) -> list[Bar]:
        bars = [
            of_ratio(f"copying: {name} / off", bound, self.over_plain(results, COPYING, name))
            for name, bound in GAINS.items()
        ]
        useless = [(COPYING, WRONG), (COPYING, ANOTHER), *((PROSE, name) for name in (LOCAL, WRONG, ANOTHER))]
        ratios = {f"{kind}, {name}": self.over_plain(results, kind, name) for kind, name in useless}
        slowest = never_slower({name: ratio for name, ratio in ratios.items() if ratio})[0]
        return [*bars, replace(slowest, claim=f"prose and wrong predictions: {slowest.claim}")]


BENCHMARK = NoDraft()

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
