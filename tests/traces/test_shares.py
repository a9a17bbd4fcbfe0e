"""Views that add up a trace's spans, as Jaeger's Trace Statistics and Trace Flamegraph do, show the statistics' shares.

Everything is computed from exported spans alone: three real processes, the real exporter, a real collector; the link of
the far coordinator is emulated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from specdec.config import CoordinatorSettings
from specdec.launch.children import start
from tests.support.network.machines import emulated
from tests.support.otlp_receiver import Receiver
from tests.support.pages import Watched, watched
from tests.support.services import MODELS, Client, Outcome, fixed
from tests.support.traces import SOON, ReadTrace, attributes, environment, trace_of

POINTS = 3.0  # of the call's time
STEPPING_POINTS = 10.0  # what a draft's step takes beside its forward pass and sampler, which its metric times
ONE_WAY_MS = 10.0
PROMPT, FEW, LONG = "Once upon a time", 10, 1900
RULES: dict[str, dict[str, Any]] = {
    "GREEDY": {"temperature": 0.0},
    "COUPLED": {"temperature": 0.7, "seed": 5},
    "REJECTION": {"temperature": 0.7},
}
DRAFTS = {"near": fixed(4, draft_window=8, draft_nodes_per_step=4), "off": {"policy": "POLICY_OFF"}}
DRAFTS["far"] = DRAFTS["near"]
# Operations by the part of the time they belong to; of a name in two services, with the service.
PARTS = {
    "wait": ("wait", "wait, summed"),
    "network": ("coordinator verify", "network, summed"),
    "queue": ("target verify", "queue", "queue, summed"),
    "forward": ("chunks", "forward", "forward, summed"),
    "sampling": ("sampling", "sampling, summed"),
    "heads": ("heads", "heads, summed"),
    "draft": ("draft", "draft, summed"),
}


def self_times_ms(trace: ReadTrace) -> Counter[tuple[str, str]]:
    """Milliseconds by service and operation as Jaeger computes them: each span less the union of its children, cut at
    its own ends."""
    sums: Counter[tuple[str, str]] = Counter()
    for service, span in trace.spans:
        own_ns, covered_ns = span.end_time_unix_nano - span.start_time_unix_nano, span.start_time_unix_nano
        for child in sorted(trace.children[span.span_id], key=lambda one: one.start_time_unix_nano):
            end_ns = min(span.end_time_unix_nano, child.end_time_unix_nano)
            own_ns -= max(0, end_ns - max(covered_ns, child.start_time_unix_nano))
            covered_ns = max(covered_ns, end_ns)
        sums[service.removeprefix("specdec-"), span.name] += own_ns / 1e6
    return sums


@dataclass
class Machines:
    """Services, the client of their coordinator, and that of a second one over a far link."""

    watched: Watched
    far: Client

    def generate(self, draft: str, rule: str, token_count: int) -> Outcome:
        """A generation by a rule, with the draft near, far or off."""
        speculative = {**DRAFTS[draft], **({"rule": "RULE_REJECTION"} if rule == "REJECTION" else {})}
        client = self.far if draft == "far" else self.watched.services.client
        asked = {"max_tokens": token_count, "ignore_eos": True, **RULES[rule]}
        return client.generate(PROMPT, speculative=speculative, **asked)

    def drafting_ms(self) -> float:
        """Milliseconds of all the draft's steps by its own metric."""
        return 1000 * self.watched.page("draft").value("specdec_step_time_seconds_sum")


@pytest.fixture(scope="module")
def machines(receiver: Receiver) -> Iterator[Machines]:
    """The shipped pair with pages of metrics, and two coordinators."""
    names = ("coordinator", "target", "draft")
    told: dict[str, Any] = {"otlp_traces_endpoint": receiver.endpoint}
    with (
        environment(**SOON),
        watched((MODELS / "target", MODELS / "draft"), coordinator=told, **told) as near,
        emulated({name: () for name in names}, namespaces_allowed=False) as network,
    ):
        assert near.services.draft is not None
        addresses = {"target": near.services.target.address, "draft": near.services.draft.address}
        for name in addresses:
            network.set_delay("coordinator", name, ONE_WAY_MS)
        reached = {name: network.address_from("coordinator", name, address) for name, address in addresses.items()}
        settings = CoordinatorSettings(tokenizer=str(MODELS / "target"), port=0, **reached, **told)
        with start("coordinator", settings) as coordinator:
            far = Client(coordinator.wait_ready())
            yield Machines(near, far)
            far.close()


def marks(draft: str, rule: str, token_count: int) -> tuple[pytest.MarkDecorator, ...]:
    """Make test runs those that differ by more than their rule; make test-more every short one."""
    cases = (("near", "COUPLED", 120), ("off", "GREEDY", FEW), ("far", "COUPLED", FEW), ("far", "REJECTION", FEW))
    if (draft, rule, token_count) in cases:
        return ()
    return (pytest.mark.more if token_count == FEW else pytest.mark.slow,)


@pytest.mark.parametrize(
    ("draft", "rule", "token_count"),
    [
        pytest.param(*case, marks=marks(*case))
        for case in [
            *((draft, rule, count) for draft in DRAFTS for rule in RULES for count in (FEW, 120)),
            ("off", "GREEDY", LONG),
            ("near", "COUPLED", LONG),
        ]
    ],
)
def test_shares_of_spans_are_the_statistics_own(
    machines: Machines, receiver: Receiver, draft: str, rule: str, token_count: int
):
    """Claim: by operation and by service, the shares of the call's time are the response's statistics' own within three
    points, for texts of a few rounds, all in detail, and of many, mostly summed; the draft's work beside a verification
    is not part of any other's time, and is what its own metric counts.

    Conclusive: spans are added up as Jaeger does; the statistics are counted by other code, on the running round.
    """
    before_ms = machines.drafting_ms()
    outcome = machines.generate(draft, rule, token_count)
    trace = trace_of(receiver, outcome)
    stepped_ms = machines.drafting_ms() - before_ms
    (root,) = trace.named("Generate")
    total_ms = (root.end_time_unix_nano - root.start_time_unix_nano) / 1e6
    split, sums = outcome.finished.statistics.time, self_times_ms(trace)
    told_ms = {
        "wait": 1000 * split.draft_wait_s,
        "network": 1000 * split.target_link_s,
        "queue": 1000 * split.target_queue_s,
        "forward": 1000 * split.target_forward_s,
        "sampling": 1000 * split.target_sampling_s,
        "heads": 1000 * split.target_heads_s,
    }
    spent_ms = {
        part: sum(ms for (service, name), ms in sums.items() if name in names or f"{service} {name}" in names)
        for part, names in PARTS.items()
    }
    for part, told in told_ms.items():
        assert abs(spent_ms[part] - told) < POINTS / 100 * total_ms, part
    if token_count > FEW:  # the steps that the draft began before it heard of the end are in its metric only
        assert abs(spent_ms["draft"] - stepped_ms) < STEPPING_POINTS / 100 * total_ms
    assert spent_ms["draft"] == pytest.approx(attributes(root).get("specdec.draft_ms", 0.0), abs=0.02 * total_ms)
    by_service: Counter[str] = Counter()
    for (service, _), ms in sums.items():
        by_service[service] += ms
    target_ms = told_ms["queue"] + told_ms["forward"] + told_ms["sampling"]
    assert abs(by_service["target"] - target_ms) < POINTS / 100 * total_ms
    assert abs(by_service["coordinator"] - (total_ms - target_ms)) < POINTS / 100 * total_ms
    assert (by_service["draft"] > 0) == (draft != "off")
