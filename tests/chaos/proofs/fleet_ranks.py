"""A fleet whose target of two ranks loses one: its texts go on at a target of one process, of other numerics.

The shipped pair. Each client is told of the other numerics before the first token from there. What came before is the
text of the two ranks; what follows is what a target of one process makes of the same beginning.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.bars import Bar, worst_of
from specdec.config import CoordinatorSettings, DraftSettings, TargetSettings
from tests.chaos.fleets import PATIENCE_S, Fleet, Member, Stream, fleet, wait_under_way
from tests.chaos.processes import Restartable
from tests.chaos.tables import COMMON, REPLICA
from tests.support.harness import DRAFT_MODEL, TARGET_MODEL, heldout_prompts
from tests.support.services import Client, fixed
from tests.support.waiting import until

PROMPT_CHARACTERS = 200
TOKENS = 120
WIDTH = 8  # of the texts that others are compared with
STRIKES = {
    f"rank {rank} {how}": (rank, number)
    for rank in (0, 1)
    for how, number in (("killed", signal.SIGKILL), ("frozen", signal.SIGSTOP))
}


def lose_rank(target: Member, rank: int, number: int) -> None:
    """Signals one rank of a target; its other one ends by itself."""
    children = Path(f"/proc/{target.pid}/task/{target.pid}/children").read_text(encoding="ascii").split()
    os.kill([target.pid, *map(int, children)][rank], number)


def has_target(client: Client) -> bool:
    """Whether its coordinator uses a target."""
    return bool(client.described().targets)


def struck(
    place: Fleet, split: Client, one: Client, requests: list[dict[str, Any]], strike: tuple[int, int]
) -> tuple[int, list[str]]:
    """Loses a rank under texts and starts its target again; returns how many texts moved, and what is wrong. `split`,
    `one`: clients of coordinators that have the target of two ranks, and one of one process, alone."""
    client, plain = place.clients[0], [{**asked, "speculative": {"enabled": False}} for asked in requests]
    of_split, of_one = (own.generate_all(plain, width=WIDTH) for own in (split, one))
    streams = [Stream(client, client.request(**asked)) for asked in requests]
    until(lambda: all(stream.outcome.started is not None or stream.has_ended for stream in streams), PATIENCE_S)
    numerics = of_split[0].started.numerics
    wait_under_way([one for one in streams if one.error is None and one.outcome.started.numerics == numerics], 10)
    lose_rank(place.targets[0], *strike)
    wrong, moved_count = [], 0
    for asked, texts, stream in zip(requests, zip(of_split, of_one), streams):
        tokens = stream.join().outcome.token_ids
        if stream.error is not None:
            wrong.append(f"{stream.error.code().name}: {stream.error.details()}")
            continue
        was_split = stream.outcome.started.numerics == numerics
        expected, told = texts[0 if was_split else 1].token_ids, stream.moved_at
        if told:
            moved_count += 1
            (index,) = told
            if not was_split or [own.first_output_index for own in stream.outcome.moved] != [index]:
                wrong.append(f"it was told of a move at {index}, and did not move there")
            expected = expected[:index] + one.generate(**asked, resume=tokens[:index]).token_ids
        if tokens != expected:
            wrong.append(f"{tokens} is not {expected}; of two ranks at first: {was_split}; moved at {told}")
    place.targets[0].kill()
    place.targets[0].restart()
    place.coordinators[0].child.stop()  # which ejects a target that is lost again and again, for ever longer
    place.coordinators[0].restart()
    place.wait_whole()
    return moved_count, wrong


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=32, help="(%(default)s)")
    parser.add_argument("--points", type=int, default=100, help="texts that move at each strike (%(default)s)")
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
        with contextlib.ExitStack() as stack:
            alone = []
            for number, target in enumerate(place.targets[:2]):
                settings = CoordinatorSettings(**COMMON, tokenizer=str(TARGET_MODEL), target=target.address)
                coordinator = Restartable(f"coordinator of target {number} alone", "coordinator", settings)
                stack.callback(coordinator.stop)
                alone.append(Client(coordinator.wait_ready()))
                stack.callback(alone[-1].close)
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
                moved_count, found = struck(place, *alone, requests, STRIKES[name])
                wrong += found
                points[name] += moved_count
                console.print(f"{name}: {points[name]:g} points, {len(wrong)} wrong")
                until(lambda: has_target(alone[0]), PATIENCE_S)
    shown = "; ".join(wrong[:3])
    return [
        Bar("texts with an error or other tokens, or told wrongly", 0, len(wrong), shown, is_limit=True),
        worst_of("texts that moved at each strike", asked.points, points),
    ]
