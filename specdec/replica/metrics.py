"""The metrics of a replica and its page: steps, sessions, cache. docs/metrics.md names each; its help says what it is.

Each has the label `replica`, target or draft, so that one dashboard can show both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import Metric

from specdec.engine.cache.kv_cache import KVCache
from specdec.engine.scheduling.scheduler import Engine
from specdec.protocol.items import Failure
from specdec.protocol.types import Description
from specdec.replica.handler import ItemHandler
from specdec.rpc.status import REASONS
from specdec.telemetry.metrics import COUNT_BOUNDS, STEP_BOUNDS_S, Histogram, common_metrics, counter, gauge, histogram

COUNTERS = {
    "prefix_query_tokens": ("specdec_prefix_cache_queries", "Tokens of admitted sessions that were looked up."),
    "prefix_hit_tokens": ("specdec_prefix_cache_hits", "Looked-up tokens found in the prefix cache."),
    "preemptions": ("specdec_preemptions", "Sessions preempted by an older one."),
    "reopenings": ("specdec_reopenings", "Preempted sessions that were opened again."),
}


@dataclass(slots=True)
class ReplicaMetrics:
    """The counters of one replica process; other threads read them."""

    step_time: Histogram = field(default_factory=lambda: Histogram(STEP_BOUNDS_S))
    step_rows: Histogram = field(default_factory=lambda: Histogram(COUNT_BOUNDS))
    step_sessions: Histogram = field(default_factory=lambda: Histogram(COUNT_BOUNDS))
    failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))

    def stepped(self, row_count: int, session_count: int, step_s: float) -> None:
        """The engine ran a step."""
        self.step_time.add(step_s)
        self.step_rows.add(row_count)
        self.step_sessions.add(session_count)

    def failed(self, failure: Failure) -> None:
        """An item of a coordinator failed."""
        self.failures[failure.reason] += 1


def page_metrics(
    name: str,
    is_serving: bool,
    description: Description,
    kernels: str,
    engine: Engine[Any, Any],
    metrics: ReplicaMetrics,
    handler: ItemHandler,
) -> Iterator[Metric]:
    """Yields all metrics of the page. May be called from any thread: each value by itself is correct. `kernels`: see
    `ModelDescription`."""
    facts = {
        "model": description.model_name,
        "dtype": description.dtype,
        "device": description.device,
        "ranks": str(description.tensor_parallel_size),
        "kernels": kernels,
    }
    yield from common_metrics(name, is_serving, facts)
    labels = {"replica": name}
    yield histogram("specdec_step_time_seconds", "One step: forward pass and sampler.", metrics.step_time, labels)
    yield histogram("specdec_step_rows", "Rows of a step, all sessions together.", metrics.step_rows, labels)
    yield histogram("specdec_step_sessions", "Sequences a step served.", metrics.step_sessions, labels)
    help = "Steps of prompts that were abandoned for newer work; they run again."
    yield counter("specdec_steps_abandoned", help, engine.abandoned_count, labels)
    waiting_count, most = handler.service.waiting_count, handler.session_count_max
    yield gauge("specdec_sessions", "Sessions open.", len(handler.sessions), labels)
    yield gauge("specdec_sessions_waiting", "Sessions that wait for cache blocks.", waiting_count, labels)
    yield gauge("specdec_sessions_max", "Limit of concurrent sessions; more are refused.", most, labels)
    help = "Share taken of sessions, cache or, on a draft, time; at 1 no further session fits. More: sessions wait."
    yield gauge("specdec_load", help, handler.load()[1], labels)
    help = "Failed items of coordinators, by the reason of the error."
    failures = {(reason,): count for reason, count in metrics.failures.items()}
    yield counter("specdec_item_failures", help, failures, labels, "reason")
    yield from cache_metrics(engine.cache, labels)
    counts = handler.service.counters()
    for key, (metric, help) in COUNTERS.items():
        if key in counts:
            yield counter(metric, help, counts[key], labels)


def cache_metrics(cache: KVCache, labels: dict[str, str]) -> Iterator[Metric]:
    """Yields the metrics of the cache: its usage, and its blocks by state."""
    evictable, free = cache.evictable_block_count, max(0, cache.free_block_count - cache.evictable_block_count)
    yield gauge("specdec_kv_cache_usage_perc", "Share of the cache that sessions hold, 0 to 1.", cache.usage, labels)
    states = {("held",): cache.block_count - 1 - free - evictable, ("evictable",): evictable, ("free",): free}
    help = "Blocks of the cache: held by sessions, evictable (cached prefixes), free."
    yield gauge("specdec_kv_cache_blocks", help, states, labels, "state")
