"""The masks of a replica's sessions, made in threads beside the forward passes.

A session's verification, or its step of a draft tree, may run as soon as its grammar is compiled; its masks are made
meanwhile. Where they take long they are given up, and made before the session's next step, in a thread of their own,
so that no other session waits for them.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from specdec.errors import GrammarFailed, one_line
from specdec.grammar.compiler import Compiled, Compiler
from specdec.grammar.matcher import MaskRows, OutOfTime, PathMatcher
from specdec.protocol.types import ResolvedSamplingParams

FAST_COUNT = 2  # threads for masks that steps wait for
SLOW_S = 0.02  # masks of one step, of 8 rows some 0.5 ms, that take longer are made before the next
LATE = "the masks of this grammar take too long to make beside a step"
MakeRows = Callable[[PathMatcher], MaskRows]


class MasksLate(GrammarFailed):
    """Masks took longer than a step waits for."""


class Masks:
    """The masks of one verification, or of one step of a draft tree."""

    def __init__(self, session: SessionGrammar, make: MakeRows) -> None:
        self._session = session
        self._make = make
        self._rows: Future[MaskRows | str] | None = None

    def begin(self, then: Callable[[], object]) -> bool:
        """Begins to make them, once more if they were late; returns whether a step may run that needs them. If not,
        `then` is called, from another thread, when it is worth asking again. Raises the error of the compilation."""
        session = self._session
        if not session.is_ready(then):
            return False
        if self._rows is None or (self._rows.done() and self._rows.result() == LATE):
            work = partial(session.run, self._make, math.inf if session.is_slow else SLOW_S)
            self._rows = session.threads.submit(work, session.is_slow)
        if session.is_slow and not self._rows.done():
            self._rows.add_done_callback(lambda _: then())
            return False
        return True

    def result(self) -> MaskRows:
        """Returns them; waits for their thread. Raises MasksLate, where they are worth a second try, GrammarFailed."""
        assert self._rows is not None, "masks are begun before their step"
        found = self._rows.result()
        if found == LATE:
            raise MasksLate(found)
        if isinstance(found, str):
            raise GrammarFailed(found)
        return found


class SessionGrammar:
    """The grammar of one session. `compiling`: shared with all sessions of the same text, None once the session has
    ended; `is_slow`: its masks are made before the step that needs them, or failed."""

    def __init__(self, threads: MaskThreads, params: ResolvedSamplingParams, vocabulary_size: int) -> None:
        assert params.grammar is not None
        self.threads = threads
        self.compiling: Future[Compiled] | None = threads.compiler.compile(params.grammar, params.end_token_ids)
        self.is_slow = False
        self._params = params
        self._vocabulary_size = vocabulary_size
        self._matcher: PathMatcher | None = None
        self._working = threading.Lock()  # a matcher works for one thread at a time

    def is_ready(self, then: Callable[[], object]) -> bool:
        """Whether the grammar is compiled; if not, `then` is called, from another thread, when it is worth asking
        again. Raises the error of the compilation."""
        assert self.compiling is not None, "the session has not ended"
        if not self.compiling.done():
            self.compiling.add_done_callback(lambda _: then())
            return False
        self.is_slow |= self.compiling.result().is_slow
        return True

    def close(self) -> None:
        """The session has ended: drops what was compiled, megabytes for some grammars. Its feeds, which refer to
        themselves, name this until the next collection of garbage."""
        self.compiling = self._matcher = None

    def verification(self, tokens: Sequence[int], draft_token_ids: Sequence[int], parents: Sequence[int]) -> Masks:
        """Returns the masks of a verification: after the committed tokens, and after each draft token."""
        output = list(tokens[self._params.prompt_length :])
        return Masks(self, lambda matcher: matcher.rows(output, draft_token_ids, parents))

    def nodes(self, tokens: Sequence[int], paths: Sequence[Sequence[int]]) -> Masks:
        """Returns the masks of nodes of a draft tree: after each path below the committed tokens."""
        output = list(tokens[self._params.prompt_length :])
        return Masks(self, lambda matcher: matcher.rows_of_paths(output, paths))

    def run(self, make: MakeRows, seconds_max: float) -> MaskRows | str:
        """Makes masks, in a thread; returns why there are none, also for a panic of the library: an error would hold
        the matcher by its traceback. LATE: it took more processor time than `seconds_max`."""
        with self._working:
            if (compiling := self.compiling) is None:
                return "the session has ended"
            try:
                ends, size = self._params.end_token_ids, self._vocabulary_size
                matcher = self._matcher or PathMatcher(compiling.result(), ends, size)
                began_s = time.thread_time()
                matcher.end_s = began_s + seconds_max
                rows = make(matcher)
                self._matcher = matcher if self.compiling else None
                self.is_slow |= time.thread_time() - began_s > SLOW_S
                return rows
            except OutOfTime:
                self._matcher, self.is_slow = matcher if self.compiling else None, True
                return LATE
            except GrammarFailed as error:
                self.is_slow = True
                return str(error)
            except BaseException as error:  # a panic of the library is no Exception
                self.is_slow = True
                return f"the grammar cannot be followed any further: {one_line(error)}"


def session_grammar(
    threads: MaskThreads | None, params: ResolvedSamplingParams, vocabulary_size: int
) -> SessionGrammar | None:
    """Returns the grammar of a session, None without. Raises CacheExhausted while too many wait to be compiled,
    GrammarFailed where there are no threads for one."""
    if params.grammar is None:
        return None
    if threads is None:
        raise GrammarFailed("this replica follows no grammars")
    return SessionGrammar(threads, params, vocabulary_size)


class MaskThreads:
    """The grammars of one replica, and the threads in which masks are made. `tokenizer`: tells the file of the target's
    tokenizer, which is read with the first grammar."""

    def __init__(self, tokenizer: Callable[[], Path]) -> None:
        self.compiler = Compiler(tokenizer)
        self._threads: dict[bool, ThreadPoolExecutor] = {}

    def submit(self, work: Callable[[], MaskRows | str], is_slow: bool) -> Future[MaskRows | str]:
        """Runs `work` in a thread for fast or for slow masks. One thread of the caller."""
        if is_slow not in self._threads:
            self._threads[is_slow] = ThreadPoolExecutor(*((1, "slow masks") if is_slow else (FAST_COUNT, "masks")))
        return self._threads[is_slow].submit(work)
