"""The expressions of two boards that vLLM publishes, by panel.

Source: examples/observability/dashboards/grafana/vllm_speculative_decoding.json and vllm_overview.json of
github.com/vllm-project/vllm (Apache-2.0), commit 8aed4e52b9351d034c652dec96bd94cf8d441711. `$matchers` stands for the
label matchers that all their queries have, `$__rate_interval` and `$__range` for Grafana's times, `$ttft_slo` and
`$tpot_slo` for the overview's own variables, whose published values are in SLOS.
"""

from __future__ import annotations

OVERVIEW_MATCHERS = 'job=~"$job", model_name=~"$model_name", instance=~"$instance"'
SPECULATIVE_MATCHERS = f'{OVERVIEW_MATCHERS}, engine=~"$engine"'
HTTP_MATCHERS = 'job=~"$job", instance=~"$instance"'
# The variables of both boards: label_values(vllm:num_requests_running, LABEL).
VARIABLES = ("job", "model_name", "instance", "engine")
SLOS = {"ttft_slo": ("0.1", "0.25", "0.5", "0.75", "1.0", "2.5", "5.0", "10.0")}
SLOS["tpot_slo"] = ("0.025", "0.05", "0.075", "0.1", "0.15", "0.2", "0.3", "0.5")


def rate(name: str, matchers: str = "$matchers", interval: str = "$__rate_interval") -> str:
    return f"rate({name}{{{matchers}}}[{interval}])"


def total(name: str, more: str = "", by: str = "", interval: str = "$__rate_interval") -> str:
    """The sum of a rate, of the series with the labels `more` too."""
    return f"sum{by} ({rate(name, '$matchers' + more, interval)})"


def ratio(upper: str, lower: str) -> str:
    return f"{upper} / ({lower} > 0)"


def mean(name: str) -> str:
    return ratio(total(f"{name}_sum"), total(f"{name}_count"))


def quantile(name: str, share: float, by: str = "le", interval: str = "$__rate_interval") -> str:
    return f"histogram_quantile({share}, sum by ({by}) ({rate(f'{name}_bucket', interval=interval)}))"


def distribution(name: str) -> list[str]:
    """Most panels of a histogram: p50, p95, p99 and mean."""
    return [*(quantile(name, share) for share in (0.5, 0.95, 0.99)), mean(name)]


DRAFTS, DRAFTED, ACCEPTED, AT_POSITION = (
    f"vllm:spec_decode_num_{name}_total"
    for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
)
TTFT, TPOT = "vllm:time_to_first_token_seconds", "vllm:request_time_per_output_token_seconds"
ITL, E2E = "vllm:inter_token_latency_seconds", "vllm:e2e_request_latency_seconds"
QUEUE, PREFILL, DECODE = (f"vllm:request_{name}_time_seconds" for name in ("queue", "prefill", "decode"))
PROMPT, OUTPUT = "vllm:prompt_tokens_total", "vllm:generation_tokens_total"
PROMPTS, OUTPUTS = "vllm:request_prompt_tokens", "vllm:request_generation_tokens"
FINISHED, RUNNING, WAITING = "vllm:request_success_total", "vllm:num_requests_running", "vllm:num_requests_waiting"
BY_REASON, CACHE, STEP = (
    "vllm:num_requests_waiting_by_reason",
    "vllm:kv_cache_usage_perc",
    "vllm:iteration_tokens_total",
)
PREEMPTED, BY_SOURCE = "vllm:num_preemptions_total", "vllm:prompt_tokens_by_source_total"
HTTP, HTTP_TIME = "http_requests_total", "http_request_duration_seconds"
BY_MODEL, BY_ENGINE = " by (model_name)", " by (instance, engine)"


def hits(name: str) -> str:
    return ratio(total(f"vllm:{name}_cache_hits_total"), total(f"vllm:{name}_cache_queries_total"))


def lengths(name: str) -> str:
    count = f"sum(increase({name}_count{{$matchers}}[$__range]))"
    return f"sum by (le) (increase({name}_bucket{{$matchers}}[$__range])) / on () group_left () ({count} > 0)"


SPECULATIVE: dict[str, list[str]] = {
    "Draft acceptance rate": [ratio(total(ACCEPTED), total(DRAFTED))],
    "Acceptance length": [f"1 + {ratio(total(ACCEPTED), total(DRAFTS))}"],
    "Accepted tokens / s": [total(ACCEPTED)],
    "Draft tokens / s (stat)": [total(DRAFTED)],
    "Drafts / s": [total(DRAFTS)],
    "Output from drafts": [ratio(total(ACCEPTED), total(OUTPUT))],
    "Draft acceptance rate (per model)": [ratio(total(ACCEPTED, by=BY_MODEL), total(DRAFTED, by=BY_MODEL))],
    "Mean acceptance length": [f"1 + {ratio(total(ACCEPTED, by=BY_MODEL), total(DRAFTS, by=BY_MODEL))}"],
    "Acceptance rate by draft position": [
        f"{total(AT_POSITION, by=' by (position)')} / on () group_left () ({total(DRAFTS)} > 0)"
    ],
    "Draft acceptance rate by engine": [ratio(total(ACCEPTED, by=BY_ENGINE), total(DRAFTED, by=BY_ENGINE))],
    "Draft tokens / s": [total(DRAFTED), total(ACCEPTED), f"{total(DRAFTED)} - {total(ACCEPTED)}"],
    "Inter-token latency": distribution(ITL),
}
FAILED, FAILED_STATUS = ', finished_reason="error"', ', status="5xx"'
OVERVIEW: dict[str, list[str]] = {
    "Requests / s": [total(FINISHED)],
    "Input tok/s": [total(PROMPT)],
    "Output tok/s": [total(OUTPUT)],
    "5xx ratio": [
        f"(sum({rate(HTTP, HTTP_MATCHERS + FAILED_STATUS)}) or vector(0)) / (sum({rate(HTTP, HTTP_MATCHERS)}) > 0)"
    ],
    "TTFT p95": [quantile(TTFT, 0.95)],
    "ITL p95": [quantile(ITL, 0.95)],
    "E2E p95": [quantile(E2E, 0.95)],
    "Unreachable": ['count(up{job=~"$job"} == 0) or vector(0)'],
    "Engines": [f"count({RUNNING}{{$matchers}})"],
    "Running": [f"sum({RUNNING}{{$matchers}})"],
    "Waiting": [f"sum({WAITING}{{$matchers}})"],
    "KV cache": [f"max({CACHE}{{$matchers}})"],
    "Preemptions": [total(PREEMPTED)],
    "Prefix hits": [hits("prefix")],
    "TTFT SLO": [ratio(total(f"{TTFT}_bucket", ', le="$ttft_slo"'), total(f"{TTFT}_count"))],
    "TPOT SLO": [ratio(total(f"{TPOT}_bucket", ', le="$tpot_slo"'), total(f"{TPOT}_count"))],
    "Per-model summary": [
        f"count by (model_name) (group by (model_name, instance) (last_over_time({RUNNING}{{$matchers}}[$__range])))",
        total(FINISHED, by=BY_MODEL, interval="$__range"),
        total(OUTPUT, by=BY_MODEL, interval="$__range"),
        *(quantile(name, 0.95, "le, model_name", "$__range") for name in (TTFT, ITL, E2E)),
        ratio(
            total(FINISHED, FAILED, BY_MODEL, "$__range"),
            total(FINISHED, by=BY_MODEL, interval="$__range"),
        ),
        f"max by (model_name) (max_over_time({CACHE}{{$matchers}}[$__range]))",
        f"round(sum by (model_name) (increase({PREEMPTED}{{$matchers}}[$__range])))",
    ],
    "Time to first token (TTFT)": distribution(TTFT),
    "Inter-token latency (ITL)": distribution(ITL),
    "Time per output token (TPOT)": distribution(TPOT),
    "End-to-end latency": distribution(E2E),
    "Queue time": distribution(QUEUE),
    "Mean time per request phase": [mean(QUEUE), mean(PREFILL), mean(DECODE)],
    "TTFT distribution": [total(f"{TTFT}_bucket", by=" by (le)")],
    "Inter-token latency distribution": [total(f"{ITL}_bucket", by=" by (le)")],
    "End-to-end latency distribution": [total(f"{E2E}_bucket", by=" by (le)")],
    "Token throughput": [total(PROMPT, by=BY_MODEL), total(OUTPUT, by=BY_MODEL)],
    "Finished requests by reason": [total(FINISHED, by=" by (finished_reason)")],
    "Scheduler queue": [
        f"sum({RUNNING}{{$matchers}})",
        *(f'sum({BY_REASON}{{$matchers, reason="{reason}"}})' for reason in ("capacity", "deferred")),
    ],
    "KV cache usage": [f"{how}({CACHE}{{$matchers}})" for how in ("max", "avg", "min")],
    "Preemptions / s": [total(PREEMPTED)],
    "Tokens per engine step": [quantile(STEP, 0.5), quantile(STEP, 0.99), mean(STEP)],
    "Cache hit rates": [hits("prefix"), hits("external_prefix"), hits("mm")],
    "Prompt tokens by source": [
        total(BY_SOURCE, f', source="{source}"')
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
    ],
    "Prompt length": distribution(PROMPTS),
    "Output length": distribution(OUTPUTS),
    "Finish reason share": [
        f"{total(FINISHED, by=' by (finished_reason)')} / ignoring (finished_reason) group_left ()"
        f" ({total(FINISHED)} > 0)"
    ],
    "Prompt length distribution": [lengths(PROMPTS)],
    "Output length distribution": [lengths(OUTPUTS)],
    "HTTP requests by status": [f"sum by (status) ({rate(HTTP, HTTP_MATCHERS)})"],
    "HTTP requests by endpoint": [f"sum by (handler) ({rate(HTTP, HTTP_MATCHERS)})"],
    "HTTP mean duration by endpoint": [
        f"sum by (handler) ({rate(f'{HTTP_TIME}_sum', HTTP_MATCHERS)})"
        f" / (sum by (handler) ({rate(f'{HTTP_TIME}_count', HTTP_MATCHERS)}) > 0)"
    ],
}
