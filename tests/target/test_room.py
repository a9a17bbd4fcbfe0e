"""Who has room in a target's cache, who waits and who gives way: real verifier, engine and cache, stepped by hand.

The table model stores token ids, so what every session's cache holds is compared with its tokens after each step. Texts
are compared with those of a cache that has room for all.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec.decoding.evidence import evidence
from specdec.engine.model import load_model
from specdec.engine.scheduler import Engine
from specdec.engine.table_model import write_table_model
from specdec.protocol.items import Close, EvidenceAnswer, Extend, Failure, Open, Short, Verification
from specdec.protocol.types import Description, Law, Rule
from specdec.replica.handler import ItemHandler
from target_service import room
from target_service.session import TargetSession
from target_service.verifier import Verifier

VOCABULARY_SIZE = 6
BLOCK_SIZE = 8
OUTPUT_COUNT = 30
DRAFT_LENGTH_MAX = 5
STEP_COUNT_MAX = 2000


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


class Target:
    """A verifier whose steps are run by hand, and the coordinator of all its sessions: plain rounds, or with drafts."""

    def __init__(self, folder: Path, block_count: int, shares_prefixes: bool = True, draft_length: int = 0) -> None:
        model = load_model(str(folder))
        self.engine = Engine(model, block_count + 1, BLOCK_SIZE, evidence, chunk_size=16)
        own = model.description
        description = Description(
            own.model_digest, "", own.model_name, own.vocabulary_size, own.positions_max, (), own.dtype, "cpu", ""
        )
        self.verifier = Verifier(self.engine, description, shares_prefixes)
        self.handler = ItemHandler(self.verifier, 64)
        self.room = self.verifier._room
        self.draft_length = draft_length
        self.tokens: dict[int, list[int]] = {}
        self.round_index: dict[int, int] = {}
        self.answers: dict[int, list[EvidenceAnswer]] = {}
        self.failures: dict[int, Failure] = {}
        self.ends: dict[int, int] = {}

    def tell(self, *items: object) -> None:
        self.handler.handle(self, list(items), self._take)

    def open(self, session: int, prompt: list[int], salt: str = "", output_count: int = OUTPUT_COUNT) -> None:
        """Opens a session and asks its first round."""
        law = Law(Rule.GREEDY, seed=1, prompt_length=len(prompt), temperature=0.0)
        self.tokens[session], self.ends[session] = list(prompt), len(prompt) + output_count
        self.round_index[session], self.answers[session] = 0, []
        end = len(prompt) + output_count
        self.tell(Open(session, 1, law, end, VOCABULARY_SIZE, cache_salt=salt), self._round(session, len(prompt)))

    def ask(self, session: int) -> None:
        """The next round, with draft tokens that are mostly wrong."""
        self.tell(self._round(session, DRAFT_LENGTH_MAX + 1))

    def _round(self, session: int, suffix_count: int) -> Verification:
        tokens = self.tokens[session]
        room_left = self.ends[session] - len(tokens) - 1
        drafts = tuple((tokens[-1] + step) % VOCABULARY_SIZE for step in range(min(self.draft_length, room_left)))
        name = session, 1, self.round_index[session]
        return Verification(*name, len(tokens), tuple(tokens[-min(suffix_count, len(tokens)) :]), drafts)

    def _take(self, answer: object) -> None:
        if isinstance(answer, Failure):
            self.failures[answer.session] = answer
            return
        if isinstance(answer, Short) and answer.session in self.failures:
            return  # its first round came with the refused Open
        assert isinstance(answer, EvidenceAnswer), answer
        assert answer.round_index == self.round_index[answer.session], "one answer for each round"
        session, tokens = answer.session, self.tokens[answer.session]
        drafts = self._round(session, 1).draft_token_ids
        replacements = answer.evidence.replacement_token_ids
        accepted = next((i for i, token in enumerate(drafts) if token != replacements[i]), len(drafts))
        tokens += replacements[: accepted + 1]
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
            assert found == fed[: held.table.length], "the cache holds something else"

    def held(self, session: int) -> TargetSession:
        return next(held for held in self.handler.sessions.values() if held.opened.session == session)

    def has_blocks(self, session: int) -> bool:
        return bool(self.held(session).table.block_ids)

    def run(self, *sessions: int, until: Callable[[], bool] = lambda: False) -> None:
        """Rounds of these sessions, all of them in each step, to their ends; each is closed at its own."""
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
    """Time stands still, so nobody is idle unless a test says so."""
    clock = Clock()
    monkeypatch.setattr(room.time, "perf_counter", clock.perf_counter)
    return clock


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "RUN_POSITIONS", 8)
    monkeypatch.setattr(room, "RUN_SHARE", 0.0)


def prompt_of(session: int, length: int = 10) -> list[int]:
    return [(session * 7 + place * (session + 1) + 1) % VOCABULARY_SIZE for place in range(length)]


def plain_text(folder: Path, prompt: list[int], output_count: int = OUTPUT_COUNT) -> list[int]:
    """What a session alone, in a large cache, without reuse comes to."""
    target = Target(folder, 64, shares_prefixes=False)
    target.open(1, prompt, output_count=output_count)
    target.run(1)
    return target.tokens[1]


def test_the_youngest_gives_way_and_all_texts_are_the_same(folder: Path, clock: Clock) -> None:
    """Claim: three sessions of five blocks in a cache of nine all end with the text of a cache for all; the youngest is
    the first to give way, the oldest never does; evidence tells how often, and nothing is left.

    Source: issue 3, "eviction of the youngest ... re-opened later with identical text". Conclusive: texts, cache
    contents after each step and the counts of each session are compared.
    """
    target = Target(folder, 9)
    for session in (1, 2, 3):
        target.open(session, prompt_of(session))
    target.run(1, 2, 3, until=lambda: target.room.counters["evictions"] == 1)
    assert [target.has_blocks(session) for session in (1, 2, 3)] == [True, True, False]
    target.run(1, 2, 3)
    assert {session: target.tokens[session] for session in (1, 2, 3)} == {
        session: plain_text(folder, prompt_of(session)) for session in (1, 2, 3)
    }
    evicted = {session: sum(answer.evictions for answer in target.answers[session]) for session in (1, 2, 3)}
    counters = target.room.counters
    assert evicted[1] == 0 and evicted[3] >= 1
    assert sum(evicted.values()) == counters["evictions"] == counters["reopenings"]
    assert not target.failures and target.engine.cache.free_block_count == 9


def test_a_new_session_is_refused_while_it_does_not_fit_or_others_wait(folder: Path, clock: Clock) -> None:
    """Claim: a session whose prompt and run find no room is refused with the time to wait, nothing of it remains, and
    the others do not notice; the same where there is room, but an evicted session waits for it.

    Source: design section 8, "new ones RESOURCE_EXHAUSTED with RetryInfo". Conclusive: free blocks are as before.
    """
    target = Target(folder, 6)
    target.open(1, prompt_of(1))
    target.open(2, prompt_of(2))
    free = target.engine.cache.free_block_count
    target.open(3, prompt_of(3))
    assert target.failures[3].reason == "CACHE_EXHAUSTED" and target.failures[3].retry_after_ms > 0
    assert target.engine.cache.free_block_count == free and len(target.handler.sessions) == 2
    target.run(1, 2, until=lambda: bool(target.room.counters["evictions"]))
    target.open(4, prompt_of(4, 1), output_count=2)
    assert "wait" in target.failures[4].message and target.room.counters["refusals"] == 2
    target.run(1, 2)
    assert [target.tokens[s] for s in (1, 2)] == [plain_text(folder, prompt_of(s)) for s in (1, 2)]


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


def test_who_was_opened_again_runs_before_it_gives_way(folder: Path, clock: Clock) -> None:
    """Claim: a session that was opened again is not evicted before it used its run, though an older one waits for room
    meanwhile with what it holds; a session that asks for nothing loses that right after IDLE_S.

    Source: issue 3, "a re-opened session runs a while before it may be evicted again". Conclusive: the older session
    asks for a block at the moment the younger has its run before it; both ends of the promise are looked at.
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
    target.ask(1)  # the fourth block: none is free, the younger has its run before it
    target.turn()
    assert older in target.room.waiting and target.has_blocks(1) and target.has_blocks(2)
    assert target.verifier.next_step().wake_s == room.IDLE_S
    while younger.table.length < younger.run_end:
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
    clock.now_s += room.IDLE_S
    idle.turn()
    assert not idle.has_blocks(2) and len(idle.tokens[1]) == 26, "it asked for nothing"


def test_what_happens_to_an_evicted_session(folder: Path, clock: Clock) -> None:
    """Claim: while a session is evicted, a round asked again is answered once, a newer round replaces the one that
    waits, tokens can be told, and Close or a lost stream leave nothing behind.

    Source: design section 4, fences. Conclusive: the answers of each session are counted, and the cache is empty.
    """
    target = Target(folder, 9)
    for session in (1, 2, 3):
        target.open(session, prompt_of(session))
    target.run(1, 2, 3, until=lambda: len(target.room.waiting) == 1)
    waits = next(iter(target.room.waiting)).opened.session
    count = len(target.answers[waits])
    target.tell(target._round(waits, 1), target._round(waits, 2))
    target.tell(Extend(waits, 1, 0, tuple(target.tokens[waits])))
    target.turn()
    assert len(target.answers[waits]) == count and not target.failures
    target.tell(Close(waits, 1))
    assert not target.room.waiting
    others = [session for session in (1, 2, 3) if session != waits]
    target.run(*others, until=lambda: bool(target.room.waiting))
    target.handler.close_stream(target)
    target.turn()
    assert not target.handler.sessions and target.engine.cache.free_block_count == 9
    assert not target.engine.waiting_count


def test_prefixes_are_found_by_sessions_of_the_same_salt(folder: Path) -> None:
    """Claim: a session that begins as another did feeds only what is not cached, and says how much was; one of another
    salt, or on a target told not to, finds nothing; the texts are the same.

    Source: issue 3, "prefix reuse ... hit counters". Conclusive: by the counters, the first evidence and the rows run.
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
        counters = target.room.counters
        assert counters["prefix_hit_tokens"] == sum(found)
        assert counters["prefix_query_tokens"] == (5 * 32 if shares_prefixes else 0)


prompts = st.tuples(st.integers(1, 3), st.integers(1, 20)).map(lambda pair: prompt_of(*pair))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    plans=st.lists(st.tuples(st.integers(0, 25), prompts, st.integers(1, 30)), min_size=1, max_size=6),
    block_count=st.integers(7, 14),
    draft_length=st.integers(0, DRAFT_LENGTH_MAX),
    data=st.data(),
)
def test_any_schedule_ends_with_the_same_texts(
    folder: Path,
    clock: Clock,
    plans: list[tuple[int, list[int], int]],
    block_count: int,
    draft_length: int,
    data: st.DataObject,
) -> None:
    """Claim: sessions that come at any time, with any prompts, pause and go on as they like, all end with the text of
    a session alone, or were refused; nothing starves and nothing is left.

    Source: issue 3, "nothing starves". Conclusive: at every step hypothesis chooses who asks; every text that is not
    refused must be complete within a bound, and each step's cache contents are compared.
    """
    target = Target(folder, block_count, draft_length=draft_length)
    going: set[int] = set()
    for step in range(STEP_COUNT_MAX):
        for session, (at, prompt, output_count) in enumerate(plans, 1):
            if at == step:
                target.open(session, prompt, output_count=output_count)
                going.add(session)
        target.turn()
        clock.now_s += 0.01
        going -= target.failures.keys()
        for session in sorted(going):
            if len(target.tokens[session]) >= target.ends[session]:
                target.tell(Close(session, 1))
                going.discard(session)
            elif target.held(session).last_answer is not None and data.draw(st.integers(0, 3)):
                target.ask(session)
        if step > 25 and not going:
            break
    assert not going, "somebody starves"
    for session, (_, prompt, output_count) in enumerate(plans, 1):
        if session not in target.failures:
            assert target.tokens[session] == plain_text(folder, prompt, output_count)
    assert target.engine.cache.free_block_count == block_count and not target.engine.waiting_count
