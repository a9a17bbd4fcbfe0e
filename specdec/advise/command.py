"""`specdec advise`: how fast a target would be with each of some drafts or heads, before anything is deployed.

The target answers prompts; each draft or head reads the answers once. Steps are those the services measure when they
start.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from specdec.advise import view
from specdec.advise.forecast import Estimate, Times
from specdec.advise.measuring import Reading, classes_of, head_readings_of, readings_of, written
from specdec.advise.report import Advice, advice_of, rounds_forecast
from specdec.advise.serving import (
    NONE,
    Outcome,
    Served,
    acceptance_of,
    mean_length_of,
    observe,
    probe,
    rate_of,
    served,
)
from specdec.advise.settings import AdviseSettings
from specdec.engine.eagle.folder import is_eagle, load_eagle, target_facts
from specdec.engine.eagle.network import EagleHead
from specdec.engine.heads import CONFIG_FILE as MEDUSA_FILE
from specdec.engine.interface import Features
from specdec.engine.loading.devices import find_device, prepare_libraries
from specdec.engine.loading.model import load_offline_target
from specdec.engine.loading.model_folder import ModelFolder, open_model_folder, shown_name, weight_files_of
from specdec.errors import ConfigError
from specdec.folders import expanded, has_file
from specdec.protocol.types import Rule, kind_of
from specdec.terminal import make_console, print_text


@dataclass(frozen=True, slots=True)
class Drafter:
    """What is forecast: a draft model or, with `head`, an EAGLE-3 head on the target. `name`: as it was given."""

    name: str
    shown: str
    weight_bytes: int
    head: EagleHead | None = None


def advise(settings: AdviseSettings) -> int:
    """Measures, predicts, prints. Raises SpecdecError."""
    console = make_console(is_for_errors=True)
    if settings.plot:
        view.check_plot(settings.plot)  # before minutes of measuring
    prepare_libraries(settings.threads or None)
    device = str(find_device(settings.device))
    drafters = drafters_of(settings)
    readings = measured(settings, drafters, device, console)
    advices, times, checks = [], [], []
    for drafter, own in zip(drafters, readings):
        draft, heads = (NONE, drafter.name) if drafter.head else (drafter.name, NONE)
        with served(settings.target, draft, device, settings.threads or 1, heads) as pair:
            its_times = times_of(settings, pair, own, console)
            prices = settings.target_price, 0.0 if drafter.head else settings.draft_price
            advice = advice_of(drafter.shown, drafter.weight_bytes, own, its_times, prices)
            advices.append(advice)
            times.append(its_times)
            if settings.check:
                checks.append(observed_of(settings, pair, advice, own, console))
    tell(settings, advices, times, checks)
    if settings.plot:
        view.picture_of(advices, times).savefig(settings.plot, dpi=110)
    return 0


def drafters_of(settings: AdviseSettings) -> list[Drafter]:
    """Returns drafts, then heads. Raises ConfigError or ModelRefused for what is not served with the target."""
    target, drafts = open_model_folder(settings.target), [open_model_folder(name) for name in settings.draft]
    check_kinds(target, drafts)
    heads = [head_of(name, target) for name in settings.heads]
    files = [folder.weight_files for folder in drafts]
    files += [weight_files_of(expanded(name), name) for name in settings.heads]
    names = *settings.draft, *settings.heads
    sizes = [sum(file.stat().st_size for file in own) for own in files]
    return [Drafter(*own) for own in zip(names, names_of(names), sizes, [*[None] * len(drafts), *heads])]


def head_of(name: str, target: ModelFolder) -> EagleHead:
    """Returns the EAGLE-3 head of a target in a folder. Raises ConfigError for a folder of none, such as one of
    Medusa's heads, and ModelRefused for a head that does not fit the target."""
    folder = expanded(name)
    if not is_eagle(folder):
        what = "has Medusa's heads" if has_file(folder / MEDUSA_FILE) else "has no config.json"
        raise ConfigError(f"--heads {name} {what}; it must be the folder of an EAGLE-3 head")
    return load_eagle(folder, target_facts(target))


def check_kinds(target: ModelFolder, drafts: Sequence[ModelFolder]) -> None:
    """Raises ConfigError for a draft of another kind than the target, and for one of an encoder-decoder target with
    another tokenizer: neither is served."""
    for draft in drafts:
        if draft.has_encoder is not target.has_encoder:
            kinds = kind_of(draft.has_encoder), kind_of(target.has_encoder)
            raise ConfigError(f"--draft {draft.path} is {kinds[0]}, the target {kinds[1]}: give one of its kind")
        if target.has_encoder and draft.tokenizer.fingerprint != target.tokenizer.fingerprint:
            limit = "one for an encoder-decoder target must have its own"
            raise ConfigError(f"--draft {draft.path} has another tokenizer than the target; {limit}")


def names_of(drafts: Sequence[str]) -> list[str]:
    """Returns what drafts and heads are called in tables, JSON and picture: those that would share a name as they were
    given."""
    shown = [shown_name(draft) for draft in drafts]
    return [own if shown.count(own) == 1 else draft for own, draft in zip(shown, drafts)]


def measured(
    settings: AdviseSettings, drafters: Sequence[Drafter], device: str, console: Console
) -> list[list[Reading]]:
    """Returns every drafter's agreement along the target's texts; models are in memory only meanwhile."""
    folder = open_model_folder(settings.target)
    target = load_offline_target(settings.target, device)
    about = settings.text_temperatures, settings.text_tokens, settings.text_seed
    texts = written(target, folder, about, classes_of(settings.prompts), console, device)
    readings = []
    for own in drafters:
        if own.head is None:
            readings.append(readings_of(target, (settings.target, own.name, own.shown), texts, device, console))
        else:
            assert isinstance(target, Features), "a decoder has features"
            readings.append(head_readings_of(target, own.head, own.shown, texts, device, console))
    return readings


def times_of(settings: AdviseSettings, pair: Served, readings: Sequence[Reading], console: Console) -> Times:
    """Returns the times to predict with: the pair's own, measured in a few rounds of each length. Raises
    SpecdecError."""
    rounds_s = asyncio.run(probe(pair.address, [own.text for own in readings], settings.text_tokens, console))
    given_s = settings.target_ms / 1e3, settings.draft_ms / 1e3
    return pair.times(rounds_s, given_s, settings.rtt_ms / 1e3, settings.overhead_ms / 1e3)


def observed_of(
    settings: AdviseSettings, pair: Served, advice: Advice, readings: Sequence[Reading], console: Console
) -> dict[str, Any]:
    """Serves the recommended plan, or one draft token if none is, and returns predicted beside observed values: of the
    plan, and of its rounds by rule."""
    length = advice.best or 1
    texts = [own.text for own in readings]
    seen = asyncio.run(observe(pair.address, texts, length, settings.text_tokens, console))
    own = [outcome for outcome in seen if outcome.rule is outcome.text.params.rule]
    plan, rate = advice.plans[length - 1], rate_of(own)
    plain_rate = rate_of([outcome for outcome in seen if outcome.rule is None])
    rounds = compared((plan.acceptance, plan.tokens), own)
    rounds["values"] |= {
        "tokens/s": (plan.rate, rate),
        "plain": (advice.plain_rate, plain_rate),
        "of plain": (plan.ratio, rate.times(1 / plain_rate.value)),
    }
    ruled = {rule: [outcome for outcome in seen if outcome.rule is rule] for rule in Rule}
    rules = {
        rule.name: compared(rounds_forecast(readings, length, rule), outcomes)
        for rule, outcomes in ruled.items()
        if outcomes
    }
    return {"draft": advice.draft, "length": length, **rounds, "rules": rules}


def compared(forecast: tuple[Estimate, Estimate], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Acceptance and tokens of a round, predicted beside observed, and the draft tokens that were verified for them."""
    acceptance, tokens = forecast
    values = {
        "acceptance": (acceptance, acceptance_of(outcomes)),
        "tokens a round": (tokens, mean_length_of(outcomes)),
    }
    return {"draft_tokens": int(sum(outcome.drafted for outcome in outcomes)), "values": values}


def tell(
    settings: AdviseSettings, advices: Sequence[Advice], times: Sequence[Times], checks: Sequence[dict[str, Any]]
) -> None:
    """Prints tables, or one JSON object."""
    if settings.as_json:
        told = {"settings": settings.model_dump(mode="json"), "drafts": [advice.as_json() for advice in advices]}
        print_text(
            json.dumps(
                {**told, "checks": checks},
                indent=1,
                default=lambda value: {name: getattr(value, name) for name in value.__slots__},
            )
        )
        return
    console = make_console(has_highlights=False)
    for advice in advices:
        view.show(console, advice, settings.rtt_ms / 1e3)
    if len(advices) > 1:
        console.print(view.sweep_table(advices))
        console.print(view.trip_table(advices, times))
    for check in checks:
        console.print(check_table(check))


def check_table(check: dict[str, Any]) -> Table:
    """Predicted beside observed: of the plan, each text under the rule that reproduces it, then by rule."""
    table = Table(title=f"{check['draft']}, k = {check['length']}: predicted, and then served")
    for name in ("rule", "drafted", "", "predicted", "served", "ratio"):
        table.add_column(name, justify="left" if name == "rule" else "right")
    for rule, part in {"": check, **check["rules"]}.items():
        head = [rule, str(part["draft_tokens"])]
        for name, (predicted, seen) in part["values"].items():
            value = predicted if isinstance(predicted, float) else predicted.value
            ratio = f"{seen.value / value:.2f}" if value else ""
            table.add_row(*head, name, f"{value:.3f}", view.of(seen, 3), ratio)
            head = ["", ""]
    return table
