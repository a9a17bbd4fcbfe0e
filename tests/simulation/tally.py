"""Many runs added up."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields

from tests.simulation.faults import Fault
from tests.simulation.scenario import TOKENS_MIN
from tests.simulation.schedule import FAULTS_MIN, Report


@dataclass(slots=True)
class Tally:
    """Counts over runs, and the seeds of those in which something did not hold or too few tokens were committed.
    `few_faults_count`: runs that ended before FAULTS_MIN faults."""

    count: int = 0
    token_count: int = 0
    offered_count: int = 0
    accepted_count: int = 0
    tree_count: int = 0
    few_faults_count: int = 0
    scored_count: int = 0
    virtual_s: float = 0.0
    faults: Counter = field(default_factory=Counter)
    cache: Counter = field(default_factory=Counter)
    sources: Counter = field(default_factory=Counter)
    moves: Counter = field(default_factory=Counter)
    problems: dict[int, str] = field(default_factory=dict)

    def add(self, seed: int, report: Report) -> None:
        """One run more."""
        self.count += 1
        self.token_count += report.token_count
        self.offered_count += report.offered_count
        self.accepted_count += report.accepted_count
        self.tree_count += report.tree_count
        self.scored_count += report.scored_count
        self.virtual_s += report.virtual_s
        self.faults += report.faults
        self.cache += report.cache
        self.sources += report.sources
        self.moves += report.moves
        problem = report.problem
        if not problem and report.token_count < TOKENS_MIN:
            problem = f"only {report.token_count} tokens"
        self.few_faults_count += sum(report.faults.values()) < FAULTS_MIN
        if problem:
            self.problems[seed] = problem

    def plus(self, other: Tally) -> Tally:
        """Both together."""
        return Tally(
            *(getattr(self, own.name) + getattr(other, own.name) for own in fields(self)[:-1]),
            self.problems | other.problems,
        )

    def __str__(self) -> str:
        lines = [
            f"{self.count} schedules, {self.token_count} tokens, {self.virtual_s:.0f} virtual seconds",
            f"{self.offered_count} draft tokens offered, {self.accepted_count} accepted; "
            f"{self.tree_count} rounds accepted tokens of a tree; {self.scored_count} prompt tokens scored",
            "accepted by source: " + ", ".join(f"{name} {count}" for name, count in self.sources.items()),
            "the target's cache: " + ", ".join(f"{name} {count}" for name, count in self.cache.items()),
            "texts and replicas: " + ", ".join(f"{name} {count}" for name, count in self.moves.items()),
            f"{sum(self.faults.values())} faults, fewer than {FAULTS_MIN} in {self.few_faults_count} schedules:",
            *(f"  {fault.name.lower():18} {self.faults[fault]:7}  {fault.value}" for fault in Fault),
            f"{len(self.problems)} schedules in which a property does not hold",
            *(f"  --seed {seed}: {problem[:300]}" for seed, problem in self.problems.items()),
        ]
        return "\n".join(lines)
