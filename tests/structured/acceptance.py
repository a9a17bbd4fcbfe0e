"""`python -m tests.structured.acceptance`: what speculation gives under 40 schemas, and what masks of the draft give.

The same texts are generated without speculation, with a draft that masks, with the same draft when its masks allow
everything, and with the masking draft beside forced tokens, all with four draft tokens a round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.bars import Bar, add_check_flag, conclude
from tests.structured.schemas import SCHEMAS
from tests.support.harness import heldout_prompts
from tests.support.services import MODELS, Client, Services, fixed, running
from tests.support.unlawful_draft import lying

DRAFT_LENGTH = 4
RULES: dict[str, dict[str, Any]] = {
    "GREEDY": {"temperature": 0.0},
    "COUPLED": {"temperature": 1.0},
    "REJECTION": {"temperature": 1.0},
}
OFF, UNMASKED, MASKED, FORCED = "off", "draft without masks", "draft", "draft and forced tokens"
COLUMNS = ("rule", "speculation", "tokens/round", "draft tokens", "accepted", "acceptance", "forced", "accepted")
PROPOSERS = {UNMASKED: ["draft"], MASKED: ["draft"], FORCED: ["draft", "grammar"]}


@contextlib.contextmanager
def clients(services: Services) -> Iterator[dict[str, Client]]:
    """A client for each way: one coordinator has the draft without masks."""
    with lying("all", MODELS / "draft", MODELS / "target") as address:
        with services.coordinator_with(draft=(address,)) as other:
            yield {OFF: services.client, UNMASKED: other, MASKED: services.client, FORCED: services.client}


def generate(client: Client, rule: str, way: str, number: int, prompt: str, tokens_max: int) -> Counter[str]:
    """Returns what came of one text."""
    how = fixed(DRAFT_LENGTH, proposers=PROPOSERS[way]) if way in PROPOSERS else {"policy": "POLICY_OFF"}
    found = client.generate(
        prompt,
        timeout_s=600.0,
        grammar={"json_schema": json.dumps(SCHEMAS[number % len(SCHEMAS)].schema)},
        max_tokens=tokens_max,
        seed=None if rule == "REJECTION" else number,
        speculative=how | {"rule": f"RULE_{rule}"},
        **RULES[rule],
    )
    own = found.finished.statistics
    return Counter(
        tokens=len(found.token_ids),
        rounds=own.rounds,
        offered=own.num_model_draft_tokens,
        accepted=own.num_model_accepted_tokens,
        forced_offered=own.num_grammar_draft_tokens,
        forced_accepted=own.num_grammar_accepted_tokens,
    )


def row_of(rule: str, way: str, own: Counter[str]) -> list[str]:
    """A line of the table."""
    counts = (own["offered"], own["accepted"])
    share = f"{acceptance(own):.3f}" if own["offered"] else "-"
    rate = f"{own['tokens'] / own['rounds']:.2f}"
    return [
        rule,
        way,
        rate,
        *map(str, counts),
        share,
        *(str(own[name]) for name in ("forced_offered", "forced_accepted")),
    ]


def acceptance(own: Counter[str]) -> float:
    """Accepted tokens of the draft over those offered."""
    return own["accepted"] / max(1, own["offered"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.structured.acceptance", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--texts", type=int, default=80, help="of each rule and way (%(default)s)")
    parser.add_argument("--streams", type=int, default=8, help="texts at a time (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=200, help="of a text (%(default)s)")
    add_check_flag(parser)
    asked = parser.parse_args(arguments)
    console, prompts = Console(width=130), list(heldout_prompts().values())
    cells = [(rule, way) for rule in RULES for way in (OFF, *PROPOSERS)]
    counts = {cell: Counter[str]() for cell in cells}
    with running(MODELS / "target", MODELS / "draft", threads=1) as services, clients(services) as own:
        jobs = [(number, cell) for number in range(asked.texts) for cell in cells]

        def run(job: tuple[int, tuple[str, str]]) -> Counter[str]:
            number, (rule, way) = job
            return generate(own[way], rule, way, number, prompts[number % len(prompts)], asked.max_tokens)

        with ThreadPoolExecutor(asked.streams) as pool:
            results = track(pool.map(run, jobs), total=len(jobs), console=Console(stderr=True), description="texts")
            for (_, cell), result in zip(jobs, results):
                counts[cell].update(result)
    table = Table(title=f"{asked.texts} texts under {len(SCHEMAS)} schemas each", title_justify="left")
    for place, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if place < 2 else "right")
    for (rule, way), found in counts.items():
        table.add_row(*row_of(rule, way, found))
    console.print(table)
    bars = [
        Bar(
            f"{rule}: acceptance with masks / without",
            1.0,
            acceptance(counts[rule, MASKED]) / acceptance(counts[rule, UNMASKED]),
        )
        for rule in RULES
    ]
    return conclude(bars, console, asked.check)


if __name__ == "__main__":
    sys.exit(main())
