"""The proof about names, in short: records come, go and fail under streams."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from rich.console import Console

from tests.chaos.proofs import names
from tests.support.dns_server import why_not_apart


@pytest.mark.slow
def test_texts_do_not_notice_what_becomes_of_names(tmp_path: Path) -> None:
    """Claim: records of targets and drafts that are added, removed, 300 at once, or fail, and a target that is killed
    while the resolver is silent, give no error at a client and no differing text; changes are in use within 6 s.

    Conclusive: a coordinator, targets, drafts and a DNS server as processes in namespaces of their own; readers compare
    every text with its reference, and the numbers of replicas in use are the coordinator's own.
    """
    if why := why_not_apart(tmp_path):
        pytest.skip(f"namespaces are not allowed here: {why}")
    bars = names.prove(argparse.Namespace(streams=4, silence_s=6.0), Console(quiet=True))
    assert [bar.state for bar in bars] == ["met"] * len(bars), bars
