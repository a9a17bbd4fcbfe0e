"""Network time without a common clock: the arithmetic of design section 4, on clocks that are far apart."""

from __future__ import annotations

import pytest

from specdec.rpc.stamps import (
    INTERVAL_NS,
    LOAD_MAX,
    UNECHOED_COUNT_MAX,
    WINDOW_LENGTH,
    Stamps,
    load_of,
    tell_load,
)
from specdec.v1.draft_service_pb2 import DraftRequest, DraftRequestItem, DraftResponse
from specdec.v1.types_pb2 import LinkStamp

MS = 1_000_000
SKEW_NS = 5_000_000_000_000  # the other side's clock is 5000 s ahead


def send(sender: Stamps, now_ns: int) -> DraftRequest:
    message = DraftRequest()
    sender.stamp(message, now_ns)
    return message


def exchange(caller: Stamps, answerer: Stamps, begin_ns: int, out_ms: int, held_ms: int, back_ms: int) -> float | None:
    """One question and its answer; the network time the asker sees. Times of the answerer are on its own clock."""
    question = send(caller, begin_ns)
    arrival_ns = begin_ns + out_ms * MS
    answerer.received(question, arrival_ns + SKEW_NS)
    answer = send(answerer, arrival_ns + held_ms * MS + SKEW_NS)
    return caller.received(answer, arrival_ns + (held_ms + back_ms) * MS)


def test_network_time_excludes_what_the_peer_held_it():
    """(t3 - t0) - (t2 - t1): 3 ms out, 250 ms at the peer, 4 ms back are 7 ms, with clocks 5000 s apart."""
    assert exchange(Stamps(), Stamps(), 1000, 3, 250, 4) == pytest.approx(0.007, abs=1e-6)


def test_unsolicited_messages_measure_too():
    """A second answer naming the same question gives its own hop: it took 9 ms back, and no time is counted twice."""
    caller, answerer = Stamps(), Stamps()
    exchange(caller, answerer, 0, 3, 250, 4)
    second = send(answerer, 1000 * MS + SKEW_NS)
    assert caller.received(second, 1009 * MS) == pytest.approx(0.012, abs=1e-6)


def test_minimum_and_median_are_of_the_last_messages():
    """One slow exchange does not move the median; old ones are forgotten after WINDOW_LENGTH."""
    caller, answerer = Stamps(), Stamps()
    assert caller.network_min_s is None and caller.network_median_s is None
    exchange(caller, answerer, 0, 1, 0, 0)
    for index in range(1, WINDOW_LENGTH + 1):
        exchange(caller, answerer, index * 1000 * MS, 2, 5, 50 if index == 9 else 2)
    assert caller.network_min_s == pytest.approx(0.004)
    assert caller.network_median_s == pytest.approx(0.004)


@pytest.mark.parametrize(
    "nonsense",
    [
        LinkStamp(sequence=1, sent_time_us=5, echo_sequence=999, echo_held_us=3),
        LinkStamp(sequence=1, sent_time_us=5, echo_sequence=1, echo_held_us=2**64 - 1),
        LinkStamp(sequence=1, sent_time_us=2**64 - 1, echo_sequence=1, echo_held_us=1),
        LinkStamp(),
    ],
)
def test_what_a_peer_claims_is_not_believed(nonsense):
    """Echoes of stamps never sent, stays longer than the round trip: no measurement, no error."""
    stamps = Stamps()
    send(stamps, 100)
    assert stamps.received(DraftRequest(stamp=nonsense), 200) is None
    assert stamps.network_min_s is None


def test_a_peer_that_never_answers_costs_bounded_memory():
    """Send times are kept for expected echoes, up to the bound."""
    stamps = Stamps()
    for index in range(UNECHOED_COUNT_MAX + 100):
        last = send(stamps, index)
    assert len(stamps._sent_ns) == UNECHOED_COUNT_MAX
    assert last.stamp.sequence == UNECHOED_COUNT_MAX + 100


def test_a_busy_stream_is_stamped_as_often_as_it_tells_something():
    """Claim: of many messages within INTERVAL_NS the first alone carries a stamp, pings always do, and a message
    without one changes nothing that was known: the arithmetic still holds across unstamped messages."""
    caller, answerer = Stamps(), Stamps()
    question = send(caller, 0)
    answerer.received(question, 3 * MS + SKEW_NS)
    items = [DraftRequestItem()]
    busy = [DraftRequest(items=items) for _ in range(4)]
    for index, message in enumerate(busy):
        answerer.stamp(message, 10 * MS + index * INTERVAL_NS // 2 + SKEW_NS)
    assert [message.HasField("stamp") for message in busy] == [True, False, True, False]
    assert caller.received(busy[0], 14 * MS) == pytest.approx(0.007, abs=1e-6)
    assert caller.received(busy[1], 17 * MS) is None and caller.network_s == pytest.approx(0.007, abs=1e-6)


WALL_SKEW_NS = 40_000_000  # the other side's wall clock is 40 ms ahead


def exchanged(out_ms: int, back_ms: int) -> Stamps:
    """The caller after one exchange with wall times."""
    caller = Stamps(lambda: 10**18)
    answerer = Stamps(lambda: 10**18 + WALL_SKEW_NS - SKEW_NS)
    exchange(caller, answerer, 1_000_000, out_ms, 250, back_ms)
    return caller


@pytest.mark.parametrize(("out_ms", "back_ms"), [(5, 5), (9, 1), (0, 10)])
def test_the_wall_clocks_are_found_apart(out_ms: int, back_ms: int):
    """Claim: the offset is the 40 ms the wall clocks differ by, wrong by half the network time at most, which is how
    lopsided a link can be; the monotonic clocks are 5000 s apart and do not matter."""
    caller = exchanged(out_ms, back_ms)
    error_s = (out_ms - back_ms) / 2 / 1000
    assert caller.clock_offset_s == pytest.approx(0.040 + error_s, abs=2e-6)


def test_the_quickest_of_the_last_exchanges_compares_the_clocks():
    """Claim: one exchange held up on its way back does not move the offset, and one long ago does not count: clocks
    part. The slow one alone would be wrong by 25 ms."""
    caller, answerer = Stamps(lambda: 0), Stamps(lambda: WALL_SKEW_NS - SKEW_NS)
    exchange(caller, answerer, 0, 5, 0, 5)
    exchange(caller, answerer, 1000 * MS, 5, 0, 55)
    assert caller.clock_offset_s == pytest.approx(0.040, abs=2e-6)
    exchange(caller, answerer, 7000 * MS, 5, 0, 55)
    assert caller.clock_offset_s == pytest.approx(0.015, abs=2e-6)


def test_what_is_to_be_timed_is_stamped_at_once():
    """Claim: a message within INTERVAL_NS of the last stamp carries one all the same when asked for, and only that one;
    wall time goes with one stamp a second."""
    stamps = Stamps(lambda: 10**18)
    messages = [DraftRequest(items=[DraftRequestItem()]) for _ in range(4)]
    for index, message in enumerate(messages):
        if index == 2:
            stamps.force()
        stamps.stamp(message, 1000 + index)
    assert [message.HasField("stamp") for message in messages] == [True, False, True, False]
    assert [bool(message.stamp.wall_time_us) for message in messages] == [True, False, False, False]
    later = DraftRequest()
    stamps.stamp(later, 1000 + 1_000_000_000)
    assert later.stamp.wall_time_us == (10**18 + 1000 + 1_000_000_000) // 1000


@pytest.mark.parametrize(
    ("told", "read"),
    [
        ((0, 0.0), (0, 0.0)),
        ((3, 0.0478), (3, 0.048)),
        ((64, 1.5), (64, 1.5)),
        ((2**32 - 1, 4e6), (2**32 - 1, LOAD_MAX)),
    ],
)
def test_the_load_of_a_replica_travels_in_eight_bytes(told, read):
    """Claim: sessions and load arrive, to a thousandth, those of an idle replica too, and no claim above LOAD_MAX
    counts: one peer would shift the mean of a pool. A message without a load tells none. Conclusive: real bytes."""
    message = DraftResponse()
    assert load_of(message) is None
    tell_load(message, *told)
    data = message.SerializeToString()
    assert load_of(DraftResponse.FromString(data)) == read
    assert told[0] > 64 or len(data) <= 8
