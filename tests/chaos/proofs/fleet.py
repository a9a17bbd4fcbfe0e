"""A fleet whose targets and drafts are killed, frozen, cut off and stopped under streams: no client notices.

Three targets, of which the third has another numerics profile (its cache blocks; the tables' logits are the same),
three drafts and two coordinators on table models, over links with a delay. Texts under GREEDY and COUPLED are read all
the time, and never resumed. A point is a text and the number of its tokens when a fault struck.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.bars import Bar, worst_of
from specdec.config import DraftSettings, TargetSettings
from specdec.engine.table_model import write_table_model
from specdec.v1 import coordinator_service_pb2 as pb
from tests.chaos.clients import percentile
from tests.chaos.fleets import PATIENCE_S, Fleet, Member, Stream, fleet, wait_longer, wait_under_way
from tests.chaos.tables import REPLICA, VOCABULARY_SIZE, table_texts
from tests.chaos.texts import SPECULATIVE, Readers, Reading, Text, longest_gap_s, references_of
from tests.support.services import fixed

FAULTS = ("killed", "frozen", "cut", "stopped")
FIRST_CLASS, ALL = "targets of equal numerics killed", "all targets killed"
KINDS = (*(f"{role} {how}" for role in ("target", "draft") for how in FAULTS), FIRST_CLASS, ALL)
DELAY_MS = 10.0
TEXT_TOKENS = 400
TEXT_COUNT = 24
BLOCK_SIZES = (64, 64, 16)  # the third: other numerics
CACHE_BYTES = 1 << 20  # space for all texts at one target: where it is short, new ones are refused as they should be
SILENT_S = 4.5  # of a freeze or a cut: longer than a link waits
WATCHED_S = 8.0  # after a fault
GAP_FAULTS = ("killed", "frozen", "cut")  # those after which the time without a token is measured
SAMPLED: dict[str, Any] = {
    "prompt": [1, 2, 3],
    "max_tokens": 90,
    "min_tokens": 45,
    "seed": 11,
    "temperature": 1.2,
    "top_k": 6,
    "top_p": 0.98,
    "min_p": 0.001,
    "logit_bias": {1: 0.5, 2: -0.5},
    "repetition_penalty": 1.1,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.02,
    "logprobs": 2,
    "stop": ["<5><4>"],
    "stop_token_ids": [0],
    "speculative": fixed(2),
}


@dataclass(slots=True)
class Struck:
    """What faults met: points by kind, and the longest times without a token after each way to fail."""

    points: dict[str, set[tuple[Text, int]]] = field(default_factory=lambda: {kind: set() for kind in KINDS})
    gaps_s: dict[str, list[float]] = field(default_factory=lambda: collections.defaultdict(list))
    wrong: list[str] = field(default_factory=list)
    codes: collections.Counter[str] = field(default_factory=collections.Counter)
    details: dict[str, str] = field(default_factory=dict)
    counts: collections.Counter[str] = field(default_factory=collections.Counter)

    def add(self, readers: Readers) -> None:
        """Adds what readers found that have stopped."""
        self.wrong += readers.wrong
        self.codes += readers.codes
        self.details |= readers.details
        for name in ("text_count", "token_count", "target_changes", "draft_changes", "moved_count"):
            self.counts[name] += getattr(readers, name)


@dataclass(slots=True)
class Sampled:
    """A text that is read again and again: its tokens at which none moved yet, how it ends, and what is wrong."""

    missing: set[int]
    reason: int
    text_count: int = 0
    wrong: list[str] = field(default_factory=list)


@contextlib.contextmanager
def table_fleet(delay_ms: float = DELAY_MS) -> Iterator[Fleet]:
    """The fleet, on table models in a folder that is removed at the end."""
    with tempfile.TemporaryDirectory() as name:
        target, draft = Path(name) / "target", Path(name) / "draft"
        for seed, folder in enumerate((target, draft), 1):
            write_table_model(folder, VOCABULARY_SIZE, seed=seed)
        grace = {**REPLICA, "drain_grace_s": 0.5, "kv_cache_bytes": CACHE_BYTES}
        targets = [TargetSettings(**grace, model=str(target), block_size=size) for size in BLOCK_SIZES]
        drafts = [DraftSettings(**grace, model=str(draft))] * 3
        with fleet(targets, drafts, [{"drain_grace_s": 1.0, "target_wait_s": PATIENCE_S}] * 2, delay_ms) as made:
            yield made


def strike(member: Member, how: str, chance: random.Random) -> None:
    """One fault, and its repair."""
    if how == "frozen":
        member.freeze(SILENT_S)
    elif how == "cut":
        member.link.cut(SILENT_S)
    else:
        if how == "killed":
            member.kill()
        else:
            member.child.stop()
        time.sleep(chance.uniform(0.0, 1.0))
        member.restart()


def strike_several(members: list[Member]) -> None:
    """Kills some at once, and starts all of them again."""
    for member in members:
        member.child.signal(signal.SIGKILL)
    for member in members:
        member.kill()
        member.restart()


def one_fault(place: Fleet, kind: str, readers: Readers, chance: random.Random, struck: Struck) -> None:
    """A fault of this kind under readers; returns when the fleet is whole again and the watch is over."""
    under_way = readers.under_way()
    struck.points[kind] |= readers.points()
    began_s = time.monotonic()
    if kind in (FIRST_CLASS, ALL):
        strike_several(place.targets[: 2 if kind == FIRST_CLASS else 3])
    else:
        role, how = kind.split()
        strike(chance.choice(place.targets if role == "target" else place.drafts), how, chance)
    place.wait_whole()
    if kind.partition(" ")[2] in GAP_FAULTS:
        gaps_s(under_way, began_s, struck.gaps_s[kind.partition(" ")[2]])


def gaps_s(under_way: list[tuple[Text, Reading]], began_s: float, found: list[float]) -> None:
    """Adds the longest time without a token of each text that was under way at a fault, once it is over."""
    time.sleep(max(0.0, began_s + WATCHED_S - time.monotonic()))
    found += [longest_gap_s(reading.times_s, began_s, began_s + WATCHED_S) for _, reading in under_way]


def under_faults(place: Fleet, asked: argparse.Namespace, console: Console) -> Struck:
    """All faults but that of all targets, under readers, until each has its points."""
    struck, chance = Struck(), random.Random(asked.seed)
    references = references_of(place.clients[0].address, table_texts(TEXT_COUNT, TEXT_TOKENS), TEXT_COUNT)
    addresses = [client.address for client in place.clients]
    for stream_count, kinds, point_count in (
        (asked.streams, [kind for kind in asked.kinds if kind != ALL], asked.points),
        (8, [kind for kind in asked.kinds if kind.partition(" ")[2] in GAP_FAULTS], asked.gap_points),
    ):
        struck.gaps_s.clear()  # those of the last, smaller number of streams count
        goals = {kind: len(struck.points[kind]) + point_count for kind in kinds}
        readers = Readers(references, (0.0, 0.02), asked.seed)
        readers.start([addresses[number % 2] for number in range(stream_count)])
        while left := [kind for kind in kinds if len(struck.points[kind]) < goals[kind]]:
            one_fault(place, chance.choice(left), readers, chance, struck)
            console.print(
                f"{stream_count} streams, points: " + ", ".join(str(len(own)) for own in struck.points.values())
            )
        readers.stop()
        struck.add(readers)
    return struck


def when_all_are_killed(place: Fleet, asked: argparse.Namespace, struck: Struck) -> None:
    """Kills all targets at once under streams, again and again until there are enough points."""
    texts = table_texts(asked.streams, TEXT_TOKENS)
    references = references_of(place.clients[0].address, texts, len(texts))
    while len(struck.points[ALL]) < asked.points:
        streams = {
            text: Stream(place.clients[number % 2], text.request(SPECULATIVE[number % len(SPECULATIVE)]))
            for number, text in enumerate(texts)
        }
        wait_under_way([*streams.values()], 10)
        struck.points[ALL] |= {(text, len(stream.outcome.token_ids)) for text, stream in streams.items()}
        strike_several(place.targets)
        for text, stream in streams.items():
            error = stream.join().error
            if error is not None:
                struck.codes[error.code().name] += 1
                struck.details[error.code().name] = error.details() or ""
            elif tuple(stream.outcome.token_ids) != references[text].token_ids:
                struck.wrong.append(f"{text}: {stream.outcome.token_ids}")
        place.wait_whole()


def at_each_token(place: Fleet, asked: argparse.Namespace) -> Sampled:
    """Reads a text with every sampling parameter again and again, and loses its target at each of its tokens: the links
    to all targets are dropped at once, so each text under way moves."""
    expected = place.clients[0].generate(**{**SAMPLED, "speculative": {"enabled": False}})
    last = len(expected.token_ids) - 3  # at the last two the end may be under way
    found = Sampled(set(range(1, min(last, asked.tokens or last) + 1)), expected.finished.reason)
    while found.missing:
        streams = [Stream(client, client.request(**SAMPLED)) for client in place.clients * (asked.streams // 4)]
        wait_under_way(streams, 1)  # without any target a new text is refused
        while under_way := [stream for stream in streams if not stream.has_ended]:
            found.missing -= {len(stream.outcome.token_ids) for stream in under_way}
            for target in place.targets:
                target.link.drop()
            wait_longer(under_way, 4)  # the third loss without an answer between would end a text
        place.wait_whole()
        found.text_count += len(streams)
        for stream in streams:
            if stream.join().error is not None:
                found.wrong.append(f"{stream.error.details()}")
            elif stream.outcome.comparable != expected.comparable:
                found.wrong.append(f"{stream.outcome.comparable} is not {expected.comparable}")
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=32, help="(%(default)s)")
    parser.add_argument("--points", type=int, default=200, help="of each fault (%(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, metavar="FAULT", help="(all)")
    parser.add_argument("--gap-points", type=int, default=40, help="with 8 streams, of each fault (%(default)s)")
    parser.add_argument("--tokens", type=int, default=0, help="of the text that moves at each; 0: all (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the faults (%(default)s)")


def prove(asked: argparse.Namespace, console: Console) -> list[Bar]:
    """Runs the proof."""
    with table_fleet() as place:
        struck = under_faults(place, asked, console)
        if ALL in asked.kinds:
            when_all_are_killed(place, asked, struck)
            console.print("all targets killed: done")
        sampled = at_each_token(place, asked)
    said = [f"{code}: {details}" for code, details in struck.details.items()]
    for line in [*struck.wrong[:5], *sampled.wrong[:5], *said]:
        console.print(line, highlight=False, soft_wrap=True)
    return bars_of(struck, sampled, asked)


def bars_of(struck: Struck, sampled: Sampled, asked: argparse.Namespace) -> list[Bar]:
    """The conditions."""
    points = {kind: float(len(struck.points[kind])) for kind in asked.kinds}
    counts, ending = struck.counts, pb.FinishReason.Name(sampled.reason)
    shown = "{text_count} texts, {token_count} tokens; {target_changes} changes of targets, {draft_changes} of drafts"
    changes = {name: float(counts[name]) for name in ("target_changes", "draft_changes", "moved_count")}
    p99_s = {how: percentile(found, 0.99) for how, found in struck.gaps_s.items() if found}
    medians = "; ".join(f"{how} {percentile(found, 0.5):.2g} of {len(found)}" for how, found in struck.gaps_s.items())
    slow = {how: p99_s[how] for how in ("frozen", "cut") if how in p99_s}
    return [
        Bar("texts that differ or did not end", 0, len(struck.wrong), shown.format(**counts), is_limit=True),
        worst_of("errors at clients, by code", 0, dict(struck.codes) or {"none": 0.0}, is_limit=True),
        worst_of("points of each fault", asked.points, points),
        worst_of("changes, and texts told of other numerics", 1, changes),
        Bar("seconds without a token after a kill, p99", 2.0, p99_s.get("killed"), f"medians: {medians}", True),
        worst_of("seconds without a token after a freeze or cut, p99", 5.0, slow, is_limit=True),
        Bar("texts with every parameter, moved at each token, that differ", 0, len(sampled.wrong), "", is_limit=True),
        Bar(
            "tokens of them at which none moved", 0, len(sampled.missing), f"{sampled.text_count} texts, {ending}", True
        ),
    ]
