"""The line after a text on a terminal."""

from __future__ import annotations

from specdec.cli.generate import summary
from specdec.v1 import coordinator_service_pb2 as pb


def test_it_has_the_statistics_and_the_trace_id():
    """Claim: tokens, speed, acceptance, length, and the trace id as `specdec trace` takes it."""
    finished = pb.Finished(trace_id="ab" * 16)
    finished.usage.output_tokens = 50
    finished.statistics.time.total_s = 2.0
    finished.statistics.acceptance_histogram.extend([1, 3])
    finished.statistics.draft_acceptance_rate = 0.75
    finished.statistics.mean_acceptance_length = 1.75
    line = "50 tokens, 25.0 tokens/s, acceptance 0.75, 1.75 tokens a speculating round; trace " + "ab" * 16
    assert summary(finished) == line
