"""The text of an output, token by token, by tokenizers with every kind of decoder.

The reference is the library's decoding of prompt and output together, less that of the prompt. Every prompt is cut at
every token, inside characters too; tokens begin and end at random places.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import tokenizers

from specdec.coordinator.output import OutputProcessor
from specdec.coordinator.tokenizer import CONTEXT_TOKENS_MAX, Tokenizer
from specdec.folders import EMBEDDED_MODELS
from tests.support.tokenizer_kinds import (
    KINDS,
    TEXTS,
    byte_tokens,
    common_length,
    letters_of,
    write_tokenizer,
)

NO_TOKEN = 1_000_000  # output layers are wider than tokenizers
STEPS = 24  # after each cut; more than any context
REPLACEMENT = "\ufffd"


class Case:
    """Texts cut into the tokens of one kind of tokenizer, and that tokenizer: the coordinator's and the library's."""

    def __init__(self, folder: Path, kind: str) -> None:
        rng = random.Random(kind)
        cut = KINDS[kind].cut
        texts = [cut(text, rng) for text in TEXTS for _ in range(2)]
        self.library = write_tokenizer(folder, KINDS[kind], texts)
        self.ours = Tokenizer(str(folder))
        found = [[self.library.token_to_id(piece) for piece in text] for text in texts]
        self.texts = [self.with_invisible(token_ids, rng) for token_ids in found]
        self.certain = [self.lengths(token_ids) for token_ids in self.texts]

    @staticmethod
    def with_invisible(token_ids: list[int], rng: random.Random) -> list[int]:
        """Adds special tokens and ids without a token: three rows of them, two longer than any context."""
        for count in (1, *[2 * CONTEXT_TOKENS_MAX] * 2):
            place = rng.randint(0, len(token_ids))
            token_ids[place:place] = rng.choices([0, 1, NO_TOKEN], k=count)
        return token_ids

    def decode(self, token_ids: list[int]) -> str:
        """The library's text of some tokens. It cannot strip the end of a text without tokens."""
        return self.library.decode(token_ids) if set(token_ids) - {0, 1, NO_TOKEN} else ""

    def lengths(self, token_ids: list[int]) -> list[int]:
        """By the number of tokens: the length of the text that is certain with them, of the whole text."""
        whole = self.decode(token_ids)
        assert REPLACEMENT not in whole
        found = [0]
        for end in range(1, len(token_ids) + 1):
            found.append(max(found[-1], common_length(whole, self.decode(token_ids[:end]))))
        return found


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("kind"), request.param)


def test_the_text_of_an_output_is_that_of_both_less_the_prompts(case: Case):
    """Claim: with every kind of decoder, wherever a prompt ends, inside a character, after special tokens, before the
    first word, each token makes final exactly the text that is certain with it, and none of the prompt's.

    Conclusive: by the library's decoding of everything at once, at every cut of every text and after every token.
    """
    for token_ids, certain in zip(case.texts, case.certain):
        whole = case.decode(token_ids)
        for cut in range(len(token_ids) + 1):
            stream, sent = case.ours.stream(tuple(token_ids[:cut])), ""
            for count, token_id in enumerate(token_ids[cut : cut + STEPS], cut + 1):
                sent += stream.step(token_id)
                assert sent == whole[certain[cut] : certain[count]], (token_ids, cut, count)
            if cut + STEPS >= len(token_ids):
                assert sent + stream.rest() == whole[certain[cut] :], (token_ids, cut)


def test_a_stop_string_matches_in_the_output_alone(case: Case):
    """Claim: stop strings of the prompt, and those that begin in it and end in the output, do not match; those of the
    output do, at their last token. A resumed text goes on as the undisturbed one, token by token.

    Conclusive: stop strings from around the end of the prompt, at every fourth cut, with `min_tokens` and without,
    against a search in the reference's text; both outcomes are counted.
    """
    rng, matched, tempted = random.Random(1), 0, 0
    for token_ids, certain in zip(case.texts, case.certain):
        whole = case.decode(token_ids)
        for cut in range(rng.randint(1, 4), len(token_ids), 4):
            start = rng.randint(max(0, certain[cut] - 6), certain[cut] + 3)
            stop, min_tokens = whole[start : start + rng.randint(1, 7)] or "\n", rng.choice((0, 0, 4))
            prompt, output = tuple(token_ids[:cut]), token_ids[cut : cut + STEPS]
            ends = [certain[cut + count] - certain[cut] for count in range(len(output) + 1)]
            expected, text = stopped(whole[certain[cut] :], ends, stop, min_tokens)
            tempted += expected is None and stop in whole[: certain[cut + len(output)]]
            matched += expected is not None

            def processor(
                prompt: tuple[int, ...] = prompt, stop: str = stop, least: int = min_tokens
            ) -> OutputProcessor:
                return OutputProcessor(case.ours.stream(prompt), (stop,), (), least, 1000)

            appended = processor().append(output)
            assert (appended.kept_count if appended.ending else None) == expected, (token_ids, cut, stop)
            assert expected is None or "".join(appended.texts) == text, (token_ids, cut, stop)
            resumed, place = processor(), rng.randrange(appended.kept_count)
            resumed.append(output[:place])
            assert resumed.append(output[place:]).texts == appended.texts[place:]
    assert matched > 20 and tempted > 20


def stopped(text: str, ends: list[int], stop: str, min_tokens: int) -> tuple[int | None, str]:
    """By definition: the number of tokens up to the first one after `min_tokens` that completes a stop string, None
    without one, and the text before that. `ends`: the length of the text by the number of tokens."""
    for count in range(min_tokens + 1, len(ends)):
        start = text.find(stop, max(0, ends[count - 1] - len(stop) + 1), ends[count])
        if start >= 0:
            return count, text[:start]
    return None, text


@pytest.mark.parametrize("name", ["target", "smollm2-draft"])
def test_a_prompt_may_end_inside_a_character(name: str):
    """Claim: with the embedded tokenizers a prompt that ends inside a character gives its output no text: where the
    output completes the character, the output has it whole, otherwise the prompt's U+FFFD is the prompt's alone. The
    same for a prompt that ends with the character U+FFFD itself.

    Conclusive: the ids of an emoji without the last, and of others without the last one, two or three.
    """
    ours, library = Tokenizer(str(EMBEDDED_MODELS / name)), reference(name)
    after = library.encode("-x robot", add_special_tokens=False).ids
    incomplete = 0
    for text in ("PROMPT ONLY: robot 🤖", "日本語", "robot é", "robot \ufffd", "👩‍👩‍👧", "x\ufffd\ufffd"):
        token_ids = library.encode(text).ids
        for cut in range(max(1, len(token_ids) - 3), len(token_ids) + 1):
            prompt, rest = token_ids[:cut], token_ids[cut:]
            begun = library.decode(prompt)
            for output in (after, rest + after):
                whole = library.decode(prompt + output)
                stream = ours.stream(tuple(prompt))
                sent = "".join(map(stream.step, output)) + stream.rest()
                assert sent == whole[common_length(begun, whole) :], (text, cut, output)
                appended = OutputProcessor(ours.stream(tuple(prompt)), ("y", "robot"), (), 0, 100).append(output)
                assert "".join(appended.texts) == sent[: sent.rindex("robot")] and appended.kept_count == len(output)
            incomplete += text[: len(begun)] != begun
    assert incomplete >= 6


@pytest.mark.parametrize("case", ["llama", "gemma", "unigram with bytes"], indirect=True)
def test_characters_of_byte_tokens_are_sent_when_they_are_whole(case: Case):
    """Claim: after a prompt wholly of byte tokens, however many, each character that byte tokens form is sent with its
    last one, and a stop string ends the text there.

    Conclusive: the small prompt for which only U+FFFD came, and prompts of 1 to 20 characters of 2, 3 and 4 bytes.
    """
    output = [case.library.token_to_id(piece) for piece in byte_tokens("日本語".encode())]
    for letter, count in itertools.product("日é🤖", range(1, 21)):
        pieces = byte_tokens(letter.encode() * count)
        prompt = tuple(case.library.token_to_id(piece) for piece in pieces)
        assert list(map(case.ours.stream(prompt).step, output)) == ["", "", "日", "", "", "本", "", "", "語"]
        appended = OutputProcessor(case.ours.stream(prompt), ("本",), (), 0, 100).append(output)
        assert appended.ending is not None and "".join(appended.texts) == "日" and appended.kept_count == 6


@pytest.mark.parametrize("case", ["llama", "gemma", "unigram with bytes"], indirect=True)
def test_bytes_that_form_no_character(case: Case):
    """Claim: with tokens of one byte each, whatever they are, prompt and output together give the text of their bytes,
    with one U+FFFD for each byte that is part of no character; a whole character stays one whatever surrounds it. The
    library's decoding says so too where it does not make all bytes of a row U+FFFD.

    Conclusive: random rows of bytes, continuation bytes alone among them, between words, cut at every place, against
    Python's own UTF-8.
    """
    rng, equal = random.Random(2), 0
    words = [piece for piece in case.library.get_vocab() if piece.isascii() and piece.isalpha()][:4]
    pool = [0x61, 0x20, 0x97, 0xA5, 0xFF, 0xC3, 0xF0, 0xE6, *"é日🤖".encode()]
    whole_ones = [byte_tokens(letter.encode()) for letter in "é日🤖a"]
    for _ in range(60):
        singles = [byte_tokens([rng.choice(pool)]) for _ in whole_ones]
        parts = [rng.choice(([rng.choice(words)], *singles, *whole_ones)) for _ in range(rng.randint(1, 16))]
        pieces = [rng.choice(words), *(piece for part in parts for piece in part)]
        pieces = [piece for piece in pieces if case.library.token_to_id(piece) is not None]
        token_ids = [case.library.token_to_id(piece) for piece in pieces]
        text = text_of(pieces)
        equal += text == case.decode(token_ids)
        for cut in range(len(pieces) + 1):
            stream = case.ours.stream(tuple(token_ids[:cut]))
            sent = "".join(map(stream.step, token_ids[cut:])) + stream.rest()
            assert sent == text[common_length(text_of(pieces[:cut]), text) :], (pieces, cut)
    assert equal >= 5


def test_parts_of_characters_in_any_order():
    """Claim: with tokens of several bytes each the text is that of one decoding of all tokens less the prompt's, and no
    more than the last U+FFFD is held back, however long no character forms.

    Conclusive: random parts of characters, whole ones, and tokens that end one character and begin the next, each cut
    into prompt and output at a random place, against the library's own decoding.
    """
    for name in ("target", "smollm2-draft"):
        ours, library = Tokenizer(str(EMBEDDED_MODELS / name)), reference(name)
        size = library.get_vocab_size()
        parts = [token for token in range(size) if REPLACEMENT in library.decode([token])]
        words = library.encode("def 日本語 é 🙂 x").ids
        for seed, pool in enumerate((parts, parts[:1], [0], parts + [0], 3 * parts + words)):
            rng = random.Random(seed)
            for length in (5, *[40] * 60, 2000):
                token_ids = rng.choices(pool, k=length)
                cut = rng.randint(0, length)
                begun, whole = library.decode(token_ids[:cut]), library.decode(token_ids)
                stream, sent = ours.stream(tuple(token_ids[:cut])), ""
                for token_id in token_ids[cut:]:
                    sent += stream.step(token_id)
                    assert stream.rest() in ("", REPLACEMENT)
                assert sent + stream.rest() == whole[common_length(begun, whole) :], (name, seed, token_ids, cut)


def test_characters_that_every_token_ends_and_begins(tmp_path: Path):
    """Claim: where no token ends with a whole character, each character is sent with the token that completes it."""
    kind, halves = KINDS["byte level"], "日".encode()
    letters = [letters_of(part) for part in (halves[:1], halves[1:] + halves[:1])]
    library = write_tokenizer(tmp_path, kind, [letters])
    first, next_one = map(library.token_to_id, letters)
    stream = Tokenizer(str(tmp_path)).stream((first,))
    assert [stream.step(next_one) for _ in range(100)] == ["日"] * 100


def test_a_token_costs_the_same_whatever_comes_before_it(case: Case, monkeypatch: pytest.MonkeyPatch):
    """Claim: a stream decodes few tokens at a time, in a prompt of 20,000 tokens and after it, of whatever tokens (a
    finding by attack: 16,000 tokens that formed no character took 11 s on the event loop).

    Conclusive: counted at each decoding, over tokens of text, incomplete characters and special tokens.
    """
    counts: list[int] = []
    text = case.ours.text
    monkeypatch.setattr(case.ours, "text", lambda pieces: [counts.append(len(pieces)), text(pieces)][1])
    tokens = [token_ids[:1] * 200 for token_ids in case.texts] + [[0] * 200, case.texts[0]]
    for output in tokens:
        counts.clear()
        stream = case.ours.stream(tuple(case.texts[0] * 500))
        for token_id in output:
            stream.step(token_id)
        assert len(counts) <= 2 * (len(output) + CONTEXT_TOKENS_MAX)
        assert max(counts) <= CONTEXT_TOKENS_MAX + 4


def text_of(pieces: list[str]) -> str:
    """The text of byte tokens and words by definition."""
    found, data = "", b""
    for piece in [*pieces, ""]:
        if piece.startswith("<0x"):
            data += bytes([int(piece[3:5], 16)])
        else:
            found, data = found + bytes_text(data) + piece, b""
    return found


def bytes_text(data: bytes) -> str:
    """Bytes as UTF-8, each that is part of no character a U+FFFD."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        bad = REPLACEMENT * (error.end - error.start)
        return data[: error.start].decode() + bad + bytes_text(data[error.end :])


def reference(name: str) -> tokenizers.Tokenizer:
    """The library's tokenizer of an embedded model."""
    return tokenizers.Tokenizer.from_file(str(EMBEDDED_MODELS / name / "tokenizer.json"))
