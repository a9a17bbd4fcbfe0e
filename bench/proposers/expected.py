"""Trees and chains of REJECTION by expectation: tokens of a target step, with the chance of the tests computed.

From places in texts of the target the draft draws a chain with siblings, the coordinator's function offers a tree of
it, and the expected number of its tokens follows from the target distributions. Served generations differ in their
texts as well, so they need a hundred times as many tokens to tell trees from chains.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from bench.bars import Bar
from bench.pair import questions
from models.chat_questions import CLASSES as CHAT_CLASSES
from specdec.advise.agreement import Reader
from specdec.advise.forecast import Estimate, resampled, share
from specdec.advise.measuring import EVERYTHING, Text, written
from specdec.decoding.proposal import ProposalRequest, propose
from specdec.engine.loading.model import load_model
from specdec.engine.loading.model_folder import open_model_folder
from specdec.folders import CHAT_DRAFT, CHAT_MODEL
from specdec.protocol.calibration import Calibration
from specdec.protocol.noise import UNIFORM_BITS
from specdec.protocol.offer import Limits, Offer, make_offer
from specdec.protocol.tree import ReceivedTree
from specdec.protocol.tree_shape import children
from specdec.protocol.types import DraftNode, DraftProbs, ResolvedSamplingParams, Rule
from tests.support.harness import DRAFT_MODEL, TARGET_MODEL, heldout_prompts

TEMPERATURES, SEED = (0.7, 1.0), 5
DEPTH, SIBLINGS, CHAINS = 8, 2, (1, 2, 3, 4, 6, 8)
ROWS = (4, 8, 16)
EVERY = 4  # tokens between two places
GOAL = 1.05  # at 8 rows


def drawn_tree(
    draft: Reader, path: Sequence[int], params: ResolvedSamplingParams, chance: random.Random
) -> ReceivedTree:
    """A chain of first draws below a path, each with its siblings."""
    tree, tokens, parent, names = ReceivedTree(path), list(path), 0, itertools.count(1)
    for _ in range(DEPTH):
        (logits,) = draft.read(tokens, len(tokens) - 1)
        draws = tuple(chance.getrandbits(UNIFORM_BITS) for _ in range(1 + SIBLINGS))
        (made,) = propose([ProposalRequest(params, tokens, logits.shape[1], draws, SIBLINGS)], logits)
        named = [(next(names), token_id) for token_id, _ in made.guesses[: 1 + SIBLINGS]]
        for name, token_id in named:
            tree.add(1, len(path), DraftNode(name, parent, token_id, True, made.draft_probs))
        parent, token_id = named[0]
        tokens.append(token_id)
    return tree


def passes(target: Tensor, tokens: Sequence[int], probs: Sequence[DraftProbs]) -> Iterator[float]:
    """Yields P(a sibling passes | those before it did not).  target: [vocabulary] float64, one distribution"""
    left, tested = target.clone(), list[int]()
    for token_id, own in zip(tokens, probs):
        rest = own.without(tested) if len(own.token_ids) > len(tested) else own
        draft = torch.zeros_like(left)
        draft[list(rest.token_ids)] = torch.tensor(rest.probabilities, dtype=left.dtype)
        yield min(1.0, float(left[token_id] / draft[token_id]))
        residual = (left - draft).clamp_min(0)
        left = residual / residual.sum() if residual.sum() > 0 else left
        tested.append(token_id)


def expected_tokens(offer: Offer, targets: Tensor, calibration: Calibration, chance: random.Random) -> float:
    """Tokens of the step that verifies an offer; a walk teaches the calibration.  targets: [depth + 1, vocabulary]"""
    following, row, depth, reach, tokens = children(offer.parents, len(offer.token_ids)), 0, 0, 1.0, 1.0
    is_walked = True
    while following[row]:
        own = following[row]
        tested = [offer.token_ids[index] for index in own], [offer.draft_probs[index] for index in own]
        chances = list(passes(targets[depth], *tested))
        refused = 1.0
        for passed in chances:
            tokens += reach * refused * passed
            refused *= 1 - passed
        accepted = next((index for index, passed in zip(own, chances) if chance.random() < passed), None)
        for index in own if is_walked else ():
            for _, features in offer.guesses[index]:
                calibration.record(features, index == accepted)
        is_walked = is_walked and accepted == own[0]
        reach, row, depth = reach * chances[0], own[0] + 1, depth + 1  # first draws only are continued
    return tokens


def measure_expected(asked: argparse.Namespace, console: Console) -> tuple[list[Table], list[Bar], dict[str, Any]]:
    """The best tree of each number of rows over the best chain of no more, on the embedded pair, whose deepened and
    widened targets have the same distributions, or the chat pair."""
    torch.set_num_threads(1)
    is_chat = asked.pair == "chat"
    folders = (open_model_folder(CHAT_MODEL).path, CHAT_DRAFT) if is_chat else (TARGET_MODEL, DRAFT_MODEL)
    asking = [one.prompt for one in questions(-(-asked.prompts // len(CHAT_CLASSES)))] if is_chat else None
    prompts = dict.fromkeys((asking or list(heldout_prompts().values()))[: asked.prompts], EVERYTHING)
    target, draft = (load_model(str(one), "float32", has_stable_rows=False) for one in folders)
    tables, bars, numbers = [], [], {}
    for temperature in TEMPERATURES:
        about = f"{temperature}", asked.tokens, 0
        texts = written(target, open_model_folder(str(folders[0])), about, prompts, Console(stderr=True))
        longest = max(len(text.token_ids) for text in texts) + DEPTH
        readers, chance, calibration = (
            (Reader(target, longest), Reader(draft, longest)),
            random.Random(SEED),
            Calibration(),
        )
        sums: dict[tuple[str, int], list[list[float]]] = {}
        title = f"temperature {temperature:g}"
        for text in track([texts[0], *texts], title, console=Console(stderr=True)):  # the first one teaches
            for key, values in tokens_along(readers, text, calibration, chance).items():
                sums.setdefault(key, []).append([sum(values), float(len(values))])
        table, own, found = results(temperature, {key: own[1:] for key, own in sums.items()})
        tables.append(table)
        bars += own
        numbers[f"{temperature:g}"] = found
    return tables, bars, numbers


def tokens_along(
    readers: tuple[Reader, Reader], text: Text, calibration: Calibration, chance: random.Random
) -> dict[tuple[str, int], list[float]]:
    """Tokens of a step at places of one text, of chains by length and trees by rows."""
    target, draft = readers
    temperature = text.params.temperature
    params = ResolvedSamplingParams(rule=Rule.REJECTION, seed=SEED, prompt_length=1, temperature=temperature)
    found: dict[tuple[str, int], list[float]] = {}
    for end in range(text.first + 1, len(text.token_ids) + 1, EVERY):
        path = text.token_ids[:end]
        tree = drawn_tree(draft, path, params, chance)
        drawn = [node.token_id for node in tree.proposal_path(DEPTH)]
        rows = torch.cat(list(target.read([*path, *drawn], end - 1)))
        targets = (rows.double() / temperature).softmax(1)
        limits = [("chain", length, Limits(length, length)) for length in CHAINS]
        limits += [("tree", count, Limits(count, min(count, DEPTH), siblings=SIBLINGS)) for count in ROWS]
        for kind, count, limit in limits:
            offer = make_offer(tree.root, (), Rule.REJECTION, limit, calibration)
            found.setdefault((kind, count), []).append(expected_tokens(offer, targets, calibration, chance))
    return found


def results(
    temperature: float, sums: dict[tuple[str, int], list[list[float]]]
) -> tuple[Table, list[Bar], dict[str, Any]]:
    table = Table(title=f"REJECTION, temperature {temperature:g}: expected tokens of a target step")
    for name in ("rows", "best chain of no more rows", "tree", "tree / chain [95 %]"):
        table.add_column(name, justify="right")
    bars, written = [], {}
    for rows in ROWS:
        chain = max((sums["chain", length] for length in CHAINS if length <= rows), key=total)
        tree = sums["tree", rows]
        pairs = [[ours[0], theirs[0]] for ours, theirs in zip(tree, chain)]
        ratio: Estimate = resampled(pairs, share)
        told = f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
        table.add_row(str(rows), f"{total(chain):.3f}", f"{total(tree):.3f}", told)
        claim = f"REJECTION, temperature {temperature:g}, {rows} rows: expected, tree / best chain"
        bars.append(Bar(claim, GOAL if rows == 8 else 1.0, ratio.value, told))
        written[str(rows)] = [total(chain), total(tree), ratio.low, ratio.high]
    return table, bars, written


def total(groups: Sequence[Sequence[float]]) -> float:
    """The mean over all places."""
    return share([sum(column) for column in zip(*groups)])
