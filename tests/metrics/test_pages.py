"""Metrics pages of real services, read over real HTTP, compared with the statistics in the responses."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import urllib.error
from itertools import permutations
from pathlib import Path

import grpc
import pytest

from specdec.coordinator.statistics import CoordinatorMetrics, RequestStatistics
from specdec.errors import CacheExhausted, ReplicaUnavailable, SpecdecError
from specdec.protocol.items import NO_TRACE
from tests.support.pages import Page, Watched, free_address, read_page, read_text, watched
from tests.support.records import changed, round_record
from tests.support.services import MODELS, Outcome, fixed
from tests.support.waiting import until

PROMPT = [1, 2, 3]
TREE = fixed(4, draft_window=8, draft_nodes_per_step=4, draft_wait_ms=2000)
COUPLED = {"temperature": 0.9, "seed": 5, "ignore_eos": True}
UNSEEDED = {"temperature": 0.9, "ignore_eos": True}
VLLM = "vllm:spec_decode_num_"
# A counter of the page, and the field of the responses' statistics it is the sum of.
SUMS = {
    f"{VLLM}drafts_total": "num_spec_steps",
    f"{VLLM}draft_tokens_total": "num_draft_tokens",
    f"{VLLM}accepted_tokens_total": "num_accepted_draft_tokens",
    "specdec_rounds_total": "rounds",
    "specdec_rounds_without_speculation_total": "num_rounds_off",
    "specdec_draft_waits_expired_total": "draft_waits_expired",
    "specdec_cached_prompt_tokens_total": "cached_prompt_tokens",
}
LABELLED_SUMS = {
    ("specdec_draft_tokens_received_total", "kind", "proposal"): "num_evaluated_nodes",
    ("specdec_draft_tokens_received_total", "kind", "branch"): "num_branch_nodes",
    ("specdec_tree_lookups_total", "next", "recovered"): "num_recovered_lookups",
    ("specdec_tree_lookups_total", "next", "bonus"): "num_bonus_lookups",
    ("specdec_tree_hits_total", "next", "recovered"): "num_recovered_hits",
    ("specdec_tree_hits_total", "next", "bonus"): "num_bonus_hits",
    ("specdec_link_payload_bytes_total", "peer", "target"): "target_link_bytes",
    ("specdec_link_payload_bytes_total", "peer", "draft"): "draft_link_bytes",
    **{
        (f"specdec_proposed_{counted}_total", "proposer", name): f"num_{field}_{said}_tokens"
        for counted, said in (("tokens", "draft"), ("accepted_tokens", "accepted"))
        for name, field in (
            ("draft", "model"),
            *((own, own) for own in ("ngram", "suffix", "prediction", "heads", "grammar")),
        )
    },
}
TIMES = ("draft_wait", "target_queue", "target_forward", "target_sampling", "target_heads", "target_link")


def check_sums(page: Page, outcomes: list[Outcome]) -> None:
    """Every metric that responses report too is the sum over these responses, exactly."""
    statistics = [outcome.finished.statistics for outcome in outcomes]
    for name, field in SUMS.items():
        assert page.value(name) == sum(getattr(one, field) for one in statistics), name
    for (name, label, value), field in LABELLED_SUMS.items():
        assert page.value(name, **{label: value}) == sum(getattr(one, field) for one in statistics), (name, value)
    for position, count in page.by_label(f"{VLLM}accepted_tokens_per_pos_total", "position").items():
        passed = [sum(one.acceptance_histogram[int(position) + 1 :]) for one in statistics]
        assert count == sum(passed), f"position {position}"
    for part in TIMES:
        expected = sum(getattr(one.time, f"{part}_s") for one in statistics)
        assert page.value("specdec_round_time_seconds_total", part=part) == expected, part
    assert page.value("vllm:generation_tokens_total") == sum(len(outcome.token_ids) for outcome in outcomes)
    assert page.value("vllm:prompt_tokens_total") == sum(outcome.finished.usage.prompt_tokens for outcome in outcomes)


def test_the_page_sums_what_responses_say(table_models: tuple[Path, Path]):
    """Claim: after generations under COUPLED, REJECTION, the server's choice and GREEDY, of several shapes, some at a
    time, with several proposers, a resumed one and one with its draft killed on the way, the counters equal the sums
    over the responses' own statistics. Once the target is killed its link is down, and health is not SERVING.

    Conclusive: the services are fresh, so nothing else was counted; counts are compared with ==.
    """
    with watched(table_models) as services:
        client, outcomes = services.services.client, []
        requests = [
            {"prompt": PROMPT, "max_tokens": 100, "speculative": speculative | rule, **params}
            for params, rule in (
                (COUPLED, {}),
                (UNSEEDED, {"rule": "RULE_REJECTION"}),
                (UNSEEDED, {}),
                ({"temperature": 0, "ignore_eos": True}, {}),
            )
            for speculative in (TREE, fixed(3), {"policy": "POLICY_AUTO"}, {"policy": "POLICY_OFF"})
        ]
        outcomes += client.generate_all(requests, width=4)
        first = outcomes[0]
        outcomes.append(client.generate(PROMPT, max_tokens=160, speculative=TREE, resume=first.token_ids, **COUPLED))
        for proposers in (["PROPOSER_NGRAM"], ["PROPOSER_SUFFIX", "PROPOSER_DRAFT"]):
            own = TREE | {"proposers": proposers}
            outcomes.append(client.generate(PROMPT, max_tokens=100, speculative=own, **COUPLED))
        page = services.page("coordinator")
        check_sums(page, outcomes)
        offered = page.by_label("specdec_proposed_tokens_total", "proposer")
        assert all(offered[name] for name in ("draft", "ngram", "suffix")), offered
        assert sum(outcome.finished.statistics.num_accepted_draft_tokens for outcome in outcomes) > 0

        def kill_the_draft(outcome: Outcome) -> None:
            if len(outcome.token_ids) > 100 and services.services.draft.is_running:
                services.services.draft.stop(0.0)

        lost = Outcome()
        request = client.request(PROMPT, max_tokens=300, speculative=TREE, **COUPLED)
        for response in client.stub.Generate(request, timeout=60):
            client.take(lost, response)
            kill_the_draft(lost)
        assert lost.token_ids[:100] == first.token_ids
        outcomes.append(lost)
        page = services.page("coordinator")
        check_sums(page, outcomes)
        assert page.value("specdec_requests_total", outcome="length") == len(outcomes)
        assert page.value("specdec_requests_total") == len(outcomes)
        check_latencies(page, outcomes)
        until(lambda: services.page("coordinator").value("specdec_link_up", peer="draft") == 0)
        assert services.page("coordinator").value("specdec_link_losses_total", peer="draft") == 1
        check_target(services.page("target"), outcomes)
        services.services.target.signal(signal.SIGKILL)

        def serves_no_more() -> bool:
            page = services.page("coordinator")
            return page.value("specdec_link_up", peer="target") == 0 == page.value("specdec_serving")

        until(serves_no_more)


@pytest.mark.more
def test_the_page_tells_five_proposers_apart():
    """Claim: with heads on the target and a predicted text, draft tokens of all five proposers are accepted, and the
    page has their sums. The first text is in the store for the later ones."""
    heads = {"heads": str(MODELS / "target-heads")}
    with watched((MODELS / "target", MODELS / "draft"), target=heads) as services:
        client, asked = services.services.client, {"max_tokens": 120, "temperature": 0, "ignore_eos": True}
        first = client.generate("import os", speculative=TREE, **asked)
        outcomes = [first]
        for name in ("DRAFT", "NGRAM", "SUFFIX", "PREDICTION", "HEADS"):
            way = fixed(4, proposers=[f"PROPOSER_{name}"], draft_wait_ms=2000)
            prediction = first.token_ids if name == "PREDICTION" else ()
            outcomes.append(client.generate("import os", speculative=way, prediction=prediction, **asked))
        assert {tuple(outcome.token_ids) for outcome in outcomes} == {tuple(first.token_ids)}
        page = services.page("coordinator")
        check_sums(page, outcomes)
        accepted = page.by_label("specdec_proposed_accepted_tokens_total", "proposer")
        assert accepted.pop("grammar") == 0 and len(accepted) == 5 and all(accepted.values()), accepted


def check_latencies(page: Page, outcomes: list[Outcome]) -> None:
    """One observation a request, one a round after the first; the sums are the responses' own times and counts."""
    statistics = [outcome.finished.statistics for outcome in outcomes]
    times, count = [own.time for own in statistics], len(outcomes)
    tokens = [len(outcome.token_ids) for outcome in outcomes]
    later_s = [own.total_s - own.time_to_first_token_s for own in times]
    sums = {
        "time_to_first_token_seconds": sum(own.time_to_first_token_s for own in times),
        "e2e_request_latency_seconds": sum(own.total_s for own in times),
        "request_time_per_output_token_seconds": sum(own / (count - 1) for own, count in zip(later_s, tokens)),
        "request_prompt_tokens": sum(outcome.finished.usage.prompt_tokens for outcome in outcomes),
        "request_generation_tokens": sum(tokens),
    }
    for name, total in sums.items():
        assert page.value(f"vllm:{name}_count") == count, name
        assert page.value(f"vllm:{name}_sum") == pytest.approx(total, rel=1e-9), name
    assert page.value("vllm:request_queue_time_seconds_count") == count
    gaps = "vllm:inter_token_latency_seconds"
    assert page.value(f"{gaps}_count") == sum(own.rounds for own in statistics) - count
    assert page.value(f"{gaps}_sum") == pytest.approx(sum(later_s), rel=1e-6)


def check_target(page: Page, outcomes: list[Outcome]) -> None:
    """The target ran at most a step per round; its sessions are gone and all their blocks are evictable."""
    assert 0 < page.value("specdec_step_time_seconds_count") <= sum(o.finished.statistics.rounds for o in outcomes)
    sessions = sum(outcome.finished.statistics.step_sessions for outcome in outcomes)
    assert page.value("specdec_step_sessions_sum") <= sessions
    assert page.value("specdec_prefix_cache_hits_total") == sum(
        outcome.finished.statistics.cached_prompt_tokens for outcome in outcomes
    )
    assert page.value("specdec_sessions") == 0 == page.value("specdec_kv_cache_usage_perc")


def test_requests_are_counted_by_how_they_ended(services: Watched):
    """Claim: each request adds one to one outcome: stop, length, cancelled, or the reason of its error, and each
    admitted one to one of vLLM's finished reasons; counters of a running generation are included, and a slot is free
    again after each."""
    client, counted = services.services.client, ("vllm:request_success_total", "finished_reason")
    before = services.page("coordinator").by_label("specdec_requests_total", "outcome")
    finished_before = services.page("coordinator").by_label(*counted)
    assert {"stop", "length", "cancelled", "INVALID_FIELD", "REPLICA_UNAVAILABLE"} <= before.keys()
    client.generate(PROMPT, max_tokens=20, stop_token_ids=[0, 1, 2, 3, 4])
    client.generate(PROMPT, max_tokens=5, ignore_eos=True)
    with pytest.raises(grpc.RpcError):
        client.generate(PROMPT, max_tokens=5, top_p=7.0)
    call = client.stub.Generate(client.request(PROMPT, max_tokens=450, speculative=TREE, **COUPLED), timeout=60)
    for _ in range(20):
        next(call)
    page = services.page("coordinator")
    tokens = page.value("vllm:generation_tokens_total")
    assert tokens > 19 and page.value("specdec_requests_total") == sum(before.values()) + 3
    call.cancel()
    expected = {"stop": 1, "length": 1, "INVALID_FIELD": 1, "cancelled": 1}

    def gained() -> dict[str, float]:
        now = services.page("coordinator").by_label("specdec_requests_total", "outcome")
        return {outcome: count - before[outcome] for outcome, count in now.items() if count != before[outcome]}

    until(lambda: gained() == expected)
    page = services.page("coordinator")
    finished = page.by_label(*counted)
    gains = {reason: count - finished_before[reason] for reason, count in finished.items()}
    assert gains == {"stop": 1, "length": 1, "abort": 1, "error": 0}, "a refused request was not admitted"
    assert page.value("vllm:generation_tokens_total") >= tokens
    assert page.value("vllm:num_requests_running") == 0 == page.value("vllm:num_requests_waiting")


def test_choices_are_counted_one_by_one(services: Watched, table_models: tuple[Path, Path]):
    """Claim: a request with n choices counts as n: running ones while it runs, ended ones after it, and all sums are
    those of its choices. Conclusive: nothing else runs on the services, and those of the sums are fresh; counts are
    compared with ==."""
    client, asked = services.services.client, {"n": 3, "speculative": TREE, **COUPLED}

    def cancelled_count() -> float:
        return services.page("coordinator").value("specdec_requests_total", outcome="cancelled")

    before = cancelled_count()
    call = client.stub.Generate(client.request(PROMPT, max_tokens=450, **asked), timeout=60)
    for _ in range(60):
        next(call)
    page = services.page("coordinator")
    assert page.value("vllm:num_requests_running") + page.value("vllm:num_requests_waiting") == 3
    call.cancel()
    until(lambda: cancelled_count() == before + 3)
    assert services.page("coordinator").value("vllm:num_requests_running") == 0
    with watched(table_models) as fresh:
        outcomes = fresh.services.client.choices(PROMPT, max_tokens=60, **asked)
        page = fresh.page("coordinator")
        check_sums(page, outcomes)
        assert page.value("specdec_requests_total", outcome="length") == 3 == page.value("specdec_requests_total")
        check_latencies(page, outcomes)


def test_no_counter_ever_falls(services: Watched):
    """Claim: no counter decreases while generations begin and end, so a scraper never takes the end of a generation for
    a restart. Conclusive: many readings over 16 generations that end in between."""
    from threading import Thread

    client = services.services.client
    requests = [{"prompt": PROMPT, "max_tokens": 40, "speculative": TREE, **COUPLED}] * 16
    working = Thread(target=client.generate_all, args=(requests, 4))
    working.start()
    seen: dict[tuple, float] = {}
    readings = 0
    while working.is_alive() or readings < 5:
        readings += 1
        for sample in services.page("coordinator").samples:
            if sample.name.endswith(("_total", "_count", "_sum", "_bucket")):
                key = (sample.name, *sorted(sample.labels.items()))
                assert sample.value >= seen.get(key, 0.0), key
                seen[key] = sample.value
    working.join()
    assert readings >= 5


@pytest.mark.parametrize(
    "error, reason", [(ReplicaUnavailable("lost"), "error"), (CacheExhausted("full"), "error"), (None, "abort")]
)
def test_finished_reasons_of_admitted_requests(error: SpecdecError | None, reason: str):
    """Claim: an admitted request that fails is one more error, one whose client leaves one more abort, and one that
    ends before it is admitted is none, whatever ended it."""
    metrics = CoordinatorMetrics()
    for is_admitted in (False, True):
        request = RequestStatistics(metrics, NO_TRACE, "")
        if is_admitted:
            metrics.enter(request)
        request.closed() if error is None else request.failed(error)
        assert sum(metrics.finished_reasons.values()) == is_admitted
    assert metrics.finished_reasons[reason] == 1 and sum(metrics.requests.values()) == 2


def test_sums_are_equal_in_any_order():
    """Claim: when a generation ends, the sums over all generations keep their bits, whichever of them ends first.
    Conclusive: all orders of three generations whose times have different sums in different orders as they are."""
    times_s = (0.1, 0.2, 0.3)
    a_round = round_record(0, end_s=1)
    assert (0.1 + 0.2) + 0.3 != 0.1 + (0.2 + 0.3)
    for order in permutations(range(3)):
        metrics = CoordinatorMetrics()
        requests = [RequestStatistics(metrics, NO_TRACE, str(index)) for index in range(3)]
        for request, time_s in zip(requests, times_s, strict=True):
            metrics.enter(request)
            request.statistics.on_round(changed(a_round, wait_s=time_s, forward_s=time_s, round_trip_s=3 * time_s))
        before = metrics.totals()
        assert before.draft_wait_s == pytest.approx(0.6, abs=3e-6)
        for index in order:
            requests[index].closed()
            assert metrics.totals() == before


def test_no_page_contains_request_data(services: Watched):
    """Claim: different requests add no series, and no series contains request data. Conclusive: label values are
    compared before and after requests with texts, labels, salts and stop strings that occur nowhere else."""

    def series() -> dict[str, set[tuple]]:
        return {
            service: {(sample.name, *sorted(sample.labels.items())) for sample in services.page(service).samples}
            for service in services.addresses
        }

    client, before = services.services.client, series()
    secret = "Zebrafinch"
    for index in range(5):
        request = client.request("<1><2>", max_tokens=5 + index, stop=[secret], cache_salt=secret, **COUPLED)
        request.label = f"{secret}{index}"
        assert list(client.stub.Generate(request, timeout=30))
    assert series() == before
    for address in services.addresses.values():
        assert secret not in read_text(address)
    assert all(len(names) < 400 for names in before.values()), "series of one process"


def test_both_formats_and_nothing_else(services: Watched):
    """Claim: the page is served as OpenMetrics and as plain text, with vLLM's names exactly; other paths are 404, and
    other methods are refused."""
    address = services.addresses["coordinator"]
    for accepted in ("", "text/plain", "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"):
        text = read_text(address, accepted)
        assert '\nvllm:spec_decode_num_drafts_total{engine="0",model_name="' in text
        assert text.endswith("# EOF\n") == ("openmetrics" in accepted)
    with pytest.raises(urllib.error.HTTPError) as refused:
        read_text(address, path="/")
    assert refused.value.code == 404


def test_the_page_says_what_the_service_is(services: Watched):
    """Claim: each page names its service and model, and reports that health is SERVING. A latency names the trace of a
    request that is sampled, and of no other."""
    for service in services.addresses:
        page = services.page(service)
        assert page.value("specdec_service_info", service=service) == 1 and page.value("specdec_serving") == 1
        assert not page.exemplars
    address = free_address()
    coordinator, client = services.services.start_coordinator(
        metrics_address=address, otlp_traces_endpoint="http://127.0.0.1:1"
    )
    with coordinator, contextlib.closing(client):
        outcome = client.generate(PROMPT, max_tokens=5, ignore_eos=True)
        assert read_page(address).exemplars == {
            f"vllm:{name}_seconds_bucket": {outcome.finished.trace_id}
            for name in (
                *("time_to_first_token", "e2e_request_latency"),
                *("request_queue_time", "request_time_per_output_token"),
            )
        }


def test_a_busy_port_is_reported_in_one_line(services: Watched, table_models: tuple[Path, Path]):
    """Claim: a service whose page cannot be served does not start, and its error names the flag to change."""
    from specdec.config import DraftSettings
    from specdec.errors import ConfigError
    from specdec.launch.children import start

    taken = services.addresses["coordinator"]
    with start("draft", DraftSettings(model=str(table_models[1]), port=0, metrics_address=taken)) as child:
        with pytest.raises(ConfigError, match=f"--metrics-address {taken} cannot be had"):
            child.wait_ready(60)


@pytest.mark.parametrize("flag", ["--metrics-address", "--health-address"])
def test_an_address_of_another_machine_is_reported_in_one_line(flag: str, table_models: tuple[Path, Path]):
    """Claim: a service that cannot bind one of its ports ends with its own message, without a traceback or a library's
    message. Conclusive: exit code and standard error are compared in full."""
    command = [sys.executable, "-m", "specdec.cli", "draft", "--model", str(table_models[1]), "--port", "0"]
    ended = subprocess.run([*command, flag, "192.0.2.1:1"], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1 and not ended.stdout
    assert ended.stderr.startswith(f"specdec: {flag} 192.0.2.1") and ended.stderr.count("\n") == 1
