"""Services with pages of metrics on known ports, and a reader of those pages over real HTTP."""

from __future__ import annotations

import contextlib
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.support.ports import free_port, free_ports
from tests.support.services import Services, running

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def free_address() -> str:
    """A loopback address without a listener at the moment."""
    return f"127.0.0.1:{free_port()}"


@dataclass(frozen=True)
class Page:
    """One reading of a page."""

    samples: tuple[Sample, ...]

    @property
    def names(self) -> frozenset[str]:
        """Names of all samples, as PromQL writes them."""
        return frozenset(sample.name for sample in self.samples)

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples of a name that have these labels; KeyError where there is none."""
        found = [
            sample.value for sample in self.samples if sample.name == name and labels.items() <= sample.labels.items()
        ]
        if not found:
            raise KeyError((name, labels))
        return sum(found)

    @property
    def exemplars(self) -> dict[str, set[str]]:
        """The trace ids that exemplars name, by the sample's name."""
        found: dict[str, set[str]] = {}
        for sample in self.samples:
            if sample.exemplar is not None:
                found.setdefault(sample.name, set()).add(sample.exemplar.labels["trace_id"])
        return found

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The samples of a name by the value of a label."""
        return {sample.labels[label]: sample.value for sample in self.samples if sample.name == name}


def read_text(address: str, accepted: str = OPENMETRICS, path: str = "/metrics") -> str:
    """The text of a page. Raises urllib.error.URLError."""
    request = urllib.request.Request(f"http://{address}{path}", headers={"Accept": accepted})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read().decode()


def read_page(address: str) -> Page:
    """A page read by a strict reader of OpenMetrics, whose refusals are errors."""
    found = list(text_string_to_metric_families(read_text(address)))
    return Page(tuple(sample for metric in found for sample in metric.samples))


@dataclass(frozen=True)
class Watched:
    """Running services and the addresses of their pages, by service."""

    services: Services
    addresses: dict[str, str]

    def page(self, service: str) -> Page:
        """The page of `coordinator`, `target` or `draft`, now."""
        return read_page(self.addresses[service])


@contextlib.contextmanager
def watched(models: tuple[Path, Path], **common: Any) -> Iterator[Watched]:
    """Services on these models with a page each. `common`: settings of both replicas; `coordinator`, `target`,
    `draft`: of these alone."""
    names = ("coordinator", "target", "draft")
    addresses = {service: f"127.0.0.1:{port}" for service, port in zip(names, free_ports(3), strict=True)}
    own = {service: {**common.pop(service, {}), "metrics_address": address} for service, address in addresses.items()}
    with running(*models, threads=1, **own, **common) as services:
        yield Watched(services, addresses)
