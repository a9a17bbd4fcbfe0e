"""The benchmark of what drafts for a target: a whole run on the shipped encoder-decoder pair."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.pair import BENCHMARK, DRAFTERS
from bench.results import Results, read_results
from bench.runner import main
from tests.support.variants import OFF, RULES_DEFAULT

NAME, CELL = "formatting", {"drafters": "formatting", "rule": RULES_DEFAULT[0], "rtt_ms": 0.0}


def test_a_run_tells_every_way_over_plain_decoding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Claim: a run measures plain decoding, `auto` and rounds of a fixed length on every prompt, with the acceptance of
    a draft token and the tokens of a step; table and bars follow from its JSON. Conclusive: real services, with a draft
    that is right nine times in ten on prompts of this kind."""
    told = ["--drafters", NAME, "--quick", "--turns", "1", "--max-tokens", "24", "--out", str(tmp_path)]
    assert main(BENCHMARK, told) == 0
    results = read_results(tmp_path / "pair.json")
    samples = results.samples(CELL)
    assert list(samples) == [OFF.name, *(way.name for way in DRAFTERS[NAME].ways)]
    assert samples[OFF.name]["steps"] == samples[OFF.name]["tokens"] and samples[OFF.name]["tested"] == [0]
    (accepted,), (tested,) = (samples["sync 7"][measure] for measure in ("accepted", "tested"))
    assert 0 < accepted <= tested and samples["sync 7"]["steps"] < samples[OFF.name]["steps"]
    (table,), (bar,) = BENCHMARK.tables(results), BENCHMARK.bars(results)
    assert table.name == NAME and [row[2] for row in table.rows] == list(samples)
    assert bar.bound == DRAFTERS[NAME].goals[CELL["rule"], 0.0] and bar.reached is not None
    assert "auto / best other" in capsys.readouterr().out


def test_auto_is_compared_with_the_best_other_way() -> None:
    """Claim: with several ways the one with most tokens per second of all texts counts, and all texts together; with
    plain decoding as the best, the median of the texts. Conclusive: the two numbers differ on these two texts."""
    results = Results({})
    rates = {"off": (10.0, 10.0), "auto": (40.0, 10.0), "draft": (20.0, 10.0), "heads": (5.0, 5.0)}
    for name, drafters in (("deepened-both", rates), ("deepened-killed", {own: rates[own] for own in ("off", "auto")})):
        for way, own in drafters.items():
            for rate in own:
                values = {"tokens_per_s": rate, "tokens": 100.0, "seconds": 100 / rate}
                values |= {"steps": 50.0, "accepted": 1.0, "tested": 2.0}
                results.add({"drafters": name, "rule": RULES_DEFAULT[0], "rtt_ms": 0.0}, way, values)
    both, killed = BENCHMARK.bars(results)
    assert both.claim.endswith("auto / draft") and both.reached == pytest.approx((200 / 12.5) / (200 / 15))
    assert killed.claim.endswith("auto / off") and killed.reached == 2.5
