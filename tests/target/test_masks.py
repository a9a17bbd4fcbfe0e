"""Masks that fail, or that a step does not wait for, in a real verifier, engine and cache, stepped by hand."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.decoding.prompt_logprobs import with_prompt_rows
from specdec.decoding.verification import verify
from specdec.engine.loading.model import load_model
from specdec.engine.scheduling.scheduler import Engine
from specdec.folders import EMBEDDED_MODELS
from specdec.grammar import jobs
from specdec.grammar.jobs import MaskThreads
from specdec.protocol.grammar import Grammar
from specdec.protocol.items import Close, Failure, Open, Verification, VerificationResult
from specdec.protocol.types import Description, ResolvedSamplingParams, Rule
from specdec.replica.handler import ItemHandler
from specdec.replica.masks import with_masks
from specdec.target_service.verifier import Verifier

FOLDER, SIZE, END = EMBEDDED_MODELS / "target", 4096, 0
PROMPT = (70, 71, 72, 73)
LETTERS = Grammar(regex="[a-z]{40}")
DEEP = Grammar(lark='start: "a" X\nX: /((.{1,100}){1,100}){1,100}/')


class Target:
    """A target; what it answered, in order, and the calls of its sampler."""

    def __init__(self) -> None:
        self.sampled_counts: list[int] = []

        def sampler(payloads: Any, *more: Any) -> Any:
            self.sampled_counts.append(len(payloads))
            return verify(payloads, *more)

        self.engine = Engine(load_model(str(FOLDER)), 65, 8, with_prompt_rows(with_masks(sampler)), chunk_size=64)
        described = Description("", "", "model", SIZE, 512, (END,), "float32", "cpu", "")
        threads = MaskThreads(lambda: FOLDER / "tokenizer.json")
        self.handler = ItemHandler(Verifier(self.engine, described, grammars=threads), 8)
        self.answers: list[Any] = []

    def open(self, session: int, grammar: Grammar | None) -> None:
        """Opens a session, and waits until its grammar is compiled."""
        ends = (END,) if grammar is not None else ()
        params = ResolvedSamplingParams(Rule.GREEDY, 1, len(PROMPT), temperature=0.0, grammar=grammar, end_token_ids=ends)
        self.handler.handle(self, [Open(session, 1, params, 100, SIZE)], self.answers.append)
        if grammar is not None:
            self.session(session).grammar.compiling.result(60)

    def session(self, number: int) -> Any:
        return self.handler.sessions[(self, number)]

    def ask(self, *sessions: int, draft: tuple[int, ...] = (97, 98)) -> None:
        """Asks the first round of sessions, and steps until they are answered."""
        for session in sessions:
            asked = Verification(session, 1, 0, len(PROMPT), PROMPT, draft)
            self.handler.handle(self, [asked], self.answers.append)
        wanted = len(self.answers) + len(sessions)
        while len(self.answers) < wanted:
            if not self.engine.waiting_count:
                self.engine._inbox.get(timeout=60)()
            self.handler.service.next_step()
            self.engine._step()
            self.engine.cache.check_integrity()


def test_a_step_does_not_wait_for_late_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: a session whose masks are late is not answered by that step, its neighbour is; the next step answers it,
    with masks made before, as one whose masks were in time. Conclusive: the same rounds in time and late, with draft
    tokens that the cache held from the first run; the numbers of sessions in each call of the sampler are counted."""
    answers = []
    for seconds in (60.0, 0.0):
        monkeypatch.setattr(jobs, "SLOW_S", seconds)
        target = Target()
        target.open(1, LETTERS)
        target.open(2, None)
        target.ask(1, 2)
        assert all(isinstance(one, VerificationResult) for one in target.answers)
        answers.append({one.session: one.output for one in target.answers})
        assert target.sampled_counts == ([2] if seconds else [2, 1])
        assert [one.session for one in target.answers] == ([1, 2] if seconds else [2, 1])
        assert target.session(1).grammar.is_slow == (not seconds)
    assert answers[0] == answers[1]


def test_a_grammar_that_fails_has_nobody_sampled_again() -> None:
    """Claim: the failure of one session's masks is its answer, GRAMMAR, and its neighbours are sampled once.
    Conclusive: a limit of the library is exceeded at the first mask after `a`."""
    target = Target()
    target.open(1, DEEP)
    target.open(2, None)
    (letter,) = target.session(1).grammar.compiling.result().tokenizer.tokenize_str("a")
    for number in (1, 2):
        prompt = (*PROMPT, letter) if number == 1 else PROMPT
        asked = Verification(number, 1, 0, len(prompt), prompt, ())
        target.handler.handle(target, [asked], target.answers.append)
    while len(target.answers) < 2:
        target.handler.service.next_step()
        target.engine._step()
    failed, answered = target.answers
    assert isinstance(failed, Failure) and failed.reason == "GRAMMAR" and failed.session == 1
    assert isinstance(answered, VerificationResult) and target.sampled_counts == [2]


def test_a_session_that_ends_drops_its_grammar() -> None:
    """Claim: closing a session drops its matcher at once, though the feed of its round still names it."""
    target = Target()
    target.open(1, LETTERS)
    target.ask(1)
    grammar = target.session(1).grammar
    assert grammar.compiling is not None and grammar._matcher is not None
    target.handler.handle(target, [Close(1, 1)], target.answers.append)
    assert grammar.compiling is None and grammar._matcher is None
