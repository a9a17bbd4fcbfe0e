"""The counts of a process as plain values, and the Prometheus metrics made of them on request.

Counting is an addition by one thread without a lock; another thread reads. One value may be an event ahead of another,
never wrong. Labels are words from fixed lists, never texts of users.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from specdec import __version__
from specdec.telemetry.logs import lost_line_count

STEP_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
COUNT_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

Labels = Mapping[str, str]
# Mappings have keys of one type only, though tuples of one word are tuples of words.
Names = TypeVar("Names", bound=tuple[str, ...])


class Histogram:
    """Observations by size. `counts[i]`: those above `bounds[i - 1]` and at most `bounds[i]`; the last: those above all
    bounds. `exemplars`: the newest of each bucket that has one, with its trace and its time since 1970."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0
        self.exemplars: dict[int, Exemplar] = {}

    def add(self, value: float, count: int = 1) -> int:
        """Counts `count` observations of one value; returns the index of their bucket."""
        index = bisect_left(self.bounds, value)
        self.counts[index] += count
        self.total += value * count
        return index

    def add_traced(self, value: float, trace_id: str, wall_s: float) -> None:
        """Counts one observation whose trace is recorded."""
        self.exemplars[self.add(value)] = Exemplar({"trace_id": trace_id}, value, wall_s)


def _metric(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    help: str,
    value: float | Mapping[Names, float],
    labels: Labels | None = None,
    *names: str,
) -> Metric:
    """Returns a metric of one number, or of numbers by the values of the labels `names`; all have `labels`."""
    labels = labels or {}
    metric = kind(name, help, labels=[*labels, *names])
    for key, number in (value if isinstance(value, Mapping) else {(): value}).items():
        metric.add_metric([*labels.values(), *key], number)
    return metric


gauge = partial(_metric, GaugeMetricFamily)  # current values
counter = partial(_metric, CounterMetricFamily)  # since the start; the name gets `_total`


def histogram(name: str, help: str, metrics: Histogram, labels: Labels | None = None) -> HistogramMetricFamily:
    """Returns the metric of a histogram, with its exemplars."""
    bounds = [*map(floatToGoString, metrics.bounds), "+Inf"]
    counts = map(float, accumulate(metrics.counts))
    metric = HistogramMetricFamily(name, help, labels=list(labels or {}))
    # The library takes None for no exemplar, which its types omit.
    buckets: list[Any] = [(*own, metrics.exemplars.get(index)) for index, own in enumerate(zip(bounds, counts))]
    metric.add_metric([*(labels or {}).values()], buckets, metrics.total)
    return metric


def common_metrics(service: str, is_serving: bool, facts: Labels) -> Iterator[Metric]:
    """Yields the metrics that every service has. `facts`: labels of its model and settings."""
    info = {"service": service, "version": __version__, **facts}
    yield InfoMetricFamily("specdec_service", "The service of this process, its version and its model.", info)
    help = "1 while health is SERVING; 0 while loading, without a target, draining."
    yield gauge("specdec_serving", help, is_serving)
    help = "Log lines that standard error did not take, or that could not be made."
    yield counter("specdec_log_lines_dropped", help, lost_line_count())
