"""A fleet under texts with a fault every 20 s, in which all services are updated in turn: no wrong token, no error.

The fleet of the proof `fleet`. In the first half the services are stopped and started one after the other, between
faults; in the second there are faults only, so the coordinators live on and their memory is watched. Errors count, but
those of the texts of a coordinator that is stopped: its clients resume.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time

from rich.console import Console

from bench.bars import Bar, worst_of
from tests.chaos.fleets import Fleet, Member
from tests.chaos.gauges import Sample, least
from tests.chaos.processes import Restartable
from tests.chaos.proofs.fleet import FIRST_CLASS, KINDS, TEXT_COUNT, TEXT_TOKENS, Struck, one_fault, strike, table_fleet
from tests.chaos.tables import table_texts
from tests.chaos.texts import Readers, references_of

FAULTS = KINDS[: KINDS.index(FIRST_CLASS) + 1]  # without any target new texts are refused
SAMPLE_COUNT = 10
MEMORY_MB_MAX = 3.0
RECONNECTED_S = 3.0  # after the start of a coordinator: its clients' channels find it


def update(place: Fleet, service: Restartable, chance: random.Random) -> None:
    """Stops a service within its grace and starts its successor."""
    if isinstance(service, Member):
        strike(service, "stopped", chance)
        place.wait_whole()
    else:
        service.child.stop()
        service.restart()
        place.wait_whole()
        time.sleep(RECONNECTED_S)


def sample(place: Fleet) -> dict[str, Sample]:
    """The least memory, descriptors and threads of each coordinator within seconds."""
    found: dict[str, list[Sample]] = {one.name: [] for one in place.coordinators}
    for _ in range(SAMPLE_COUNT):
        for one in place.coordinators:
            found[one.name].append(Sample.of(one.pid))
        time.sleep(0.5)
    return {name: least(samples) for name, samples in found.items()}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=20.0, help="(%(default)s)")
    parser.add_argument("--period-s", type=float, default=20.0, help="between faults (%(default)s)")
    parser.add_argument("--streams", type=int, default=16, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")


def prove(asked: argparse.Namespace, console: Console) -> list[Bar]:
    """Runs the proof."""
    chance, struck, fault_count, error_count = random.Random(asked.seed), Struck(), 0, 0
    with table_fleet() as place:
        references = references_of(place.clients[0].address, table_texts(TEXT_COUNT, TEXT_TOKENS), TEXT_COUNT)
        readers = Readers(references, (0.0, 0.2), asked.seed)
        readers.start([place.clients[number % 2].address for number in range(asked.streams)])
        began_s, before = time.monotonic(), None
        updates = itertools.cycle([*place.members, *place.coordinators])
        updated: set[str] = set()
        service_count = len(place.members) + len(place.coordinators)
        while (now_s := time.monotonic()) < began_s + 60 * asked.minutes:
            seen_count, what = readers.codes.total(), chance.choice(FAULTS)
            if fault_count % 2 == 0 and before is None and len(updated) < service_count:
                service = next(updates)
                updated.add(service.name)
                what = f"{service.name} updated"
                update(place, service, chance)
            else:
                one_fault(place, what, readers, chance, struck)
            fault_count += 1
            if not what.startswith("coordinator"):
                error_count += readers.codes.total() - seen_count
            if before is None and now_s > began_s + 30 * asked.minutes:
                before = sample(place)
            console.print(f"{now_s - began_s:.0f} s: {what}; {readers.text_count} texts, {error_count} errors")
            time.sleep(max(0.0, now_s + asked.period_s - time.monotonic()))
        readers.stop()
        after = sample(place)
    grown = {name: one.memory_mb - (before or after)[name].memory_mb for name, one in after.items()}
    shown = f"{readers.text_count} texts, {readers.token_count} tokens, {readers.target_changes} changes of targets, "
    shown += f"{readers.draft_changes} of drafts; {readers.resumed_count} resumed"
    return [
        Bar("texts that differ or did not end", 0, len(readers.wrong), "; ".join(readers.wrong[:2]) or shown, True),
        Bar("errors but those of a stopped coordinator", 0, error_count, str(dict(readers.codes)), is_limit=True),
        Bar("faults and updates", 0.5 * 60 * asked.minutes / asked.period_s, fault_count),
        Bar("services updated", service_count, len(updated)),
        worst_of("MB more of a coordinator in the second half", MEMORY_MB_MAX, grown, is_limit=True),
    ]
