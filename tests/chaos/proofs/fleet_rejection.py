"""The distribution of texts under REJECTION whose targets are lost in their midst: the target's, whatever was redone.

Table models whose distribution is known exactly, and a clearly different draft. The links to both targets are dropped
again and again, so each text under way is sent to a target once more, with the draft tokens and distributions of its
round; some texts lose their target by SIGKILL. The statistic and its limit are those of tests/services.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.bars import Bar
from specdec.config import DraftSettings, TargetSettings
from specdec.engine.table_model import write_table_model
from tests.chaos.fleets import PATIENCE_S, Fleet, Stream, fleet, wait_longer, wait_under_way
from tests.chaos.proofs.fleet import strike_several
from tests.chaos.tables import REPLICA
from tests.services.test_distribution import (
    P_LIMIT,
    PROMPT,
    TOKENS_EACH,
    VOCABULARY_SIZE,
    WAYS,
    distribution_of,
    p_value,
    transitions,
)

WIDTH = 32
DELAY_MS = 3.0
TOKENS_BETWEEN = 100  # two losses
BIAS = 0.03  # of the draft's distribution, planted: rejected by the same statistic on the same sample


def asked_of(index: int) -> dict[str, Any]:
    """The arguments of one text."""
    speculative = {**WAYS[index % len(WAYS)], "rule": "RULE_REJECTION"}
    return {"prompt": PROMPT, "max_tokens": TOKENS_EACH, "ignore_eos": True, "speculative": speculative}


def wave(place: Fleet, first: int, is_killed: bool) -> list[Stream]:
    """Reads WIDTH texts whose targets are lost after every TOKENS_BETWEEN tokens: all links are dropped at once, or the
    targets killed, so that every text under way loses its own."""
    client = place.clients[0]
    streams = [Stream(client, client.request(**asked_of(first + number))) for number in range(WIDTH)]
    wait_under_way(streams, 1)
    while under_way := [stream for stream in streams if not stream.has_ended]:
        if is_killed:
            strike_several(place.targets)
            for stream in under_way:
                stream.join()
            break
        for target in place.targets:
            target.link.drop()
        wait_longer(under_way, TOKENS_BETWEEN)
    place.wait_whole()
    return streams


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--texts", type=int, default=260, help=f"of {TOKENS_EACH} tokens (%(default)s)")
    parser.add_argument("--bias", type=float, default=BIAS, help="of the draft that must be found (%(default)s)")


def prove(asked: argparse.Namespace, console: Console) -> list[Bar]:
    """Runs the proof."""
    streams: list[Stream] = []
    with tempfile.TemporaryDirectory() as name:
        models = Path(name) / "target", Path(name) / "draft"
        for seed, folder in enumerate(models, 5):
            write_table_model(folder, VOCABULARY_SIZE, seed=seed)
        target = TargetSettings(**REPLICA, model=str(models[0]))
        draft = DraftSettings(**REPLICA, model=str(models[1]))
        own = {
            "speculation_policy": "fixed",
            "draft_wait_ms": 2000.0,
            "drain_grace_s": 1.0,
            "target_wait_s": PATIENCE_S,
        }
        with fleet([target] * 2, [draft], [own], DELAY_MS) as place:
            while len(streams) < asked.texts:
                streams += wave(place, len(streams), is_killed=not streams)
                console.print(f"{len(streams)} texts")
        true, drafted = map(distribution_of, models)
    return bars_of(streams, true, drafted, asked)


def bars_of(streams: list[Stream], true: Any, drafted: Any, asked: argparse.Namespace) -> list[Bar]:
    """The conditions."""
    errors = [str(stream.error) for stream in streams if stream.error is not None]
    counts = transitions([stream.outcome for stream in streams])
    changes = [stream.statistics.num_target_changes for stream in streams if stream.error is None]
    accepted = sum(stream.statistics.num_accepted_draft_tokens for stream in streams if stream.error is None)
    biased = (1 - asked.bias) * true + asked.bias * drafted
    shown = f"{sum(changes)} moves, {accepted} draft tokens accepted"
    return [
        Bar("errors at clients", 0, len(errors), "; ".join(errors[:2]), is_limit=True),
        Bar("tokens", asked.texts * TOKENS_EACH, float(counts.sum()), shown),
        Bar("texts that moved", asked.texts, sum(map(bool, changes)), f"{WIDTH} of them by SIGKILL"),
        Bar("p of the target distribution", P_LIMIT, p_value(counts, true)),
        Bar(f"p with {asked.bias:g} of the draft's planted", P_LIMIT, p_value(counts, biased), is_limit=True),
    ]
