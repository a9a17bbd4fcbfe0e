"""Routing by hand: where a key lies, who gets it, and what stays bounded. No chance: draws are scripted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.protocol import routing
from specdec.protocol.routing import BLOCK_SIZE, BOUND, FULL, Keys, choose, choose_draft, order, session_load

ADDRESSES = [f"10.0.0.{index}:50052" for index in range(10)]


@dataclass(slots=True)
class Replica:
    """A candidate. `wait_s`: of a draft."""

    address: str
    load: float
    wait_s: float = 0.0


def blocks(*names: int) -> list[int]:
    """The tokens of blocks: a name is a block's content."""
    return [name for name in names for _ in range(BLOCK_SIZE)]


def drawing(*draws: int) -> routing.Draw:
    """Draws that are these, in turn."""
    left = iter(draws)
    return lambda count: next(left)


def replicas(loads: Sequence[float]) -> list[Replica]:
    """Replicas with these loads."""
    return [Replica(address, load) for address, load in zip(ADDRESSES, loads)]


def test_a_conversation_keeps_its_key_and_common_beginnings_divide() -> None:
    """Claim: the key is the first block after the last place where prompts differ: below a shared system prompt each
    conversation has a key of its own, which its later turns keep, at every coordinator that knows the system prompt.

    Conclusive: the system prompt (1, 2) is shared by conversations that differ in their third block; keys are compared
    over three turns and between coordinators that saw other conversations.
    """
    here, there = Keys(), Keys()
    assert here.key(blocks(1, 2, 3), "") == there.key(blocks(1, 2, 4), "")  # nothing differs yet: one key
    learned = here.key(blocks(1, 2, 5), "")
    there.key(blocks(1, 2, 6), "")
    for prompt in (blocks(1, 2, 5, 7), blocks(1, 2, 5, 7, 8) + [9]):
        assert here.key(prompt, "") == there.key(prompt, "") == learned
    others = {here.key(blocks(1, 2, name, 7), "") for name in range(20, 40)}
    assert len(others) == 20 and learned not in others


def test_what_has_no_block_has_no_key_and_a_name_takes_the_place_of_tokens() -> None:
    """Claim: less than one block has no key; texts of other salts have other keys, as they share no cache; a name
    decides alone, within its salt."""
    keys = Keys()
    assert keys.key(blocks(1)[:-1], "") == b"" != keys.key(blocks(1), "")
    assert keys.key(blocks(1), "one") != keys.key(blocks(1), "two")
    named = keys.key(blocks(1), "", "session-7")
    assert named == Keys().key([], "", "session-7") != keys.key(blocks(1), "")
    assert named not in (keys.key([], "", "session-8"), keys.key([], "one", "session-7"))


def test_an_encoders_input_is_a_key_as_a_whole() -> None:
    """Claim: the key of a prompt with an encoder's input is that of the whole input and its salt, whatever follows; an
    input of less than a block has none, a name goes before it, and nothing is remembered."""
    keys, own = Keys(), blocks(1, 2) + [3]
    key = keys.key(own + [4, 5], "", "", len(own))
    assert key == keys.key(own + [6], "", "", len(own)) != b""
    others = keys.key(own + [4], "salt", "", len(own)), keys.key(own[:-1] + [4], "", "", len(own)), keys.key(own, "")
    assert key not in others and len({*others}) == 3
    assert keys.key(own, "", "", BLOCK_SIZE - 1) == b""
    assert keys.key(own, "", "session-7", len(own)) == keys.key([], "", "session-7")
    assert keys.key(blocks(1, 7) + own, "", "", len(own)) != key


def test_a_prompt_that_ends_where_others_go_on_keeps_the_key_above() -> None:
    """Claim: a prompt without a block after the last branch has the key of the branch above it, and so finds its cache:
    of a conversation that was continued in two ways, the part before both stays where it was."""
    keys = Keys()
    keys.key(blocks(1, 2), "")
    home = keys.key(blocks(1, 5, 6), "")
    divided = {keys.key(blocks(1, 5, 6, name), "") for name in (7, 8)}
    assert keys.key(blocks(1, 5, 6), "") == home in divided  # the first continuation was alone
    assert keys.key(blocks(1, 5, 6, 8, 9), "") in divided - {home}


def test_hostile_prompts_take_bounded_memory_and_work() -> None:
    """Claim: a prompt of a million tokens digests DIGESTED_BLOCKS_MAX blocks and remembers NEW_BLOCKS_MAX; thousands of
    prompts leave at most REMEMBERED_MAX digests in each table, and a branch in use is not forgotten.

    Conclusive: the tokens that are read are counted, and the tables after twice as many prompts as fill them.
    """

    class Counted(list[int]):
        """A prompt that counts the tokens that are taken of it."""

        taken = 0

        def __getitem__(self, at: slice) -> list[int]:  # type: ignore[override]  # digests take slices only
            Counted.taken += at.stop - at.start
            return list.__getitem__(self, at)

    keys = Keys()
    keys.key(Counted([1]) * 1_000_000, "")
    assert len(keys._seen) <= routing.NEW_BLOCKS_MAX
    prompt = Counted(blocks(*range(1000)))
    keys.key(prompt, "")
    assert Counted.taken == routing.DIGESTED_BLOCKS_MAX * BLOCK_SIZE
    shared = 10_000_000
    keys.key(blocks(shared, 1), "")
    learned = keys.key(blocks(shared, 2, 0), "")
    for name in range(2 * routing.REMEMBERED_MAX):
        keys.key(blocks(name, name % 2, name % 3), "")  # each prompt new, every other one a branch below its first
        keys.key(blocks(name, 2), "")
        if name % 1000 == 0:
            keys.key(blocks(shared, 2), "")
    assert max(len(keys._seen), len(keys._branches)) == routing.REMEMBERED_MAX
    assert keys.key(blocks(shared, 2, 5), "") == learned


def test_a_lost_target_changes_its_own_keys_only() -> None:
    """Claim: all coordinators have the same order for a key; without one target each key goes to the first of the rest,
    so only the lost one's keys move, and they spread over all others.

    Conclusive: 2,000 keys, whose orders with and without a target are compared place by place.
    """
    lost, rest = ADDRESSES[3], [address for address in ADDRESSES if address != ADDRESSES[3]]
    heirs = []
    for number in range(2000):
        key = number.to_bytes(4, "big")
        full = order(key, ADDRESSES)
        assert full == order(key, reversed(ADDRESSES))
        assert order(key, rest) == [address for address in full if address != lost]
        if full[0] == lost:
            heirs.append(full[1])
    assert set(heirs) == set(rest) and max(map(heirs.count, rest)) < len(heirs) / 4


def test_a_text_goes_to_the_first_in_order_within_the_bound() -> None:
    """Claim: the first target of the key's order gets the text while its load is at most BOUND times the mean and one
    session, and leaves half free of what the mean does; then the next does; a full one only if all are.

    Conclusive: the first target's load is set just below and above the bound, with the mean known.
    """
    key, one = b"key", 1 / 64
    first, second, *others = order(key, ADDRESSES)

    def chosen(first_load: float, other_load: float, second_load: float | None = None) -> str:
        loads = dict.fromkeys(ADDRESSES, other_load) | {first: first_load}
        if second_load is not None:
            loads[second] = second_load
        return choose(key, [Replica(*item) for item in loads.items()], drawing(), one).address

    other = 0.4  # a first load x is at the bound where x = BOUND * (x + 9 * other) / 10 + one
    at_bound = (BOUND * 9 * other / 10 + one) / (1 - BOUND / 10)
    assert chosen(at_bound - 1e-9, other) == first and chosen(at_bound + 1e-9, other) == second
    assert chosen(0.0, 0.0) == first and chosen(0.0, 5.0) == first
    half = (9 * 0.9 / 10 + FULL) / 2 / (1 - 1 / 20)  # nearly full: x = ((x + 9 * 0.9) / 10 + 1) / 2
    assert half < BOUND * 0.9
    assert chosen(half - 1e-9, 0.9) == first and chosen(half + 1e-9, 0.9) == second
    assert chosen(1.0, 1.5, 1.2) == first  # all are full
    assert chosen(1.0, 1.5, 0.999) == second and len(others) == 8


def test_without_a_key_the_less_loaded_of_two_gets_the_text() -> None:
    """Claim: two different random targets are compared; a full one is none of them while another is not, and one
    target alone is chosen.

    Conclusive: the draws are given, every pair of three among them.
    """
    three = replicas([0.5, 0.2, 0.9])
    for draws, expected in (((0, 0), 0.2), ((0, 1), 0.5), ((1, 0), 0.2), ((1, 1), 0.2), ((2, 0), 0.5), ((2, 1), 0.2)):
        assert choose(b"", three, drawing(*draws)).load == expected
    assert choose(b"", replicas([1.0, 0.99, 1.0]), drawing(0)).load == 0.99
    assert choose(b"", replicas([1.0, 2.0]), drawing(0, 0)).load == 1.0
    assert choose(b"", replicas([1.0]), drawing(0)).load == choose(b"key", replicas([1.0]), drawing()).load == 1.0


def test_a_text_gets_the_nearer_and_idler_of_two_drafts() -> None:
    """Claim: of two random drafts the one with the smaller wait is chosen, its load aside, unless it is full."""
    near, far, full = Replica("near", 0.9, 0.004), Replica("far", 0.1, 0.006), Replica("full", 1.0, 0.001)

    def wait_s(draft: Replica) -> float:
        return draft.wait_s

    for draws in ((0, 0), (1, 0)):
        assert choose_draft([near, far, full], wait_s, drawing(*draws)) is near
    assert choose_draft([full, far], wait_s, drawing(0)) is far
    assert choose_draft([full], wait_s, drawing(0)) is full


def test_the_load_of_one_session_is_the_pools_mean() -> None:
    """Claim: one session adds the sum of loads over the sum of sessions; without sessions a guess, never 0."""
    assert session_load([(10, 0.5), (0, 0.1), (30, 0.3)]) == 0.8 / 40
    assert session_load([(0, 0.0)]) == session_load([]) == routing.SESSION_LOAD_GUESS > 0


def test_a_burst_between_two_reports_spreads() -> None:
    """Claim: what a coordinator opens itself counts before the next report: 300 texts of one key on 10 idle targets
    leave no target with more than BOUND times the mean and two sessions.

    Conclusive: all have the same key, so without that count one target would get all.
    """
    pool = replicas([0.0] * 10)
    rng = random.Random(1)
    for _ in range(300):
        choose(b"one", pool, rng.randrange).load += routing.SESSION_LOAD_GUESS
    sessions = [replica.load / routing.SESSION_LOAD_GUESS for replica in pool]
    assert sum(sessions) == 300 and max(sessions) <= BOUND * 30 + 2
