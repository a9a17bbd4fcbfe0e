"""Draws the acceptance of draft tokens by class of prompt, over a coordinator that serves:

    python examples/acceptance_by_class.py examples/prompts.jsonl [--address HOST:PORT]

Each line of the file is an object with `class` and `prompt`. Every round offers as many draft tokens as the draft has,
at most --draft-tokens, so that classes are compared under one plan; texts are greedy.
"""

import argparse
import asyncio
import json
from collections import defaultdict
from pathlib import Path

from rich.bar import Bar
from rich.console import Console
from rich.table import Table

from specdec.client.events import Statistics
from specdec.client.request import make_request
from specdec.client.run import acceptance_of
from specdec.client.stream import Client


async def statistics_by_class(asked: argparse.Namespace) -> dict[str, list[Statistics]]:
    """Returns the statistics of each text, by the class of its prompt. Raises SpecdecError."""
    found: dict[str, list[Statistics]] = defaultdict(list)
    plan = {"policy": "fixed", "num_speculative_tokens": asked.draft_tokens, "proposers": ["draft"]}
    async with Client(asked.address) as client:
        for line in asked.prompts.read_text(encoding="utf-8").splitlines():
            told = json.loads(line)
            request = make_request(told["prompt"], max_tokens=asked.max_tokens, temperature=0.0, **plan)
            found[told["class"]].append((await client.read(request)).statistics)
    return found


def table_of(found: dict[str, list[Statistics]]) -> Table:
    """Returns a line for each class, the best first."""
    table = Table("class", "prompts", "draft tokens", "accepted", "tokens a round", "")
    for name, own in sorted(found.items(), key=lambda item: -acceptance_of(item[1])[0]):
        rate, tokens = acceptance_of(own)
        drafted = sum(statistics.num_draft_tokens for statistics in own)
        bar = Bar(size=1.0, begin=0.0, end=rate, width=30, color="green", bgcolor="bright_black")
        table.add_row(name, str(len(own)), str(drafted), f"{rate:.0%}", f"{tokens:.2f}", bar)
    return table


parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
parser.add_argument("prompts", type=Path, help="JSON lines with class and prompt")
parser.add_argument("--address", default="127.0.0.1:50051", help="of the coordinator (%(default)s)")
parser.add_argument("--max-tokens", type=int, default=64, help="of each text (%(default)s)")
parser.add_argument("--draft-tokens", type=int, default=4, help="of a round, at most (%(default)s)")
Console().print(table_of(asyncio.run(statistics_by_class(parser.parse_args()))))
