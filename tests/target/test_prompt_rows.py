"""A prompt that is scored, in a real verifier, engine and cache, stepped by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specdec.decoding.prompt_logprobs import with_prompt_rows
from specdec.decoding.verification import verify
from specdec.engine.loading.model import load_model
from specdec.engine.scheduling.scheduler import Engine
from specdec.engine.table_model import write_table_model
from specdec.protocol.items import Failure, Open, PromptPart, Verification, VerificationResult
from specdec.protocol.types import Description, ResolvedSamplingParams, Rule
from specdec.replica.handler import ItemHandler
from specdec.target_service.verifier import Verifier

VOCABULARY_SIZE, BLOCK_SIZE, CHUNK_SIZE, TOP_COUNT = 6, 8, 16, 2
PROMPT = [1 + index * index % 5 for index in range(70)]


class Target:
    """A target, and all that it answered, in order."""

    def __init__(self, folder: Path, chunk_size: int = CHUNK_SIZE, **engine: Any) -> None:
        model = load_model(str(folder))
        self.engine = Engine(model, 65, BLOCK_SIZE, with_prompt_rows(verify), chunk_size=chunk_size, **engine)
        own = model.description
        size = own.vocabulary_size, own.positions_max
        described = Description(own.model_digest, "", own.model_name, *size, (), own.dtype, "cpu", "")
        self.verifier = Verifier(self.engine, described)
        self.handler = ItemHandler(self.verifier, 8)
        self.answers: list[Any] = []

    def ask(self, session: int, start: int, prompt: list[int] = PROMPT, scores: bool = True) -> None:
        """Opens a session and asks its first round, with scores from token `start` on."""
        count = TOP_COUNT if scores else None
        params = ResolvedSamplingParams(
            Rule.GREEDY, seed=1, prompt_length=len(prompt), temperature=0.0, prompt_logprobs=count
        )
        opened = Open(session, 1, params, len(prompt) + 4, VOCABULARY_SIZE)
        asked = Verification(session, 1, 0, len(prompt), tuple(prompt), (1, 2), prompt_logprobs_start=start)
        self.handler.handle(self, [opened, asked], self.answers.append)

    def turn(self) -> None:
        self.verifier.next_step()
        self.engine._step()

    def run(self) -> None:
        """Turns until nothing waits; the cache is sound."""
        while self.engine.waiting_count or self.verifier.waiting_count:
            self.turn()
            self.engine.cache.check_integrity()

    def scores(self, session: int, start: int = 1, length: int = len(PROMPT)) -> list[tuple[Any, ...]]:
        """An entry for each scored token of a session; fails for a missing or doubled one, or one after the result."""
        own = [answer for answer in self.answers if answer.session == session]
        assert isinstance(own[-1], VerificationResult) and all(isinstance(one, PromptPart) for one in own[:-1])
        rows: list[tuple[Any, ...]] = []
        for part in own[:-1]:
            numbers = part.logprobs
            assert numbers.first_index == start + len(rows)
            for at, entry in enumerate(zip(numbers.token_ids, numbers.logprobs, numbers.ranks, strict=True)):
                place = slice(at * TOP_COUNT, (at + 1) * TOP_COUNT)
                rows.append((*entry, *numbers.top_token_ids[place], *numbers.top_logprobs[place]))
        assert len(rows) == length - start
        return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("table")
    write_table_model(path, VOCABULARY_SIZE, positions_max=200, seed=4)
    return path


def scored_alone(folder: Path) -> tuple[list[tuple[Any, ...]], VerificationResult]:
    target = Target(folder)
    target.ask(1, 1)
    target.run()
    return target.scores(1), target.answers[-1]


def test_the_same_numbers_from_any_start_in_any_chunks(folder: Path) -> None:
    """Claim: from token `start` on the numbers are those from the first token on, for chunks of 1 to all rows, in an
    empty cache and one that has the prompt; the result is that of a verification without them, and later sessions find
    the prompt in the cache. Conclusive: everything is compared exactly; the counters count the tokens found."""
    whole, result = scored_alone(folder)
    plain = Target(folder)
    plain.ask(1, 0, scores=False)
    plain.run()
    assert plain.answers[-1].output == result.output
    for chunk_size in (1, 7, 16, 64):
        target = Target(folder, chunk_size, rows_max=64)
        for session, start in enumerate((1, 2, 17, 40, len(PROMPT) - 1), 1):
            target.ask(session, start)
            target.run()
            assert target.scores(session, start) == whole[start - 1 :]
            assert target.answers[-1].output == result.output
            assert target.answers[-1].cached_prompt_tokens <= start - 1
        assert target.answers[-1].cached_prompt_tokens == (len(PROMPT) - 2) // BLOCK_SIZE * BLOCK_SIZE
        target.ask(9, 0)
        target.run()
        assert target.answers[-1].cached_prompt_tokens == len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE


def test_a_session_that_loses_its_blocks_goes_on(folder: Path) -> None:
    """Claim: a session whose blocks are taken after any number of steps sends each position once, with the same
    numbers, and its result. Conclusive: it is tried after every step of the prompt."""
    whole, result = scored_alone(folder)
    for step_count in range(8):
        target = Target(folder)
        target.ask(1, 1)
        for _ in range(step_count):
            target.turn()
        (session,) = target.handler.sessions.values()
        if session.work is not None:
            target.verifier._admission._preempt(session)
        target.run()
        assert target.scores(1) == whole and target.answers[-1].output == result.output
        assert target.answers[-1].preemptions == (step_count < 6)


def test_prompts_that_are_scored_delay_no_decode(folder: Path) -> None:
    """Claim: while three prompts are scored, a session's verifications are answered in every step, and the prompts have
    one chunk of it together. Conclusive: the rows of each step are counted."""
    steps: list[tuple[int, int]] = []
    target = Target(folder, stepped=lambda rows, feeds, _: steps.append((rows, feeds)))
    target.ask(1, 0, PROMPT[:3], scores=False)
    target.run()
    for session in (2, 3, 4):
        target.ask(session, 1)
    del steps[:]
    tokens = PROMPT[:3]
    for round_index in range(1, 4):
        tokens = [*tokens, 1]
        asked = Verification(1, 1, round_index, len(tokens), (1,))
        target.handler.handle(target, [asked], target.answers.append)
        target.turn()
        found = [own for own in target.answers if isinstance(own, VerificationResult) and own.session == 1]
        assert found[-1].round_index == round_index
    assert all(rows <= 1 + CHUNK_SIZE for rows, _ in steps) and len(steps) == 3
    target.run()
    assert target.scores(2) == target.scores(3) == target.scores(4) == scored_alone(folder)[0]


@pytest.mark.parametrize(("start", "scores"), [(len(PROMPT), True), (1, False)])
def test_a_start_outside_the_prompt_is_refused(folder: Path, start: int, scores: bool) -> None:
    """Claim: a start beyond the prompt's tokens, or one in a session without log-probabilities of its prompt, is
    refused by field before anything is fed."""
    target = Target(folder)
    target.ask(1, start, scores=scores)
    (failure,) = target.answers
    assert isinstance(failure, Failure) and failure.field == "prompt_logprobs_start" and not target.engine.waiting_count
