"""`python -m bench.pair`: what drafts for a target, all of it together, over plain decoding and over each part alone.

One stream on emulated machines; the target has one core, draft and coordinator share the other. The chat pair answers
held-out questions with its shipped draft, its feature head, or both, or continues code with the draft of the embedded
target, which has another tokenizer; the deepened target has heads (Medusa) and a draft, over round trips, or a draft
that is killed before the first measured text; the shipped encoder-decoder pair formats code, beside rounds of seven
draft tokens, as published for T5 (Leviathan, Kalman, Matias 2023, table 2).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.bars import Bar, of_ratio
from bench.placement import Placed, placed
from bench.prompts import sent_prompts, target_folder
from bench.results import Cell, Ratio, Results, Table, shown
from bench.runner import Contender, Prepared, Values, main
from bench.texts import generate, pooled, pooled_ratio
from specdec.engine.heads import load_heads, save_heads
from specdec.engine.loading.model_folder import open_model_folder
from specdec.folders import (
    CHAT_DRAFT,
    CHAT_HEAD,
    CHAT_MODEL,
    CHAT_PROMPTS,
    EMBEDDED_MODELS,
    FORMATTING_PAIR,
    PROMPTS,
    read_json,
)
from tests.support.harness import DRAFT_MODEL
from tests.support.variants import OFF, RULES_DEFAULT, Variant, request_of, synchronous

GREEDY, SEEDED, _, COUPLED_1, REJECTION_1 = RULES_DEFAULT
DEEPENED = "deepened"
TARGET_RTT_MS = 0.2
COLUMNS = ("rule", "RTT ms", "way", "tokens/s", "over plain", "acceptance", "tokens a step", "auto / best other")


def auto(*proposers: str) -> Variant:
    """What the coordinator chooses; no names: all that the service has."""
    return Variant("auto", None, proposers=proposers)


def alone(*proposers: str) -> list[Variant]:
    """The same with one proposer, for each of these."""
    return [Variant(name, None, proposers=(name,)) for name in proposers]


@dataclass(frozen=True, slots=True)
class Drafters:
    """What drafts for a target. `ways`: `auto` first, others that it is compared with beside plain decoding. `goals`:
    by rule and round trip in ms to the draft, of `auto` over the best other way."""

    target: str
    prompts: Path
    draft: Path
    ways: Sequence[Variant]
    goals: Mapping[tuple[str, float], float]
    has_heads: bool = False
    is_killed: bool = False


CHAT, EMBEDDED = (CHAT_MODEL, CHAT_PROMPTS, CHAT_DRAFT), (DEEPENED, PROMPTS, DRAFT_MODEL)
FORMATTING = FORMATTING_PAIR[0], EMBEDDED_MODELS / "formatting_prompts.jsonl", EMBEDDED_MODELS / FORMATTING_PAIR[1]
NEAR, FAR = ((GREEDY, 0.0), (SEEDED, 0.0)), ((GREEDY, 50.0), (SEEDED, 50.0))
HEAD_ONLY = auto("heads", "ngram", "suffix", "grammar")
TWO = [auto("draft", "heads"), *alone("draft", "heads")]
DRAFTERS = {
    "chat-draft": Drafters(*CHAT, [auto()], dict(zip(NEAR + FAR, (1.4, 1.3, 1.2, 1.2)))),
    "chat-head": Drafters(*CHAT, [HEAD_ONLY], dict(zip(NEAR, (1.4, 1.3))), has_heads=True),
    "chat-both": Drafters(*CHAT, [auto(), *alone("heads", "draft", "ngram")], dict.fromkeys(NEAR, 0.98), True),
    "other-tokenizer": Drafters(CHAT_MODEL, PROMPTS, DRAFT_MODEL, [auto("draft"), synchronous(3)], {NEAR[0]: 0.98}),
    "deepened-both": Drafters(*EMBEDDED, TWO, {(GREEDY, rtt_ms): 0.97 for rtt_ms in (0.0, 5.0, 20.0, 50.0)}, True),
    "deepened-killed": Drafters(*EMBEDDED, [auto("draft", "ngram")], {NEAR[0]: 0.98}, is_killed=True),
    "formatting": Drafters(
        *FORMATTING, [auto(), synchronous(7)], {(rule, 0.0): 1.0 for rule in (GREEDY, COUPLED_1, REJECTION_1)}
    ),
}


def heads_of_deepened(target: Path, folder: Path) -> Path:
    """Writes the shipped heads as those of the deepened target: hidden states are the same. Returns the folder."""
    shipped = EMBEDDED_MODELS / "target-heads"
    own = open_model_folder(str(EMBEDDED_MODELS / "target"))
    heads = load_heads(shipped, own.digest(), read_json(shipped / "heads.json")["hidden_size"])
    folder.mkdir()
    save_heads(heads, folder, open_model_folder(str(target)).digest())
    return folder


Running = tuple[Placed, Sequence[str | Sequence[int]]]


@contextmanager
def served(own: Drafters) -> Iterator[Running]:
    """The services of a target and what drafts for it, and its prompts."""
    with TemporaryDirectory() as scratch:
        folder, is_deepened = target_folder(own.target, Path(scratch) / "target"), own.target == DEEPENED
        heads = heads_of_deepened(folder, Path(scratch) / "heads") if is_deepened else CHAT_HEAD
        settings = {"heads": str(heads)} if own.has_heads else None
        draft_dtype = "float32" if own.draft == DRAFT_MODEL else "auto"
        with placed(folder, "bfloat16", draft_dtype, draft_model=own.draft, target=settings) as place:
            yield place, sent_prompts(own.prompts, folder)


class Pair:
    """See the module."""

    name = "pair"
    about = "what drafts for a target, over plain decoding; one stream, emulated machines"
    turns, quick_turns, minutes = 12, 2, 25

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, help="(all; --quick: without those of chat)")
        parser.add_argument("--max-tokens", type=int, default=64, help="of a text (%(default)s)")

    def cells(self, asked: argparse.Namespace) -> list[Cell]:
        quick = [name for name, own in DRAFTERS.items() if own.target != CHAT_MODEL]
        names = asked.drafters or (quick if asked.quick else DRAFTERS)
        return [
            {"drafters": name, "rule": rule, "rtt_ms": rtt_ms}
            for name in names
            for rule, rtt_ms in list(DRAFTERS[name].goals)[: 1 if asked.quick else None]
        ]

    @contextmanager
    def prepared(self, asked: argparse.Namespace) -> Iterator[Prepared]:
        with ExitStack() as stack:
            current: dict[str, Running] = {}

            def contenders(cell: Cell, results: Results) -> dict[str, Contender]:
                name, rule = str(cell["drafters"]), str(cell["rule"])
                own = DRAFTERS[name]
                if name not in current:
                    stack.close()
                    current.clear()
                    current[name] = stack.enter_context(served(own))
                place, prompts = current[name]
                place.set_rtt(float(cell["rtt_ms"]), TARGET_RTT_MS)

                def measured(variant: Variant, turn: int) -> Values:
                    if own.is_killed and turn == 1 and place.services.draft:
                        place.services.draft.process.kill()
                    prompt = prompts[turn % len(prompts)]
                    request = request_of(variant, rule, prompt, asked.max_tokens, ignore_eos=False)
                    return generate(place.stubs[0 if variant.draft_length is None else -1], request)[0]

                return {variant.name: partial(measured, variant) for variant in (OFF, *own.ways)}

            yield contenders

    def over_best(self, results: Results, cell: Cell) -> tuple[str, Ratio | None]:
        """The best way beside `auto`, and `auto` over it in tokens per second: over plain decoding the median of texts;
        over another way all texts together, as tries of both policies move single ratios between 0.5 and 2."""
        rates = {way: pooled(results, cell, way, "tokens", "seconds") or 0 for way in results.samples(cell)}
        best = max((way for way in rates if way != "auto"), key=lambda way: rates[way], default=OFF.name)
        if best == OFF.name:
            return best, results.ratio(cell, "auto", best, "tokens_per_s")
        return best, pooled_ratio(results, cell, "auto", best, "tokens", "seconds")

    def goal(self, cell: Cell) -> float:
        """The bar of a cell."""
        return DRAFTERS[str(cell["drafters"])].goals[str(cell["rule"]), float(cell["rtt_ms"])]

    def row(self, results: Results, cell: Cell, way: str) -> list[str]:
        """The line of one way in one cell."""
        medians = [shown(results.median(cell, way, "tokens_per_s")), "", ""]
        if way != OFF.name and (ratio := results.ratio(cell, way, OFF.name, "tokens_per_s")):
            medians[1:] = ratio.short(), shown(pooled(results, cell, way, "accepted", "tested"))
        best, best_ratio = self.over_best(results, cell)
        goal, over = self.goal(cell), ""
        if best_ratio and way == "auto":
            over = f"{best_ratio.short(goal)} ({best}; bar {goal:g})"
        steps = shown(pooled(results, cell, way, "tokens", "steps"))
        return [str(cell["rule"]), f"{cell['rtt_ms']:g}", way, *medians, steps, over]

    def tables(self, results: Results) -> list[Table]:
        tables = []
        for name in dict.fromkeys(str(cell["drafters"]) for cell in results.cells()):
            cells = results.cells(drafters=name)
            rows = [self.row(results, cell, way) for cell in cells for way in results.samples(cell)]
            tables.append(Table(name, f"{name}: {self.about}", COLUMNS, rows))
        return tables

    def bars(self, results: Results) -> list[Bar]:
        bars = []
        for cell in results.cells():
            way, ratio = self.over_best(results, cell)
            claim = f"{cell['drafters']}, {cell['rule']}, RTT {cell['rtt_ms']:g} ms: auto / {way}"
            bars.append(of_ratio(claim, self.goal(cell), ratio))
        return bars


BENCHMARK = Pair()

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
