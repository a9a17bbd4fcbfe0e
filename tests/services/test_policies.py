"""The policy in force, by request and by service, and its statistics at the end of a generation."""

from __future__ import annotations

import pytest

from tests.support.services import Outcome, Services, fixed

TOKENS = 450  # a draft that begins late on a busy machine still has a part in it
ASKED = {"prompt": [1, 2], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
REQUESTS = {
    None: {},
    "auto": {"policy": "POLICY_AUTO"},
    "fixed": fixed(2),
    "off": {"policy": "POLICY_OFF"},
}


def check(policy: str, outcome: Outcome) -> None:
    """The statistics are those of a generation under this policy."""
    statistics = outcome.finished.statistics
    assert statistics.observed_tokens_per_s > 0 and statistics.policy_reason
    if policy == "off":
        assert statistics.num_rounds_off == statistics.rounds == TOKENS and not statistics.num_draft_tokens
        assert statistics.policy_reason == "off" and statistics.predicted_tokens_per_s == 0
    elif policy == "fixed":
        assert statistics.num_rounds_off == 0 < statistics.num_draft_tokens
        assert statistics.policy_reason.startswith("fixed: ") and statistics.predicted_tokens_per_s == 0
    else:
        assert "tokens/s predicted" in statistics.policy_reason, statistics.policy_reason
        assert "off" in statistics.policy_reason and statistics.predicted_tokens_per_s > 0


@pytest.mark.parametrize(
    "of_service", ["auto", *(pytest.param(name, marks=pytest.mark.more) for name in ("fixed", "off"))]
)
def test_the_requests_policy_counts_else_the_services(table_services: Services, of_service: str) -> None:
    """Claim (docs/performance.md): `auto`, `fixed` and `off`, by request and by service; the statistics hold
    prediction, result and reason. Conclusive: every pair of the two, distinguished by their counts; all texts are
    equal. (Table models compute nothing: this is about the protocol, not about speed.)"""
    with table_services.coordinator_with(speculation_policy=of_service) as client:
        texts = set()
        for of_request, speculative in REQUESTS.items():
            outcome = client.generate(speculative=speculative, **ASKED)
            check(of_request or of_service, outcome)
            texts.add(tuple(outcome.token_ids))
        assert len(texts) == 1
