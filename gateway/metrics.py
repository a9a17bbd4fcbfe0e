"""The counts of a gateway, and its metrics page. vLLM's names are on the coordinator's page only."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import Metric

from specdec.telemetry.metrics import Histogram, common_metrics, counter, gauge, histogram

DURATION_BOUNDS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
LAG_LOOK_S = 0.25
OTHER = "other"  # the field of a refusal whose field is not in the table: labels are never words of clients


class GatewayMetrics:
    """Counted by the event loop, read by the page's thread."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, str]] = Counter()
        self.durations = Histogram(DURATION_BOUNDS_S)
        self.refusals: Counter[tuple[str]] = Counter()
        self.open_count = 0
        self.resumed_count = 0
        self.passed_count = 0
        self.gone_count = 0
        self.lag_s = 0.0
        self.is_serving = False
        self.model = ""

    def retried(self, has_started: bool) -> None:
        """Counts a resumption of a text that had started, or the passing over of a coordinator before its start."""
        if has_started:
            self.resumed_count += 1
        else:
            self.passed_count += 1

    def answered(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Counts an answer."""
        self.requests[handler, method, f"{status // 100}xx"] += 1
        self.durations.add(seconds)

    async def measure_lag(self) -> None:
        """Keeps `lag_s`, the longest of the last delays of the event loop."""
        while True:
            start_s = time.monotonic()
            await asyncio.sleep(LAG_LOOK_S)
            self.lag_s = max(self.lag_s * 0.9, time.monotonic() - start_s - LAG_LOOK_S)

    def page(self) -> Iterator[Metric]:
        """Yields the current metrics; from any thread."""
        yield from common_metrics("gateway", self.is_serving, {"model": self.model})
        requests = {key: float(count) for key, count in dict(self.requests).items()}
        yield counter("http_requests", "Answers.", requests, None, "handler", "method", "status")
        yield histogram(
            "specdec_gateway_request_duration_seconds", "From a request to its answer's end.", self.durations
        )
        yield gauge("specdec_gateway_requests_open", "Requests under way.", self.open_count)
        help = "Texts that went on after the loss of a target or coordinator."
        yield counter("specdec_gateway_resumptions", help, self.resumed_count)
        help = "Coordinators passed over for the next because they were full or lost."
        yield counter("specdec_gateway_passed_over", help, self.passed_count)
        yield counter("specdec_gateway_clients_gone", "Requests that ended because their client left.", self.gone_count)
        refusals = {key: float(count) for key, count in dict(self.refusals).items()}
        yield counter("specdec_gateway_refusals", "Refused requests, by field.", refusals, None, "field")
        yield gauge("specdec_gateway_event_loop_lag_seconds", "Longest delay of the event loop, lately.", self.lag_s)
