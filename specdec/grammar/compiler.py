"""Compiles the grammars of a process, each text once, in threads beside everything else.

Two at a time: short texts have a thread of their own, so none waits behind a long one. The tokenizer is read with the
first grammar; a process that sees none has neither it nor the library. A constructor of the library never raises: it
makes a matcher in an error state.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.errors import CacheExhausted, InvalidRequest, SpecdecError, one_line
from specdec.grammar.texts import lark_text
from specdec.protocol.grammar import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

KEPT_COUNT_MAX, KEPT_BYTES_MAX = 32, 256 << 10  # compiled grammars, the latest, and their texts: 100 bytes of a byte
WAITING_COUNT_MAX = 32  # of each thread; a further one is refused
SHORT_BYTES_MAX = 4 << 10
NICE = 10  # of the threads that compile
SLOW_MASK_S, SLOW_COMPILATION_S = 0.005, 0.02  # usual are 0.1 ms and 1 ms; slower ones are not for beside a step


class Compiled:
    """A grammar compiled for a `tokenizer`. `ends`: the tokens that the library takes for ends of a text. `is_slow`: to
    compile it, or to make its first mask, took long.

    Its matchers share what they learn of the grammar, and a limit of the lexer that one of them exceeds is exceeded for
    all: then it is compiled again for those that follow.
    """

    def __init__(self, tokenizer: LLTokenizer, lark: str) -> None:
        self.tokenizer = tokenizer
        self._lark = lark
        self._renewing = threading.Lock()
        began_s = time.thread_time()
        self._first = self._made()
        made_s = time.thread_time()
        self.has_texts = not self._first.is_error() and (
            any(self._first.compute_bitmask()) or self._first.is_accepting()
        )
        self.error = self._first.get_error()
        self.ends = tuple(tokenizer.eos_tokens)
        self.is_slow = made_s - began_s > SLOW_COMPILATION_S or time.thread_time() - made_s > SLOW_MASK_S

    def _made(self) -> LLMatcher:
        from llguidance import LLMatcher

        return LLMatcher(self.tokenizer, LLMatcher.grammar_from_lark(self._lark), log_level=0, limits=limits())

    def matcher(self) -> tuple[LLMatcher, LLMatcher]:
        """Returns the matcher before the first token, and a copy of it, which the caller may use."""
        return self._first, self._first.deep_copy()

    def renew(self, first: LLMatcher) -> None:
        """The matchers of `first` are of no more use: compiles the grammar again, unless it was already."""
        with self._renewing:
            if self._first is first:
                self._first = self._made()


class Compiler:
    """The grammars of one process. `tokenizer`: tells the file of the target's tokenizer, once it is needed."""

    def __init__(self, tokenizer: Callable[[], Path]) -> None:
        self._path = tokenizer
        self._tokenizer: LLTokenizer | None = None
        self._loading = threading.Lock()
        self._kept: OrderedDict[bytes, Future[Compiled]] = OrderedDict()
        self._bytes: dict[bytes, int] = {}  # of the texts of those kept
        self._changing = threading.Lock()  # of what is kept and counted
        self._waiting_counts = {True: 0, False: 0}  # by whether the text is short
        self._threads: dict[bool, ThreadPoolExecutor] = {}

    def compile(self, grammar: Grammar, end_token_ids: Sequence[int]) -> Future[Compiled]:
        """Returns the compiled grammar, once it is: the same to all who ask for it. `end_token_ids`: of the model. Its
        error is InvalidRequest, naming field, value and limit. Raises CacheExhausted while too many wait."""
        key = hashlib.sha256(repr(grammar).encode("utf-8", "surrogatepass")).digest()
        with self._changing:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
            is_short = grammar.size < SHORT_BYTES_MAX
            if self._waiting_counts[is_short] >= WAITING_COUNT_MAX:
                raise CacheExhausted(f"{WAITING_COUNT_MAX} grammars wait to be compiled")
            self._waiting_counts[is_short] += 1
            if is_short not in self._threads:
                self._threads[is_short] = ThreadPoolExecutor(1, "grammar", initializer=give_way)
            made = self._threads[is_short].submit(self._compile, grammar, tuple(end_token_ids))
            self._kept[key], self._bytes[key] = made, grammar.size
        made.add_done_callback(lambda _: self._compiled(is_short))
        return made

    def _compiled(self, is_short: bool) -> None:
        """One has been compiled: forgets the oldest ones beyond what is kept; those that are awaited hold text only."""
        with self._changing:
            self._waiting_counts[is_short] -= 1
            for key in [key for key, one in self._kept.items() if one.done()]:
                if len(self._kept) <= KEPT_COUNT_MAX and sum(self._bytes.values()) <= KEPT_BYTES_MAX:
                    break
                del self._kept[key], self._bytes[key]

    def _compile(self, grammar: Grammar, end_token_ids: tuple[int, ...]) -> Compiled:
        found = self._found(grammar, end_token_ids)
        if isinstance(found, Compiled):
            return found
        try:
            raise found.with_traceback(None)  # with it each one kept would hold what it refused, compiled
        finally:
            del found

    def _found(self, grammar: Grammar, end_token_ids: tuple[int, ...]) -> Compiled | SpecdecError:
        """Returns the compiled grammar, or the error of its text."""
        field, kind = f"grammar.{grammar.kind}", grammar.kind
        text = grammar.json_schema or grammar.regex or grammar.lark or ", ".join(grammar.choice) or "any JSON object"
        try:
            lark = lark_text(grammar)
            compiled = Compiled(self._loaded(end_token_ids), lark)
        except SpecdecError as error:
            return error
        except BaseException as error:  # a panic of the library is no Exception
            return InvalidRequest(field, text, f"a grammar that can be followed: {one_line(error)}")
        if compiled.error:
            return InvalidRequest(field, text, f"a grammar that can be followed: {said(compiled.error, kind)}")
        if not compiled.has_texts:
            return InvalidRequest(field, text, "a grammar of at least one text, in the model's tokens")
        return compiled

    def _loaded(self, end_token_ids: tuple[int, ...]) -> LLTokenizer:
        """The tokenizer, read once. Raises InvalidRequest for one that the library does not read."""
        with self._loading:
            if self._tokenizer is None:
                from llguidance import LLTokenizer

                try:
                    self._tokenizer = LLTokenizer(str(self._path()), eos_token=list(end_token_ids))
                except BaseException as error:  # a panic of the library is no Exception
                    cause = f"absent: the library cannot read this model's tokenizer: {one_line(error)}"
                    raise InvalidRequest("grammar", "set", cause) from None
            return self._tokenizer


def give_way() -> None:
    """Lets the other threads of this machine go before the calling one, where the system has priorities of threads:
    a compilation may take a second, which steps and events must not wait for."""
    if sys.platform == "linux":
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + NICE)


def limits() -> LLParserLimits:
    """Returns the library's limits of one compilation or mask: fuel is 20 ns or 70 ns a unit, an item 50 ns. A state is
    up to 2 kB; usual schemas make less than 1,000."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_items_in_row=2_000,
        max_lexer_states=10_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )


def said(message: str, kind: str) -> str:
    """Returns what the library says of a grammar, in one line; of the text that it was made of only Lark is the
    client's own."""
    message = message.replace("<non-verbose/>", "")
    if kind != "lark":
        message = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", message)
        message = message.rpartition("error: ")[2]
        message = re.split(r"\n +\d+ \| ", message)[0]
    return one_line(SpecdecError(message))
