"""The order in which two workers take the files of tests."""

from __future__ import annotations

from tests.hygiene.sources import ROOT
from tests.support.order import LONG, SHARING, SHARING_WORKERS_MAX, place_of, unit_of


def test_files_that_share_stay_together_and_long_ones_come_first() -> None:
    """Claim: of two workers one has all files of a folder whose tests share services, of more each takes files; folders
    of long files come first. Conclusive: the folders are there, and a test of each kind of folder is asked for."""
    assert all((ROOT / folder).is_dir() for folder in LONG) and set(SHARING) < set(LONG)
    shared, other = "tests/services/test_pair.py::test_a", "tests/rpc/test_link.py::test_b[x::y]"
    assert unit_of(shared, SHARING_WORKERS_MAX) == "tests/services"
    assert unit_of(shared, SHARING_WORKERS_MAX + 1) == "tests/services/test_pair.py"
    assert {unit_of(other, count) for count in (1, 2, 8)} == {"tests/rpc/test_link.py"}
    units = ["tests/rpc/test_link.py", "tests/fleet/test_moves.py", "tests/gateway", "tests/services"]
    assert sorted(units, key=place_of) == units[::-1]
