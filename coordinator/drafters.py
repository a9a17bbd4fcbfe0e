"""The drafter of a text, whose tokens its plans are about, and what is measured of it: a draft, or the feature head on
the target."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from specdec.coordinator.replicas import Draft, Target
from specdec.policy.acceptance import Acceptance
from specdec.policy.draft_time import DraftTimes
from specdec.policy.goodput import Goodput
from specdec.policy.plans import catalogue
from specdec.protocol.types import Proposer, Rule


class Drafting(NamedTuple):
    """The replicas that draft for requests of one kind, and verify: `draft` is None without one. `has_local`: whether
    they have proposers beside the drafter."""

    rule: Rule
    target: Target
    draft: Draft | None
    kind: Proposer
    has_local: bool

    def measurements(self, without: tuple[DraftTimes, Acceptance]) -> tuple[DraftTimes, Acceptance]:
        """Returns the times and the acceptance of the drafter, those of `without` where there is none."""
        rule, target = self.rule, self.target
        if self.draft is not None:
            return self.draft.times[rule], self.draft.acceptance[rule]
        return (target.head_times[rule], target.head_acceptance[rule]) if self.kind is Proposer.HEADS else without

    def measured(self, cap: int) -> Goodput | None:
        """Returns the measurements of plans that requests with this limit share; None before the first."""
        key = self.target.model_key, self.rule, cap, self.kind, self.has_local
        return (self.draft or self.target).goodputs.get(key)

    def goodput(self, cap: int, siblings_max: int, without: tuple[DraftTimes, Acceptance]) -> Goodput:
        """Returns the same, begun where there is none."""
        found = self.measured(cap)
        if found is None:
            kinds = self.kind is Proposer.DRAFT, self.has_local, siblings_max, self.rule
            plans = catalogue(*kinds, with_head=self.kind is Proposer.HEADS)
            found = Goodput(self.target.steps[self.rule], *self.measurements(without), cap, plans)
            key = self.target.model_key, self.rule, cap, self.kind, self.has_local
            (self.draft or self.target).goodputs[key] = found
        return found


def drafting(rule: Rule, target: Target, draft: Draft | None, proposers: Collection[Proposer]) -> Drafting:
    """Returns how a request with these proposers is drafted for. A target has a feature head, which is the drafter
    where no draft is, or heads of single positions, which are proposers beside one."""
    has_head = target.has_feature_head
    without = Proposer.HEADS if has_head and Proposer.HEADS in proposers else Proposer.NONE
    beside = {*proposers} - {Proposer.DRAFT, *([Proposer.HEADS] if has_head else [])}
    return Drafting(rule, target, draft, without if draft is None else Proposer.DRAFT, bool(beside))
