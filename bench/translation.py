"""`python -m bench.translation`: a draft with another tokenizer, beside assisted generation of `transformers`.

Same weights, prompts and draft tokens a round, temperature 0. Theirs: draft text is tokenised again for the target.
Ours: three services on loopback. Rounds are counted, not timed.

With sampling, texts of release 5.23 are not compared: it accepts more draft tokens there than the distributions have in
common, and writes the draft's text. Its translator is, along texts of the target at temperature 1: the probability that
the target's distribution and the draft's have in common, the draft's over the tokens that both maps have, beside that
over the tokens of our map. The draft reads the same tokens for both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any
from unittest import mock

import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers.generation import candidate_generator

from specdec.advise.agreement import Reader, own_tokens
from specdec.advise.forecast import Estimate, resampled, share
from specdec.advise.measuring import EVERYTHING, Text, written
from specdec.advise.serving import observe, served
from specdec.engine.loading.model import load_model, load_offline_target
from specdec.engine.loading.model_folder import open_model_folder
from specdec.errors import SpecdecError
from specdec.folders import CHAT_MODEL
from specdec.protocol.types import ResolvedSamplingParams, Rule
from tests.support.harness import DRAFT_MODEL, heldout_prompts


@contextmanager
def counted(rounds: list[int]) -> Iterator[None]:
    """Appends the accepted draft tokens of every round of assisted generation."""

    def count(_: Any, input_ids: Any, scores: Any, num_matches: int) -> None:
        rounds.append(int(num_matches))

    with mock.patch.object(candidate_generator.AssistedCandidateGenerator, "update_candidate_strategy", count):
        yield


class Theirs:
    """Assisted generation in this process."""

    def __init__(self, target: str, draft: str, length: int) -> None:
        self.tokenizer, self._other = (transformers.AutoTokenizer.from_pretrained(name) for name in (target, draft))
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._target, self._draft = (load(name, dtype=torch.float32).eval() for name in (target, draft))
        own = self._draft.generation_config
        own.num_assistant_tokens, own.num_assistant_tokens_schedule = length, "constant"
        own.assistant_confidence_threshold = 0.0

    def accepted(self, ids: list[int], count: int) -> list[float]:
        """Returns accepted draft tokens and rounds of one text."""
        rounds: list[int] = []
        with counted(rounds), torch.no_grad():
            self._target.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
                do_sample=False,
                max_new_tokens=count,
                assistant_model=self._draft,
                tokenizer=self.tokenizer,
                assistant_tokenizer=self._other,
            )
        return [float(sum(rounds)), float(len(rounds))]


def measured(options: argparse.Namespace, console: Console) -> dict[str, Estimate]:
    """Returns the tokens of a round by contender. Raises SpecdecError."""
    target, draft = (str(open_model_folder(name).path) for name in (options.target, options.draft))
    theirs = Theirs(target, draft, options.length)
    sums: dict[str, list[list[float]]] = {}
    prompts = list(heldout_prompts().values())[: options.prompts]
    quiet = Console(quiet=True)
    with served(target, draft) as pair:
        for prompt in track(prompts, "texts", console=console, disable=not console.is_terminal):
            ids = theirs.tokenizer(prompt)["input_ids"]
            params = ResolvedSamplingParams(rule=Rule.GREEDY, seed=0, prompt_length=len(ids), temperature=0.0)
            text = Text(EVERYTHING, params, (*ids, 0), len(ids) - 1)
            seen = asyncio.run(observe(pair.address, [text], options.length, options.tokens, quiet))
            sums.setdefault("specdec", []).extend([own.accepted, own.rounds] for own in seen if own.rule)
            sums.setdefault("transformers", []).append(theirs.accepted(ids, options.tokens))
    return {name: resampled(own, lambda sums: 1 + share(sums)) for name, own in sorted(sums.items())}


def shared_by_map(options: argparse.Namespace, console: Console) -> tuple[dict[str, Estimate], str]:
    """Returns the probability in common by map, and a sentence about the maps. Raises SpecdecError."""
    names = [str(open_model_folder(name).path) for name in (options.target, options.draft)]
    own_tokenizer, other = (transformers.AutoTokenizer.from_pretrained(name) for name in names)
    target = load_offline_target(names[0])
    draft = load_model(names[1], device="cpu", has_stable_rows=False, target_tokenizer=names[0])
    size = target.description.vocabulary_size
    translator = candidate_generator.AssistantToTargetTranslator(own_tokenizer, other, size)
    theirs = torch.zeros(size, dtype=torch.bool)
    theirs[sorted(translator.target_to_assistant_input_ids)] = True
    prompts = dict.fromkeys(list(heldout_prompts().values())[: options.prompts], EVERYTHING)
    texts = written(target, open_model_folder(names[0]), ("1", options.tokens, 0), prompts, console)
    longest = max(len(own_tokens(model, text.token_ids, text.first)[0]) for text in texts for model in (target, draft))
    readers = Reader(target, longest), Reader(draft, longest)
    sums: dict[str, list[list[float]]] = {"specdec": [], "transformers": []}
    ours = torch.zeros(size, dtype=torch.bool)
    for text in track(texts, "the draft reads", console=console, disable=not console.is_terminal):
        own: dict[str, float] = dict.fromkeys(sums, 0.0)
        count = 0
        for rows in zip(*(reader.read(text.token_ids[:-1], text.first) for reader in readers)):
            target_rows, draft_rows = rows[0].double(), rows[1][:, :size].double()
            ours |= (draft_rows > -torch.inf).any(0)
            p, masked = target_rows.softmax(1), draft_rows.masked_fill(~theirs, -torch.inf)
            for name, logits in (("specdec", draft_rows), ("transformers", masked)):
                own[name] += float(torch.minimum(p, logits.softmax(1)).sum())
            count += len(p)
        for name, value in own.items():
            sums[name].append([value, count])
    counts = [int(known.sum()) for known in (ours, theirs, ours & theirs)]
    about = "{} tokens in our map, {} in the translator's, {} in both".format(*counts)
    return {name: resampled(values, share) for name, values in sums.items()}, about


def main() -> int:
    """Measures and prints."""
    options = argparse.ArgumentParser(prog="python -m bench.translation", description=__doc__)
    options.add_argument("--target", default=CHAT_MODEL, help="default: %(default)s")
    options.add_argument("--draft", default=str(DRAFT_MODEL), help="with another tokenizer; default: the shipped one")
    options.add_argument("--length", type=int, default=3, help="draft tokens of a round (default: %(default)s)")
    options.add_argument("--prompts", type=int, default=12, help="of the held-out ones (default: %(default)s)")
    options.add_argument("--tokens", type=int, default=48, help="of a text (default: %(default)s)")
    options.add_argument("--json", metavar="FILE", help="write the results")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    try:
        console = Console(stderr=True)
        shared, about = shared_by_map(chosen, console)
        found = measured(chosen, console)
    except SpecdecError as error:
        print(f"specdec: {error}", file=sys.stderr)
        return error.exit_code
    table = Table(title=f"tokens of a round with {chosen.length} draft tokens (95 %)")
    table.add_column("contender")
    table.add_column("tokens", justify="right")
    for name, value in found.items():
        table.add_row(name, f"{value.value:.2f} ({value.low:.2f} to {value.high:.2f})")
    Console().print(table)
    table = Table(title="probability in common with the target at temperature 1 (95 %)", caption=about)
    for column in ("map", "share"):
        table.add_column(column)
    for name, value in shared.items():
        table.add_row(name, f"{value.value:.3f} ({value.low:.3f} to {value.high:.3f})")
    Console().print(table)
    if chosen.json:
        with open(chosen.json, "w", encoding="utf-8") as file:
            rows = {name: asdict(value) for name, value in found.items()}
            json.dump(rows | {f"{name}, in common": asdict(value) for name, value in shared.items()}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
