"""Which policy is in force, by request and by service, and what a generation says of it at its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.services import Outcome, fixed, running

ASKED = {"prompt": [1, 2], "max_tokens": 80, "temperature": 0, "ignore_eos": True}
REQUESTS = {
    None: {},
    "auto": {"policy": "POLICY_AUTO"},
    "fixed": fixed(2),
    "off": {"policy": "POLICY_OFF"},
}


def check(policy: str, outcome: Outcome) -> None:
    """The statistics are those of a generation under this policy."""
    told = outcome.finished.statistics
    assert told.observed_tokens_per_s > 0 and told.policy_reason
    if policy == "off":
        assert told.num_rounds_off == told.rounds == 80 and not told.num_draft_tokens
        assert told.policy_reason == "off" and told.predicted_tokens_per_s == 0
    elif policy == "fixed":
        assert told.num_rounds_off == 0 < told.num_draft_tokens
        assert told.policy_reason.startswith("fixed: ") and told.predicted_tokens_per_s == 0
    else:
        assert "tokens/s predicted" in told.policy_reason, told.policy_reason
        assert "off" in told.policy_reason and told.predicted_tokens_per_s > 0


@pytest.mark.parametrize("of_service", ["auto", "fixed", "off"])
def test_the_requests_policy_counts_else_the_services(table_models: tuple[Path, Path], of_service: str) -> None:
    """Claim (docs/performance.md): `auto`, `fixed` and `off`, by request and by service; what was predicted, what came
    of it and why stand in the statistics. Conclusive: every pair of the two, each told from the others by what it
    counts, and the text is one. (Table models compute nothing: this is about the protocol, not about speed.)"""
    with running(*table_models, coordinator={"speculation_policy": of_service}, threads=1) as services:
        texts = set()
        for of_request, speculative in REQUESTS.items():
            outcome = services.client.generate(speculative=speculative, **ASKED)
            check(of_request or of_service, outcome)
            texts.add(tuple(outcome.token_ids))
        assert len(texts) == 1
