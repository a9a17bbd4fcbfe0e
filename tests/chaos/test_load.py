"""Short forms of the proofs under load, most on table models: `python -m tests.chaos` runs the whole ones.

Bars about counts must hold; those about times and rates are left to the command, for a busy machine breaks them.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from rich.console import Console

from bench.bars import Bar
from tests.chaos.__main__ import modules
from tests.chaos.clients import prompts
from tests.chaos.texts import Text, references_of
from tests.support import harness
from tests.support.pages import watched

TIMED = {*"seconds ms ms, goodput, throughput CPU memory times rates steps faults round,".split()}


def bars_of(proof: str, *arguments: str) -> list[Bar]:
    """Runs a proof."""
    module: Any = modules()[proof]
    parser = argparse.ArgumentParser()
    module.add_options(parser)
    return list(module.prove(parser.parse_args(arguments), Console()))


def missed(proof: str, *arguments: str) -> list[Bar]:
    """Runs a proof; returns its missed bars, without those of times and rates."""
    bars = bars_of(proof, *arguments)
    return [bar for bar in bars if bar.state == "missed" and not any(word in bar.claim.split() for word in TIMED)]


@pytest.mark.more
def test_cancels_leave_nothing() -> None:
    """Claim: after 300 cancels at random points no session, block, thread or descriptor is left. Conclusive: counted in
    the processes, after as many cancels more that make them keep all they ever keep."""
    assert not missed("cancels", "--cancels", "300", "--timed", "5")


@pytest.mark.more
def test_a_row_of_not_a_number_costs_its_requests_only() -> None:
    """Claim: requests that meet the planted row end INTERNAL with a prefix of their text, the others are unharmed.
    Conclusive: every token is compared with those of a sound target."""
    assert not missed("nan", "--requests", "60", "--tokens", "60")


@pytest.mark.more
def test_a_stop_ends_what_it_must() -> None:
    """Claim: streams that fit the grace finish, others say how to resume, beside unread ones. Conclusive: of every read
    stream the end is checked; the exit code is 0."""
    assert not missed("drain", "--short", "4", "--long", "2", "--stalled", "2", "--grace-s", "4")


@pytest.mark.more
def test_a_lost_rank_ends_all_and_every_stream() -> None:
    """Claim: after a SIGKILL of one of two ranks both end, the other with the exit code of a lost rank, and the streams
    end UNAVAILABLE with the beginning of their text. Conclusive: the kernel tells the code of each rank; the text is
    that of the same ranks before."""
    assert not missed("rank", "--repeats", "1", "--strikes", "rank 1 killed", "--streams", "2", "--tokens", "60")


@pytest.mark.more
def test_a_short_prompt_does_not_wait_for_long_ones() -> None:
    """Claim: a prompt of 3 tokens that comes after twelve of 320 has its token before nearly all of them. Conclusive:
    an order, not a time; by age, eight fill every step and come first. On a busy machine one may end before the short
    prompt is sent."""
    sizes = {"repeats": 1, "prompts": 12, "prompt-tokens": 320, "streams": 2, "tokens": 20, "cache-bytes": 100_000_000}
    flags = (part for name, size in sizes.items() for part in (f"--{name}", str(size)))
    (ended_before,) = [
        bar.reached
        for bar in bars_of("fair", "--shared-only", *flags)
        if bar.claim == "long prompts that ended before it"
    ]
    assert ended_before is not None and ended_before <= 3


@pytest.mark.more
def test_a_step_of_long_prompts_is_abandoned_for_a_short_one() -> None:
    """Claim: a short prompt that arrives in a large step of long ones has it abandoned, and has the text it has alone;
    the long ones end. Conclusive: the target counts abandoned steps, over real sockets; short prompts come as long as
    the long ones run, which takes many steps."""
    longs = [Text(prompt, 0.0, 0, 1, True) for prompt in prompts(6, 1500, 4000)]
    short = Text(prompts(1, 3, 4000)[0], 0.0, 0, 4, True)
    with watched((harness.TARGET_MODEL, harness.DRAFT_MODEL), target={"kv_cache_bytes": 200 << 20}) as own:
        address = own.services.coordinator.address
        alone = references_of(address, [short])
        with ThreadPoolExecutor(len(longs)) as pool:
            running = [pool.submit(references_of, address, [text]) for text in longs]
            while not all(each.done() for each in running):
                assert references_of(address, [short]) == alone
            assert all(each.result() for each in running)
        assert own.page("target").value("specdec_steps_abandoned_total") > 0


@pytest.mark.more
def test_texts_survive_half_a_minute_of_faults() -> None:
    """Claim: with a fault every 6 s every text ends as its reference, malformed input is refused, and nothing is held
    at the end. Conclusive: as in the hour, without what only time shows: the growth of memory."""
    kinds = "draft killed", "link cut", "malformed input", "cancels"
    sizes = "--minutes", "0.5", "--fault-every", "6", "--texts", "4", "--streams", "2", "--pause", "0.2"
    assert not missed("soak", *sizes, "--faults", *kinds)


@pytest.mark.more
def test_a_cut_link_and_a_frozen_process_are_noticed_by_every_end() -> None:
    """Claim: a cut link of the target is noticed by client, coordinator and target, a frozen coordinator by client,
    target and draft, while it lasts. Conclusive: each end has its own sign, and time ends the strike."""
    assert not missed("cut", "--repeats", "1", "--strikes", "target's link cut", "coordinator frozen")


@pytest.mark.more
def test_overload_is_refused_and_changes_no_text() -> None:
    """Claim: beyond its places a coordinator refuses with RESOURCE_EXHAUSTED and a delay, and nothing else, and the
    accepted texts are those of a free one. Conclusive: at ten times the load some must be refused."""
    assert not missed("overload", "--seconds", "4", "--peak-seconds", "4", "--places", "4", "--tokens", "24")


@pytest.mark.more
def test_a_silent_collector_fails_no_request() -> None:
    """Claim: texts with a collector that takes nothing, or is not there, equal those with one that works; requests of
    every end have one root span each, with this end. Conclusive: every text of every set is compared, and what clients
    saw is counted beside the spans."""
    assert not missed("collector", "--blocks", "1", "--texts", "1", "--tokens", "40", "--requests", "40")


def test_what_checks_cost_is_measured() -> None:
    """Claim: the cost of a round's checks is measured under each rule. Conclusive: what the measurement leaves out is
    patched by its name, which fails where the name is gone."""
    (bar,) = bars_of("checks", "--rounds", "2", "--turns", "3")
    assert bar.reached is not None and "REJECTION" in bar.shown
