"""What came of one generation, and the statistics of several: rates by the client's clock, acceptance, shares of
proposers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from specdec.client.events import Event, Finished, Moved, Started, Statistics, event_of, pieces_of
from specdec.errors import ReplicaUnavailable
from specdec.protocol.report import Delta
from specdec.protocol.types import PromptLogprobs, TokenKind
from specdec.v1 import coordinator_service_pb2 as coordinator_pb

PROPOSERS = {
    "draft": "model",
    "ngram": "ngram",
    "suffix": "suffix",
    "prediction": "prediction",
    "heads": "heads",
    "grammar": "grammar",
}


@dataclass(slots=True)
class Run:
    """One generation, filled while it streams. `pieces`: each token's text and kind; `deltas`: when each came, in
    seconds by the performance counter, and its number of tokens; `moves`: to targets of other numerics;
    `prompt_logprobs`: parts of the prompt's log-probabilities."""

    token_ids: list[int] = field(default_factory=list)
    pieces: list[tuple[str, TokenKind]] = field(default_factory=list)
    deltas: list[tuple[float, int]] = field(default_factory=list)
    moves: list[Moved] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    started: Started | None = None
    finished: Finished | None = None

    @classmethod
    def of(cls, responses: Iterable[coordinator_pb.GenerateResponse]) -> Run:
        """Returns a generation read to its end, from the answers of a blocking call. Raises what they raise."""
        run = cls()
        for response in responses:
            run.take(event_of(response))
        return run

    def take(self, event: Event) -> None:
        """Adds what was received."""
        if isinstance(event, Delta):
            self.deltas.append((time.perf_counter(), len(event.token_ids)))
            self.token_ids += event.token_ids
            self.pieces += zip(pieces_of(event), event.kinds)
        elif isinstance(event, Started):
            self.started = event
        elif isinstance(event, Moved):
            self.moves.append(event)
        elif isinstance(event, PromptLogprobs):
            self.prompt_logprobs.append(event)
        else:
            self.finished = event

    @property
    def text(self) -> str:
        """The text generated so far."""
        return "".join(piece for piece, _ in self.pieces)

    @property
    def statistics(self) -> Statistics:
        """Those of the ended text. Raises ReplicaUnavailable before its end."""
        if self.finished is None:
            raise ReplicaUnavailable("the stream ended before the text")
        return self.finished.statistics

    @property
    def timed_tokens(self) -> int:
        """Tokens after the first delta, which came in `seconds`."""
        return sum(count for _, count in self.deltas[1:])

    @property
    def seconds(self) -> float:
        """From the first delta to the last."""
        return self.deltas[-1][0] - self.deltas[0][0] if self.deltas else 0.0


def rate_of(runs: Sequence[Run]) -> float:
    """Returns tokens per second of all runs, each counted from its first delta on; 0 before any has a second."""
    seconds = sum(run.seconds for run in runs)
    return sum(run.timed_tokens for run in runs) / seconds if seconds > 0 else 0.0


def acceptance_of(statistics: Sequence[Statistics]) -> tuple[float, float]:
    """Returns accepted / draft tokens, and tokens of a speculating round, of generations together; 0 and 1 of none."""
    drafted = sum(own.num_draft_tokens for own in statistics)
    accepted = sum(own.num_accepted_draft_tokens for own in statistics)
    rounds = sum(own.num_spec_steps for own in statistics)
    return accepted / drafted if drafted else 0.0, 1 + accepted / rounds if rounds else 1.0


def shares_of(statistics: Statistics) -> dict[str, tuple[int, int]]:
    """Returns accepted and verified draft tokens of each proposer that had some verified, by its name."""
    counts = {
        name: (getattr(statistics, f"num_{own}_accepted_tokens"), getattr(statistics, f"num_{own}_draft_tokens"))
        for name, own in PROPOSERS.items()
    }
    return {name: pair for name, pair in counts.items() if pair[1]}
