"""Grammars of requests at the coordinator: refused at admission or followed, and what its own proposers may guess."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from specdec.errors import InvalidRequest, one_line
from specdec.folders import tokenizer_file
from specdec.grammar.compiler import Compiler
from specdec.grammar.matcher import PathMatcher
from specdec.protocol.limits import CONFIDENCE_MAX
from specdec.protocol.proposers import RUN_LENGTH_MAX, Run
from specdec.protocol.request import GenerationRequest
from specdec.protocol.types import Description, Proposer
from specdec.telemetry.logs import get_logger

T = TypeVar("T")
SLOW_S = 0.01  # of the event loop: texts whose guesses take longer to check get none


class LegalRuns:
    """Cuts runs, which were not drawn, where their tokens are illegal: these would only take rows. As a proposer
    (LocalProposer) it guesses the tokens of the only text that may follow; the target alone decides how a text is split
    into tokens, so another split is rejected, never forced.

    It never fails a text: where it cannot tell, or takes long, there are no runs. `matcher`: None for a grammar that
    takes long.
    """

    def __init__(self, matcher: PathMatcher | None, prompt_length: int) -> None:
        self._matcher = matcher
        self._prompt_length = prompt_length

    @property
    def is_of_use(self) -> bool:
        """Whether there may be guesses."""
        return self._matcher is not None

    def __call__(self, committed: Sequence[int], runs: Sequence[Run]) -> list[Run]:
        """Returns the legal beginnings of the runs, as far as they have one."""
        counts = [self._asked(PathMatcher.legal_count, committed, run.token_ids) or 0 for run in runs]
        return [
            run._replace(token_ids=run.token_ids[:count], confidences=run.confidences[:count])
            for run, count in zip(runs, counts)
            if count
        ]

    def propose(self, committed: Sequence[int]) -> list[Run]:
        """Returns the tokens of the only text that may follow, as one run; none where several may."""
        found = (self._asked(PathMatcher.forced, committed) or ())[:RUN_LENGTH_MAX]
        return [Run(Proposer.GRAMMAR, found, 0, 0, (CONFIDENCE_MAX,) * len(found))] if found else []

    def close(self) -> None:
        """The text has ended: drops the matcher, which is megabytes for some grammars."""
        self._matcher = None

    def _asked(self, ask: Callable[..., T], committed: Sequence[int], *more: Sequence[int]) -> T | None:
        """What the matcher says of the output; None where it cannot tell."""
        if self._matcher is None:
            return None
        began_s = time.thread_time()
        try:
            found = ask(self._matcher, committed[self._prompt_length :], *more)
        except BaseException as error:  # a panic of the library is no Exception
            get_logger().info("no guesses under a grammar", error=one_line(error))
            self._matcher = None
            return None
        if time.thread_time() - began_s >= SLOW_S:
            self._matcher = None
        return found


class Grammars:
    """The grammars of one coordinator. `tokenizer`: folder or hub id of the target's tokenizer."""

    def __init__(self, tokenizer: str) -> None:
        self._compiler = Compiler(lambda: tokenizer_file(tokenizer))

    async def admit(
        self, request: GenerationRequest, prompt: Sequence[int], target: Description, has_ended: bool
    ) -> list[LegalRuns | None]:
        """Returns what cuts the guesses of each choice of a request; None without a grammar. `has_ended`: the resumed
        tokens reach the end of the text. Raises InvalidRequest for a grammar that cannot be followed, or resumed tokens
        that do not follow it, and CacheExhausted while too many grammars wait to be compiled."""
        grammar = request.sampling.grammar
        if grammar is None:
            return [None] * request.sampling.n
        waiting = asyncio.wrap_future(self._compiler.compile(grammar, target.end_token_ids))
        compiled = await asyncio.shield(waiting)  # another request may wait for it too
        resumed = request.resumed_token_ids
        if resumed:
            matcher = PathMatcher(compiled, target.end_token_ids, target.vocabulary_size)
            await asyncio.to_thread(check_resumed, matcher, resumed[:-1] if has_ended else resumed)
        model = target.end_token_ids, target.vocabulary_size
        return [
            LegalRuns(None if compiled.is_slow else PathMatcher(compiled, *model), len(prompt))
            for _ in range(request.sampling.n)
        ]


def check_resumed(matcher: PathMatcher, token_ids: Sequence[int]) -> None:
    """Raises InvalidRequest naming the first of some output tokens that is illegal, GrammarFailed."""
    count = matcher.legal_count([], token_ids)
    if count < len(token_ids):
        field = f"resume.output_token_ids[{count}]"
        raise InvalidRequest(field, token_ids[count], "a token that is legal there by the grammar")
