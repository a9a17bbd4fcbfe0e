"""Text between two tokenizers: byte-level, by pieces with spaces inside, and by words, in both directions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from specdec.engine.retokenizer import Reading, Retokenizer, token_bytes
from specdec.folders import CHAT_DRAFT, EMBEDDED_MODELS

CORPUS = ["def total(values):\n    return sum(values)\n", "the naïve café, 12345 times: 日本 and 🎉\n"] * 20
TEXTS = st.text(st.sampled_from("abdefz 019\n\t_(é本日🎉\u0301\u200d"), min_size=1, max_size=24)
STEPS = st.lists(st.integers(1, 3), min_size=1, max_size=30)  # committed tokens at once


def trained(kind: str) -> Tokenizer:
    """A small tokenizer of each kind. Those by words write text in small letters and lose line ends and U+FFFD."""
    if kind == "words":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(handle_chinese_chars=False, strip_accents=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[PAD]", "[SEP]", "[UNK]"])
    else:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<s>", "</s>", *bytes_], limit_alphabet=20)
    tokenizer.train_from_iterator(CORPUS, trainer)
    if kind == "pieces":
        content = json.loads(tokenizer.to_str())  # bytes are ordinary tokens, as in tokenizers of this kind
        content["added_tokens"] = content["added_tokens"][:2]
        tokenizer = Tokenizer.from_str(json.dumps(content))
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tokenizers")
    for kind in ("pieces", "words"):
        trained(kind).save(str(folder / f"{kind}.json"))
    return {
        "bytes": EMBEDDED_MODELS / "target" / "tokenizer.json",
        "other bytes": CHAT_DRAFT / "tokenizer.json",
        **{kind: folder / f"{kind}.json" for kind in ("pieces", "words")},
    }


@pytest.fixture(scope="module")
def pair(files: dict[str, Path]) -> Callable[[str, str], Retokenizer]:
    made: dict[tuple[str, str], Retokenizer] = {}

    def of(target: str, draft: str) -> Retokenizer:
        if (target, draft) not in made:
            made[target, draft] = Retokenizer(files[target], files[draft], (0,), (1,))
        return made[target, draft]

    return of


@cache
def texts_of(file: Path) -> list[bytes | None]:
    return token_bytes(json.loads(file.read_text(encoding="utf-8")))


def bytes_read(reading: Reading, retokenizer: Retokenizer, file: Path) -> bytes:
    """The bytes of all that was read, by the draft's own tokens."""
    texts = texts_of(file)
    own = [retokenizer.own_of[one] if one < retokenizer.size else one - retokenizer.size for one in reading.tokens]
    return b"".join(texts[one] or b"" for one in own)


LOSSLESS = ["bytes", "other bytes", "pieces"]


@pytest.mark.parametrize("draft", LOSSLESS)
@pytest.mark.parametrize("target", LOSSLESS)
def test_the_draft_reads_the_text(target: str, draft: str, files: dict[str, Path], pair: Any) -> None:
    """Claim: however a text is committed, as a prompt and then token by token or several at once, and cut and committed
    again, the draft's tokens stand for the bytes of all its whole characters, at every moment. Conclusive: each token's
    bytes, compared for texts with characters of one to four bytes, cut by tokens, joiners, marks and spaces."""
    if target == draft:
        return
    retokenizer, tokenizer = pair(target, draft), Tokenizer.from_file(str(files[target]))
    texts = texts_of(files[target])

    @settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.generate])
    @given(TEXTS, STEPS, st.integers(0, 20))
    def check(text: str, steps: list[int], cut: int) -> None:
        ids, reading, done = tokenizer.encode(text, add_special_tokens=False).ids, Reading(retokenizer), 0
        for index, step in enumerate([*steps, *[1] * len(ids)]):
            done = min(len(ids), done + step)
            reading.read(ids[:done])
            whole = b"".join(texts[one] or b"" for one in ids[:done])
            found = bytes_read(reading, retokenizer, files[draft])
            assert whole.startswith(found) or not whole.decode("utf-8", "ignore"), (whole, found)
            rest = whole[len(found) :]
            assert not rest or rest.decode("utf-8", "ignore").encode() != rest, (whole, found)  # inside a character
            if index == len(steps) // 2:
                done = min(cut, done)
                assert reading.cut(done) == len(reading.tokens)
        assert done == len(ids) and bytes_read(reading, retokenizer, files[draft]) == whole

    check()


@pytest.mark.parametrize(("target", "draft"), [(a, b) for a in [*LOSSLESS, "words"] for b in LOSSLESS if a != b])
def test_common_tokens_are_the_same_text(target: str, draft: str, files: dict[str, Path], pair: Any) -> None:
    """Claim: each common token stands for one text in both, by both libraries' own decoding after a word; special
    tokens are common by their names, the ends by their meaning."""
    retokenizer = pair(target, draft)
    one, other = (Tokenizer.from_file(str(files[name])) for name in (target, draft))
    assert retokenizer.own_of[0] == 1 and len(retokenizer.own_of) > 20

    def text(tokenizer: Tokenizer, token_id: int) -> str:
        before = tokenizer.encode("def", add_special_tokens=False).ids
        decoded = [tokenizer.decode([*before, *more], skip_special_tokens=False) for more in ((), (token_id,))]
        return decoded[1][len(decoded[0]) :]

    ordinary = [(a, b) for a, b in retokenizer.own_of.items() if a]
    for target_id, own in ordinary[:: max(1, len(ordinary) // 300)]:
        texts = text(one, target_id), text(other, own)
        assert texts[0] == texts[1] or "\ufffd" in "".join(texts), (target_id, own, texts)


def test_a_character_waits_for_its_last_byte(files: dict[str, Path], pair: Any) -> None:
    """Claim: of a character that begins with a token the draft lacks nothing is read before its end, then all of it;
    and a text that never becomes whole characters does not wait for ever."""
    tokenizer, retokenizer = Tokenizer.from_file(str(files["other bytes"])), pair("other bytes", "bytes")
    prompt = tokenizer.encode("x = ").ids
    pieces = {one: tokenizer.encode(one).ids for one in map(chr, range(0x4E00, 0x4F00))}
    character = next(one for one, ids in pieces.items() if len(ids) > 1 and ids[0] not in retokenizer.own_of)
    ids, reading = pieces[character], Reading(retokenizer)
    reading.read(prompt)
    before = len(reading.tokens)
    for count in range(1, len(ids)):
        reading.read([*prompt, *ids[:count]])
        assert len(reading.tokens) == before
    reading.read([*prompt, *ids])
    assert bytes_read(reading, retokenizer, files["bytes"]).endswith(character.encode())
    broken = [*prompt, *[ids[0]] * 20]
    endless = Reading(retokenizer)
    for count in range(len(prompt), len(broken) + 1):
        endless.read(broken[:count])
    assert len(endless.tokens) > before


def test_special_tokens(files: dict[str, Path], tmp_path: Path, pair: Any) -> None:
    """Claim: a special token that both have is itself; one of the target alone is read as its text; the first tokens of
    the target's texts are not read, those of the draft's are put there."""
    tokenizer = Tokenizer.from_file(str(files["other bytes"]))
    tokenizer.add_special_tokens([AddedToken("</s>", special=True), AddedToken("<|tool|>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|tool|> $A", special_tokens=[("<|tool|>", tokenizer.token_to_id("<|tool|>"))]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    retokenizer = Retokenizer(tmp_path / "tokenizer.json", files["pieces"], (), ())
    assert retokenizer.own_of[tokenizer.token_to_id("</s>")] == 1
    alone = tokenizer.token_to_id("<|im_start|>")
    found, count = retokenizer.read([tokenizer.token_to_id("<|tool|>"), alone], is_start=True)
    own = Tokenizer.from_file(str(files["pieces"]))
    assert count == 2 and found[0] == 0 and own.decode(found) == "<|im_start|>"


def test_a_draft_by_words_reads_what_it_can(files: dict[str, Path], pair: Any) -> None:
    """Claim: a draft whose tokenizer loses letters and line ends reads every text all the same, with unknown words."""
    tokenizer, retokenizer = Tokenizer.from_file(str(files["bytes"])), pair("bytes", "words")
    ids = tokenizer.encode("def Total(values):\n\treturn 日本").ids
    found, count = retokenizer.read(ids, is_start=True)
    assert count == len(ids) and "total" in Tokenizer.from_file(str(files["words"])).decode(found)
    assert retokenizer.own_of, "and it shares tokens with the target"


def test_words_and_pieces_of_words(files: dict[str, Path], pair: Any) -> None:
    """Claim: a draft by words reads text that follows other text as a piece of its word, after a line end as a word,
    and, where it has no piece for it, as a word too, instead of losing it."""
    target, words = (Tokenizer.from_file(str(files[name])) for name in ("bytes", "words"))

    def read(text: str) -> list[str]:
        found, _ = pair("bytes", "words").read(target.encode(text).ids, is_start=False)
        return [words.id_to_token(one) for one in found]

    assert read("def") == ["##d", "##e", "##f"] and read(" def") == read("\ndef") == ["def"]
    assert words.token_to_id("##日") is None and read("日") == ["日"]


@pytest.mark.parametrize("draft", LOSSLESS)
def test_word_pieces_are_read_as_their_text(draft: str, files: dict[str, Path]) -> None:
    """Claim: whatever word pieces a target by words commits, one or several at once, cut and committed again, the
    draft's tokens stand for their text, special tokens by name, an end by the draft's own. Conclusive: at every moment
    the bytes are those of the library's own decoding, the space that begins a text of words put before."""
    retokenizer = Retokenizer(files["words"], files[draft], (0,), (0,))
    tokenizer = Tokenizer.from_file(str(files["words"]))
    end, size = 0, tokenizer.get_vocab_size()

    def text_of(ids: list[int]) -> bytes:
        kept = [one for one in ids if one != end]
        text = " " + tokenizer.decode(kept, skip_special_tokens=False)
        return text.replace(" [SEP]", "[SEP]").replace(" [UNK]", "[UNK]").encode()

    @settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.generate])
    @given(st.lists(st.integers(0, size - 1), max_size=16), STEPS, st.integers(1, 20))
    def check(pieces: list[int], steps: list[int], cut: int) -> None:
        ids, reading = [tokenizer.token_to_id("def"), *pieces], Reading(retokenizer)
        for done in moments(len(ids), steps, cut, reading):
            reading.read(ids[:done])
            assert bytes_read(reading, retokenizer, files[draft]) == text_of(ids[:done])

    check()


@pytest.mark.parametrize("target", ["bytes", "other bytes"])
def test_word_pieces_stand_for_all_whole_characters(target: str, files: dict[str, Path], pair: Any) -> None:
    """Claim: a draft by words reads a byte-level target's text, however it is committed, with each character once it is
    whole: of text whose characters it all has as pieces nothing is lost but case and spaces, at any moment; of other
    text it reads a part, in order. A special token that it lacks is read as unknown words, the end as its own end, and
    a text of which it can read nothing as one unknown word."""
    retokenizer, tokenizer = pair(target, "words"), Tokenizer.from_file(str(files[target]))
    own_tokenizer = Tokenizer.from_file(str(files["words"]))
    unknown, own_end, end, special = 2, 1, 0, tokenizer.token_to_id("<|im_start|>")
    texts = texts_of(files[target])
    known = st.text(st.sampled_from("adefé本DF \n\t"), max_size=12)
    special_words = own_tokenizer.encode("<|im_start|>").ids
    assert set(special_words) == {unknown} and special not in retokenizer.own_of and retokenizer.own_of[end] == own_end

    @settings(max_examples=120, deadline=None, phases=[Phase.explicit, Phase.generate])
    @given(st.sampled_from("d\n"), st.one_of(known, TEXTS), known, st.booleans(), STEPS, st.integers(1, 20))
    def check(prompt: str, text: str, more: str, is_special: bool, steps: list[int], cut: int) -> None:
        first, second = (tokenizer.encode(own, add_special_tokens=False).ids for own in (text, more))
        between = [special] if is_special and special is not None else [end]
        ids = [*tokenizer.encode(prompt).ids, *first, *between, *second]
        reading, is_known = Reading(retokenizer), set(text) <= set("adefé本DF \n\t")
        reading.read(ids[:1])
        for done in moments(len(ids), steps, cut, reading):
            reading.read(ids[:done])
            text_bytes = b"".join(texts[one] or b"" for one in ids[:done] if one not in between)
            whole = "".join(text_bytes.decode("utf-8", "ignore").lower().split())
            found = "".join(bytes_read(reading, retokenizer, files["words"]).decode().split())
            rest = iter(whole)
            assert found == whole if is_known else all(letter in rest for letter in found), (found, whole)
        own = [retokenizer.own_of[one] if one < retokenizer.size else one - retokenizer.size for one in reading.tokens]
        assert own.count(own_end) == between.count(end)
        if is_known:
            assert own.count(unknown) == len(special_words) * (end not in between) + (prompt == "\n")

    check()


def moments(length: int, steps: list[int], cut: int, reading: Reading) -> Iterator[int]:
    """Yields numbers of committed tokens, 1 first and `length` last, and once cuts what was read."""
    done = 1
    yield done
    for index, step in enumerate([*steps, *[1] * length]):
        done = min(length, done + step)
        yield done
        if index == len(steps) // 2:
            done = min(cut, done)
            assert reading.cut(done) == len(reading.tokens)
