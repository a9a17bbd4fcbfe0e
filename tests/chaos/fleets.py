"""A fleet of real processes that can be struck: targets and drafts behind links of their own, and coordinators.

A member keeps the address of its link and its port, so a process that is killed is replaced behind them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from specdec.config import CoordinatorSettings, DraftSettings, TargetSettings
from specdec.v1 import coordinator_service_pb2 as pb
from tests.chaos.processes import Link, Restartable
from tests.support.services import Client, Outcome
from tests.support.waiting import until

PATIENCE_S = 180.0  # for replicas that start, and tokens, on a machine that others use
STREAM_TIMEOUT_S = 300.0


class Member(Restartable):
    """A replica as the coordinators see it: a process and the link to it."""

    link: Link

    def open_link(self, delay_ms: float) -> None:
        """Makes the link to the process, which serves."""
        self.link = Link(self.address, delay_ms)

    def stop(self) -> None:
        super().stop()
        if hasattr(self, "link"):
            self.link.stop()


@dataclass(slots=True)
class Fleet:
    """The processes, and a client of each coordinator."""

    targets: list[Member] = field(default_factory=list)
    drafts: list[Member] = field(default_factory=list)
    coordinators: list[Restartable] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)

    @property
    def members(self) -> list[Member]:
        return [*self.targets, *self.drafts]

    def counts(self, client: Client) -> tuple[int, int]:
        """The number of targets and drafts that a coordinator uses for new texts."""
        said = client.described()
        targets, drafts = (sum(group.num_replicas for group in groups) for groups in (said.targets, said.drafts))
        return targets, drafts

    def wait_whole(self) -> None:
        """Returns once every coordinator uses all targets and drafts. Raises TimeoutError."""
        self.wait_counts(len(self.targets), len(self.drafts))

    def wait_counts(self, target_count: int, draft_count: int) -> None:
        """Returns once every coordinator uses this number. Raises TimeoutError."""
        for client in self.clients:
            until(lambda client=client: self.counts(client) == (target_count, draft_count), PATIENCE_S)

    def stop(self) -> None:
        """Stops all processes, coordinators first."""
        for client in self.clients:
            client.close()
        for service in (*self.coordinators, *self.members):
            service.stop()


@contextlib.contextmanager
def fleet(
    targets: Sequence[TargetSettings],
    drafts: Sequence[DraftSettings],
    coordinators: Sequence[dict[str, Any]],
    delay_ms: float = 0.0,
) -> Iterator[Fleet]:
    """Starts replicas with these settings, a coordinator of all of them for each of `coordinators` (settings beside
    their addresses), and stops all at the end. `delay_ms`: of every link, one way."""
    made = Fleet()
    try:
        for role, list_, several in (("target", made.targets, targets), ("draft", made.drafts, drafts)):
            list_ += [Member(f"{role} {number}", role, settings) for number, settings in enumerate(several, 1)]
        for member in made.members:
            member.wait_ready()
            member.open_link(delay_ms)
        peers: dict[str, Any] = {
            "target": tuple(member.link.address for member in made.targets),
            "draft": tuple(member.link.address for member in made.drafts),
        }
        for number, own in enumerate(coordinators, 1):
            common = {"port": 0, "log_level": "error", "tokenizer": targets[0].model}
            settings = CoordinatorSettings(**{**common, **peers, **own})
            made.coordinators.append(Restartable(f"coordinator {number}", "coordinator", settings))
        for coordinator in made.coordinators:
            made.clients.append(Client(coordinator.wait_ready()))
        made.wait_whole()
        yield made
    finally:
        made.stop()


class Stream:
    """One text as its client sees it, read in a thread, never resumed. `times_s`: when each token came; `moved_at`:
    tokens that had come when it was told of other numerics; `error`: the one that ended it."""

    def __init__(self, client: Client, request: pb.GenerateRequest) -> None:
        self.outcome = Outcome()
        self.times_s: list[float] = []
        self.moved_at: list[int] = []
        self.error: grpc.RpcError | None = None
        self._client, self._request = client, request
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for response in self._client.stub.Generate(self._request, timeout=STREAM_TIMEOUT_S):
                self._take(response)
        except grpc.RpcError as error:
            self.error = error

    def _take(self, response: pb.GenerateResponse) -> None:
        if response.HasField("moved"):
            self.moved_at.append(len(self.times_s))
        self._client.take(self.outcome, response)
        new_count = len(self.outcome.token_ids) - len(self.times_s)
        self.times_s += [time.monotonic()] * new_count

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    @property
    def statistics(self) -> Any:
        """Those of a text that finished."""
        assert self.outcome.finished is not None, f"it did not finish: {self.error}"
        return self.outcome.finished.statistics

    def join(self) -> Stream:
        """Waits for its end."""
        self._thread.join(STREAM_TIMEOUT_S)
        return self


def wait_under_way(streams: Sequence[Stream], token_count: int) -> None:
    """Returns once each has that number of tokens. Fails when one has ended."""

    def are_running() -> bool:
        assert not any(stream.has_ended for stream in streams), "a text ended too soon for this test"
        return all(len(stream.outcome.token_ids) >= token_count for stream in streams)

    until(are_running, PATIENCE_S)


def wait_longer(streams: Sequence[Stream], token_count: int) -> None:
    """Returns once each has that number of tokens more, or has ended."""
    goals = [len(stream.outcome.token_ids) + token_count for stream in streams]
    until(
        lambda: all(one.has_ended or len(one.outcome.token_ids) >= goal for one, goal in zip(streams, goals)),
        PATIENCE_S,
    )
