"""Text between two tokenizers: byte-level, by pieces with spaces inside, and by words, in both directions."""

from __future__ import annotations

import json
from collections.abc import Callable
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


def trained(kind: str) -> Tokenizer:
    """A small tokenizer of each kind. Those by words write text in small letters and lose line ends."""
    if kind == "words":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.Lowercase()
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]", "[PAD]"])
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
    @given(TEXTS, st.lists(st.integers(1, 3), min_size=1, max_size=30), st.integers(0, 20))
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
