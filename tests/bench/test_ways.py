"""The tracer of ways: its counts on ways written down here, and a run of it on the three services."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.holdings import reached
from bench.ways import AUTO_ROUND, FIRST_DELTA, OFF_ROUND, Place, Size, size_of
from specdec.errors import SpecdecError
from specdec.protocol.growth import GrowingNode

ROUNDS = 4
CONCLUSION = "specdec/protocol/rejection.py:conclude"  # of a round, by the acceptance rule, as its result arrives
ANSWER = "target_service/verifier.py:Verifier._answer"  # to a round, on the target's engine thread
ENCODING = "coordinator/tokenizer.py:Tokenizer.encode"  # of the prompt, on a thread of the coordinator
DRAFT_STEP = "draft_service/drafter.py:Drafter.next_step"  # on the draft's engine thread, from the session's opening on


def places(way: str) -> list[Place]:
    """The functions of a way written as `file.function`, in order."""
    return [Place(*name.split(".")) for name in way.split()]


@pytest.mark.parametrize(
    ("threads", "size"),
    [
        (["a.f a.g a.f"], Size(2, 1, 0, 0, 3)),
        (["a.f b.f c.f"], Size(3, 3, 2, 0, 3)),
        (["a.f b.f a.g c.f b.g"], Size(5, 3, 4, 2, 5)),
        (["a.f b.f a.f b.f"], Size(2, 2, 1, 0, 4)),
        (["a.f b.f", "b.f a.f"], Size(2, 2, 2, 0, 4)),
    ],
    ids=["one file", "onwards", "back twice", "known functions", "two threads"],
)
def test_the_size_of_a_way(threads: list[str], size: Size) -> None:
    """Claim: a way counts each function and file once, and as switches and returns the changes of file in the order in
    which each thread first called its functions. Conclusive: the numbers were counted by hand."""
    calls = [(thread, place) for thread, way in enumerate(threads) for place in places(way)]
    assert size_of(calls) == size


def test_what_a_request_holds_ends_at_another_request() -> None:
    """Claim: a walk that leaves its request is refused, with the field that leads out, instead of counting what other
    requests hold. Conclusive: two nodes that know each other play two requests."""
    one = GrowingNode(1, 0)
    one.children[5] = GrowingNode(2, 5, one)
    with pytest.raises(SpecdecError, match=r"GrowingNode\.children .* SHARED"):
        reached(one)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The counts of a run in a process of its own: it profiles every thread."""
    path: Path = tmp_path_factory.mktemp("ways") / "ways.json"
    sizes = ["--requests", "2", "--rounds", str(ROUNDS), "--json", str(path)]
    subprocess.run([sys.executable, "-m", "bench.ways", *sizes], check=True, timeout=400)
    counts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return counts


@pytest.mark.more
def test_known_functions_are_on_their_ways(found: dict[str, Any]) -> None:
    """Claim: a way has the functions that every reader knows to be on it, of all services and threads, and nothing but
    product code. Conclusive: only the way to the first delta tokenises; the draft's engine thread runs before a first
    delta, and never where the policy may not draft; no tool, test or library is named."""
    first, auto, off = (found["ways"][name] for name in (FIRST_DELTA, AUTO_ROUND, OFF_ROUND))
    for own in (first, auto, off):
        named = [function.partition(":") for function in own["functions"]]
        assert any(name.startswith("Session.") for _, _, name in named)
        folders = {file.partition("/")[0] for file, _, _ in named}
        assert {"specdec", "coordinator", "target_service"} <= folders
        assert {function.partition("/")[0] for function in own["calls"]} <= folders | {"draft_service"}
    assert first["calls"][ENCODING] == [1, 1] and ENCODING not in {*auto["calls"], *off["calls"]}
    assert DRAFT_STEP in first["calls"] and DRAFT_STEP not in off["calls"]


@pytest.mark.more
def test_the_counts_of_ways_agree_with_each_other(found: dict[str, Any]) -> None:
    """Claim: a way begins and ends with its round; two requests in one process take the same way but for a few
    functions and what the draft may do before the first delta, and so do rounds without speculation; and the counts of
    a way bound each other. Conclusive: every way concludes one round, on the event loop, and answers one, on the
    target's engine thread, so that one that misses either thread, or runs on into the next round, has 0 or 2; of some
    250 and 450 functions at most a tenth are not on all ways, 90 of the draft's left out, since it steps on a thread of
    its own and as soon as the machine lets it."""
    assert [len(own["each"]) for own in found["ways"].values()] == [2, 2 * ROUNDS, 2 * ROUNDS]
    for name, own in found["ways"].items():
        assert [own["calls"][function] for function in (CONCLUSION, ANSWER)] == [[1, 1], [1, 1]]
        for size in own["each"]:
            assert 0 < size["returns"] <= size["switches"] < size["functions"] <= size["calls"]
            assert 10 < size["files"] < size["functions"]
        if name != AUTO_ROUND:  # the policy may change its plan from one round to the next
            functions = [size["functions"] for size in own["each"]]
            usual = min(functions) if name == FIRST_DELTA else max(functions)
            assert 0.9 * usual <= own["on_all"] <= min(functions), (own["on_all"], functions)


@pytest.mark.more
def test_a_request_holds_its_own_objects_only(found: dict[str, Any]) -> None:
    """Claim: session, statistics and trace of a request count, each class once, and nothing that requests share: peers,
    metrics, tables of the policy. Conclusive: both kinds are named."""
    held = {own["name"]: own["fields"] for own in found["holdings"]}
    assert len(held) == len(found["holdings"]) and min(held.values()) > 0
    assert {"Generation", "Session", "Statistics"} <= set(held)
    assert not {"Coordinator", "CoordinatorMetrics", "Replica", "Link", "Speculation", "Table"} & set(held)
