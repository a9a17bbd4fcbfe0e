"""`python -m bench.trees`: trees beside chains: tokens of a step, and the speed of `auto` with trees and without.

The best tree of at most 4, 8 or 16 draft tokens over the best chain of no more; plans wait for their draft tokens, so
that tokens of a step do not depend on load. Best by all texts together: a long text counts as its tokens do, and texts
of REJECTION are drawn anew for each plan. The deepened target has cheap rows and a draft that takes a fifth of its
step; steps of the widened one are bounded by reading weights, as those of a large model are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc

from bench.bars import Bar, of_ratio
from bench.prompts import sent_prompts, target_folder
from bench.results import Cell, Ratio, Results, Table
from bench.runner import Contender, Prepared, Values, main
from bench.texts import generate, pooled, pooled_ratio
from specdec.folders import CHAT_DRAFT, CHAT_MODEL, CHAT_PROMPTS, PROMPTS
from specdec.launch.children import start, stop_all
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from tests.support.harness import DRAFT_MODEL, running
from tests.support.variants import AUTO, RULES_DEFAULT, WAIT_MS, Variant, request_of, synchronous

GREEDY, COUPLED, REJECTION = RULES_DEFAULT[:3]
CELLS = (
    ("deepened", GREEDY),
    ("deepened", COUPLED),
    ("deepened", REJECTION),
    ("widened", COUPLED),
    (CHAT_MODEL, COUPLED),
)
# By rows: depths and siblings. The first of each are for drafts that are seldom right, the last one also grows.
SHAPES = {4: ((3, 1), (4, 2)), 8: ((4, 2), (6, 1), (8, 2)), 16: ((8, 3), (12, 3), (16, 3))}
CHAINS = tuple(map(synchronous, (1, 2, 3, 4, 6, 8, 12, 16)))
AUTO_CHAINS, AUTO_TREES = replace(AUTO, name="auto, chains"), replace(AUTO, name="auto, trees")
FIXED = "fixed plans"
# By rows, tokens of a step over those of chains; 0: tokens per second of `auto` over those without trees.
GOALS = {GREEDY: {16: 1.08, 0: 0.98}, COUPLED: {8: 1.12, 0: 1.08}, REJECTION: {8: 1.05, 0: 0.98}}


def tree_variants(rows: int) -> list[Variant]:
    """Trees of at most `rows` tokens: chains with siblings, and one that also grows below these (not under REJECTION).
    The likeliest nodes take the rows: where the depth allows as many as the best chain has, the text decides between
    length and siblings."""
    waited = [
        Variant(f"depth {depth}, {siblings} siblings, {rows} rows", rows, depth, 1, WAIT_MS, siblings)
        for depth, siblings in SHAPES[rows]
    ]
    return [*waited, replace(waited[-1], name=f"grown, {waited[-1].name}", nodes_per_step=4)]


TREES = {rows: tree_variants(rows) for rows in SHAPES}


@dataclass(frozen=True, slots=True)
class Served:
    """Coordinators before one target and one draft: for fixed plans, and for each `auto`. And the prompts."""

    stubs: dict[str, pb_grpc.CoordinatorServiceStub]
    prompts: Sequence[str | Sequence[int]]


@contextmanager
def served(pair: str) -> Iterator[Served]:
    """The pair of this name, with one thread each."""
    with TemporaryDirectory() as scratch, ExitStack() as stack:
        target, is_chat = target_folder(pair, Path(scratch)), pair == CHAT_MODEL
        draft, file, dtype = (CHAT_DRAFT, CHAT_PROMPTS, "auto") if is_chat else (DRAFT_MODEL, PROMPTS, "float32")
        own = {"speculation_policy": "auto"}, {"dtype": dtype}
        services = stack.enter_context(running(target, draft, *own, coordinator_count=2, threads=1, dtype="bfloat16"))
        without = start("coordinator", services.settings.model_copy(update={"draft_siblings_max": 0}))
        stack.callback(stop_all, [without])
        without.wait_ready()
        children = zip((FIXED, AUTO_TREES.name, AUTO_CHAINS.name), (*services.coordinators, without))
        channels = {name: stack.enter_context(grpc.insecure_channel(child.address)) for name, child in children}
        stubs = {name: pb_grpc.CoordinatorServiceStub(channel) for name, channel in channels.items()}
        yield Served(stubs, sent_prompts(file, target))


class Trees:
    """See the module."""

    name = "trees"
    about = "tokens of a target step, best tree / best chain of no more rows; tokens/s of auto with trees / without"
    turns, quick_turns, minutes = 12, 2, 25

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--pairs", nargs="+", choices=sorted({pair for pair, _ in CELLS}), help="(all)")
        parser.add_argument("--max-tokens", type=int, default=64, help="of a text (%(default)s)")

    def cells(self, asked: argparse.Namespace) -> list[Cell]:
        wanted = [cell for cell in CELLS if cell[0] in (asked.pairs or cell)]
        return [{"pair": pair, "rule": rule} for pair, rule in (wanted[:1] if asked.quick else wanted)]

    @contextmanager
    def prepared(self, asked: argparse.Namespace) -> Iterator[Prepared]:
        with ExitStack() as stack:
            current: dict[str, Served] = {}

            def contenders(cell: Cell, results: Results) -> dict[str, Contender]:
                pair, rule = str(cell["pair"]), str(cell["rule"])
                if pair not in current:
                    stack.close()
                    current.clear()
                    current[pair] = stack.enter_context(served(pair))
                own = current[pair]

                def measured(variant: Variant, turn: int) -> Values:
                    prompt = own.prompts[turn % len(own.prompts)]
                    request = request_of(variant, rule, prompt, asked.max_tokens)
                    return generate(own.stubs.get(variant.name, own.stubs[FIXED]), request)[0]

                variants = [*CHAINS, *(one for trees in TREES.values() for one in trees), AUTO_CHAINS, AUTO_TREES]
                return {variant.name: partial(measured, variant) for variant in variants}

            yield contenders

    def ratio(self, results: Results, cell: Cell, rows: int) -> tuple[str, Ratio | None]:
        """The best tree and the best chain of no more rows, and tokens of a step of one over those of the other."""

        def best(variants: Sequence[Variant]) -> str:
            tokens = {own.name: pooled(results, cell, own.name, "tokens", "steps") or 0 for own in variants}
            return max(tokens, key=lambda name: tokens[name])

        tree, chain = best(TREES[rows]), best([own for own in CHAINS if (own.draft_length or 0) <= rows])
        return f"{tree} / {chain}", pooled_ratio(results, cell, tree, chain)

    def auto(self, results: Results, cell: Cell) -> Ratio | None:
        """Tokens per second of `auto` with trees over those without."""
        return results.ratio(cell, AUTO_TREES.name, AUTO_CHAINS.name, "tokens_per_s")

    def tables(self, results: Results) -> list[Table]:
        lines = []
        for cell in results.cells():
            goals = GOALS[str(cell["rule"])]
            ratios = [(self.ratio(results, cell, rows)[1], goals.get(rows)) for rows in TREES]
            ratios.append((self.auto(results, cell), goals[0]))
            own = [ratio.short(goal) if ratio else "" for ratio, goal in ratios]
            lines.append([f"{cell['pair']}, {cell['rule']}", *own])
        columns = ["target, rule", *(f"{rows} rows" for rows in TREES), "auto, tokens/s"]
        return [Table("over_chains", self.about, columns, lines)]

    def bars(self, results: Results) -> list[Bar]:
        bars = []
        for cell in results.cells():
            where, goals = f"{cell['pair']}, {cell['rule']}", GOALS[str(cell["rule"])]
            for rows in TREES:
                told, ratio = self.ratio(results, cell, rows)
                claim = f"{where}, {rows} rows: tokens of a step, best tree / best chain"
                bars.append(of_ratio(claim, goals.get(rows, 1.0), ratio, f": {told}"))
            bars.append(of_ratio(f"{where}: tokens/s, auto with trees / without", goals[0], self.auto(results, cell)))
        return bars


BENCHMARK = Trees()

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
