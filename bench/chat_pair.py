"""`python -m bench.chat_pair`: the real chat model with its shipped draft, over plain decoding of the same services.

Held-out questions, as many of every class; plain decoding (off) and the service's own choice (auto, all proposers) in
turns on every question, greedy and with a seed at temperature 0.7, on loopback and with a round trip to the draft. The
target has one core; draft and coordinator share the other.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.bars import Bar, add_check_flag, as_json, conclude
from bench.pipeline.measurements import ratio_of
from bench.pipeline.placement import Placed, description, placed
from bench.pipeline.variants import OFF, RULES_DEFAULT, Variant
from bench.prompts import Prompt
from bench.proposers.chat import chat_request
from bench.proposers.texts import Found, Text, generate, per_second
from specdec.chat.template import ChatTemplate
from specdec.engine.loading.chat_model import chat_model
from specdec.errors import SpecdecError
from specdec.folders import CHAT_DRAFT, EMBEDDED_MODELS

AUTO = Variant("auto", None, proposers=())  # no names: all that the service has
GREEDY, SEEDED = RULES_DEFAULT[:2]
RATE_BARS = {(GREEDY, 0.0): 1.4, (SEEDED, 0.0): 1.3, (GREEDY, 50.0): 1.2, (SEEDED, 50.0): 1.2}  # by rule and RTT in ms
Cell = tuple[str, float]


def questions(per_class: int) -> list[Prompt]:
    """Returns the first held-out questions of every class."""
    lines = (EMBEDDED_MODELS / "chat_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    chosen: dict[str, list[Prompt]] = {}
    for row in map(json.loads, lines):
        chosen.setdefault(row["class"], []).append(Prompt(str(row["id"]), row["class"], row["prompt"]))
    return [question for own in chosen.values() for question in own[:per_class]]


def texts_of(place: Placed, cell: Cell, template: ChatTemplate, asked: argparse.Namespace) -> Found:
    """Returns the texts of one rule and round trip; the first question warms up."""
    rule, rtt_ms = cell
    place.set_rtt(rtt_ms, 0.2)
    found, chosen = Found(), questions(asked.per_class)
    for question in track([chosen[0], *chosen], f"{rule}, RTT {rtt_ms:g} ms", console=Console(stderr=True)):
        for variant, stub in ((OFF, place.stubs[-1]), (AUTO, place.stubs[0])):
            request = chat_request(template, question, variant, asked.tokens, rule)
            found.add(variant.name, question.name, generate(stub, request))
    return found


def table_of(found: dict[Cell, Found]) -> Table:
    """A line for each rule and round trip; the draft's tokens alone count as accepted."""
    table = Table(title="the chat pair")
    for name in ("rule", "RTT ms", "off tok/s", "auto tok/s", "auto / off", "draft accepted", "tokens a round"):
        table.add_column(name, justify="left" if name == "rule" else "right")
    for (rule, rtt_ms), own in found.items():
        off, auto = (list(own.texts[variant.name].values()) for variant in (OFF, AUTO))
        counts = [text.statistics for text in auto]
        proposed = sum(each.num_model_draft_tokens for each in counts)
        accepted = sum(each.num_model_accepted_tokens for each in counts) / max(1, proposed)
        length = sum(len(text.token_ids) for text in auto) / sum(each.rounds for each in counts)
        columns = (f"{rate(off):.1f}", f"{rate(auto):.1f}", str(own.ratio(AUTO.name, OFF.name, per_second, None)))
        table.add_row(rule, f"{rtt_ms:g}", *columns, f"{accepted:.2f}", f"{length:.2f}")
    return table


def rate(texts: list[Text]) -> float:
    """Tokens per second of all texts together."""
    return sum(len(text.token_ids) for text in texts) / sum(len(text.token_ids) / text.tokens_per_s for text in texts)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.chat_pair", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--per-class", type=int, default=2, help="questions of every class (%(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the JSON (%(default)s)")
    add_check_flag(parser)
    asked = parser.parse_args()
    console = Console(width=150)
    try:
        folder = chat_model()
        template = ChatTemplate.read(folder)
        assert template is not None
        with placed(folder, "bfloat16", "auto", draft_model=CHAT_DRAFT) as place:
            hardware = description(place)
            found = {cell: texts_of(place, cell, template, asked) for cell in RATE_BARS}
    except SpecdecError as error:
        print(f"chat_pair: {error}", file=sys.stderr)
        return 1
    console.print(table_of(found))
    ratios = {cell: own.ratio(AUTO.name, OFF.name, per_second, None) or ratio_of([0.0]) for cell, own in found.items()}
    bars = [
        Bar(f"chat pair, auto / off, {rule}, RTT {rtt_ms:g} ms", bound, ratios[rule, rtt_ms].median)
        for (rule, rtt_ms), bound in RATE_BARS.items()
    ]
    asked.out.mkdir(parents=True, exist_ok=True)
    written = {"hardware": hardware, "bars": as_json(bars)}
    written |= {f"{rule}, RTT {rtt_ms:g} ms": asdict(own) for (rule, rtt_ms), own in ratios.items()}
    (asked.out / "chat_pair.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return conclude(bars, console, asked.check)


if __name__ == "__main__":
    sys.exit(main())
