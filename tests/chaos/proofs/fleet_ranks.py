"""A fleet whose target of two ranks loses one: its texts go on at a target of one process, of other numerics.

The shipped pair. Each client is told of the other numerics before the first token from there. What came before is the
text of the two ranks; what follows is what a target of one process makes of the same beginning.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.bars import Bar, worst_of
from bench.harness import DRAFT_MODEL, TARGET_MODEL, heldout_prompts
from specdec.config import CoordinatorSettings, DraftSettings, TargetSettings
from tests.chaos.fleets import Fleet, Member, Stream, fleet, wait_under_way
from tests.chaos.processes import Restartable
from tests.chaos.tables import COMMON, REPLICA
from tests.support.services import Client, fixed

PROMPT_CHARACTERS = 200
TOKENS = 120
STRIKES = {
    f"rank {rank} {how}": (rank, number)
    for rank in (0, 1)
    for how, number in (("killed", signal.SIGKILL), ("frozen", signal.SIGSTOP))
}


def lose_rank(target: Member, rank: int, number: int) -> None:
    """Signals one rank of a target; its other one ends by itself."""
    children = Path(f"/proc/{target.pid}/task/{target.pid}/children").read_text(encoding="ascii").split()
    os.kill([target.pid, *map(int, children)][rank], number)


def struck(place: Fleet, alone: Client, requests: list[dict[str, Any]], strike: tuple[int, int]) -> list[str]:
    """Loses a rank under texts and starts its target again; returns what is wrong. `alone`: a client of a coordinator
    without that target."""
    client, split = place.clients[0], place.targets[0]
    undisturbed = [client.generate(**{**asked, "speculative": {"enabled": False}}) for asked in requests]
    streams = [Stream(client, client.request(**asked)) for asked in requests]
    wait_under_way(streams, 10)
    lose_rank(split, *strike)
    wrong = []
    for asked, whole, stream in zip(requests, undisturbed, streams):
        tokens = stream.join().outcome.token_ids
        if stream.error is not None:
            wrong.append(f"{stream.error.code().name}: {stream.error.details()}")
            continue
        if not stream.moved_at:
            wrong.append("a text was not told of the other numerics")
            continue
        (index,) = stream.moved_at
        rest = alone.generate(**asked, resume=tokens[:index]).token_ids
        if [one.first_output_index for one in stream.outcome.moved] != [index] or tokens[:index] != whole.token_ids[
            :index
        ]:
            wrong.append(f"the first {index} tokens are not those of two ranks")
        if tokens[index:] != rest:
            wrong.append(f"the tokens from {index} on are not those of one process")
    split.kill()
    split.restart()
    place.wait_whole()
    return wrong


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=16, help="(%(default)s)")
    parser.add_argument("--points", type=int, default=200, help="texts under way at each strike (%(default)s)")
    parser.add_argument("--strikes", nargs="+", choices=STRIKES, default=list(STRIKES), help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")


def prove(asked: argparse.Namespace, console: Console) -> list[Bar]:
    """Runs the proof."""
    chance = random.Random(asked.seed)
    prompts = [prompt[:PROMPT_CHARACTERS] for prompt in heldout_prompts().values()]
    small: dict[str, Any] = {**REPLICA, "model": str(TARGET_MODEL), "max_model_len": 512}
    targets = [TargetSettings(**small, tensor_parallel_size=size) for size in (2, 1, 1)]
    draft = DraftSettings(**{**small, "model": str(DRAFT_MODEL)})
    points: dict[str, float] = dict.fromkeys(asked.strikes, 0)
    wrong: list[str] = []
    with fleet(targets, [draft], [{"drain_grace_s": 1.0}]) as place:
        own = CoordinatorSettings(**COMMON, tokenizer=str(TARGET_MODEL), target=place.targets[1].address)
        second = Restartable("coordinator alone", "coordinator", own)
        alone = Client(second.wait_ready())
        try:
            while left := [name for name, count in points.items() if count < asked.points]:
                name = chance.choice(left)
                requests = [
                    {
                        "prompt": chance.choice(prompts),
                        "max_tokens": TOKENS,
                        "ignore_eos": True,
                        "temperature": float(number % 2),
                        "seed": chance.randrange(1 << 32),
                        "speculative": fixed(3),
                    }
                    for number in range(asked.streams)
                ]
                wrong += struck(place, alone, requests, STRIKES[name])
                points[name] += asked.streams
                console.print(f"{name}: {points[name]:g} points, {len(wrong)} wrong")
        finally:
            alone.close()
            second.stop()
    shown = "; ".join(wrong[:3])
    return [
        Bar("texts with an error or other tokens, or not told", 0, len(wrong), shown, is_limit=True),
        worst_of("texts under way at each strike", asked.points, points),
    ]
