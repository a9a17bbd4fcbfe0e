"""`specdec advise` with an encoder-decoder pair: a prompt is the encoder's input, an answer follows a beginning."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from specdec.advise.agreement import Reader, agreement_along
from specdec.advise.forecast import expected_rounds
from specdec.engine.loading.model import load_model
from specdec.protocol.types import ResolvedSamplingParams, Rule
from specdec.v1 import coordinator_service_pb2 as pb
from tests.support.encoder_decoder_models import START, PairReference, make_encoder_decoder, make_resembling
from tests.support.engine_models import make_tiny_model
from tests.support.services import fixed, running

PROMPTS = ("def total(values):", "return sum(value for value in values)", "if value is not None " * 8)
TOKENS = 24


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft that often agrees with it."""
    folder = tmp_path_factory.mktemp("t5")
    target = make_encoder_decoder(folder / "target", "t5-gated", seed=1)
    return target, make_resembling(folder / "draft", target)


def readers_of(pair: tuple[Path, Path]) -> list[Reader]:
    return [Reader(load_model(str(folder), dtype="float32", has_stable_rows=False), 512) for folder in pair]


def test_measures_are_those_of_transformers_distributions(pair: tuple[Path, Path]) -> None:
    """Claim: along an output the measures are those of the softmax of `transformers` with the same input, whatever the
    lengths of input and output, and whatever was read before. Conclusive: inputs shorter and longer than a slice of the
    reader, outputs of several slices; the library's own forward of both models."""
    readers, references = readers_of(pair), [PairReference(folder) for folder in pair]
    for length, start in ((5, 1), (150, 1), (64, 3), (20, 70)):
        source = [index % 200 + 1 for index in range(length)]
        output = [START, *((7 * index + length) % 250 + 1 for index in range(140))]
        params = ResolvedSamplingParams(
            Rule.COUPLED, seed=3, prompt_length=length + start, temperature=0.7, encoder_length=length
        )
        own = agreement_along(readers[0], readers[1], [*source, *output], length + start - 1, params)
        p, q = (
            (reference.logits(source, output)[start - 1 : -1].double() / 0.7).softmax(1) for reference in references
        )
        assert len(own) == len(p) == len(output) - start
        close = {"rtol": 0, "atol": 1e-3}
        assert torch.allclose(own.variation, (p - q).abs().sum(1) / 2, **close), (length, start)
        assert torch.allclose(own.divergence, (p * (p / q).log()).sum(1), **close)
        assert torch.allclose(own.confidence, q.max(1).values, **close)


@pytest.mark.more
def test_served_rounds_are_the_predicted_ones(pair: tuple[Path, Path]) -> None:
    """Claim: along a served text the predicted coins give the accepted draft tokens of every generation, under GREEDY
    and, with the seed, under COUPLED. Conclusive: coins are 0 or 1, so there is no chance in it; real services, chains
    of 3 that wait; some tokens are accepted and some are not."""
    asked = [(prompt, temperature) for prompt in PROMPTS for temperature in (0.0, 0.7)]
    with running(*pair, dtype="float32", threads=1) as services:
        speculative = fixed(3, draft_window=3, draft_wait_ms=2000)
        outcomes = [
            services.client.generate(
                prompt, speculative=speculative, max_tokens=TOKENS, temperature=at, seed=7, ignore_eos=True
            )
            for prompt, at in asked
        ]
    readers, counts = readers_of(pair), [0, 0]

    words = tokenizers.Tokenizer.from_file(str(pair[0] / "tokenizer.json"))
    for (prompt, temperature), outcome in zip(asked, outcomes, strict=True):
        ids = words.encode(prompt).ids
        rule = Rule.COUPLED if temperature else Rule.GREEDY
        length = len(ids)
        params = ResolvedSamplingParams(rule, 7, length + 1, temperature=temperature, encoder_length=length)
        own = agreement_along(readers[0], readers[1], [*ids, START, *outcome.token_ids], length, params)
        coins = own.passes[rule].tolist()
        start = len(list(takewhile(lambda kind: kind == pb.TOKEN_KIND_BONUS, outcome.kinds)))
        statistics = outcome.finished.statistics
        assert statistics.num_accepted_draft_tokens == TOKENS - start - expected_rounds(coins[start:], 3)
        counts[0] += statistics.num_accepted_draft_tokens
        counts[1] += statistics.num_draft_tokens
    assert 0 < counts[0] < counts[1]


def advise(pair: tuple[Path, Path], prompts: Path, *more: str) -> subprocess.CompletedProcess[str]:
    told = f"--target {pair[0]} --draft {pair[1]} --prompts {prompts} --text-tokens {TOKENS} --threads 1 --json"
    line = [sys.executable, "-m", "specdec.cli", "advise", *told.split(), "--text-temperatures", "0,1", *more]
    return subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    return tmp_path / "prompts.txt"


@pytest.mark.more
def test_the_command_predicts_what_is_then_served(pair: tuple[Path, Path], prompts: Path) -> None:
    """Claim: `specdec advise --check` tells agreement and plans of such a pair, and what it then serves is near: greedy
    answers are the same texts, so the tokens of a round are the predicted ones within an interval. No time is judged.
    Conclusive: a prompt served as one sequence, or without its beginning, would give other texts."""
    done = advise(pair, prompts, "--check")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    (draft,), (check,) = found["drafts"], found["checks"]
    assert [cell["temperature"] for cell in draft["cells"]] == [0.0, 1.0]
    assert all(0 < cell["acceptance"][rule]["value"] for cell in draft["cells"] for rule in cell["acceptance"])
    predicted, seen = check["rules"]["GREEDY"]["values"]["tokens a round"]
    assert abs(seen["value"] - predicted["value"]) < 0.3 * predicted["value"], (predicted, seen)


def test_a_draft_that_is_not_served_is_refused(pair: tuple[Path, Path], prompts: Path, tmp_path: Path) -> None:
    """Claim: a draft of another kind is refused by name before the target writes, in one line."""
    decoder = make_tiny_model(tmp_path / "decoder", "llama")
    done = advise((pair[0], decoder), prompts)
    assert done.returncode == 1 and done.stdout == ""
    said = done.stderr.strip()
    assert "is a decoder alone, the target an encoder-decoder model: give one of its kind" in said
    assert len(said.splitlines()) == 1
