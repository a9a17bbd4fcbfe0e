"""`python -m bench.ray_restarts`: from `specdec ray up` to the first token, and how long what dies is away. Root.

Three emulated machines with a link between each two: Ray's head node, a large node for a target of two ranks, a small
one for the draft. Actors are killed, then machines: for them the head's machine has a node in reserve, which joins
after the start; the coordinator must find a draft that moves there, without a restart. While the draft is lost a
generation runs, and its text must be the undisturbed one. Then, on machines begun anew, the draft's machine falls
silent without a word, and the head is lost. A turn is the life of a deployment; none warms up.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bench.bars import Bar
from bench.results import Cell, Results, Table, shown
from bench.runner import Contender, Prepared, Values, main
from specdec.errors import ConfigError
from tests.support.network.namespaces import why_unusable
from tests.support.ray_deployment import AWAY_S_MAX, LARGE, POLL_S, SMALL, Deployment, holds, machines
from tests.support.ray_machines import HEAD

ONE_WAY_MS = 5.0


def killed() -> Values:
    """Seconds of a start, of each killed actor and lost machine, and of the end."""
    found: dict[str, float] = {}
    with machines(ONE_WAY_MS) as (ray, hosts, folder):
        began_s = time.monotonic()
        own = Deployment(ray, hosts, folder)
        found["specdec ray up"] = time.monotonic() - began_s
        own.generate(1)
        found["specdec ray up to the first token"] = time.monotonic() - began_s
        kill = own.kill_actor
        found["draft's actor killed, until it serves"] = own.away_amid_text_s(
            lambda: kill(SMALL, "draft"), own.draft_serves
        )
        rank = (LARGE, "target", "--node-rank=1")
        found["a rank's actor killed, until a token"] = own.away_s(lambda: kill(*rank), own.answers)
        coordinator = (LARGE, "coordinator")
        found["coordinator's actor killed, until a token"] = own.away_s(lambda: kill(*coordinator), own.answers)
        ray.add(HEAD, cpus=1, gpus=0, role="draft")
        before = own.service(*coordinator)
        found["draft's machine lost, until it drafts"] = own.away_amid_text_s(lambda: ray.kill(SMALL), own.drafts)
        if own.service(*coordinator) != before:
            raise ConfigError("the coordinator was restarted for a draft that moved")
        ray.add(HEAD, cpus=3, gpus=2, role="target")
        own.coordinator_host = hosts[HEAD]
        found["target's machine lost, until a token"] = own.away_s(lambda: ray.kill(LARGE), own.answers)
        began_s = time.monotonic()
        ray.run(HEAD, ["ray", "down"])
        found["specdec ray down"] = time.monotonic() - began_s
    return found


def silent() -> Values:
    """Seconds of a machine that vanishes without a word, and of the head's end."""
    with machines(ONE_WAY_MS) as (ray, hosts, folder):
        own = Deployment(ray, hosts, folder)
        ray.add(HEAD, cpus=1, gpus=0, role="draft")
        silent_s = own.away_amid_text_s(lambda: ray.freeze(SMALL), own.drafts)
        ray.kill(HEAD)
        began_s = time.monotonic()
        while holds(own.answers) and time.monotonic() - began_s < AWAY_S_MAX:
            time.sleep(POLL_S)
        lost_s = time.monotonic() - began_s
    return {
        "draft's machine silent, until another drafts": silent_s,
        "the head lost, until requests are not answered": lost_s,
    }


class RayRestarts:
    """See the module."""

    name = "ray_restarts"
    about = f"seconds, three machines, {ONE_WAY_MS:g} ms one way between any two"
    turns, quick_turns, minutes = 3, 1, 20

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """None of its own."""

    def cells(self, asked: argparse.Namespace) -> list[Cell]:
        return [{"of": "killed"}, {"of": "silent"}]

    @contextmanager
    def prepared(self, asked: argparse.Namespace) -> Iterator[Prepared]:
        if reason := why_unusable():
            raise ConfigError(f"it needs network namespaces: {reason}")
        lives = {"killed": killed, "silent": silent}

        def contenders(cell: Cell, results: Results) -> dict[str, Contender]:
            life = lives[str(cell["of"])]
            return {"Ray": lambda turn: life() if turn else {}}

        yield contenders

    def tables(self, results: Results) -> list[Table]:
        rows = [
            [what, shown(results.median(cell, "Ray", what)), " ".join(f"{value:.1f}" for value in values)]
            for cell, samples in results.found
            for what, values in samples["Ray"].items()
        ]
        return [Table("away", self.about, ["", "median", "all"], rows)]

    def bars(self, results: Results) -> list[Bar]:
        return []


BENCHMARK = RayRestarts()

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
