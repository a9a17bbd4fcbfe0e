"""Texts of the target and the agreement of every draft, or head on it, along them, with progress bars."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from specdec.advise.agreement import Agreement, Reader, agreement_along, own_tokens
from specdec.advise.chains import ChainReader
from specdec.distill.plans import Plans
from specdec.distill.texts import LabelledTexts
from specdec.distill.writing import TextWriter, check_lengths, params_of
from specdec.distill.written import prompts_of, temperatures_of
from specdec.engine.eagle.model import EagleTarget, FeatureTarget
from specdec.engine.eagle.network import EagleHead
from specdec.engine.interface import CausalModel
from specdec.engine.loading.model import load_model
from specdec.engine.loading.model_folder import ModelFolder
from specdec.errors import ConfigError
from specdec.protocol.types import ResolvedSamplingParams, Rule

TEXTS_AT_ONCE = 64
EVERYTHING = "all"  # the class of prompts without one

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Text:
    """A text of the target: its prompt's class, how it was drawn, and its tokens. Those after position `first` are the
    answer; the first `params.encoder_length` are an encoder's input."""

    prompt_class: str
    params: ResolvedSamplingParams
    token_ids: tuple[int, ...]
    first: int

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The tokens of the prompt."""
        return self.token_ids[: self.first + 1]


def tracked(items: Sequence[Item], title: str, console: Console) -> Iterable[Item]:
    """Yields the items with a bar and the time that is left, on a terminal. It is redrawn rarely, for rounds are timed
    meanwhile."""
    return track(items, title, console=console, disable=not console.is_terminal, refresh_per_second=2)


def by_prompt(texts: Iterable[Text], numbers: Iterable[Sequence[float]]) -> list[list[float]]:
    """Returns the numbers of texts, added up over those of one prompt: the groups of a bootstrap."""
    rows: dict[tuple[int, ...], list[Sequence[float]]] = defaultdict(list)
    for text, own in zip(texts, numbers, strict=True):
        rows[text.prompt_ids].append(own)
    return [[sum(column) for column in zip(*own)] for own in rows.values()]


@dataclass(frozen=True, slots=True)
class Reading:
    """One draft, or head, along one text. The agreement ends with the text; that of a head begins behind the answer's
    first token, that of a draft at it."""

    text: Text
    agreement: Agreement

    @property
    def rule(self) -> Rule:
        """The rule that reproduces the text: GREEDY at temperature 0, else COUPLED, with its seed."""
        return self.text.params.rule

    def coins(self, rule: Rule | None = None) -> Tensor:
        """Returns by place in a chain, the last for all later ones too, the probabilities that the positions pass at
        which a round may draft: those behind the answer's first token, which comes with the prompt's last row. Under a
        rule, or the one that reproduces the text.  # [places, positions] float64"""
        rule, own = rule or self.rule, self.agreement
        every = torch.cat([own.passes[rule][None], *(own.deeper[rule] for _ in [rule] if rule in own.deeper)])
        return every[:, every.shape[1] - (len(self.text.token_ids) - self.text.first - 2) :]


def classes_of(file: Path) -> dict[str, str]:
    """Returns the prompts of a file, and the class of each. Raises ConfigError."""
    prompts = dict.fromkeys(prompts_of(file), EVERYTHING)
    if not prompts:
        raise ConfigError(f"--prompts {file} has no prompts")
    if file.suffix == ".jsonl":
        for line in filter(str.strip, file.read_text(encoding="utf-8").split("\n")):
            entry = json.loads(line)
            prompts[entry["prompt"]] = str(entry.get("class", EVERYTHING))
    return prompts


def written(
    model: CausalModel,
    folder: ModelFolder,
    settings_of_texts: tuple[str, int, int],
    classes: Mapping[str, str],
    console: Console,
    device: str = "cpu",
) -> list[Text]:
    """Returns the target's answers to all prompts at all temperatures. `settings_of_texts`: temperatures, most tokens,
    seed. `classes`: prompts, and the class of each. `device`: where the model is. Raises ConfigError, SpecdecError."""
    listed, token_count, seed = settings_of_texts
    temperatures = temperatures_of(listed, "--text-temperatures")
    about = folder.path, temperatures, token_count, f"advise/{seed}", list(classes)
    plans = Plans(*about, beginning=folder.beginning).make(0, len(classes) * len(temperatures))
    lengths = [(plan.length_max, plan.encoder_length) for plan in plans]
    longest = check_lengths(lengths, token_count, model.description)
    parts: list[LabelledTexts] = []
    at_once = range(0, len(plans), TEXTS_AT_ONCE)
    with TextWriter(model, TEXTS_AT_ONCE, longest, device) as writer:
        for first in tracked(at_once, "the target writes", console):
            parts.append(writer.write(plans[first : first + TEXTS_AT_ONCE]))
    texts = LabelledTexts.joined(parts)
    tokens = texts.token_ids.split(texts.lengths.tolist())
    inputs = [plan.passages[0].given[: plan.encoder_length] for plan in plans]
    names = [name for name in classes.values() for _ in temperatures]
    made = [
        Text(name, params_of(plan, plan.passages[-1]), (*source, *own.tolist()), len(source) + first)
        for name, plan, source, own, first in zip(names, plans, inputs, tokens, texts.answered_from.tolist())
    ]
    if all(len(text.token_ids) <= text.first + 2 for text in made):
        raise ConfigError("the target's answers to --prompts all end within 2 tokens, without a round to predict")
    return [text for text in made if len(text.token_ids) > text.first + 1]


def readings_of(
    target: CausalModel, names: tuple[str, str, str], texts: Sequence[Text], device: str, console: Console
) -> list[Reading]:
    """Returns one draft's agreement along all texts. `names`: of target and draft, and the draft's in the bar. Raises
    ConfigError for a draft with fewer positions than a text, SpecdecError."""
    target_name, draft_name, shown_name = names
    draft = load_model(  # eager: it reads pieces of more rows than captured steps have
        draft_name, device=device, enforce_eager=True, has_stable_rows=False, target_tokenizer=target_name
    )
    longest = max(len(own_tokens(model, text.token_ids, text.first)[0]) for text in texts for model in (target, draft))
    if longest > draft.description.positions_max:
        limit = f"the draft has {draft.description.positions_max} positions"
        raise ConfigError(f"the longest text has {longest} tokens; {limit}: lower --text-tokens")
    readers = Reader(target, longest, device), Reader(draft, longest, device)
    shown = tracked(texts, f"{shown_name} reads", console)
    return [Reading(text, agreement_along(*readers, text.token_ids, text.first, text.params)) for text in shown]


def head_readings_of(
    target: FeatureTarget, head: EagleHead, shown_name: str, texts: Sequence[Text], device: str, console: Console
) -> list[Reading]:
    """Returns the agreement of a head on the target along the texts in which it has something to draft. Raises
    SpecdecError."""
    model = EagleTarget(target, head)
    reader = Reader(model, max(len(text.token_ids) for text in texts), device)
    readers = reader, ChainReader(model, reader.blocks)
    drafted = [text for text in texts if len(text.token_ids) > text.first + 2]
    shown = tracked(drafted, f"{shown_name} reads", console)
    return [Reading(text, agreement_along(*readers, text.token_ids, text.first + 1, text.params)) for text in shown]
