"""The store of earlier text: it keeps salts apart, its bounds, and to each salt its share of the bytes."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.protocol import suffix_store
from specdec.protocol.proposers import RUN_LENGTH_MAX, Run
from specdec.protocol.suffix_store import (
    PIECE_LENGTH,
    STORED_TOKEN_BYTES,
    SUFFIX_LENGTH_MIN,
    SUFFIX_TEXT_LENGTH_MAX,
    WAITING_TOKENS_MAX,
    SuffixProposer,
    SuffixStore,
)
from specdec.protocol.types import Proposer

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def keep(store: SuffixStore, salt: str, token_ids: Sequence[int]) -> None:
    """Stores a text at once."""
    store.add(salt, token_ids)
    while store.work():
        pass


def new_text(length: int, rng: random.Random) -> list[int]:
    """A text that shares no token with others, but by a chance of one in thousands."""
    return [rng.randrange(1 << 30) for _ in range(length)]


def kept_count(store: SuffixStore, salt: str, texts: Sequence[Sequence[int]]) -> int:
    """How many tokens of these texts, each longer than a match, are found: those after their first tokens."""
    found = 0
    for text in texts:
        for end in range(SUFFIX_LENGTH_MIN, len(text)):
            found += any(run.token_ids[0] == text[end] for run in store.runs(salt, text[:end]))
    return found


def test_the_store_never_crosses_salts() -> None:
    """Claim: a text is found by its own salt only, in full, and not by another or by none; nor by a salt that ends in
    what the tokens of another begin with."""
    store, text = SuffixStore(1 << 20), list(range(100, 160))
    keep(store, "a", text)
    keep(store, "b", [token_id + 1000 for token_id in text])
    committed = text[10 : 10 + SUFFIX_LENGTH_MIN]
    (found,) = SuffixProposer(store, "a").propose(committed)
    assert found == Run(Proposer.SUFFIX, tuple(text[14 : 14 + RUN_LENGTH_MAX]), SUFFIX_LENGTH_MIN)
    for salt in ("b", "", "A", "ad", "aa"):
        assert SuffixProposer(store, salt).propose(committed) == []


@given(st.lists(st.tuples(st.sampled_from("ab"), TEXTS), max_size=12), st.integers(0, 40), st.integers(1, 50))
def test_the_store_is_bounded_and_forgets_whole_texts(
    added: list[tuple[str, list[int]]], token_max: int, piece_length: int
) -> None:
    """Claim: after every piece of work the bytes in use are at most the limit, and every run found is what follows the
    context in some text of that salt, though texts are half added and half forgotten; in the end no place of a
    forgotten text is left. Conclusive: all contexts are looked up after every piece, of one place or of many."""
    store, kept = SuffixStore(token_max * STORED_TOKEN_BYTES), list[tuple[str, list[int]]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix_store, "PIECE_LENGTH", piece_length)
        for salt, text in added:
            store.add(salt, text)
            kept.append((salt, text))
            is_working = True
            while is_working:
                is_working = store.work()
                assert store.byte_count <= token_max * STORED_TOKEN_BYTES
                for own, context in kept:
                    for run in store.runs(own, context):
                        whole = [*context[-SUFFIX_LENGTH_MIN:], *run.token_ids]
                        assert any(
                            other == own and any(text[i : i + len(whole)] == whole for i in range(len(text)))
                            for other, text in kept
                        )
    shares = [store._common, *store._shares.values()]
    assert sum(share.token_count for share in shares) == store._token_count
    assert sorted(number for share in shares for number in share.texts) == sorted(store._texts)
    filed = {place for places in store._places.values() for found in places.values() for place in found}
    assert all(store._found(place)[1] < len(store._found(place)[0].token_ids) for place in filed)
    assert set(store._places) == {text.salt for text in store._texts.values()}


def test_the_least_recently_used_text_goes_first() -> None:
    """Claim: of two texts the one that was found last stays."""
    texts = [list(range(start, start + 10)) for start in (0, 100, 200)]
    store = SuffixStore(20 * STORED_TOKEN_BYTES)
    keep(store, "", texts[1])
    keep(store, "", texts[0])
    assert store.runs("", texts[1][:SUFFIX_LENGTH_MIN]) and store.runs("", texts[0][:SUFFIX_LENGTH_MIN])
    keep(store, "", texts[2])
    found = [bool(store.runs("", text[:SUFFIX_LENGTH_MIN])) for text in texts]
    assert found == [True, False, True]


def test_the_store_uses_no_more_memory_than_it_counts() -> None:
    """Claim: for text that never repeats, the worst kind, the bytes that Python allocates for the store are those that
    it counts, within a tenth above, at every size: its dictionary grows by doubling. Conclusive: counted by tracemalloc
    after every text, texts long and short, the shortest each with a salt of its own; and at the end of long ones four
    fifths at least, so that the bound is no waste."""
    for length, salt_count in ((SUFFIX_TEXT_LENGTH_MAX, 3), (300, 20), (SUFFIX_LENGTH_MIN + 1, 8000)):
        rng, store = random.Random(length), SuffixStore(1 << 30)
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for number in range(24_000 // length):
                keep(store, f"salt {number % salt_count}", [rng.randrange(1000, 200_000) for _ in range(length)])
                allocated = tracemalloc.get_traced_memory()[0] - before
                assert allocated < 1.1 * store.byte_count, (length, salt_count, number)
            assert allocated > 0.8 * store.byte_count or length < 100
        finally:
            tracemalloc.stop()


def test_a_text_that_is_generated_again_is_stored_once() -> None:
    """Claim: a recurring answer takes the store's bytes once, and its return is a use of it.

    Conclusive: stored twice, the first text would leave no place for the second; not used, it would go before it. Under
    another salt, or with another end, it is another text.
    """
    first, second, third = (list(range(start, start + 10)) for start in (0, 100, 200))
    store = SuffixStore(20 * STORED_TOKEN_BYTES)
    for text in (first, second, first, first):
        keep(store, "", text)
    assert store.byte_count == 20 * STORED_TOKEN_BYTES
    assert store.runs("", second[:SUFFIX_LENGTH_MIN]) and store.runs("", first[:SUFFIX_LENGTH_MIN])
    keep(store, "", second)
    keep(store, "", first)
    keep(store, "", third)
    assert [bool(store.runs("", text[:SUFFIX_LENGTH_MIN])) for text in (first, second, third)] == [True, False, True]
    large = SuffixStore(1 << 20)
    for salt, text in (("", first), ("a", first), ("", [*first[:-1], 77])):
        keep(large, salt, text)
    assert large.byte_count == 30 * STORED_TOKEN_BYTES


def test_a_piece_of_work_is_small_whatever_the_texts() -> None:
    """Claim: one call adds or forgets PIECE_LENGTH places at most, so the event loop is held up by no text, however
    long, nor by the texts that go for it. Conclusive: the places are counted before and after every call, with
    the store full of the longest texts."""
    rng, store = random.Random(1), SuffixStore(3 * SUFFIX_TEXT_LENGTH_MAX * STORED_TOKEN_BYTES)
    seen = 0
    for _ in range(5):
        assert store.add("", new_text(5 * SUFFIX_TEXT_LENGTH_MAX, rng))
        is_working = True
        while is_working:
            is_working, before = store.work(), seen
            seen = sum(map(len, store._places.get("", {}).values()))
            assert abs(seen - before) <= PIECE_LENGTH
    assert seen == 3 * (SUFFIX_TEXT_LENGTH_MAX - SUFFIX_LENGTH_MIN)


def test_texts_that_wait_are_bounded() -> None:
    """Claim: while WAITING_TOKENS_MAX tokens wait to be stored further texts are dropped, and it goes on afterwards."""
    rng, store = random.Random(2), SuffixStore(1 << 26)
    texts = [new_text(SUFFIX_TEXT_LENGTH_MAX, rng) for _ in range(WAITING_TOKENS_MAX // SUFFIX_TEXT_LENGTH_MAX + 1)]
    assert [store.add("", text) for text in texts] == [True] + [False] * (len(texts) - 1)
    while store.work():
        pass
    assert store.byte_count == WAITING_TOKENS_MAX * STORED_TOKEN_BYTES
    assert [bool(store.runs("", text[:9])) for text in texts] == [True] * (len(texts) - 1) + [False]
    assert store.add("", texts[-1])


SIZE = 4000  # tokens of a store whose shares are tested
LENGTH = 50  # of its texts


def a_used_salt(store: SuffixStore, salt: str, token_count: int, rng: random.Random) -> list[list[int]]:
    """Fills a part of the store by a salt whose texts are found again, as those of a tenant with recurring answers."""
    texts = [new_text(LENGTH, rng) for _ in range(token_count // LENGTH)]
    for text in texts:
        keep(store, salt, text)
        assert store.runs(salt, text[:SUFFIX_LENGTH_MIN])
    return texts


@pytest.mark.parametrize("salt", ["", "attacker"])
def test_one_salt_takes_only_its_share(salt: str) -> None:
    """Claim: whatever one salt generates, "no salt" among them, and though its texts are found again, another salt
    below half of a full store keeps all that it has. Conclusive: ten stores' worth of text; a store with one order of
    use forgets the other's text after one."""
    rng, store = random.Random(3), SuffixStore(SIZE * STORED_TOKEN_BYTES)
    own = a_used_salt(store, "tenant", SIZE // 2 - LENGTH, rng)
    a_used_salt(store, salt, 10 * SIZE, rng)
    assert kept_count(store, "tenant", own) == len(own) * (LENGTH - SUFFIX_LENGTH_MIN)


@pytest.mark.parametrize("repeats", [False, True], ids=["each used once", "each text generated twice"])
def test_many_salts_take_no_more_than_they_fill(repeats: bool) -> None:
    """Claim: salts that are used once have one share together, so a client that invents one for every request takes
    nothing from a salt below half of the store whose texts recur. If it has each text generated twice, its salts get
    shares, each of what was generated for it: a salt in use goes down to the size of these, no further.

    Conclusive: ten stores' worth of text under 800 salts; in the second case the salt's last text is as large as the
    share of any other."""
    rng, store = random.Random(4), SuffixStore(SIZE * STORED_TOKEN_BYTES)
    own = a_used_salt(store, "tenant", SIZE // 2 - LENGTH, rng)
    for number in range(10 * SIZE // LENGTH):
        text = new_text(LENGTH, rng)
        for _ in range(1 + repeats):
            keep(store, f"random {number}", text)
        if number % 10 == 0:
            assert store.runs("tenant", own[-1][:SUFFIX_LENGTH_MIN])
    kept = own[-1:] if repeats else own
    assert kept_count(store, "tenant", own) == len(kept) * (LENGTH - SUFFIX_LENGTH_MIN)
    assert len(store._shares) == (SIZE // LENGTH if repeats else 1)


def test_a_newcomer_gets_space() -> None:
    """Claim: where one salt fills the whole store, another's first text is stored, stays while less than half of the
    store is generated by others, and with its return begins to grow to half."""
    rng, store = random.Random(5), SuffixStore(SIZE * STORED_TOKEN_BYTES)
    a_used_salt(store, "old", 2 * SIZE, rng)
    assert store.byte_count > (SIZE - LENGTH) * STORED_TOKEN_BYTES
    first = new_text(LENGTH, rng)
    keep(store, "new", first)
    a_used_salt(store, "old", 2 * SIZE, rng)
    for number in range(SIZE // 2 // LENGTH - 2):
        keep(store, f"once {number}", new_text(LENGTH, rng))
    assert kept_count(store, "new", [first]) == LENGTH - SUFFIX_LENGTH_MIN
    own = a_used_salt(store, "new", SIZE // 3 - LENGTH, rng)
    a_used_salt(store, "old", 2 * SIZE, rng)
    assert kept_count(store, "new", own) == len(own) * (LENGTH - SUFFIX_LENGTH_MIN)


def test_shares_are_bounded_and_those_out_of_use_return(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: beyond SHARE_COUNT_MAX salts with shares the one that was least recently used joins those without: its
    texts stay until these need their place."""
    monkeypatch.setattr(suffix_store, "SHARE_COUNT_MAX", 3)
    rng, store = random.Random(6), SuffixStore(SIZE * STORED_TOKEN_BYTES)
    own = {salt: a_used_salt(store, salt, 5 * LENGTH, rng) for salt in "abcd"}
    assert list(store._shares) == ["b", "c", "d"] and store._common.token_count == 5 * LENGTH
    assert kept_count(store, "a", own["a"]) == 5 * (LENGTH - SUFFIX_LENGTH_MIN)
    assert list(store._shares) == ["c", "d", "a"] and store._token_count == 20 * LENGTH
