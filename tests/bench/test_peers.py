"""The comparison with peers, without the peers: what it starts is what it tells."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

from bench.peers import shown_settings
from bench.peers.systems import Model, grids

EVERYTHING = Model("made up", "folder", Path("a.gguf"), Path("dense"), Path("draft"), Path("b.gguf"), Path("heads"))


def test_settings_are_told_and_not_changed() -> None:
    """Claim: the table tells what differs between the settings of a system, and a server is started with all of them:
    once its speculation was lost on the way to the table. Conclusive: of every setting of every system."""
    for name, (_, grid) in grids(EVERYTHING).items():
        before = deepcopy(grid)
        told = [shown_settings(settings) for settings in grid]
        assert list(grid) == list(before), name
        assert len(set(told)) == len(grid), name
