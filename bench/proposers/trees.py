"""Trees and chains on the deepened target by rule: tokens per target step and per second, and `auto` with and without
trees; greedy also assisted generation of `transformers` at its best settings."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from specdec.bench.assisted import Assisted
from specdec.bench.bars import Bar
from specdec.bench.deepened import write_deepened
from specdec.bench.harness import DRAFT_MODEL, heldout_prompts
from specdec.bench.pipeline.measurements import ratio_of
from specdec.bench.pipeline.variants import AUTO, CHAIN, OFF, RULES_DEFAULT, WAIT_MS, Variant, request_of, synchronous
from specdec.bench.proposers.texts import Found, generate, median_of, per_round, per_second, served

COMBS = {4: ((2, 1), (3, 1)), 8: ((3, 2), (4, 2), (6, 1)), 16: ((4, 3), (6, 3))}  # rows: depths and siblings
ROWS = tuple(COMBS)
TREE_BARS = {"GREEDY": (16, 1.08), "COUPLED": (8, 1.12), "REJECTION": (8, 1.05)}


def tree_variants(rows: int) -> list[Variant]:
    """Trees of at most `rows` tokens: a chain of some depth with siblings, waited for as synchronous rounds are; and a
    tree that streams."""
    combs = [
        Variant(f"depth {depth}, {siblings} siblings, {rows} rows", rows, depth, 1, WAIT_MS, siblings)
        for depth, siblings in COMBS[rows]
    ]
    return [*combs, Variant(f"streamed tree, {rows} rows", rows, min(rows, 12), 4, siblings=2)]


def measure_trees(asked: argparse.Namespace, console: Console) -> tuple[list[Table], list[Bar], dict[str, Any]]:
    """Trees and chains on the deepened target, by rule."""
    prompts = list(heldout_prompts().items())[: asked.prompts]
    chains = [CHAIN, *map(synchronous, (1, 2, 3, 4, 6, 8))]
    chains_only = {"draft_siblings_max": 0}
    tables, bars, written = [], [], {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_deepened(Path(scratch))
        with served(folder, DRAFT_MODEL, chains_only, {}) as (fixed, plain_auto, tree_auto):
            for rule in [RULES_DEFAULT[number] for number in asked.rules]:
                found = Found()
                ways = [(OFF, fixed), *((one, fixed) for one in chains)]
                ways += [(one, fixed) for rows in ROWS for one in tree_variants(rows)]
                ways += [
                    (replace(AUTO, name="auto, chains"), plain_auto),
                    (replace(AUTO, name="auto, trees"), tree_auto),
                ]
                is_greedy = rule == RULES_DEFAULT[0]
                peer = Peer(folder, asked) if is_greedy else None
                for name, prompt in track([prompts[0], *prompts], rule, console=Console(stderr=True)):
                    for variant, stub in ways:
                        found.add(
                            variant.name, str(name), generate(stub, request_of(variant, rule, prompt, asked.tokens))
                        )
                    if peer is not None:
                        peer.tokens_per_s[str(name)] = peer.generate(prompt)
                tables.append(tree_table(rule, found, [variant for variant, _ in ways]))
                bars += tree_bars(rule, found, chains)
                bars += [peer.bar(found)] if peer is not None else []
                written[rule] = {
                    name: {prompt: [one.tokens_per_s, one.tokens_per_round] for prompt, one in own.items()}
                    for name, own in found.texts.items()
                }
                console.print(tables[-1])
    return tables, bars, written


class Peer:
    """Assisted generation of `transformers` with one thread, at the best of its settings on other prompts."""

    def __init__(self, folder: Path, asked: argparse.Namespace) -> None:
        self._assisted, self._tokens = Assisted(folder, "bfloat16", DRAFT_MODEL, "float32"), asked.tokens
        tuning = list(heldout_prompts().values())[asked.prompts :][: asked.tuning_prompts]
        self._settings = self._assisted.tuned(tuning, 0.0, min(asked.tokens, 64), 1)
        self.tokens_per_s: dict[str, float] = {}

    def generate(self, prompt: str) -> float:
        """Tokens per second after the first ones."""
        return self._assisted.generate(prompt, 0.0, self._tokens, 1, self._settings)

    def bar(self, found: Found) -> Bar:
        """`auto` with trees over assisted generation, prompt by prompt."""
        texts = found.texts["auto, trees"]
        ratio = ratio_of([texts[name].tokens_per_s / rate for name, rate in self.tokens_per_s.items()])
        return Bar("GREEDY: tokens/s, auto with trees / assisted generation", 1.5, ratio.median, str(ratio))


def tree_table(rule: str, found: Found, variants: Sequence[Variant]) -> Table:
    table = Table(title=f"{rule}: medians over {len(found.texts[OFF.name])} prompts")
    for name in ("", "tokens a target step", "tokens/s", "tokens/s over off [95 %]"):
        table.add_column(name, justify="left" if not name else "right")
    for variant in variants:
        medians = median_of(found, variant.name, per_round), median_of(found, variant.name, per_second)
        ratio = found.ratio(variant.name, OFF.name, per_second, None)
        table.add_row(variant.name, f"{medians[0]:.2f}", f"{medians[1]:.1f}", str(ratio))
    return table


def tree_bars(rule: str, found: Found, chains: Sequence[Variant]) -> list[Bar]:
    """Tokens per target step of trees over the best chain of no more rows, and tokens/s of auto with trees."""
    bars = []
    rows, bound = TREE_BARS[rule.split(",")[0]]
    for count in ROWS:
        own = [chain.name for chain in chains if (chain.draft_length or 0) <= count]
        best = max(own, key=lambda name: median_of(found, name, per_round))
        tree = max((one.name for one in tree_variants(count)), key=lambda name: median_of(found, name, per_round))
        ratio = found.ratio(tree, best, per_round, None)
        claim = f"{rule}, {count} rows: tokens a target step, {tree} / best chain ({best})"
        bars.append(Bar(claim, bound if count == rows else 1.0, None if ratio is None else ratio.median, str(ratio)))
    ratio = found.ratio("auto, trees", "auto, chains", per_second, None)
    goal = 1.08 if rule.startswith("COUPLED") else 0.98
    bars.append(
        Bar(f"{rule}: tokens/s, auto with trees / without", goal, None if ratio is None else ratio.median, str(ratio))
    )
    return bars
