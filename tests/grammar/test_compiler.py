"""What a process holds of the grammars that it compiles, and for how long."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import wait

import pytest

from specdec.errors import GrammarFailed, InvalidRequest
from specdec.folders import EMBEDDED_MODELS
from specdec.grammar.compiler import (
    KEPT_BYTES_MAX,
    KEPT_COUNT_MAX,
    NICE,
    WAITING_COUNT_MAX,
    Compiled,
    Compiler,
    give_way,
)
from specdec.grammar.jobs import MaskThreads, SessionGrammar
from specdec.grammar.matcher import PathMatcher
from specdec.protocol.grammar import Grammar
from specdec.protocol.types import ResolvedSamplingParams, Rule
from tests.support.waiting import until

FILE = EMBEDDED_MODELS / "target" / "tokenizer.json"
SIZE, END = 4096, 0
DEEP = Grammar(lark='start: "a" X\nX: /((.{1,100}){1,100}){1,100}/')
WIDE_ROW = Grammar(
    json_schema=json.dumps(
        {
            "type": "object",
            "properties": {f"k{index}": {"type": "string", "pattern": f"^[a-z]*x{index}$"} for index in range(700)},
            "additionalProperties": False,
        }
    )
)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Without the collector of garbage: what is left is held, or is a cycle."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def left(kind: type) -> int:
    return sum(isinstance(one, kind) for one in gc.get_objects())


def test_the_latest_grammars_are_kept_within_a_sum_of_bytes(uncollected: None) -> None:
    """Claim: of compiled grammars the latest are kept, at most so many and of so many bytes of text; what is beyond is
    freed at once. Conclusive: the objects of the process are counted, with no collection of garbage."""
    compiler = Compiler(lambda: FILE)
    before, long = left(Compiled), 40 << 10
    for index in range(2 * KEPT_BYTES_MAX // long):
        last = compiler.compile(Grammar(lark=f'start: "a{index}"\n// {"x" * long}'), (END,))
        last.result(60)
    until(lambda: left(Compiled) - before == KEPT_BYTES_MAX // long)
    assert compiler.compile(Grammar(lark=f'start: "a{index}"\n// {"x" * long}'), (END,)) is last
    del last
    for index in range(KEPT_COUNT_MAX + 20):
        compiler.compile(Grammar(regex=f"b{index}"), (END,)).result(60)
    until(lambda: left(Compiled) - before == KEPT_COUNT_MAX)


def test_those_that_wait_are_compiled_once_however_long(uncollected: None) -> None:
    """Claim: grammars that wait to be compiled are not forgotten by the bound of bytes: a text asked for twice is
    compiled once. Conclusive: many more bytes wait than are kept, and the second asking gets the first one's."""
    compiler = Compiler(lambda: FILE)
    texts = [Grammar(lark=f'start: "a{index}"\n// {"x" * (40 << 10)}') for index in range(WAITING_COUNT_MAX)]
    first = [compiler.compile(text, (END,)) for text in texts]
    waiting = [index for index, one in enumerate(first) if not one.done()]
    again = [compiler.compile(texts[index], (END,)) for index in waiting[KEPT_COUNT_MAX // 2 :]]
    assert again and all(one is first[index] for one, index in zip(again, waiting[KEPT_COUNT_MAX // 2 :]))
    wait(first)


def test_a_refused_grammar_is_kept_as_its_reason_alone(uncollected: None) -> None:
    """Claim: a refusal holds nothing compiled. Conclusive: the objects of the process are counted while the refusals
    are kept, with no collection of garbage."""
    compiler = Compiler(lambda: FILE)
    before = left(Compiled)
    found = [compiler.compile(Grammar(regex=f"((.{{1,100}}){{1,100}}){{1,100}}{index}"), (END,)) for index in range(4)]
    assert all(isinstance(one.exception(60), InvalidRequest) for one in found)
    until(lambda: left(Compiled) == before)


def test_what_no_other_text_caused_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: a limit that a text exceeds by its own items fails it at once; a limit of the lexer, which texts of a
    grammar share, has it compiled again. Conclusive: compilations are counted."""
    made: list[Compiled] = []
    make = Compiled._made
    monkeypatch.setattr(Compiled, "_made", lambda self: made.append(self) or make(self))
    for grammar, text, message, count in ((WIDE_ROW, '{"', "items", 1), (DEEP, "a", "too many expressions", 2)):
        made.clear()
        compiled = Compiler(lambda: FILE).compile(grammar, (END,)).result(60)
        tokens = [token_id for letter in text for token_id in compiled.tokenizer.tokenize_str(letter)]
        with pytest.raises(GrammarFailed, match=message):
            PathMatcher(compiled, (END,), SIZE).rows(tokens)
        assert len(made) == count


@pytest.mark.parametrize("grammar", [Grammar(regex="a[a-z]{40}"), DEEP], ids=["legal", "failing"])
def test_a_session_that_ends_holds_nothing_compiled(uncollected: None, grammar: Grammar) -> None:
    """Claim: what was compiled for a session is freed when it ends, whatever its masks came to, and though they, and
    their error, are still named. Conclusive: a weak reference dies with no collection of garbage."""
    threads = MaskThreads(lambda: FILE)
    params = ResolvedSamplingParams(Rule.GREEDY, 1, 1, temperature=0.0, grammar=grammar, end_token_ids=(END,))
    session = SessionGrammar(threads, params, SIZE)
    assert session.compiling is not None
    compiled = session.compiling.result(60)
    alive = weakref.ref(compiled)
    (letter,) = compiled.tokenizer.tokenize_str("a")
    del compiled
    masks, errors = session.verification([5, letter], (), ()), []
    assert masks.begin(lambda: None)
    try:
        masks.result()
    except GrammarFailed as error:
        errors.append(error)
    assert bool(errors) == (grammar is DEEP)
    threads.compiler._kept.clear()
    assert alive() is not None
    session.close()
    until(lambda: alive() is None)  # once its thread has let go of it
    assert masks is not None


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities of their own")
def test_a_thread_gives_way_from_where_it_stands() -> None:
    """Claim: a compiling thread's priority is lower than its process's, also where that has been lowered itself, which
    none but root may undo. Conclusive: asked of the system, for one thread lowered before."""
    found: list[int] = []

    def lower() -> None:
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, min(19, before + 5))
        give_way()
        found.append(os.getpriority(os.PRIO_PROCESS, own))

    before = os.getpriority(os.PRIO_PROCESS, 0)
    thread = threading.Thread(target=lower)
    thread.start()
    thread.join()
    assert found == [min(19, before + 5 + NICE)] and os.getpriority(os.PRIO_PROCESS, 0) == before
