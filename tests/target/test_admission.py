"""Admission, waiting and preemption in a target's cache: real verifier, engine and cache, stepped by hand.

The table model stores token ids, so every session's cache is compared with its tokens after each step. Texts are
compared with those of a cache with space for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec.decoding.verification import verify
from specdec.engine.loading.model import load_model
from specdec.engine.scheduling.scheduler import Engine
from specdec.engine.table_model import write_table_model
from specdec.protocol.items import Close, Extend, Failure, MissingTokens, Open, Verification, VerificationResult
from specdec.protocol.limits import UINT32_MAX
from specdec.protocol.types import Description, ResolvedSamplingParams, Rule
from specdec.replica.handler import ItemHandler
from specdec.rpc.convert_items import item_to_bytes
from specdec.target_service import admission
from specdec.target_service.session import TargetSession
from specdec.target_service.verifier import Verifier
from specdec.v1.target_service_pb2 import VerifyResponse

VOCABULARY_SIZE = 6
BLOCK_SIZE = 8
OUTPUT_COUNT = 30
DRAFT_LENGTH_MAX = 5
TREE_DEPTH = 10
STEP_COUNT_MAX = 2000
PAUSE_COUNT_MAX = 4  # turns


class Clock:
    """Seconds that a test advances."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


class Target:
    """A verifier whose steps are run by hand, and the coordinator of all its sessions: plain rounds, or with drafts."""

    def __init__(self, folder: Path, block_count: int, shares_prefixes: bool = True, draft_length: int = 0) -> None:
        model = load_model(str(folder))
        self.engine = Engine(model, block_count + 1, BLOCK_SIZE, verify, chunk_size=16)
        own = model.description
        description = Description(
            own.model_digest, "", own.model_name, own.vocabulary_size, own.positions_max, (), own.dtype, "cpu", ""
        )
        self.verifier = Verifier(self.engine, description, shares_prefixes)
        self.handler = ItemHandler(self.verifier, 64)
        self.admission = self.verifier._admission
        self.draft_length = draft_length
        self.tokens: dict[int, list[int]] = {}
        self.round_index: dict[int, int] = {}
        self.answers: dict[int, list[VerificationResult]] = {}
        self.failures: dict[int, Failure] = {}
        self.ends: dict[int, int] = {}

    def tell(self, *items: object) -> None:
        self.handler.handle(self, list(items), self._take)

    def open(
        self, session: int, prompt: list[int], salt: str = "", output_count: int = OUTPUT_COUNT, age_ms: int = 0
    ) -> None:
        """Opens a session, with an age that of a text from elsewhere, and asks its first round."""
        params = ResolvedSamplingParams(Rule.GREEDY, seed=1, prompt_length=len(prompt), temperature=0.0)
        self.tokens[session], self.ends[session] = list(prompt), len(prompt) + output_count
        self.round_index[session], self.answers[session] = 0, []
        end = len(prompt) + output_count
        opened = Open(session, 1, params, end, VOCABULARY_SIZE, cache_salt=salt, age_ms=age_ms)
        self.tell(opened, self._round(session, len(prompt)))

    def ask(self, session: int) -> None:
        """The next round, with draft tokens that are mostly wrong."""
        self.tell(self._round(session, DRAFT_LENGTH_MAX + 1))

    def ask_tree(self, session: int) -> None:
        """The next round with every token at the next position, and TREE_DEPTH - 1 tokens below each."""
        own = self._round(session, DRAFT_LENGTH_MAX + 1)
        count = VOCABULARY_SIZE * TREE_DEPTH
        parents = tuple(index if index % TREE_DEPTH else 0 for index in range(count))
        token_ids = tuple(index // TREE_DEPTH if index % TREE_DEPTH == 0 else 1 for index in range(count))
        self.tell(own._replace(draft_token_ids=token_ids, parents=parents))

    def _round(self, session: int, suffix_count: int) -> Verification:
        tokens = self.tokens[session]
        space_left = self.ends[session] - len(tokens) - 1
        drafts = tuple((tokens[-1] + step) % VOCABULARY_SIZE for step in range(min(self.draft_length, space_left)))
        name = session, 1, self.round_index[session]
        return Verification(*name, len(tokens), tuple(tokens[-min(suffix_count, len(tokens)) :]), drafts)

    def _take(self, answer: object) -> None:
        if isinstance(answer, Failure):
            self.failures[answer.session] = answer
            return
        if isinstance(answer, MissingTokens) and answer.session in self.failures:
            return  # its first round came with the refused Open
        assert isinstance(answer, VerificationResult), answer
        assert answer.round_index == self.round_index[answer.session], "one answer for each round"
        session, tokens = answer.session, self.tokens[answer.session]
        drafts = self._round(session, 1).draft_token_ids
        recovered = answer.output.recovered_token_ids
        accepted = next((i for i, token in enumerate(drafts) if token != recovered[i]), len(drafts))
        tokens += recovered[: accepted + 1]
        self.round_index[session] += 1
        self.answers[session].append(answer)

    def turn(self) -> None:
        """One turn of the engine's thread: the service's, then a step."""
        self.verifier.next_step()
        self.engine._step()
        self.check()

    def check(self) -> None:
        cache = self.engine.cache
        cache.check_integrity()
        cells = self.engine._runner._model._storage.token_ids
        for held in self.handler.sessions.values():
            found = [
                int(cells[held.table.block_ids[position // BLOCK_SIZE], position % BLOCK_SIZE])
                for position in range(held.table.length)
            ]
            fed = [*held.tokens[: held.fed_length], *held.fed_draft]
            assert found == fed[: held.table.length], "the cache holds other tokens"

    def held(self, session: int) -> TargetSession:
        return next(held for held in self.handler.sessions.values() if held.opened.session == session)

    def has_blocks(self, session: int) -> bool:
        return bool(self.held(session).table.block_ids)

    def run(self, *sessions: int, until: Callable[[], bool] = lambda: False) -> None:
        """Runs rounds of these sessions, all in each step, to their ends; each is closed at its own."""
        going = set(sessions)
        for _ in range(STEP_COUNT_MAX):
            self.turn()
            for session in sorted(going):
                if session in self.failures:
                    going.discard(session)
                elif len(self.tokens[session]) >= self.ends[session]:
                    self.tell(Close(session, 1))
                    going.discard(session)
                elif self.held(session).last_answer is not None:
                    self.ask(session)
            if not going or until():
                return
        raise AssertionError(f"sessions {going} have no end")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("table")
    write_table_model(path, VOCABULARY_SIZE, positions_max=200, seed=4)
    return path


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time stands still, so no session is idle unless a test advances it."""
    clock = Clock()
    monkeypatch.setattr(admission.time, "perf_counter", clock.perf_counter)
    return clock


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "RUN_POSITIONS", 8)
    monkeypatch.setattr(admission, "RUN_SHARE", 0.0)


def prompt_of(session: int, length: int = 10) -> list[int]:
    return [(session * 7 + index * (session + 1) + 1) % VOCABULARY_SIZE for index in range(length)]


def plain_text(folder: Path, prompt: list[int], output_count: int = OUTPUT_COUNT) -> list[int]:
    """The tokens of a session alone, in a large cache, without prefix caching."""
    target = Target(folder, 64, shares_prefixes=False)
    target.open(1, prompt, output_count=output_count)
    target.run(1)
    return target.tokens[1]


def test_the_youngest_is_preempted_and_all_texts_are_the_same(folder: Path, clock: Clock) -> None:
    """Claim: three sessions of five blocks in a cache of nine all end with the text of a cache for all; the youngest is
    preempted first, the oldest never; results count preemptions, and all blocks are free at the end.

    Requirement: the youngest is preempted and "re-opened later with identical text". Conclusive: texts, cache contents
    after each step and the counts of each session are compared.
    """
    target = Target(folder, 9)
    for session in (1, 2, 3):
        target.open(session, prompt_of(session))
    target.run(1, 2, 3, until=lambda: target.admission.counters["preemptions"] == 1)
    assert [target.has_blocks(session) for session in (1, 2, 3)] == [True, True, False]
    target.run(1, 2, 3)
    assert {session: target.tokens[session] for session in (1, 2, 3)} == {
        session: plain_text(folder, prompt_of(session)) for session in (1, 2, 3)
    }
    preempted = {session: sum(answer.preemptions for answer in target.answers[session]) for session in (1, 2, 3)}
    counters = target.admission.counters
    assert preempted[1] == 0 and preempted[3] >= 1
    assert sum(preempted.values()) == counters["preemptions"] == counters["reopenings"]
    assert not target.failures and target.engine.cache.free_block_count == 9


def test_a_new_session_is_refused_while_it_does_not_fit_or_others_wait(folder: Path, clock: Clock) -> None:
    """Claim: a session without space for its prompt and run is refused with a retry delay, none of its blocks remain,
    and the others go on; the same where there is space, but a preempted session waits for it.

    Source: design section 8, "new ones RESOURCE_EXHAUSTED with RetryInfo". Conclusive: free blocks are as before.
    """
    target = Target(folder, 6)
    target.open(1, prompt_of(1))
    target.open(2, prompt_of(2))
    free = target.engine.cache.free_block_count
    target.open(3, prompt_of(3))
    assert target.failures[3].reason == "CACHE_EXHAUSTED" and target.failures[3].retry_after_ms > 0
    assert target.engine.cache.free_block_count == free and len(target.handler.sessions) == 2
    target.run(1, 2, until=lambda: bool(target.admission.counters["preemptions"]))
    target.open(4, prompt_of(4, 1), output_count=2)
    assert "wait" in target.failures[4].message and target.admission.counters["refusals"] == 2
    target.run(1, 2)
    assert [target.tokens[s] for s in (1, 2)] == [plain_text(folder, prompt_of(s)) for s in (1, 2)]


def test_sessions_left_alone_give_their_blocks_to_others(folder: Path, clock: Clock) -> None:
    """Claim: sessions without work keep the cache from a new session and from a younger one for ABANDONED_S only; asked
    again they go on, and all texts are those of a cache for all.

    Source: one stream must not take more than its share while others ask. Conclusive: the same requests are refused,
    or wait, until that time is over.
    """
    target = Target(folder, 9)
    for session in (1, 2, 3):
        target.open(session, prompt_of(session))
    target.run(1, 2, until=lambda: target.engine.cache.free_block_count == 0)
    for _ in range(20):
        target.turn()  # the answers under way; 1 and 2 ask for nothing more
    clock.now_s += admission.ABANDONED_S - 0.1
    target.open(4, prompt_of(4, 30))
    assert target.failures.pop(4).reason == "CACHE_EXHAUSTED"
    reached = len(target.tokens[3])
    clock.now_s += 0.2
    target.run(3)
    assert len(target.tokens[3]) > reached
    target.open(4, prompt_of(4, 30), output_count=2)
    target.run(4)
    target.run(1, 2)
    for session, (length, count) in {1: (10, 30), 2: (10, 30), 3: (10, 30), 4: (30, 2)}.items():
        assert target.tokens[session] == plain_text(folder, prompt_of(session, length), count)
    assert not target.failures and target.engine.cache.free_block_count == 9


def test_a_text_from_elsewhere_waits_where_a_new_one_is_refused(folder: Path, clock: Clock) -> None:
    """Claim: a session with an age that finds no blocks is not refused: it waits without any, new ones are refused
    meanwhile, and it runs once blocks are free; its start counts as no preemption and no reopening, and its prefix hits
    are reported. Where there is space it starts at once, and so does a new one behind it.

    Requirement: "a text under way waits for blocks". Conclusive: the same session without an age is refused,
    and the blocks are as many.
    """
    target = Target(folder, 6)
    target.open(1, prompt_of(1))
    target.open(2, prompt_of(2), age_ms=1)
    target.open(3, prompt_of(3))
    assert target.has_blocks(2) and target.failures.pop(3).reason == "CACHE_EXHAUSTED"
    target.open(4, prompt_of(4, 30), output_count=2, age_ms=1)
    target.turn()
    assert not target.has_blocks(4) and target.verifier.waiting_count == 1 and not target.failures
    target.open(5, [1], output_count=2)
    assert "wait" in target.failures.pop(5).message
    target.run(1, 2, 4)
    texts = {1: (10, 30), 2: (10, 30), 4: (30, 2)}
    assert all(target.tokens[own] == plain_text(folder, prompt_of(own, n), out) for own, (n, out) in texts.items())
    counters = target.admission.counters
    assert counters["preemptions"] == counters["reopenings"] and not target.answers[4][0].preemptions
    for session in (6, 7):
        target.open(session, prompt_of(4, 30), output_count=2, age_ms=1)
        target.run(session)
    assert target.answers[7][0].cached_prompt_tokens == 24 and target.engine.cache.free_block_count == 6


def test_texts_from_elsewhere_are_as_old_as_they_say(folder: Path, clock: Clock) -> None:
    """Claim: order is that of births, whichever came first: an older text takes the blocks of younger sessions once
    their runs are over, one of an age between two takes those of the younger only, and of two that wait the older
    begins first; equal ages keep the order of arrival.

    Requirement: "targets order texts by age, whichever coordinator they come from". Conclusive: by order of
    arrival each of these would be the youngest, and wait.
    """
    target = Target(folder, 9)
    for session in (1, 2, 3):
        target.open(session, prompt_of(session))
        clock.now_s += 1
    for session, age_ms in ((4, 1500), (5, 60_000), (6, 60_000)):
        target.open(session, prompt_of(session), age_ms=age_ms)
    assert [held.opened.session for held in target.admission._sessions] == [5, 6, 1, 2, 4, 3]
    begun: list[int] = []

    def note() -> bool:
        begun.extend(own for own in (4, 5, 6) if own not in begun and target.answers[own])
        return len(target.tokens[5]) >= target.ends[5] - 1

    target.run(*range(1, 7), until=note)
    assert begun[:2] == [5, 6] and not any(answer.preemptions for answer in target.answers[5])
    assert not target.failures and len(target.tokens[5]) > max(len(target.tokens[own]) for own in (2, 3, 4))
    target.run(*range(1, 7))
    assert all(target.tokens[own] == plain_text(folder, prompt_of(own)) for own in range(1, 7))
    assert not target.failures and target.engine.cache.free_block_count == 9


def test_a_session_that_could_never_fit_is_refused_when_it_is_opened(folder: Path) -> None:
    """Claim: length_max beyond all positions of the cache is INVALID_ARGUMENT, naming value and limit; exactly that
    many is fine, and such a session ends. Conclusive: both sides of the limit."""
    target = Target(folder, 5)
    target.open(1, prompt_of(1, 11))
    failure = target.failures.pop(1)
    assert (failure.code, failure.field) == (3, "length_max") and "40" in failure.message
    target.open(2, prompt_of(2))
    target.run(2)
    assert target.tokens[2] == plain_text(folder, prompt_of(2)) and not target.failures


def test_a_reopened_session_runs_before_it_is_preempted(folder: Path, clock: Clock) -> None:
    """Claim: a reopened session is not preempted before the end of its run, though an older one waits for blocks
    meanwhile and keeps its own; a session without a request loses that right after TURNAROUND_S.

    Requirement: a "re-opened session runs a while" before the next preemption. Conclusive: the older session needs a
    block when the run of the younger begins; both the start and the end of the protection are checked.
    """
    target = Target(folder, 6)
    target.open(1, prompt_of(1, 15))  # two blocks, and a run of one
    target.open(2, prompt_of(2, 9))  # as many
    target.turn()
    older, younger = target.held(1), target.held(2)
    while len(target.tokens[1]) < 25:
        target.ask(1)
        target.turn()
    assert older.table.length == 24 and younger.table.length == 9
    target.ask(1)  # the fourth block: none is free, the younger is at the start of its run
    target.turn()
    assert older in target.admission.waiting and target.has_blocks(1) and target.has_blocks(2)
    assert target.verifier.next_step().wake_s == admission.TURNAROUND_S
    while younger.table.length < younger.guaranteed_length:
        target.ask(2)
        target.turn()
        assert target.has_blocks(2) == (younger.table.length > 0)
    target.turn()
    assert not target.has_blocks(2) and len(target.tokens[1]) == 26, "its run is over"
    idle = Target(folder, 6)
    idle.open(1, prompt_of(1, 15))
    idle.open(2, prompt_of(2, 9))
    idle.turn()
    while len(idle.tokens[1]) < 25:
        idle.ask(1)
        idle.turn()
    idle.ask(1)
    idle.turn()
    assert idle.has_blocks(2)
    clock.now_s += admission.TURNAROUND_S
    idle.turn()
    assert not idle.has_blocks(2) and len(idle.tokens[1]) == 26, "it had no request"


def test_items_of_a_preempted_session(folder: Path, clock: Clock) -> None:
    """Claim: while a session is preempted, a round requested again is answered once, a newer round replaces the waiting
    one, tokens can be sent, and after Close or a lost stream nothing remains.

    Source: design section 4, fences. Conclusive: the answers of each session are counted, and the cache is empty.
    """
    target = Target(folder, 9)
    for session in (1, 2, 3):
        target.open(session, prompt_of(session))
    target.run(1, 2, 3, until=lambda: len(target.admission.waiting) == 1)
    waits = next(iter(target.admission.waiting)).opened.session
    count = len(target.answers[waits])
    target.tell(target._round(waits, 1), target._round(waits, 2))
    target.tell(Extend(waits, 1, 0, tuple(target.tokens[waits])))
    target.turn()
    assert len(target.answers[waits]) == count and not target.failures
    target.tell(Close(waits, 1))
    assert not target.admission.waiting
    others = [session for session in (1, 2, 3) if session != waits]
    target.run(*others, until=lambda: bool(target.admission.waiting))
    target.handler.close_stream(target)
    target.turn()
    assert not target.handler.sessions and target.engine.cache.free_block_count == 9
    assert not target.engine.waiting_count


def test_tokens_beyond_a_waiting_verification_are_refused(folder: Path, clock: Clock) -> None:
    """Claim: a verification that waits for blocks keeps its base: an Extend beyond it is refused by field, and every
    session ends with its text."""
    target = Target(folder, 9)
    for session in (1, 2, 3):
        target.open(session, prompt_of(session))
    target.run(1, 2, 3, until=lambda: len(target.admission.waiting) == 1)
    waits = next(iter(target.admission.waiting)).opened.session
    target.tell(Extend(waits, 1, len(target.tokens[waits]), (1,)))
    assert target.failures.pop(waits).field == "start_position"
    target.run(1, 2, 3)
    assert all(target.tokens[session] == plain_text(folder, prompt_of(session)) for session in (1, 2, 3))


def test_the_blocks_of_a_tree_are_freed_with_its_session(folder: Path, clock: Clock) -> None:
    """Claim: a preemption frees the blocks of a session's tree too, and the older session's tree gets them.

    Source: an older session waited for ever beside an idle one with a large tree. Conclusive: no block is free, and the
    older tree lacks more than the younger session has for its text alone.
    """

    def with_tree_of_the_younger(block_count: int) -> Target:
        target = Target(folder, block_count)
        for session in (1, 2):
            target.open(session, prompt_of(session))
            target.turn()
        target.ask_tree(2)
        target.turn()
        assert len(target.answers[2]) == 2
        return target

    used_count = 64 - with_tree_of_the_younger(64).engine.cache.free_block_count
    target = with_tree_of_the_younger(used_count)
    cache, older = target.engine.cache, target.held(1).table
    wanted_count = cache.blocks_for(len(target.tokens[1]) + VOCABULARY_SIZE * TREE_DEPTH)
    assert cache.free_block_count == 0
    assert wanted_count - len(older.block_ids) > cache.blocks_for(len(target.tokens[2]))
    clock.now_s += 1
    target.ask_tree(1)
    target.turn()
    assert len(target.answers[1]) == 2 and not target.has_blocks(2)
    for session in (1, 2):
        target.ask(session)
    target.run(1, 2)
    assert {session: target.tokens[session] for session in (1, 2)} == {
        session: plain_text(folder, prompt_of(session)) for session in (1, 2)
    }


def test_prefixes_are_found_by_sessions_of_the_same_salt(folder: Path) -> None:
    """Claim: a session with a cached prefix feeds only the other tokens and reports the cached count; one of another
    salt, or on a target without prefix caching, finds nothing; the texts are the same.

    Requirement: "prefix reuse ... hit counters". Conclusive: counters, first results and rows run are compared.
    """
    prompt = prompt_of(1, 32)
    for shares_prefixes in (True, False):
        target = Target(folder, 40, shares_prefixes)
        found = []
        for session, salt in enumerate(("", "", "a", "a", "b"), 1):
            target.open(session, prompt, salt)
            rows = target.held(session).feed.row_count
            target.run(session)
            found.append(target.answers[session][0].cached_prompt_tokens)
            assert rows == len(prompt) - found[-1]
            assert not any(answer.cached_prompt_tokens for answer in target.answers[session][1:])
            assert target.tokens[session] == plain_text(folder, prompt)
        assert found == ([0, 31, 0, 31, 0] if shares_prefixes else [0] * 5)
        counters = target.admission.counters
        assert counters["prefix_hit_tokens"] == sum(found)
        assert counters["prefix_query_tokens"] == (5 * 32 if shares_prefixes else 0)


def test_a_step_of_hours_is_reported_as_the_longest_time(folder: Path) -> None:
    """Claim: a time beyond 32 bits of microseconds is sent as the largest number.

    Source: a forward of 71 minutes ended the stream of all sessions. Conclusive: the answer is serialised and read.
    """
    sent: list[bytes] = []
    target = Target(folder, 9)
    target.open(1, prompt_of(1))
    target.held(1).feed.timing.forward_s = 5000.0
    target.held(1).reply = lambda answer: sent.append(item_to_bytes(VerifyResponse, answer))
    target.turn()
    assert VerifyResponse.FromString(sent[0]).items[0].result.forward_us == UINT32_MAX


ages = st.sampled_from([0, 0, 1, 100, 100, 10_000])  # milliseconds; a turn takes 10
prompts = st.tuples(st.integers(1, 3), st.integers(1, 20)).map(lambda pair: prompt_of(*pair))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    plans=st.lists(st.tuples(st.integers(0, 25), prompts, st.integers(1, 30), ages), min_size=1, max_size=6),
    block_count=st.integers(7, 14),
    draft_length=st.integers(0, DRAFT_LENGTH_MAX),
    data=st.data(),
)
def test_any_schedule_ends_with_the_same_texts(
    folder: Path,
    clock: Clock,
    plans: list[tuple[int, list[int], int, int]],
    block_count: int,
    draft_length: int,
    data: st.DataObject,
) -> None:
    """Claim: sessions opened at any time, of any age, with any prompts and pauses, all end with the text of a session
    alone, or were refused; one with an age never is, no session starves and all blocks are free at the end.

    Requirement: "nothing starves". Conclusive: at every step hypothesis chooses the sessions that send a request; every
    text that is not refused must be complete within a bound, and each step's cache contents are compared.
    """
    target = Target(folder, block_count, draft_length=draft_length)
    going: set[int] = set()
    pauses: Counter[int] = Counter()  # since a session's last request: a client that never asks does not starve
    for step in range(STEP_COUNT_MAX):
        for session, (at, prompt, output_count, age_ms) in enumerate(plans, 1):
            if at == step:
                target.open(session, prompt, output_count=output_count, age_ms=age_ms)
                going.add(session)
        target.turn()
        clock.now_s += 0.01
        going -= target.failures.keys()
        for session in sorted(going):
            if len(target.tokens[session]) >= target.ends[session]:
                target.tell(Close(session, 1))
                going.discard(session)
            elif target.held(session).last_answer is not None:
                if pauses[session] == PAUSE_COUNT_MAX or data.draw(st.integers(0, 3)):
                    pauses[session] = 0
                    target.ask(session)
                else:
                    pauses[session] += 1
        if step > 25 and not going:
            break
    assert not going, f"sessions {going} starve"
    for session, (_, prompt, output_count, age_ms) in enumerate(plans, 1):
        assert session not in target.failures or not age_ms
        if session not in target.failures:
            assert target.tokens[session] == plain_text(folder, prompt, output_count)
    assert target.engine.cache.free_block_count == block_count and not target.engine.waiting_count
