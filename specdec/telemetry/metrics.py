"""What a process counts, as plain values, and the metric families made of them when somebody asks.

Counting is an addition by one thread and takes no lock; another reads. A reader may find one figure an event ahead of
another, never a wrong one. Labels are words from fixed lists, never what users sent.
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

LATENCY_BOUNDS_S = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
TOKEN_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
STEP_BOUNDS_S = TOKEN_BOUNDS_S
COUNT_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

Labels = Mapping[str, str]
# Mappings have keys of one type only, though tuples of one word are tuples of words.
Names = TypeVar("Names", bound=tuple[str, ...])


class Histogram:
    """Observations by size. `counts[i]` are those above `bounds[i - 1]` and at most `bounds[i]`; the last are above all
    bounds. `exemplars` are the newest of each bucket that has one, with their traces and times since 1970."""

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


def _family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    help: str,
    value: float | Mapping[Names, float],
    labels: Labels | None = None,
    *names: str,
) -> Metric:
    """One number, or numbers by the values of the labels `names`; `labels` stand on all of them."""
    labels = labels or {}
    family = kind(name, help, labels=[*labels, *names])
    for key, number in (value if isinstance(value, Mapping) else {(): value}).items():
        family.add_metric([*labels.values(), *key], number)
    return family


gauge = partial(_family, GaugeMetricFamily)  # as things are now
counter = partial(_family, CounterMetricFamily)  # since the start; the name gets `_total`


def histogram(name: str, help: str, figures: Histogram, labels: Labels | None = None) -> HistogramMetricFamily:
    """Observations by size, with their exemplars."""
    bounds = [*map(floatToGoString, figures.bounds), "+Inf"]
    counts = map(float, accumulate(figures.counts))
    family = HistogramMetricFamily(name, help, labels=list(labels or {}))
    # The library takes None for no exemplar, and does not say so.
    buckets: list[Any] = [(*own, figures.exemplars.get(index)) for index, own in enumerate(zip(bounds, counts))]
    family.add_metric([*(labels or {}).values()], buckets, figures.total)
    return family


def common_families(service: str, is_serving: bool, facts: Labels) -> Iterator[Metric]:
    """What every service says of itself. `facts`: what it serves and with what, by name."""
    info = {"service": service, "version": __version__, **facts}
    yield InfoMetricFamily("specdec_service", "What this process is and serves.", info)
    help = "1 while health says SERVING; 0 while loading, without a target, draining."
    yield gauge("specdec_serving", help, is_serving)
