"""Short form of the proof of hostile grammars: each kind twice; pauses and memory belong to the command."""

from __future__ import annotations

import argparse

import pytest
from rich.console import Console

from tests.chaos.proofs import grammars

MEASURED = ("longest pause", "MB more", "threads more")


@pytest.mark.more
def test_hostile_grammars_end_by_text_or_refusal() -> None:
    """Claim: hostile grammars of every kind end, by text or a refusal, and streams beside them go on to their end.
    Conclusive: real processes and sockets; the kinds exceed different limits of the library, and no two are equal."""
    asked = argparse.Namespace(seconds=2.0, rate=5.0, streams=1)
    found = grammars.prove(asked, Console(quiet=True))
    assert [bar.claim for bar in found if bar.state == "missed" and not bar.claim.startswith(MEASURED)] == []
