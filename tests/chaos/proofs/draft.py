"""A draft that dies, freezes, crawls or lies: no failed request, no other token, plain decoding's speed.

Texts of table models, under GREEDY and COUPLED, are read all the time while one trouble after another strikes their
draft; a point is a text and the number of its tokens when trouble struck it. Speed and recovery are measured with the
shipped pair: auto in trouble over plain decoding, in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console

from bench.bars import Bar, worst_of
from specdec.config import CoordinatorSettings, DraftSettings, TargetSettings
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from specdec.v1 import types_pb2 as types_pb
from tests.chaos.byzantine import BEHAVIOURS, ByzantineDraft
from tests.chaos.processes import Restartable
from tests.chaos.tables import COMMON, REPLICA, Tables, table_texts, tables
from tests.chaos.texts import Readers, Text, open_channel, read, references_of
from tests.support.draft_troubles import hundred_times_slower
from tests.support.harness import DRAFT_MODEL, TARGET_MODEL, heldout_prompts
from tests.support.services import fixed
from tests.support.waiting import until

STREAM_COUNT = 16
TEXT_TOKENS = 400
BEAT_S = 0.1
SENT_S = 60.0  # for the first item of a lying draft
LIES_S = 15.0  # for as many items as points: some lies cost the draft its link, which pauses
NORMAL_SHARE = 0.9
SPEED_SHARE = 0.95  # of plain decoding, while trouble lasts
AUTO = {"policy": "POLICY_AUTO", "proposers": ["PROPOSER_DRAFT"]}  # another would hide a draft's trouble


Points = set[tuple[Text, int]]
Strike = Callable[[], None]


def struck(place: Tables, readers: Readers, point_count: int, chance: random.Random) -> dict[str, Points]:
    """Kills, freezes and slows the draft under the readers until each has met its points."""
    assert place.draft is not None
    draft = place.draft
    points: dict[str, Points] = {"killed": set(), "frozen": set(), "x100 slow": set()}
    while len(points["killed"]) < point_count:
        points["killed"] |= readers.points()
        draft.kill()
        draft.restart()
        until(lambda: place.has_draft)
        time.sleep(chance.uniform(0.0, 0.5))
    while len(points["frozen"]) < point_count:
        points["frozen"] |= readers.points()
        draft.freeze(chance.choice([0.05, 0.3, 1.0, 4.0]))
        until(lambda: place.has_draft)
        time.sleep(chance.uniform(0.0, 0.3))
    is_over = threading.Event()
    slowing = threading.Thread(target=hundred_times_slower, args=(draft.child, is_over))
    slowing.start()
    while len(points["x100 slow"]) < point_count:
        points["x100 slow"] |= readers.points()
        time.sleep(BEAT_S)
    is_over.set()
    slowing.join()
    draft.child.signal(signal.SIGCONT)
    return points


def lied_to(place: Tables, readers: Readers, point_count: int) -> tuple[dict[str, Points], dict[str, int]]:
    """Has a byzantine draft behave in every way; returns the points and the items it sent, by behaviour."""
    liar = ByzantineDraft(place.described().target.tokenizer_fingerprint, place.draft_port)
    points: dict[str, Points] = {}
    counts: dict[str, int] = {}
    try:
        until(lambda: place.has_draft)
        for name in BEHAVIOURS:
            liar.behave(name)
            points[name], counts[name] = set(), 0
            began_s = time.monotonic()

            def is_enough(name: str = name, began_s: float = began_s) -> bool:
                if name == "silence" or counts[name] >= point_count:
                    return True
                # a policy that has learned to do without the draft asks it seldom
                return time.monotonic() > began_s + (LIES_S if counts[name] else SENT_S)

            while len(points[name]) < point_count or not is_enough():
                points[name] |= readers.points()
                time.sleep(BEAT_S)
                counts[name] += liar.behave(name)
            liar.behave("silence")
            with contextlib.suppress(TimeoutError):
                until(lambda: place.has_draft, 5.0)
    finally:
        liar.stop()
    return points, counts


def exactness(point_count: int, seed: int, say: Callable[[str], None]) -> list[Bar]:
    """The conditions about texts."""
    texts = table_texts(24, TEXT_TOKENS)
    found: dict[str, float] = {}
    item_counts: dict[str, int] = {}
    wrong: list[str] = []
    codes: dict[str, float] = {}
    shown = ""
    for has_draft in (True, False):
        with tables(has_draft) as place:
            readers = Readers(references_of(place.coordinator.address, texts), (0.0, 0.02), seed)
            readers.start([place.coordinator.address] * STREAM_COUNT)
            if has_draft:
                points = struck(place, readers, point_count, random.Random(seed))
            else:
                points, item_counts = lied_to(place, readers, point_count)
            readers.stop()
        found |= {name: float(len(own)) for name, own in points.items()}
        wrong += readers.wrong
        codes |= {code: float(count) for code, count in readers.codes.items()}
        shown += f"{readers.text_count} texts, {readers.token_count} tokens with {'a real' if has_draft else 'a lying'}"
        shown += " draft; "
        say(shown)
    for line in wrong[:5]:
        say(line)
    lying = {name: float(count) for name, count in item_counts.items() if name != "silence"}
    return [
        Bar("texts that differ or did not end", 0, len(wrong), shown, is_limit=True),
        worst_of("failed requests, by code", 0, codes or {"none": 0.0}, is_limit=True),
        worst_of("points of each trouble", point_count, found),
        worst_of("items of each lie that the draft sent", 1, lying),
    ]


@contextlib.contextmanager
def shipped() -> Iterator[tuple[Restartable, Restartable]]:
    """Draft and coordinator of the shipped pair."""
    with contextlib.ExitStack() as stack:
        target = Restartable("target", "target", TargetSettings(**REPLICA, model=str(TARGET_MODEL)))
        stack.callback(target.stop)
        draft = Restartable("draft", "draft", DraftSettings(**REPLICA, model=str(DRAFT_MODEL)))
        stack.callback(draft.stop)
        addresses = {"target": target.wait_ready(), "draft": draft.wait_ready()}
        settings = CoordinatorSettings(**COMMON, **addresses, tokenizer=str(TARGET_MODEL))
        coordinator = Restartable("coordinator", "coordinator", settings)
        stack.callback(coordinator.stop)
        coordinator.wait_ready()
        yield draft, coordinator


def rate(stub: pb_grpc.CoordinatorServiceStub, text: Text, speculative: dict[str, Any]) -> float:
    """Tokens a second from the first token on."""
    first_s = 0.0

    def note(reading: Any) -> None:
        nonlocal first_s
        if not first_s and reading.content.token_ids:
            first_s = time.perf_counter()

    reading = read(stub, text, speculative, on_message=note)
    return (len(reading.content.token_ids) - 1) / (time.perf_counter() - first_s)


def speeds(pair_count: int, pairs_max: int, token_count: int, say: Callable[[str], None]) -> dict[str, float]:
    """Auto over plain decoding while each trouble lasts: the median over pairs in turns, from 3 s after it began. One
    below the bar counts by `pairs_max` other pairs: single pairs differ by 6 % where nothing is drafted."""
    prompts = list(heldout_prompts().values())
    found: dict[str, float] = {}

    def pair(stub: pb_grpc.CoordinatorServiceStub, number: int) -> float:
        text = Text(prompts[number % len(prompts)], float(number % 2), number, token_count, ignore_eos=True)
        kinds: dict[str, dict[str, Any]] = {"auto": AUTO, "off": {"enabled": False}}
        own = {kind: rate(stub, text, kinds[kind]) for kind in sorted(kinds, reverse=bool(number % 2))}
        return own["auto"] / own["off"]

    def ratio(name: str, stub: pb_grpc.CoordinatorServiceStub) -> None:
        for numbers in (range(pair_count), range(pair_count, pair_count + pairs_max)):
            ratios = [pair(stub, number) for number in numbers]
            found[name] = statistics.median(ratios)
            say(
                f"auto / plain, {name}: {found[name]:.3f} ({min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} pairs)"
            )
            if found[name] >= SPEED_SHARE or not pairs_max:
                break

    with shipped() as (draft, coordinator), open_channel(coordinator.address) as channel:
        stub = pb_grpc.CoordinatorServiceStub(channel)
        rate(stub, Text(prompts[0], 0.0, 0, token_count, ignore_eos=True), AUTO)
        port = int(draft.address.rpartition(":")[2])
        draft.child.signal(signal.SIGSTOP)
        time.sleep(3.0)
        ratio("frozen", stub)
        draft.child.signal(signal.SIGCONT)
        time.sleep(3.0)
        is_over = threading.Event()
        slowing = threading.Thread(target=hundred_times_slower, args=(draft.child, is_over))
        slowing.start()
        time.sleep(3.0)
        ratio("x100 slow", stub)
        is_over.set()
        slowing.join()
        draft.kill()
        ratio("killed", stub)
        liar = ByzantineDraft(fingerprint_of(stub), port)
        try:
            for name in BEHAVIOURS:
                liar.behave(name)
                time.sleep(3.0)
                ratio(name, stub)
        finally:
            liar.stop()
    return found


def fingerprint_of(stub: pb_grpc.CoordinatorServiceStub) -> str:
    """The tokenizer that a draft must have."""
    fingerprint: str = stub.Describe(types_pb.DescribeRequest(), timeout=5).target.tokenizer_fingerprint
    return fingerprint


def recoveries(count: int, say: Callable[[str], None]) -> list[float]:
    """Seconds from the draft's READY after a SIGKILL to the end of a short text with 0.9 of its usual acceptance."""
    prompt = next(iter(heldout_prompts().values()))
    text = Text(prompt, 0.0, 0, 24, ignore_eos=True)
    times_s = []
    with shipped() as (draft, coordinator), open_channel(coordinator.address) as channel:
        stub = pb_grpc.CoordinatorServiceStub(channel)

        def acceptance() -> float:
            counts = read(stub, text, fixed(3, draft_wait_ms=200)).last.statistics
            return counts.num_accepted_draft_tokens / max(1, counts.rounds)

        normal = statistics.median(acceptance() for _ in range(5))
        assert normal > 0
        for _ in range(count):
            draft.kill()
            acceptance()
            draft.restart()
            ready_s = time.monotonic()
            until(lambda: acceptance() >= NORMAL_SHARE * normal)
            times_s.append(time.monotonic() - ready_s)
    shown = ", ".join(f"{time_s:.2f}" for time_s in times_s)
    say(f"normal: {normal:.2f} accepted draft tokens a round; recovered after {shown} s")
    return times_s


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--points", type=int, default=200, help="of each trouble (%(default)s)")
    parser.add_argument("--pairs", type=int, default=6, help="of auto and plain; 0: no speeds (%(default)s)")
    parser.add_argument("--pairs-max", type=int, default=24, help="other pairs, where those are below the bar (24)")
    parser.add_argument("--tokens", type=int, default=160, help="of a text whose speed counts (%(default)s)")
    parser.add_argument("--restarts", type=int, default=5, help="of the draft, for recovery; 0: none (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")


def prove(asked: argparse.Namespace, console: Console) -> list[Bar]:
    """Runs the proof."""

    def say(sentence: str) -> None:
        console.print(sentence, highlight=False, soft_wrap=True)

    bars = exactness(asked.points, asked.seed, say) if asked.points else []
    if asked.restarts:
        slowest_s = max(recoveries(asked.restarts, say))
        bars.append(Bar("seconds until acceptance is back at 90 %", 3.0, slowest_s, is_limit=True))
    if asked.pairs:
        shares = speeds(asked.pairs, asked.pairs_max, asked.tokens, say)
        bars.append(worst_of("auto / plain while it lasts", SPEED_SHARE, shares))
    return bars
