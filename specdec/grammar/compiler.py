"""Compiles the grammars of a process, each text once, in threads beside everything else.

Two at a time: short texts have a thread of their own, so none waits behind a long one. The tokenizer is read with the
first grammar; a process that sees none has neither it nor the library. A constructor of the library never raises: it
makes a matcher in an error state.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.errors import CacheExhausted, InvalidRequest, SpecdecError, one_line
from specdec.grammar.texts import lark_text
from specdec.protocol.grammar import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

KEPT_COUNT_MAX = 64  # compiled grammars: the latest
WAITING_COUNT_MAX = 32  # of each thread; a further one is refused
SHORT_BYTES_MAX = 4 << 10
SLOW_S = 0.005  # a mask, of some 0.1 ms, that takes longer is not made beside a step
# The library's limits, of one compilation or mask: fuel is 20 ns or 70 ns a unit, a state up to 2 kB, an item 50 ns.
LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar compiled for a tokenizer. `first`: a matcher before the first token, which is only copied. `ends`: the
    tokens that the library takes for ends of a text. `is_slow`: its first mask took longer than SLOW_S."""

    first: LLMatcher
    tokenizer: LLTokenizer
    ends: tuple[int, ...]
    is_slow: bool


class Compiler:
    """The grammars of one process. `tokenizer`: tells the file of the target's tokenizer, once it is needed."""

    def __init__(self, tokenizer: Callable[[], Path]) -> None:
        self._path = tokenizer
        self._tokenizer: LLTokenizer | None = None
        self._loading = threading.Lock()
        self._kept: OrderedDict[bytes, Future[Compiled]] = OrderedDict()
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
                self._threads[is_short] = ThreadPoolExecutor(1, "grammar")
            made = self._threads[is_short].submit(self._compile, grammar, tuple(end_token_ids))
            self._kept[key] = made
            if len(self._kept) > KEPT_COUNT_MAX:
                self._kept.popitem(last=False)
        made.add_done_callback(lambda _: self._compiled(is_short))
        return made

    def _compiled(self, is_short: bool) -> None:
        with self._changing:
            self._waiting_counts[is_short] -= 1

    def _compile(self, grammar: Grammar, end_token_ids: tuple[int, ...]) -> Compiled:
        field, kind = f"grammar.{grammar.kind}", grammar.kind
        text = grammar.json_schema or grammar.regex or grammar.lark or ", ".join(grammar.choice) or "any JSON object"
        try:
            lark = lark_text(grammar)
            tokenizer = self._loaded(end_token_ids)
            from llguidance import LLMatcher

            first = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0, limits=limits())
            began_s = time.thread_time()
            mask = b"" if first.is_error() else first.compute_bitmask()
            mask_s = time.thread_time() - began_s
            if first.is_error():
                raise InvalidRequest(field, text, f"a grammar that can be followed: {said(first.get_error(), kind)}")
            if not any(mask) and not first.is_accepting():
                raise InvalidRequest(field, text, "a grammar of at least one text, in the model's tokens")
            return Compiled(first, tokenizer, tuple(tokenizer.eos_tokens), mask_s > SLOW_S)
        except SpecdecError:
            raise
        except BaseException as error:  # a panic of the library is no Exception
            raise InvalidRequest(field, text, f"a grammar that can be followed: {one_line(error)}") from None

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


def limits() -> LLParserLimits:
    """Returns LIMITS, of one compilation or mask."""
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False, **LIMITS)  # type: ignore[arg-type]


def said(message: str, kind: str) -> str:
    """Returns what the library says of a grammar, in one line; of the text that it was made of only Lark is the
    client's own."""
    message = message.replace("<non-verbose/>", "")
    if kind != "lark":
        message = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", message)
        message = message.rpartition("error: ")[2]
        message = re.split(r"\n +\d+ \| ", message)[0]
    return one_line(SpecdecError(message))
