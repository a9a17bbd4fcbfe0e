"""Which texts the target writes: answers to given prompts, to questions of its own, and, in turn with them, windows of
given files, as they are and continued, and recorded texts."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from functools import cached_property
from pathlib import Path

from specdec.chat.template import ChatTemplate
from specdec.distill.writing import Passage, TextOrder
from specdec.engine.retokenizer import first_tokens
from specdec.errors import ConfigError
from specdec.protocol.fields import TEMPERATURE_MAX
from specdec.protocol.types import RECORD_SIGNS, TokenKind
from specdec.tokenizer_file import whole_tokenizer

MARK = "\u241e"  # stands for the user's words while a template is rendered
QUESTION_TOKENS_MAX = 64
TEXT_DATE = datetime(2025, 1, 1)  # that templates say in all texts: a run goes on as it began on any later day

CONTINUED_PART = 4  # a continued window begins with this part of its tokens as given
FILE_BYTES_MAX = 1 << 26
RECORDED_PROMPT_MAX = 512  # tokens before a recorded answer, the last ones
SIGNS = "".join(RECORD_SIGNS.values())


@dataclass(frozen=True, slots=True)
class Record:
    """A text of `specdec coordinator --record`. `accepted`: a sign for each output token; `encoder_length`: the first
    tokens of the prompt, which are an encoder's input; 0 of a decoder alone."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    accepted: str
    temperature: float
    encoder_length: int = 0


class Plans:
    """The plans of a model folder: `prompts`, if given, are asked in turn; else the target asks itself. In turn
    with these are windows of `files`, as they are, which the target only labels, and continued, and texts of `records`.

    Without a chat template a prompt is the text's beginning. Temperatures are taken in turn; `seed` decides all draws.
    `is_repeated`: a prompt is asked at every temperature before the next one; else at another one each time that all
    have been asked, so that few texts are of as many prompts as they can.
    `beginning`: tokens with which an output of an encoder-decoder target begins, after a prompt, which is its input;
    such a target neither asks itself nor continues files. Raises ConfigError for a template that is not valid, for one
    with no tokens around a question of the target's own, and without template, prompts and files. Making a plan raises
    it for a prompt or a file that has no tokens.
    """

    def __init__(
        self,
        folder: Path,
        temperatures: Sequence[float],
        answer_tokens_max: int,
        seed: str,
        prompts: Sequence[str] = (),
        files: Sequence[Path] = (),
        records: Sequence[Record] = (),
        beginning: tuple[int, ...] = (),
        is_repeated: bool = True,
    ) -> None:
        self._is_repeated = is_repeated or not prompts
        self._beginning = beginning
        if beginning and (files or not (prompts or records)):
            limit = "give --prompts, which are inputs, or --from-record"
            what = "--corpus has texts without inputs" if files else "it cannot ask itself"
            raise ConfigError(f"{folder} is an encoder-decoder model, and {what}: {limit}")
        self._words = whole_tokenizer(folder / "tokenizer.json")
        self._first = tuple(first_tokens(self._words))
        self._prompts = prompts
        self._temperatures = temperatures
        self._answer_tokens_max = answer_tokens_max
        self._seed = seed
        self._parts = turn_parts(folder)
        self._files = files
        self.records = records
        self._sources = [self._window] * bool(files) + [self._recorded] * bool(records)
        if prompts or (self._parts and not beginning):
            self._sources.insert(0, self._asked)
        self._read: dict[Path, tuple[int, ...]] = {}
        if self._parts and not (prompts or beginning) and not all(map(self._encode, self._parts)):
            lacking = "no tokens before the user's words or none after them"
            raise ConfigError(
                f"the chat template of {folder} has {lacking}: the target cannot ask itself: give --prompts"
            )
        if not self._sources:
            needed = "give --prompts, --corpus or --from-record"
            raise ConfigError(f"{folder} has no chat template, so the target cannot ask itself: {needed}")

    def digest(self, first: int, count: int, target: str) -> str:
        """Returns a digest of everything that decides the texts first to first + count of the target of that digest."""
        facts = [target, first, count, self._temperatures, self._answer_tokens_max, self._seed, self._parts]
        if self._first and (self._files or self._parts is None):
            facts.append(self._first)
        if self._beginning:
            facts.append([self._beginning, [own.encoder_length for own in self.records]])
        if not self._is_repeated:
            facts.append("each prompt once")
        records = [list(map(list, (own.prompt_ids, own.output_ids))) for own in self.records]
        return hashlib.sha256(
            json.dumps([*facts, list(self._prompts), *self._file_digests, records]).encode()
        ).hexdigest()

    @cached_property
    def _file_digests(self) -> list[str]:
        return [hashlib.sha256(file.read_bytes()).hexdigest() for file in self._files]

    def make(self, first: int, count: int) -> list[TextOrder]:
        """Returns plans first to first + count."""
        return [self._plan(index) for index in range(first, first + count)]

    def _plan(self, index: int) -> TextOrder:
        seed = random.Random(f"{self._seed}/{index}").getrandbits(64)
        index, source = divmod(index, len(self._sources))
        return self._sources[source](index, seed)

    def _asked(self, index: int, seed: int) -> TextOrder:
        """A given prompt, or a question of the target, with its answer."""
        asked, turn = divmod(index, len(self._temperatures))
        if not self._is_repeated:
            asked, turn = index, sum(divmod(index, len(self._prompts)))
        temperature = self._temperatures[turn % len(self._temperatures)]
        prompt = self._prompts[asked % len(self._prompts)] if self._prompts else None
        if self._parts is None:
            assert prompt is not None
            ids = tuple(self._words.encode(prompt).ids)  # with the tokens that the tokenizer adds, as when served
            return self._answered(prompt, ids, len(self._first), temperature, seed)
        before, after = self._parts
        begin = self._encode(before)
        if prompt is not None:
            ids = self._encode(before + prompt + after)
            return self._answered(prompt, ids, len(begin), temperature, seed)
        question = Passage(begin, QUESTION_TOKENS_MAX, 1.0)
        answer = Passage(self._encode(after), self._answer_tokens_max, temperature)
        return TextOrder((question, answer), len(begin), seed)

    def _answered(
        self, prompt: str, ids: tuple[int, ...], learned_from: int, temperature: float, seed: int
    ) -> TextOrder:
        """A given prompt, whose tokens these are, with its answer, which alone is learned after an encoder's input."""
        check_tokens(ids, f"--prompts: {prompt!r}")
        given, encoder_length = ids + self._beginning, len(ids) if self._beginning else 0
        passage = Passage(given, self._answer_tokens_max, temperature)
        learned_from = len(given) - 1 if self._beginning else learned_from
        return TextOrder((passage,), learned_from, seed, encoder_length=encoder_length)

    def _window(self, index: int, seed: int) -> TextOrder:
        """A window of a file that is drawn by the seed, after the tokens that every served text begins with: continued,
        or as it is and one token more."""
        draws = random.Random(seed)
        file = draws.choice(self._files)
        if file not in self._read:
            self._read[file] = self._encode(read_text(file))
            check_tokens(self._read[file], f"--corpus: {file}")
        ids, length = self._read[file], self._answer_tokens_max
        start = draws.randrange(max(1, len(ids) - length + 1))
        window = ids[start : start + length]
        temperature = self._temperatures[index // 2 % len(self._temperatures)]
        if index % 2 and len(window) > CONTINUED_PART:
            window = window[: len(window) // CONTINUED_PART]
            passage = Passage(self._first + window, length - len(window), temperature)
        else:
            passage = Passage(self._first + window, 1, temperature)
        return TextOrder((passage,), len(self._first), seed)

    def _recorded(self, index: int, seed: int) -> TextOrder:
        """A recorded answer, its beginning if it is longer than others, after the end of what came before: after all of
        it, if that is an encoder's input."""
        own = self.records[index % len(self.records)]
        before = own.prompt_ids if own.encoder_length else own.prompt_ids[-RECORDED_PROMPT_MAX:]
        answered_from = max(0, len(before) - 1)
        passage = Passage(before + own.output_ids[: self._answer_tokens_max], 1, own.temperature)
        return TextOrder((passage,), answered_from, seed, answered_from, own.encoder_length)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._words.encode(text, add_special_tokens=False).ids)


def check_tokens(ids: Sequence[int], name: str) -> None:
    """Raises ConfigError for a text without tokens: the target cannot continue it."""
    if not ids:
        raise ConfigError(f"{name} has 0 tokens in the target's tokenizer; it must have 1")


def text_files(folder: Path | None, told: Callable[[str], None] = lambda line: None) -> list[Path]:
    """Returns the text files below a folder, by name; none without one. `told` is given a line if others are skipped.
    Raises ConfigError for a folder with fewer than two, and for a file that cannot be read."""
    if folder is None:
        return []
    every = sorted(file for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else []
    files = [file for file in every if read_text(file)]
    skipped = f"{len(every) - len(files)} of {len(every)} files are no UTF-8 text of 1 to {FILE_BYTES_MAX} bytes"
    if len(files) < 2:
        why = f"; {skipped}" if every else ""
        raise ConfigError(f"--corpus {folder} has {len(files)} text files; it must have 2, one to test with{why}")
    if len(files) < len(every):
        told(f"--corpus {folder}: {skipped} and are skipped")
    return files


def records_of(
    file: Path | None,
    vocabulary_size: int,
    told: Callable[[str], None] = lambda line: None,
    has_encoder: bool = False,
) -> list[Record]:
    """Returns the texts of a file of `specdec coordinator --record`; none without one. A line that is no record, such
    as one that was cut, is skipped; `told` is given a line if there are such. Raises ConfigError for a file that cannot
    be read or has fewer than two texts, and for token ids that the target does not have. `has_encoder`: of the target;
    texts of the other kind are refused too."""
    if file is None:
        return []
    try:
        lines = [line for line in file.read_bytes().split(b"\n") if line.strip()]
    except OSError as error:
        raise ConfigError(f"--from-record {file} cannot be read: {error.strerror}") from None
    found = [record for record in map(record_of, lines) if record is not None]
    skipped = f"{len(lines) - len(found)} of {len(lines)} lines are no record"
    if any(max(own.prompt_ids + own.output_ids) >= vocabulary_size for own in found):
        raise ConfigError(f"--from-record {file} has token ids outside 0 to {vocabulary_size - 1}: of another target")
    if any((own.encoder_length > 0) is not has_encoder for own in found):
        lacking = "without" if has_encoder else "with"
        raise ConfigError(f"--from-record {file} has texts {lacking} an encoder's input: of another target")
    if len(found) < 2:
        why = f"; {skipped}" if lines else ""
        raise ConfigError(f"--from-record {file} has {len(found)} texts; it must have 2, one to test with{why}")
    if len(found) < len(lines):
        told(f"--from-record {file}: {skipped} and are skipped")
    return found


def record_of(line: bytes) -> Record | None:
    """Returns the record in a line; None unless it has token ids, one of SIGNS for each of the output, and a
    temperature, and a part of the prompt alone is an encoder's input."""
    try:
        own = json.loads(line)
        prompt_ids, output_ids, accepted, temperature = (own[field.name] for field in fields(Record)[:-1])
        encoder_length = own.get("encoder_length", 0)
    except (ValueError, KeyError, TypeError, RecursionError):  # JSON of depth, or of a digit string without end
        return None
    lists = isinstance(prompt_ids, list) and isinstance(output_ids, list) and isinstance(accepted, str)
    if not lists or not prompt_ids + output_ids or len(accepted) != len(output_ids) or set(accepted) - set(SIGNS):
        return None
    if not all(type(one) is int and one >= 0 for one in prompt_ids + output_ids):
        return None
    if type(temperature) not in (int, float) or not 0 <= temperature <= TEMPERATURE_MAX:
        return None
    if type(encoder_length) is not int or not 0 <= encoder_length < max(1, len(prompt_ids)):
        return None
    return Record(tuple(prompt_ids), tuple(output_ids), accepted, float(temperature), encoder_length)


def recorded_acceptance(records: Sequence[Record]) -> dict[float, tuple[int, int]]:
    """Returns how many draft tokens of records were accepted, and how many tested, by temperature, ascending."""
    found: dict[float, tuple[int, int]] = {}
    for own in sorted(records, key=lambda record: record.temperature):
        accepted, tested = found.get(own.temperature, (0, 0))
        more, rejected = (own.accepted.count(RECORD_SIGNS[kind]) for kind in (TokenKind.ACCEPTED, TokenKind.RECOVERED))
        found[own.temperature] = accepted + more, tested + more + rejected
    return found


def read_text(file: Path) -> str:
    """Returns the text of a file; empty if it is not UTF-8, has a zero byte, is blank or too large. Raises ConfigError
    for one that cannot be read."""
    try:
        text = file.read_text(encoding="utf-8") if file.stat().st_size <= FILE_BYTES_MAX else ""
    except UnicodeDecodeError:
        return ""
    except OSError as error:
        raise ConfigError(f"--corpus: {file} cannot be read: {error.strerror}") from None
    return text if text.strip() and "\0" not in text else ""


def turn_parts(folder: Path) -> tuple[str, str] | None:
    """Returns the text of a chat before the user's words and after them, up to the answer; None without a template.
    Raises ConfigError for a template that does not repeat the user's words once."""
    template = ChatTemplate.read(folder, TEXT_DATE)
    if template is None:
        return None
    parts = template.render([{"role": "user", "content": MARK}]).split(MARK)
    if len(parts) != 2:
        raise ConfigError(f"the chat template of {folder} does not repeat the user's words once")
    return parts[0], parts[1]
