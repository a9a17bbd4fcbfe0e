"""`python -m bench.draft`: the draft's step beside the bare greedy loop of `transformers` on the same weights.

One thread, after short and long contexts: a step of the draft service's own engine and handler in this process, by
rule, nodes of a session and sessions; the loop in the faster of the draft's type and float32, with a batch of as many
texts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from bench.bars import Bar, worst_of
from bench.draft.alone import SPARE_TOKENS, DraftAlone, texts_of
from bench.draft.bare import BareLoop
from bench.results import Cell, Ratio, Results, Table, shown
from bench.runner import Contender, Prepared, Values, main
from specdec.errors import SpecdecError
from specdec.protocol.types import ResolvedSamplingParams
from specdec.rpc.process import set_startup_objects_aside
from tests.support.harness import DRAFT_MODEL
from tests.support.variants import RULES_DEFAULT, rule_of

BARE, DRAFT = "bare loop", "draft"
RULES = tuple(RULES_DEFAULT[number] for number in (0, 3, 4))
CONTEXTS, STEPS = (64, 1000), 24  # cached tokens; steps of a turn
BOUNDS = {
    (1, 1): (0.35, 0.25),
    (1, 8): (0.8, 0.45),
}  # by sessions and nodes: the bar of a step over the loop's, stretch
SHAPES = ((1, 1), (1, 4), (1, 8), (8, 1))


def cell_of(rule: str, context: int, sessions: int, nodes: int) -> Cell:
    return {"rule": rule, "context": context, "sessions": sessions, "nodes": nodes}


class DraftStep:
    """See the module."""

    name = "draft"
    about = "the draft's step over the bare loop of transformers on the same weights, one thread"
    turns, quick_turns, minutes = 15, 3, 3

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--dtype", default="auto", help="of the draft: float32, bfloat16 (%(default)s)")

    def cells(self, asked: argparse.Namespace) -> list[Cell]:
        contexts, shapes = (CONTEXTS[:1], tuple(BOUNDS)) if asked.quick else (CONTEXTS, SHAPES)
        return [cell_of(rule, context, *shape) for context in contexts for shape in shapes for rule in RULES]

    @contextmanager
    def prepared(self, asked: argparse.Namespace) -> Iterator[Prepared]:
        torch.set_num_threads(1)
        draft = DraftAlone(DRAFT_MODEL, asked.dtype)
        loops = [BareLoop(DRAFT_MODEL, dtype) for dtype in dict.fromkeys((draft.dtype, "float32"))]
        set_startup_objects_aside()  # as services do

        def contenders(cell: Cell, results: Results) -> dict[str, Contender]:
            results.notes["type"] = draft.dtype
            context, sessions, nodes = (int(cell[name]) for name in ("context", "sessions", "nodes"))
            rule, temperature = rule_of(str(cell["rule"]))
            params = ResolvedSamplingParams(rule, 1, context, temperature=temperature)
            texts = texts_of(sessions, context + SPARE_TOKENS)

            def bare(turn: int) -> Values:
                return {"ms": min(loop.step_ms([text[:context] for text in texts], STEPS) for loop in loops)}

            def own(turn: int) -> Values:
                step_ms = draft.step_ms(params, texts, nodes, STEPS)
                if step_ms is None:
                    raise SpecdecError(f"{cell}: its trees have no step that wide")
                return {"ms": step_ms}

            return {BARE: bare, DRAFT: own}

        yield contenders

    def tables(self, results: Results) -> list[Table]:
        def ratio(rule: str, context: int, shape: tuple[int, int]) -> str:
            found = over_bare(results, cell_of(rule, context, *shape))
            bound = BOUNDS.get(shape, (None, None))[0]
            return found.short(bound, is_limit=True) if found else ""

        names = [f"{sessions} × {nodes}" for sessions, nodes in SHAPES]
        rows = [
            [
                f"{rule}, after {context}",
                shown(results.median(cell_of(rule, context, 1, 1), BARE, "ms")),
                *(ratio(rule, context, shape) for shape in SHAPES),
            ]
            for context in CONTEXTS
            for rule in RULES
            if results.cells(rule=rule, context=context)
        ]
        columns = ["rule, cached tokens", "loop, one text, ms", *names]
        about = (
            "the draft's step over the loop of transformers with as many texts, by sessions × nodes of each; one thread"
        )
        return [Table("over_bare", about, columns, rows)]

    def bars(self, results: Results) -> Sequence[Bar]:
        bars = []
        for (sessions, nodes), (bound, stretch) in BOUNDS.items():
            cells = results.cells(sessions=sessions, nodes=nodes)
            found = {f"{cell['rule']} after {cell['context']}": over_bare(results, cell) for cell in cells}
            ratios = {name: ratio.median for name, ratio in found.items() if ratio}
            claim = f"draft's step / bare loop of transformers, {nodes} node{'s' * (nodes > 1)}"
            bars.append(worst_of(claim, bound, ratios, True, stretch))
        return bars


def over_bare(results: Results, cell: Cell) -> Ratio | None:
    return results.ratio(cell, DRAFT, BARE, "ms")


BENCHMARK = DraftStep()

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
