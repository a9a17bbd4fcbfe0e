"""What a coordinator's page says: its figures, its links and its places, under the names dashboards know.

vLLM's four counters of speculation bear vLLM's names; everything else begins with `specdec_`. docs/metrics.md says what
each is good for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import Metric

from coordinator.figures import Figures
from coordinator.replicas import Replica
from specdec.config import CoordinatorSettings
from specdec.protocol.report import SERIES, Series, Statistics
from specdec.telemetry.metrics import common_families, counter, gauge, histogram

if TYPE_CHECKING:
    from coordinator.service import Coordinator


def families(coordinator: Coordinator, settings: CoordinatorSettings, is_serving: bool) -> Iterator[Metric]:
    """All families of the page, as things stand. May be called from any thread."""
    served = coordinator.target.description
    facts = {"model": served.model_name if served else "", "policy": settings.speculation_policy}
    yield from common_families("coordinator", is_serving, facts)
    yield from request_families(coordinator.figures, settings.max_num_seqs)
    yield from statistics_families(coordinator.figures.totals(), settings.num_speculative_tokens_max)
    yield from link_families(coordinator.replicas)


def request_families(figures: Figures, places: int) -> Iterator[Metric]:
    """Requests and how long they took."""
    running_count, waiting_count = figures.counts()
    yield gauge("specdec_num_requests_running", "Generations that have given a token and go on.", running_count)
    yield gauge("specdec_num_requests_waiting", "Generations whose first token is not there yet.", waiting_count)
    yield gauge("specdec_num_requests_max", "Most generations at a time; more are refused.", places)
    outcomes = {(outcome,): count for outcome, count in dict(figures.requests).items()}
    help = "Requests that ended, by finish reason, cancelled, or the reason of the error."
    yield counter("specdec_requests", help, outcomes, None, "outcome")
    help = "From admission to the first token."
    yield histogram("specdec_time_to_first_token_seconds", help, figures.time_to_first_token)
    help = "Between tokens: the time of a round shared by the tokens it brought."
    yield histogram("specdec_inter_token_latency_seconds", help, figures.inter_token)
    help = "From admission to the last token, of texts that ended."
    yield histogram("specdec_e2e_request_latency_seconds", help, figures.e2e_latency)
    help = "What the first verification of a request waited at the target for its step."
    yield histogram("specdec_request_queue_time_seconds", help, figures.queue_time)


def statistics_families(statistics: Statistics, draft_length_max: int) -> Iterator[Metric]:
    """The statistics of all generations, under the names that `Statistics` gives them."""
    series: dict[str, dict[Series, float]] = {}
    for field, own in SERIES:
        series.setdefault(own.name, {})[own] = getattr(statistics, field)
    for name, values in series.items():
        first = next(iter(values))
        labelled = {own.label[1:] if own.label[0] else (): value for own, value in values.items()}
        yield counter(name, first.help, labelled, None, *filter(None, first.label[:1]))
    at_least = list(accumulate(reversed(statistics.acceptance_histogram)))[::-1]
    passed = {(str(at),): sum(at_least[at + 1 : at + 2]) for at in range(max(draft_length_max, len(at_least) - 1))}
    help = "Draft tokens accepted, by their place in the round."
    yield counter("vllm:spec_decode_num_accepted_tokens_per_pos", help, passed, None, "position")


def link_families(replicas: Iterable[Replica]) -> Iterator[Metric]:
    """The links to the replicas there should be."""
    named = {(replica.kind.name,): replica for replica in replicas}
    up = {key: float(replica.is_up) for key, replica in named.items()}
    help = "1 while the replica is connected, fits and takes sessions."
    yield gauge("specdec_link_up", help, up, None, "peer")
    lost = {key: float(replica.loss_count) for key, replica in named.items()}
    yield counter("specdec_link_losses", "Connections that were lost.", lost, None, "peer")
    measured = {key: replica.link.stamps.network_median_s for key, replica in named.items() if replica.is_up}
    network = {key: value for key, value in measured.items() if value is not None}
    help = "Network time of the last messages, both ways, median; without the stay at the peer."
    yield gauge("specdec_link_network_seconds", help, network, None, "peer")
