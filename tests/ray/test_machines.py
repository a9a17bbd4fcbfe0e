"""Ray on three emulated machines with a link of 5 ms between any two, as the benchmark of restarts runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.results import read_results
from tests.support.network.namespaces import why_unusable

TIMEOUT_S = 1200


@pytest.mark.slow
@pytest.mark.skipif(bool(why_unusable()), reason=f"needs network namespaces: {why_unusable()}")
def test_what_dies_on_three_machines_comes_back(tmp_path: Path):
    """Claim: actors that are killed, machines that are lost, one that falls silent and the loss of the head end as
    docs/ray.md says.

    Conclusive: the benchmark fails where a text that ran meanwhile is not the undisturbed one, where the coordinator
    was restarted for a draft that moved, and where something does not come back; so ten measurements mean
    that everything did. Without its head a deployment goes on answering.
    """
    pytest.importorskip("ray", reason="Ray is not installed")
    command = [sys.executable, "-m", "bench.ray_restarts", "--turns", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = read_results(tmp_path / "ray_restarts.json").found
    measurements = {what: seconds for _, samples in found for what, seconds in samples["Ray"].items()}
    assert len(measurements) == 10 and all(len(seconds) == 1 for seconds in measurements.values())
    assert measurements["the head lost, until requests are not answered"][0] > 5
