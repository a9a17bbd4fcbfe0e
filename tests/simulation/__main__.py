"""`python -m tests.simulation`: many schedules, one schedule with its transcript, or the planted bugs."""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulation.bugs import BUGS
from tests.simulation.many import quiet, run_many
from tests.simulation.planting import hunt
from tests.simulation.schedule import run_seed
from tests.simulation.tally import Tally
from tests.simulation.transcript import Transcript

PROGRESS_EVERY = 5000


def main() -> int:
    """Runs the command; returns 1 when a property did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--schedules", type=int, default=10_000, help="how many random schedules (default 10000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--seed", type=int, help="run this one schedule only")
    parser.add_argument("--trace", action="store_true", help="with --seed: print every message and step")
    parser.add_argument("--bugs", type=int, metavar="COUNT", help="plant each bug and look for it in COUNT schedules")
    arguments = parser.parse_args()
    quiet()
    if arguments.seed is not None:
        return one(arguments.seed, arguments.trace)
    if arguments.bugs is not None:
        return bugs(arguments.bugs)
    return many(arguments.first, arguments.schedules)


def one(seed: int, is_traced: bool) -> int:
    """Runs one schedule."""
    transcript = Transcript()
    report = run_seed(seed, transcript)
    if is_traced:
        print("\n".join(transcript.lines))
    print(report.problem or f"every property holds: {report.token_count} tokens, {sum(report.faults.values())} faults")
    return bool(report.problem)


def many(first: int, count: int) -> int:
    """Runs random schedules and prints their tally."""
    tally, began_s = Tally(), time.monotonic()
    for tally in run_many(first, count):
        if tally.count % PROGRESS_EVERY == 0:
            print(f"{tally.count} schedules, {time.monotonic() - began_s:.0f} s", file=sys.stderr)
    print(tally)
    return bool(tally.problems)


def bugs(schedule_count: int) -> int:
    """Plants each bug and prints the table."""
    found = [hunt(bug, schedule_count) for bug in BUGS]
    print("\n".join(map(str, found)))
    print(f"{sum(1 for one in found if one.schedule)} of {len(found)} found within {schedule_count} schedules each")
    return 0


if __name__ == "__main__":
    sys.exit(main())
