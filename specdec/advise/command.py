"""`specdec advise`: how fast a target would be with each of some drafts, before anything is deployed.

The target answers prompts; each draft reads the answers once. Steps are those the services measure when they start.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from specdec.advise import view
from specdec.advise.forecast import Times
from specdec.advise.measuring import Reading, classes_of, readings_of, written
from specdec.advise.report import Advice, advice_of
from specdec.advise.serving import Observed, Served, observe, probe, served
from specdec.advise.settings import AdviseSettings
from specdec.engine.devices import find_device, prepare_libraries
from specdec.engine.model import load_model
from specdec.engine.model_folder import open_model_folder


def advise(settings: AdviseSettings) -> int:
    """Measures, predicts, prints. Raises SpecdecError."""
    console = Console(stderr=True)
    if settings.plot:
        view.check_plot(settings.plot)  # before minutes of measuring
    prepare_libraries(settings.threads or None)
    device = str(find_device(settings.device))
    drafts = [open_model_folder(name) for name in settings.draft]
    readings = measured(settings, device, console)
    prices = settings.target_price, settings.draft_price
    advices, times, checks = [], [], []
    for name, folder, own in zip(settings.draft, drafts, readings):
        weight_bytes = sum(file.stat().st_size for file in folder.weight_files)
        with served(settings.target, name, device) as pair:
            its_times = times_of(settings, pair, own)
            advice = advice_of(folder.path.name, weight_bytes, own, its_times, prices)
            advices.append(advice)
            times.append(its_times)
            if settings.check:
                checks.append(observed_of(settings, pair, advice, own))
    tell(settings, advices, checks)
    if settings.plot:
        view.draw(settings.plot, advices, times)
    return 0


def measured(settings: AdviseSettings, device: str, console: Console) -> list[list[Reading]]:
    """Returns every draft's agreement along the target's texts; models are in memory only meanwhile."""
    folder = open_model_folder(settings.target)
    target = load_model(settings.target, device=device, has_stable_rows=False)
    about = settings.text_temperatures, settings.text_tokens, settings.text_seed
    texts = written(target, folder, about, classes_of(settings.prompts), console, device)
    return [readings_of(target, (settings.target, name), texts, device, console) for name in settings.draft]


def times_of(settings: AdviseSettings, pair: Served, readings: Sequence[Reading]) -> Times:
    """Returns the times to predict with: the pair's own, measured in a few rounds of each length. Raises
    SpecdecError."""
    rounds_s = asyncio.run(probe(pair.address, [reading.text for reading in readings]))
    given_s = settings.target_ms / 1e3, settings.draft_ms / 1e3
    return pair.times(rounds_s, given_s, settings.rtt_ms / 1e3, settings.overhead_ms / 1e3)


def observed_of(settings: AdviseSettings, pair: Served, advice: Advice, readings: Sequence[Reading]) -> dict[str, Any]:
    """Serves the recommended plan, or one draft token if none is, and returns predicted beside observed values."""
    length = advice.best or 1
    texts = [reading.text for reading in readings]
    seen: Observed = asyncio.run(observe(pair.address, texts, length, settings.text_tokens))
    plan = advice.plans[length - 1]
    pairs = {
        "acceptance": (plan.acceptance, seen.acceptance),
        "tokens a round": (plan.tokens, seen.mean_length),
        "tokens/s": (plan.rate, seen.rate),
        "plain": (advice.plain_rate, seen.plain_rate),
        "of plain": (plan.ratio, seen.rate.times(1 / seen.plain_rate.value)),
    }
    verified = int(sum(count for _, count in seen.verified))
    return {"draft": advice.draft, "length": length, "draft_tokens": verified, "values": pairs}


def tell(settings: AdviseSettings, advices: Sequence[Advice], checks: Sequence[dict[str, Any]]) -> None:
    """Prints tables, or one JSON object."""
    if settings.as_json:
        told = {"settings": settings.model_dump(mode="json"), "drafts": [advice.as_json() for advice in advices]}
        print(
            json.dumps(
                {**told, "checks": checks},
                indent=1,
                default=lambda value: {name: getattr(value, name) for name in value.__slots__},
            )
        )
        return
    console = Console(highlight=False)
    for advice in advices:
        view.show(console, advice, settings.rtt_ms / 1e3)
    if len(advices) > 1:
        console.print(view.sweep_table(advices))
    if checks:
        console.print(check_table(checks))


def check_table(checks: Sequence[dict[str, Any]]) -> Table:
    """Predicted beside observed."""
    table = Table(title="predicted, and then served")
    for name in ("draft", "k", "drafted", "", "predicted", "served", "served / predicted"):
        table.add_column(name, justify="right" if name != "draft" else "left")
    for check in checks:
        for index, (name, (predicted, seen)) in enumerate(check["values"].items()):
            value = predicted if isinstance(predicted, float) else predicted.value
            head = [check["draft"], str(check["length"]), str(check["draft_tokens"])] if not index else [""] * 3
            ratio = f"{seen.value / value:.2f}" if value else ""
            table.add_row(*head, name, f"{value:.3f}", view.of(seen, 3), ratio)
    return table
