"""The engine's benchmark: sequences decode real text, the sampler gets a real request, and the bar."""

from __future__ import annotations

import pytest

from bench.engine.__main__ import BENCHMARK, CHAT, DEEPENED, PARTS, Sequences, name_of
from bench.engine.sampler import ALL_PARAMS, made_up_logits, request_of
from bench.results import Results
from specdec.decoding.verification import verify
from specdec.engine.loading.model import load_model
from tests.support.engine_models import Driver
from tests.support.harness import DRAFT_MODEL
from tests.support.threads import one_thread  # noqa: F401


def test_sequences_decode_what_one_alone_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: a turn decodes the tokens it counts, the greedy ones, and frees its cache blocks; its parts are the step.

    Conclusive: 9 tokens by hand through the same model.
    """
    monkeypatch.setattr("bench.engine.__main__.TOKENS", 9)
    sequences = Sequences(load_model(str(DRAFT_MODEL), "float32"), 3)
    for count in (3, 1, 3):
        found = sequences.decode(count)
        assert found["step"] == pytest.approx(sum(found[part] for part in PARTS)) and min(found.values()) > 0
    driver = Driver(load_model(str(DRAFT_MODEL), "float32"))
    for text in sequences.texts:
        assert text[-10:] == driver.greedy(text[:-10], 10)
    assert sequences.engine.cache.usage == 0


@pytest.mark.parametrize("rule", ALL_PARAMS)
def test_verification_is_of_a_real_request(rule: str) -> None:
    """Claim: the timed request passes the real `verify` and yields a recovered token for every row; most of the mass
    lies on few tokens, as in real text."""
    logits = made_up_logits(3, 500)
    (found,) = verify([request_of(ALL_PARAMS[rule], logits)], [3], logits)
    assert len(found.recovered_token_ids) == 3
    assert logits.softmax(-1).topk(16).values.sum(-1).min() > 0.95


def test_the_goal_is_judged_by_the_worst_model() -> None:
    """Claim: one model below the bar misses the goal; without measurements nothing counts as met."""
    results = Results({})
    assert [bar.state for bar in BENCHMARK.bars(results)] == ["not measured"]
    for model, rate, state in ((DEEPENED, 90.0, "stretch"), (CHAT, 49.0, "missed")):
        results.add({"model": model}, name_of(1), {"tokens_per_s": 10.0})
        results.add({"model": model}, name_of(16), {"tokens_per_s": rate})
        assert [bar.state for bar in BENCHMARK.bars(results)] == [state]
