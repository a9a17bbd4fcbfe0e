"""Figures turned into metric families: names, help texts, labels.

Labels are words from fixed lists, never what users sent. What is counted is not known here, nor how it is served.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

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
from specdec.telemetry.figures import Histogram

Labels = Mapping[str, str]


def gauge(name: str, help: str, value: float | None, labels: Labels | None = None) -> GaugeMetricFamily:
    """One number as it is now; without a sample where it is not known."""
    return gauges(name, help, {} if value is None else {(): value}, labels)


def gauges(
    name: str, help: str, values: Mapping[tuple[str, ...], float], labels: Labels | None = None, *names: str
) -> GaugeMetricFamily:
    """Numbers as they are now, by the values of the labels `names`; `labels` stand on all of them."""
    family = GaugeMetricFamily(name, help, labels=[*(labels or {}), *names])
    for key, value in values.items():
        family.add_metric([*(labels or {}).values(), *key], value)
    return family


def counter(name: str, help: str, value: float, labels: Labels | None = None) -> CounterMetricFamily:
    """A count since the start; its name gets `_total`."""
    return counters(name, help, {(): value}, labels)


def counters(
    name: str, help: str, values: Mapping[tuple[str, ...], float], labels: Labels | None = None, *names: str
) -> CounterMetricFamily:
    """Counts since the start, by the values of the labels `names`; `labels` stand on all of them."""
    family = CounterMetricFamily(name, help, labels=[*(labels or {}), *names])
    for key, value in values.items():
        family.add_metric([*(labels or {}).values(), *key], value)
    return family


def histogram(name: str, help: str, figures: Histogram, labels: Labels | None = None) -> HistogramMetricFamily:
    """Observations by size, with their exemplars."""
    bounds = [*map(floatToGoString, figures.bounds), "+Inf"]
    buckets: list = []
    for index, (bound, count) in enumerate(zip(bounds, accumulate(figures.counts))):
        found = figures.exemplars.get(index)
        exemplar = found and Exemplar({"trace_id": found.trace_id}, found.value, found.wall_s)
        buckets.append((bound, float(count), exemplar))
    family = HistogramMetricFamily(name, help, labels=list(labels or {}))
    family.add_metric([*(labels or {}).values()], buckets, figures.total)
    return family


def common_families(service: str, is_serving: bool, facts: Labels) -> Iterator[Metric]:
    """What every service says of itself. `facts`: what it serves and with what, by name."""
    info = {"service": service, "version": __version__, **facts}
    yield InfoMetricFamily("specdec_service", "What this process is and serves.", info)
    yield gauge(
        "specdec_serving", "1 while health says SERVING; 0 while loading, without a target, draining.", is_serving
    )
