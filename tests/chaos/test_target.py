"""The proof about targets and coordinators, in short: each is killed once under streams."""

from __future__ import annotations

import argparse

import pytest
from rich.console import Console

from tests.chaos.proofs import target


@pytest.mark.more
def test_texts_survive_a_killed_target_and_a_killed_coordinator() -> None:
    """Claim (reliability table): after a SIGKILL of the target or the coordinator every client resumes its text, byte
    by byte the one without faults.

    Conclusive: the texts are read again from undisturbed services; all streams are under way at each kill, and all of
    them meet an error.
    """
    bars = target.prove(argparse.Namespace(streams=8, kills=1), Console(quiet=True))
    wrong, resumed, _seconds, codes = bars  # the time until the error is the command's
    assert [bar.state for bar in (wrong, resumed, codes)] == ["met"] * 3, bars
