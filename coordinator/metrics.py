"""The metrics page of a coordinator: its statistics, its links and its capacity, under the names dashboards use.

What vLLM exports too has vLLM's name, meaning and labels, so that its boards show it; all others begin with `specdec_`.
docs/metrics.md names each; its help says what it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import Metric

from specdec.config import CoordinatorSettings
from specdec.coordinator.fleet import Fleet
from specdec.coordinator.peers import STATES, Peer
from specdec.coordinator.statistics import CoordinatorMetrics
from specdec.protocol.report import SERIES, Series, Statistics
from specdec.telemetry.metrics import Labels, common_metrics, counter, gauge, histogram

VLLM = "vllm:"


def page_metrics(
    metrics: CoordinatorMetrics,
    fleet: Fleet,
    settings: CoordinatorSettings,
    is_serving: bool,
) -> Iterator[Metric]:
    """Yields all metrics of the page with their current values. May be called from any thread."""
    model_name = fleet.model_name
    facts = {"model": model_name, "policy": settings.speculation_policy}
    yield from common_metrics("coordinator", is_serving, facts)
    help = "Limit of concurrent generations; more are refused."
    yield gauge("specdec_num_requests_max", help, settings.max_num_seqs)
    outcomes = {(outcome,): count for outcome, count in dict(metrics.requests).items()}
    help = "Requests that ended, each choice one, by finish reason, cancelled, or the reason of the error."
    yield counter("specdec_requests", help, outcomes, None, "outcome")
    labels = {"model_name": model_name, "engine": "0"}  # one engine, as vLLM counts them
    own = statistics_metrics(metrics.totals(), settings.num_speculative_tokens_max, labels)
    for metric in (*request_metrics(metrics, labels), *own):
        if model_name or not metric.name.startswith(VLLM):  # no series before the model is known
            yield metric
    yield from link_metrics(fleet.peers)
    yield from pool_metrics(metrics, fleet)


def request_metrics(metrics: CoordinatorMetrics, labels: Labels) -> Iterator[Metric]:
    """Yields the metrics of requests: their numbers, finished reasons, latencies and lengths, with `labels`."""
    running_count, waiting_count = metrics.counts()
    help = "Generations in progress after their first token."
    yield gauge("vllm:num_requests_running", help, running_count, labels)
    yield gauge("vllm:num_requests_waiting", "Generations before their first token.", waiting_count, labels)
    finished = {(reason,): count for reason, count in dict(metrics.finished_reasons).items()}
    help = "Admitted requests that ended, by reason: abort if the client left, error if the generation failed."
    yield counter("vllm:request_success", help, finished, labels, "finished_reason")
    for name, help, observed in (
        ("time_to_first_token_seconds", "From admission to the first token.", metrics.time_to_first_token),
        ("inter_token_latency_seconds", "Between rounds, whatever number of tokens they bring.", metrics.inter_token),
        (
            "request_time_per_output_token_seconds",
            "Time of a finished text after its first token, divided by its later tokens; 0 without any.",
            metrics.time_per_output_token,
        ),
        ("e2e_request_latency_seconds", "From admission to the last token, of finished texts.", metrics.e2e_latency),
        ("request_queue_time_seconds", "Wait of a first verification at the target for its step.", metrics.queue_time),
        ("request_prompt_tokens", "Prompt tokens of finished texts.", metrics.prompt_length),
        ("request_generation_tokens", "Output tokens of finished texts, without resumed ones.", metrics.output_length),
    ):
        yield histogram(VLLM + name, help, observed, labels)


def statistics_metrics(statistics: Statistics, draft_length_max: int, labels: Labels) -> Iterator[Metric]:
    """Yields the statistics of all generations, under the names that `Statistics` defines; vLLM's with `labels`."""
    series: dict[str, dict[Series, float]] = {}
    for field, own in SERIES:
        series.setdefault(own.name, {})[own] = getattr(statistics, field)
    for name, values in series.items():
        first = next(iter(values))
        labelled = {own.label[1:] if own.label[0] else (): value for own, value in values.items()}
        common = labels if name.startswith(VLLM) else None
        yield counter(name, first.help, labelled, common, *filter(None, first.label[:1]))
    at_least = list(accumulate(reversed(statistics.acceptance_histogram)))[::-1]
    passed = {(str(at),): sum(at_least[at + 1 : at + 2]) for at in range(max(draft_length_max, len(at_least) - 1))}
    help = "Draft tokens accepted, by position in the round."
    yield counter("vllm:spec_decode_num_accepted_tokens_per_pos", help, passed, labels, "position")


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


def pool_metrics(metrics: CoordinatorMetrics, fleet: Fleet) -> Iterator[Metric]:
    """Yields the metrics of the pools: replicas by state, and what texts did about lost ones."""
    states = {(kind, state): 0.0 for kind in ("target", "draft") for state in STATES}
    for peer in fleet.peers:
        states[peer.name, peer.state] += 1
    help = "Replicas by state: up (used for new texts), ejected (for a time not), stopping, unlisted (not found), down."
    yield gauge("specdec_replicas", help, states, None, "peer", "state")
    help = "Texts that went on at another target: lost, refused, overdue, malformed or failed; or when it was back."
    yield counter("specdec_target_changes", help, _by(metrics.target_changes), None, "reason")
    help = "Texts that went on with another draft: lost, refused or stopped."
    yield counter("specdec_draft_changes", help, _by(metrics.draft_changes), None, "reason")
    help = (
        "Choices of a target: home, the first one by the key of the prompt; spill, another one as that had no space; "
        "random, without a key."
    )
    yield counter("specdec_routes", help, _by(fleet.routes), None, "choice")


def _by(counts: Mapping[str, int]) -> dict[tuple[str, ...], float]:
    return {(name,): float(count) for name, count in dict(counts).items()}
