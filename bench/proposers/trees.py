"""Trees and chains by rule, on the deepened or widened target or the chat pair: tokens per target step and per second,
and `auto` with and without trees; greedy, but on the chat pair, also assisted generation of `transformers` at its best
settings, which cannot use that pair's draft, as it has a part of the tokens."""

from __future__ import annotations

import argparse
import heapq
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.assisted import Assisted
from bench.bars import Bar
from bench.deepened import write_deepened, write_widened
from bench.pair import questions
from bench.pipeline import ranks
from bench.pipeline.ranks import Ranks
from bench.pipeline.variants import AUTO, CHAIN, OFF, RULES_DEFAULT, WAIT_MS, Variant, request_of, synchronous
from bench.prompts import Prompt
from bench.proposers.chat import chat_request
from bench.proposers.texts import (
    Found,
    generate,
    median_of,
    per_round,
    per_second,
    pooled,
    pooled_ratio,
    served,
    shown,
    steps_of,
)
from bench.results import ratio_of
from models.chat_questions import CLASSES as CHAT_CLASSES
from specdec.chat.template import ChatTemplate
from specdec.folders import CHAT_DRAFT, CHAT_MODEL
from specdec.v1 import coordinator_service_pb2 as pb
from tests.support.harness import DRAFT_MODEL, TARGET_MODEL, heldout_prompts
from tests.support.unpacked import write_unpacked

# By rows: depths and siblings. The first of each are for drafts that are seldom right, the last one also grows.
SHAPES = {
    4: ((1, 3), (3, 1), (4, 2)),
    8: ((2, 3), (4, 2), (6, 1), (8, 2)),
    16: ((3, 3), (6, 3), (8, 3), (12, 3), (16, 3)),
}
ROWS = tuple(SHAPES)
CHAINS = (CHAIN, *map(synchronous, (1, 2, 3, 4, 6, 8, 12, 16)))
AUTO_CHAINS, AUTO_TREES = replace(AUTO, name="auto, chains"), replace(AUTO, name="auto, trees")
TREE_BARS = {"GREEDY": (16, 1.08), "COUPLED": (8, 1.12), "REJECTION": (8, 1.05)}


def tree_variants(rows: int) -> list[Variant]:
    """Trees of at most `rows` tokens. Waited for as synchronous rounds are: a chain with siblings, and one that also
    grows below these (not under REJECTION); and a tree that streams. The likeliest nodes take the rows: where the depth
    allows as many as the best chain has, the text decides between length and siblings."""
    waited = [
        Variant(f"depth {depth}, {siblings} siblings, {rows} rows", rows, depth, 1, WAIT_MS, siblings)
        for depth, siblings in SHAPES[rows]
    ]
    depth, siblings = SHAPES[rows][-1]
    grown = Variant(f"grown, depth {depth}, {rows} rows", rows, depth, 4, WAIT_MS, siblings)
    return [*waited, grown, Variant(f"streamed tree, {rows} rows", rows, min(rows, 12), 4, siblings=2)]


def fixed_variants(waited_only: bool) -> list[Variant]:
    """Plain decoding, chains and trees; `waited_only`: those that wait for their draft tokens."""
    every = [*CHAINS, *(one for rows in ROWS for one in tree_variants(rows))]
    return [OFF, *(one for one in every if one.is_synchronous or not waited_only)]


@dataclass(frozen=True, slots=True)
class Pair:
    """A target, a draft and its type, and prompts by name. `plain`: the folders of target and draft, the target a
    smaller one of the same function if there is one. `template`: of a chat model."""

    target: Path
    draft: Path
    draft_dtype: str
    prompts: dict[str, str]
    plain: tuple[Path, Path]
    template: ChatTemplate | None = None

    def request(self, variant: Variant, rule: str, name: str, tokens: int) -> pb.GenerateRequest:
        """A generation after the prompt of that name."""
        prompt = self.prompts[name]
        if self.template is None:
            return request_of(variant, rule, prompt, tokens)
        return chat_request(self.template, Prompt(name, "chat", prompt), variant, tokens, rule)


def pair_of(name: str, prompt_count: int, scratch: Path) -> Pair:
    """Returns the deepened or widened target with the shipped draft, or the chat pair with as many questions of every
    class."""
    if name == "chat":
        folder, chosen = write_unpacked(CHAT_MODEL, scratch), questions(-(-prompt_count // len(CHAT_CLASSES)))
        prompts = {question.name: question.prompt for question in chosen}
        return Pair(folder, CHAT_DRAFT, "auto", prompts, (folder, CHAT_DRAFT), ChatTemplate.read(folder))
    prompts = {str(name): prompt for name, prompt in list(heldout_prompts().items())[:prompt_count]}
    write = write_widened if name == "widened" else write_deepened
    return Pair(write(scratch), DRAFT_MODEL, "float32", prompts, (TARGET_MODEL, DRAFT_MODEL))


def measure_trees(asked: argparse.Namespace, console: Console) -> tuple[list[Table], list[Bar], dict[str, Any]]:
    """Trees and chains on a pair, by rule."""
    chains_only = {"draft_siblings_max": 0}
    tables, bars, written = [], [], {}
    with tempfile.TemporaryDirectory() as scratch:
        pair = pair_of(asked.pair, asked.prompts, Path(scratch))
        names = list(pair.prompts)
        with served(pair.target, pair.draft, chains_only, {}, draft_dtype=pair.draft_dtype) as stubs:
            fixed, plain_auto, tree_auto = stubs
            for rule in [RULES_DEFAULT[number] for number in asked.rules]:
                found = Found()
                ways = [(one, fixed) for one in fixed_variants(asked.waited_only)]
                if not asked.waited_only:
                    ways += [(AUTO_CHAINS, plain_auto), (AUTO_TREES, tree_auto)]
                has_peer = rule == RULES_DEFAULT[0] and not asked.waited_only and pair.template is None
                peer = Peer(pair.target, asked) if has_peer else None
                for name in track([names[0], *names], rule, console=Console(stderr=True)):
                    for variant, stub in ways:
                        found.add(variant.name, name, generate(stub, pair.request(variant, rule, name, asked.tokens)))
                    if peer is not None:
                        peer.tokens_per_s[name] = peer.generate(pair.prompts[name])
                tables.append(tree_table(rule, found, [variant for variant, _ in ways]))
                bars += tree_bars(rule, found)
                texts = list(pair.prompts.values())
                guesses = ranks.measure_ranks(texts, [rule], asked.tokens, with_siblings=True, pair=pair.plain)[rule]
                bars += static_bars(rule, found, guesses)
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
        texts = found.texts[AUTO_TREES.name]
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


def best_static_tree(guesses: Ranks, rows: int) -> dict[tuple[int, ...], float]:
    """The paths of ranks of the best static tree of `rows` draft tokens, with their probabilities if each guess of a
    rank is right as often as on these texts, whatever came before: those of highest product (Chen et al. 2024,
    Sequoia)."""
    missed = 1 - guesses.acceptance
    own = [guesses.acceptance, *(missed * share for share in guesses.branches)]
    heap: list[tuple[float, tuple[int, ...]]] = [(-probability, (rank,)) for rank, probability in enumerate(own)]
    heapq.heapify(heap)
    tree: dict[tuple[int, ...], float] = {}
    while len(tree) < rows:
        reach, path = heapq.heappop(heap)
        tree[path] = -reach
        for rank, probability in enumerate(own):
            heapq.heappush(heap, (reach * probability, (*path, rank)))
    return tree


def walked_tokens(tree: Collection[tuple[int, ...]], texts: Sequence[Sequence[int | None]]) -> float:
    """Tokens of a step if a tree of ranks is verified along texts of which the right guess is known at each position:
    after the accepted path comes one more token, and the next step begins there. As with those generated, tokens beyond
    a text's end do not count."""
    steps = tokens = 0
    for text in texts:
        place = 0
        while place < len(text):
            path: tuple[int, ...] = ()
            for rank in text[place:]:
                if rank is None or (*path, rank) not in tree:
                    break
                path = (*path, rank)
            place += len(path) + 1
            steps += 1
        tokens += len(text)
    return tokens / max(1, steps)


def static_bars(rule: str, found: Found, guesses: Ranks) -> list[Bar]:
    """The best tree over the best static one, in tokens of a step: by the acceptance of each rank on texts of the same
    prompts, as if guesses were independent; and that tree walked along those texts, as a step begins where a guess
    failed and right guesses come in runs."""
    bars = []
    for rows in ROWS:
        best = max(pooled(found, one.name, steps_of) for one in tree_variants(rows) if one.name in found.texts)
        tree = best_static_tree(guesses, rows)
        static, independent = walked_tokens(tree, guesses.texts), 1 + sum(tree.values())
        for claim, tokens in (("by its acceptance", independent), ("walked", static)):
            of = f"{best:.2f} / {tokens:.2f}"
            bars.append(Bar(f"{rule}, {rows} rows: best tree / best static tree, {claim}", 0.95, best / tokens, of))
    return bars


def tree_bars(rule: str, found: Found) -> list[Bar]:
    """Tokens per target step of trees over the best chain of no more rows, and tokens/s of auto with trees."""
    bars = []
    rows, bound = TREE_BARS[rule.split(",")[0]]

    def best_of(variants: Sequence[Variant]) -> str:
        return max(
            (one.name for one in variants if one.name in found.texts), key=lambda name: pooled(found, name, steps_of)
        )

    for count in ROWS:
        chain = best_of([one for one in CHAINS if (one.draft_length or 0) <= count])
        tree = best_of(tree_variants(count))
        ratio, medians = pooled_ratio(found, tree, chain, steps_of), found.ratio(tree, chain, per_round, None)
        claim = f"{rule}, {count} rows: tokens a target step, {tree} / best chain ({chain})"
        told = f"{shown(ratio)}; median of prompts {medians}"
        bars.append(Bar(claim, bound if count == rows else 1.0, ratio.value, told))
    if AUTO_TREES.name in found.texts:
        rates = found.ratio(AUTO_TREES.name, AUTO_CHAINS.name, per_second, None)
        assert rates is not None
        goal = 1.08 if rule.startswith("COUPLED") else 0.98
        bars.append(Bar(f"{rule}: tokens/s, auto with trees / without", goal, rates.median, str(rates)))
    return bars
