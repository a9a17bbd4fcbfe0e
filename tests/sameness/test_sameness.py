"""The long comparison itself: its prompts have the documented form, and it detects differences.

That speculation changes nothing is proved by tests/services/test_pair.py for few prompts and by the command for many.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.sameness.__main__ import INCOMPLETE, main, options, table_of, target_settings
from tests.sameness.comparison import Comparison
from tests.sameness.generations import (
    ALL_PARAMS,
    HEADS_WAY,
    WAYS,
    Generation,
    generations,
    heldout_token_ids,
    prompts_of,
)
from tests.support.encoder_decoder_models import make_encoder_decoder, make_resembling
from tests.support.services import MODELS, Outcome, Services, running


def test_prompts_are_of_held_out_text_and_none_twice() -> None:
    """Claim: 1,000 different prompts, each a run of tokens of the held-out texts one after another, long ones among
    them, and beginnings that others share; the same in every run; none longer than asked for."""
    texts = heldout_token_ids()
    prompts = prompts_of(texts, 1000)
    assert len(set(prompts)) == 1000 and prompts == prompts_of(texts, 1000)
    everything = " ".join(str(token_id) for text in texts for token_id in text) + " "
    assert all(" ".join(map(str, prompt)) + " " in everything for prompt in prompts)
    assert sum(len(prompt) > 256 for prompt in prompts) >= 50 and min(map(len, prompts)) <= 8
    beginnings = [prompt[:64] for prompt in prompts if len(prompt) > 64]
    assert len(beginnings) - len(set(beginnings)) >= 100
    cut = prompts_of(texts, 1000, length_max=50)
    assert len(set(cut)) == 1000 and max(map(len, cut)) == 50


def test_params_and_ways_to_speculate_are_combined() -> None:
    """Claim: all sampling parameters occur with every way to speculate; each sampled generation has its own seed."""
    asked = generations(80)
    assert {(one.params, one.way) for one in asked} == {(params, way) for params in ALL_PARAMS for way in WAYS}
    seeds = [one.request(True, 8).get("seed") for one in asked]
    sampled = [seed for seed in seeds if seed is not None]
    assert len(set(sampled)) == len(sampled) == 40
    assert asked[0].request(False, 8)["speculative"] == {"policy": "POLICY_OFF"}


def test_a_difference_is_seen() -> None:
    """Claim: one other token, a text cut short and another log-probability are each counted, and only tokens as
    tokens."""
    generation = Generation(3, (1, 2), "GREEDY", "tree")
    finished = type("Finished", (), {"HasField": lambda self, name: False, "usage": type("Usage", (), {})()})()
    finished.reason, finished.stop_string = 2, ""
    finished.usage.prompt_tokens, finished.usage.output_tokens = 2, 3
    finished.statistics = type("Statistics", (), {"num_draft_tokens": 5, "num_accepted_draft_tokens": 2})()
    off = Outcome(finished=finished, token_ids=[7, 8, 9], text="abc", logprobs=[(-1.0, (), ())] * 3)
    for change, tokens in (
        ({"token_ids": [7, 1, 9]}, 1),
        ({"token_ids": [7]}, 2),
        ({"logprobs": [(-1.0, (), ())] * 2 + [(-1.5, (), ())]}, 0),
        ({}, 0),
    ):
        one = Comparison(generation, replace(off, **change), off)
        assert (one.is_same, one.differing_token_count) == (not change, tokens)
    assert "from output token 1 on" in str(Comparison(generation, replace(off, token_ids=[7, 1, 9]), off))
    assert table_of([Comparison(generation, off, off)], "x").row_count == len(ALL_PARAMS) + len(WAYS) + 1


def test_settings_of_the_target_are_named() -> None:
    """Claim: an option other than NAME=VALUE is refused before anything starts."""
    with pytest.raises(SystemExit):
        options(["--target", "tensor-parallel-size"])


def test_the_target_has_heads_for_the_way_that_asks_for_them() -> None:
    """Claim: by default the target has the shipped heads; without that way it has none, and `--target` comes first."""
    shipped = {"heads": str(MODELS / "target-heads")}
    assert HEADS_WAY in WAYS and target_settings(options([])) == shipped
    assert target_settings(options(["--target", "block-size=16"])) == {**shipped, "block_size": "16"}
    assert target_settings(options(["--target", "heads=none"])) == {"heads": "none"}
    assert target_settings(options(["--ways", "tree"])) == {}
    others = options(["--models", "target", "draft"])
    assert HEADS_WAY not in others.ways and len(others.ways) == len(WAYS) - 1 and target_settings(others) == {}


@pytest.mark.slow
def test_a_run_that_ends_early_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Claim: where the services cannot start, or one is lost and stays so, the command ends with 2, not with the 1 of
    a difference, and prints the service's own sentence, or the call's status and which service ended."""
    asked = "--prompts 2 --tokens 4 --dtypes float32".split()
    assert main([*asked, "--target", "heads=/none"]) == INCOMPLETE
    assert "ended after 0 of 2 prompts: /none has no heads.json" in capsys.readouterr().out.replace("\n", " ")

    @contextlib.contextmanager
    def without_target(*arguments: Any, **named: Any) -> Iterator[Services]:
        with running(*arguments, **named) as services:
            services.target.signal(signal.SIGKILL)
            yield services

    monkeypatch.setattr("tests.sameness.__main__.running", without_target)
    monkeypatch.setattr("tests.sameness.comparison.LOST_COUNT_MAX", 1)
    assert main(asked) == INCOMPLETE
    told = capsys.readouterr().out.replace("\n", " ")
    assert "UNAVAILABLE: " in told and re.search(r"Child\(target,\s+pid\s+\d+,\s+ended\s+with\s+-9\)", told)


@pytest.mark.more
@pytest.mark.lengthy
@pytest.mark.parametrize(
    "ways", [pytest.param((), id="all"), pytest.param(("--ways", HEADS_WAY), id="heads", marks=pytest.mark.slow)]
)
def test_the_command_runs(ways: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Claim: a few prompts through real services, with a setting passed on to the target, differ nowhere.

    Conclusive: it ends with 0 only if every pair is equal and draft tokens were accepted, and of the way with heads
    only if heads offered some.
    """
    asked = "--prompts 6 --tokens 12 --streams 4 --dtypes bfloat16 --target block-size=16"
    assert main([*asked.split(), *ways]) == 0
    assert "bfloat16, 1 thread(s) block-size=16" in capsys.readouterr().out


@pytest.mark.more
@pytest.mark.lengthy
@pytest.mark.parametrize("kind", ["t5-gated", pytest.param("t5", marks=pytest.mark.slow)])
def test_an_encoder_decoder_pair(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Claim: of 256 prompts, read by the encoder of a T5 target and of its draft, none differs. Conclusive: as above;
    all ways to speculate but heads."""
    target = make_encoder_decoder(tmp_path / "target", kind, seed=1)
    models = ["--models", str(target), str(make_resembling(tmp_path / "draft", target))]
    assert main([*models, *"--prompts 256 --tokens 32 --dtypes float32".split()]) == 0
    assert "8192 tokens with speculation and as many without" in capsys.readouterr().out
