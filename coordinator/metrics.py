"""The metrics page of a coordinator: its statistics, its links and its capacity, under the names dashboards use.

vLLM's four counters of speculation have vLLM's names; all others begin with `specdec_`. docs/metrics.md explains each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import Metric

from specdec.config import CoordinatorSettings
from specdec.coordinator.fleet import Fleet
from specdec.coordinator.peers import Peer
from specdec.coordinator.statistics import CoordinatorMetrics
from specdec.protocol.report import SERIES, Series, Statistics
from specdec.telemetry.metrics import common_metrics, counter, gauge, histogram


def page_metrics(
    metrics: CoordinatorMetrics,
    fleet: Fleet,
    settings: CoordinatorSettings,
    is_serving: bool,
) -> Iterator[Metric]:
    """Yields all metrics of the page with their current values. May be called from any thread."""
    served = fleet.target.description
    facts = {"model": served.model_name if served else "", "policy": settings.speculation_policy}
    yield from common_metrics("coordinator", is_serving, facts)
    yield from request_metrics(metrics, settings.max_num_seqs)
    yield from statistics_metrics(metrics.totals(), settings.num_speculative_tokens_max)
    yield from link_metrics(fleet.peers)


def request_metrics(metrics: CoordinatorMetrics, places: int) -> Iterator[Metric]:
    """Yields the metrics of requests: their numbers, outcomes and latencies."""
    running_count, waiting_count = metrics.counts()
    yield gauge("specdec_num_requests_running", "Generations in progress after their first token.", running_count)
    yield gauge("specdec_num_requests_waiting", "Generations before their first token.", waiting_count)
    yield gauge("specdec_num_requests_max", "Limit of concurrent generations; more are refused.", places)
    outcomes = {(outcome,): count for outcome, count in dict(metrics.requests).items()}
    help = "Requests that ended, by finish reason, cancelled, or the reason of the error."
    yield counter("specdec_requests", help, outcomes, None, "outcome")
    help = "From admission to the first token."
    yield histogram("specdec_time_to_first_token_seconds", help, metrics.time_to_first_token)
    help = "Between tokens: the time of a round divided by its tokens."
    yield histogram("specdec_inter_token_latency_seconds", help, metrics.inter_token)
    help = "From admission to the last token, of finished texts."
    yield histogram("specdec_e2e_request_latency_seconds", help, metrics.e2e_latency)
    help = "Wait of a request's first verification at the target for its step."
    yield histogram("specdec_request_queue_time_seconds", help, metrics.queue_time)


def statistics_metrics(statistics: Statistics, draft_length_max: int) -> Iterator[Metric]:
    """Yields the statistics of all generations, under the names that `Statistics` defines."""
    series: dict[str, dict[Series, float]] = {}
    for field, own in SERIES:
        series.setdefault(own.name, {})[own] = getattr(statistics, field)
    for name, values in series.items():
        first = next(iter(values))
        labelled = {own.label[1:] if own.label[0] else (): value for own, value in values.items()}
        yield counter(name, first.help, labelled, None, *filter(None, first.label[:1]))
    at_least = list(accumulate(reversed(statistics.acceptance_histogram)))[::-1]
    passed = {(str(at),): sum(at_least[at + 1 : at + 2]) for at in range(max(draft_length_max, len(at_least) - 1))}
    help = "Draft tokens accepted, by position in the round."
    yield counter("vllm:spec_decode_num_accepted_tokens_per_pos", help, passed, None, "position")


def link_metrics(peers: Sequence[Peer]) -> Iterator[Metric]:
    """Yields the metrics of the links to the configured peers, each by its kind and its address."""
    named = {(peer.name, peer.address): peer for peer in peers}
    labels = "peer", "address"
    up = {key: float(peer.is_up) for key, peer in named.items()}
    help = "1 while the replica is connected, compatible and accepts sessions."
    yield gauge("specdec_link_up", help, up, None, *labels)
    lost = {key: float(peer.loss_count) for key, peer in named.items()}
    yield counter("specdec_link_losses", "Connections lost.", lost, None, *labels)
    measured = {key: peer.link.stamps.network_median_s for key, peer in named.items() if peer.is_up}
    network = {key: value for key, value in measured.items() if value is not None}
    help = "Median network round-trip time of the last messages, without the time at the peer."
    yield gauge("specdec_link_network_seconds", help, network, None, *labels)
