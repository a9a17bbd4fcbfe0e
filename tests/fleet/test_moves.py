"""Texts whose target or draft fails in their midst, with real processes and signals: each comes out as undisturbed.

Every link delays by DELAY_MS, so that a text of table models lasts for seconds and the machine has nothing to compute.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec.config import DraftSettings, TargetSettings
from specdec.engine.table_model import write_table_model
from tests.chaos.clients import retry_after_s
from tests.chaos.fleets import Fleet, Member, Stream, fleet, wait_longer, wait_under_way
from tests.chaos.tables import REPLICA, VOCABULARY_SIZE
from tests.chaos.texts import longest_gap_s
from tests.support.services import Client, fixed
from tests.support.waiting import until

DELAY_MS = 10.0
WIDTH = 6
TOKENS = 360
MEANWHILE = 20  # tokens that each text has when a fault strikes
STOPPED_S_MAX = 5.0  # after a freeze or a cut
COORDINATOR = {"speculation_policy": "fixed", "draft_wait_ms": 2000.0, "drain_grace_s": 1.0}
ASKED: dict[str, Any] = {"ignore_eos": True, "speculative": fixed(2)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table model; it is also the draft, so that all draft tokens are accepted."""
    folder = tmp_path_factory.mktemp("moves") / "model"
    write_table_model(folder, VOCABULARY_SIZE, seed=1, positions_max=1024)
    return folder


@pytest.fixture(scope="module")
def place(model: Path) -> Iterator[Fleet]:
    """Two targets, two drafts, and two coordinators, of which the second waits a second for a target."""
    target, draft = (kind(**REPLICA, model=str(model)) for kind in (TargetSettings, DraftSettings))
    impatient = {**COORDINATOR, "target_wait_s": 1.0}
    with fleet([target] * 2, [draft] * 2, [COORDINATOR, impatient], DELAY_MS) as made:
        yield made


@pytest.fixture(scope="module")
def expected(place: Fleet) -> list[tuple[Any, ...]]:
    """The texts, undisturbed and without speculation."""
    streams = begin(place.clients[0], speculative={"enabled": False})
    return [stream.join().outcome.comparable for stream in streams]


@pytest.fixture
def whole(place: Fleet) -> Iterator[Fleet]:
    """The fleet; what a test has broken is mended after it."""
    yield place
    for member in place.members:
        mend(member)
    place.wait_whole()


def mend(member: Member) -> None:
    """Undoes a fault."""
    member.link.end_cut()
    member.child.signal(signal.SIGCONT)
    if not member.child.is_running:
        member.restart()


def begin(client: Client, width: int = WIDTH, **own: Any) -> list[Stream]:
    """Starts texts, GREEDY and COUPLED in turn."""
    return [Stream(client, client.request([1 + seed % 3, 2], **{**asked_of(seed), **own})) for seed in range(width)]


def asked_of(seed: int) -> dict[str, Any]:
    """The arguments of one text."""
    return {**ASKED, "max_tokens": TOKENS, "temperature": float(seed % 2), "seed": seed}


def check(streams: list[Stream], expected: list[tuple[Any, ...]]) -> None:
    """All came out as undisturbed, and no client saw more of it than a pause."""
    for stream in streams:
        assert stream.join().error is None
    assert [stream.outcome.comparable for stream in streams] == expected
    assert not any(stream.outcome.moved for stream in streams), "the numerics are equal"


def moved_count(streams: list[Stream]) -> int:
    """The texts that changed targets."""
    return sum(stream.statistics.num_target_changes > 0 for stream in streams)


def strike(member: Member, how: str) -> None:
    """One fault."""
    if how == "killed":
        member.kill()
    elif how == "frozen":
        member.child.signal(signal.SIGSTOP)
    elif how == "cut":
        member.link.begin_cut()
    else:
        member.child.request_stop()


@pytest.mark.parametrize(
    "how",
    ["killed", *(pytest.param(how, marks=pytest.mark.more) for how in ("frozen", "cut", "stopped beyond its grace"))],
)
def test_a_text_outlives_its_target(how: str, whole: Fleet, expected: list[tuple[Any, ...]]) -> None:
    """Claim: of a target that is killed, frozen, cut off or stopped, with a grace that is too short, all texts go on at
    another one: no error, the same bytes, and no message to the client; after a freeze or cut within 5 s.

    Conclusive: the texts are equal to those without faults, all are under way at the strike, and some say that they
    changed targets.
    """
    streams = begin(whole.clients[0])
    wait_under_way(streams, MEANWHILE)
    struck_s = time.monotonic()
    strike(whole.targets[0], how)
    check(streams, expected)
    assert moved_count(streams)
    if how in ("frozen", "cut"):
        assert max(longest_gap_s(stream.times_s, struck_s, struck_s + 10) for stream in streams) < STOPPED_S_MAX
    elif how != "killed":
        assert whole.targets[0].child.process.wait(10) == 0


@pytest.mark.more
def test_late_answers_of_a_target_that_was_left_change_nothing(whole: Fleet, expected: list[tuple[Any, ...]]) -> None:
    """Claim: a link that was cut while answers were on the way delivers them after its texts have moved, and moved
    back: nothing is doubled.

    Conclusive: every byte that was sent passes when the cut ends, while all texts are still under way, which are then
    struck at the other target and return to the first.
    """
    streams = begin(whole.clients[0], max_tokens=2 * TOKENS)
    wait_under_way(streams, MEANWHILE)
    whole.targets[0].link.cut(4.0)
    whole.wait_whole()
    assert not any(stream.has_ended for stream in streams)
    whole.targets[1].kill()
    undisturbed = begin(whole.clients[0], max_tokens=2 * TOKENS, speculative={"enabled": False})
    found = [stream.join().outcome.comparable for stream in streams]
    assert found == [stream.join().outcome.comparable for stream in undisturbed]
    assert max(stream.statistics.num_target_changes for stream in streams) >= 2


@pytest.mark.more
def test_all_targets_restart(whole: Fleet, expected: list[tuple[Any, ...]]) -> None:
    """Claim: texts whose targets are all killed wait until one is back, without an error; new requests meanwhile are
    refused, with UNAVAILABLE. Beyond --target-wait-s the texts end UNAVAILABLE, with how to resume.

    Conclusive: no target runs for longer than the links need to notice it, when a request meets the refusal; the
    coordinator that waits a second only says so, and what its texts have with what they are resumed to is the whole.
    """
    client, impatient = whole.clients
    streams = begin(client)
    given_up = begin(impatient)
    wait_under_way([*streams, *given_up], MEANWHILE)
    for target in whole.targets:
        target.kill()
    until(lambda: whole.counts(client)[0] == 0)
    refused = Stream(client, client.request([1], max_tokens=3)).join()
    assert refused.error is not None and refused.error.code().name == "UNAVAILABLE"
    for stream in given_up:
        error = stream.join().error
        assert error is not None and error.code().name == "UNAVAILABLE" and "for 1 s" in error.details()
        assert f"resume.output_token_ids, the {len(stream.outcome.token_ids)} received so far" in error.details()
    whole.targets[1].restart()
    check(streams, expected)
    assert moved_count(streams) == WIDTH
    for seed, stream in enumerate(given_up):
        begun = stream.outcome.token_ids
        until(lambda: whole.counts(impatient)[0] == 1)
        rest = impatient.generate([1 + seed % 3, 2], **asked_of(seed), resume=begun).token_ids
        assert begun + rest == expected[seed][0]


def test_targets_that_are_lost_together_end_no_text(whole: Fleet, expected: list[tuple[Any, ...]]) -> None:
    """Claim: a network that fails for a moment, to all targets at once, three times, ends no text: the third loss in a
    row is that of a target which was there.

    Conclusive: every link is dropped, so each text loses every target within milliseconds, and has been answered
    before the next time; both coordinators serve.
    """
    streams = begin(whole.clients[0]) + begin(whole.clients[1])
    wait_under_way(streams, MEANWHILE)
    for _ in range(3):
        for target in whole.targets:
            target.link.drop()
        wait_longer(streams, MEANWHILE)
    check(streams, 2 * expected)
    assert min(stream.statistics.num_target_changes for stream in streams) >= 3


@pytest.mark.more
@pytest.mark.parametrize("how", ["killed", "frozen", "cut", "stopped"])
def test_a_text_changes_drafts(how: str, whole: Fleet, expected: list[tuple[Any, ...]]) -> None:
    """Claim: texts whose draft is killed, frozen, cut off or stops draft with another one: the same bytes, no error.

    Conclusive: some texts say that they changed drafts, and these have accepted draft tokens at their end, long after
    the strike.
    """
    for draft in 3 * whole.drafts[:2]:  # all texts may have the other one, or be over before it is missed
        streams = begin(whole.clients[0])
        wait_under_way(streams, MEANWHILE)
        strike(draft, how)
        check(streams, expected)
        mend(draft)
        whole.wait_whole()
        changed = [stream for stream in streams if stream.statistics.num_draft_changes]
        if changed:
            break
    assert changed
    assert all(any(stream.outcome.proposers[-20:]) for stream in changed)
    assert not moved_count(streams)


@pytest.mark.more
def test_texts_under_way_wait_for_space(model: Path) -> None:
    """Claim: a target whose places are taken refuses a text, which another one then serves; with all places taken a new
    text is refused, with a delay, and one under way whose target dies waits for a place and ends as undisturbed.

    Conclusive: two coordinators fill all places of two targets, then a request is refused; the texts of the target that
    is killed can end at the other one only, where no place is left before its own texts end.
    """
    width = 3
    target = TargetSettings(**REPLICA, model=str(model), max_num_seqs=width)
    with fleet([target] * 2, [], [COORDINATOR] * 2, DELAY_MS) as place:
        first, second = place.clients
        asked: dict[str, Any] = {"max_tokens": TOKENS // 2, "speculative": {"enabled": False}}
        streams = begin(first, width, **asked) + begin(second, width, **asked)
        wait_under_way(streams, MEANWHILE)
        refused = Stream(first, first.request([1], max_tokens=3)).join()
        assert refused.error is not None and refused.error.code().name == "RESOURCE_EXHAUSTED"
        assert (retry_after_s(refused.error) or 0) > 0
        place.targets[0].kill()
        for stream in streams:
            assert stream.join().error is None
        assert moved_count(streams) >= width
        again = [stream.join().outcome.comparable for stream in begin(first, width, **asked)]
    assert [stream.outcome.comparable for stream in streams] == 2 * again


@pytest.mark.more
def test_other_numerics_are_the_last_choice_and_are_told(model: Path) -> None:
    """Claim: while a target of equal numerics is up texts move there, and no client is told; with another one only,
    each client is told the numerics, and the index of the first token from there, before that token.

    Conclusive: the first two targets have blocks of 64 positions, the third of 16, which is another profile with the
    same logits here: so the texts stay equal, and only the messages can differ.
    """
    targets = [TargetSettings(**REPLICA, model=str(model), block_size=size) for size in (64, 64, 16)]
    asked: dict[str, Any] = {**ASKED, "max_tokens": TOKENS, "seed": 3, "speculative": {"enabled": False}}
    with fleet(targets, [], [COORDINATOR], DELAY_MS) as place:
        client = place.clients[0]
        streams = [Stream(client, client.request([1], **asked)) for _ in range(4)]
        wait_under_way(streams, MEANWHILE)
        place.targets[0].kill()
        until(lambda: place.counts(client)[0] == 2)
        wait_under_way(streams, 3 * MEANWHILE)
        assert not any(stream.moved_at for stream in streams if "64" in stream.outcome.started.numerics.libraries)
        place.targets[1].kill()
        for stream in streams:
            assert stream.join().error is None
            told = stream.outcome.moved
            assert [one.first_output_index for one in told] == stream.moved_at and all(stream.moved_at)
            assert all(one.numerics.libraries.endswith("blocks of 16") for one in told) and len(told) < 2
        moved = [stream for stream in streams if stream.moved_at]
        assert moved and all(stream.statistics.num_target_changes for stream in moved)
        assert len({tuple(stream.outcome.token_ids) for stream in streams}) == 1
