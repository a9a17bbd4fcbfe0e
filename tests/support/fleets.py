"""A fleet of one target, and perhaps one draft, that are connected by word only: no link runs."""

from __future__ import annotations

from specdec.config import CoordinatorSettings
from specdec.coordinator.discovery import Member
from specdec.coordinator.fleet import Fleet
from specdec.protocol.types import Description

MODEL = Description("digest", "print", "name", 7, 100, (1,), "float32", "cpu", "torch")


def fleet_of(settings: CoordinatorSettings, target: Description = MODEL, draft: Description = MODEL) -> Fleet:
    """Returns a fleet whose replicas have answered with these descriptions."""
    fleet = Fleet(settings, "", lambda: None)
    for pool, values, description in ((fleet.targets, settings.target, target), (fleet.drafts, settings.draft, draft)):
        pool.update([Member(value) for value in values])
        for peer in pool.peers:
            peer.found(description)
    return fleet
