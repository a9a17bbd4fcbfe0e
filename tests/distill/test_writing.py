"""Texts that the target writes: its own tokens and distributions, many at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
import torch
from transformers import AutoModelForCausalLM

from specdec.distill.plans import Plans, recorded_acceptance, records_of, text_files
from specdec.distill.settings import DistillSettings
from specdec.distill.texts import LabelledTexts
from specdec.distill.writing import Passage, TextOrder, TextWriter
from specdec.distill.written import plans_of
from specdec.engine.loading.model import load_model
from specdec.engine.loading.model_folder import open_model_folder
from specdec.errors import ConfigError
from tests.support.services import MODELS

PROMPTS_FILE = MODELS / "heldout_prompts.jsonl"
PROMPTS = [json.loads(line)["prompt"] for line in PROMPTS_FILE.read_text().splitlines()[:5]]
TARGET = open_model_folder(str(MODELS / "target"))
ANSWER_TOKENS = 12


@pytest.fixture(scope="module")
def target() -> object:
    return load_model(str(MODELS / "target"), dtype="float32", has_stable_rows=False)


def written(target: object, plans: list[TextOrder], at_once: int) -> LabelledTexts:
    with TextWriter(target, at_once, max(plan.length_max for plan in plans)) as writer:
        return writer.write(plans)


def tokens_of(texts: LabelledTexts) -> list[list[int]]:
    return [part.tolist() for part in texts.token_ids.split(texts.lengths.tolist())]


def test_texts_and_labels_are_the_targets_own(target):
    """Claim: a greedy text is the one `transformers` generates, whatever is written beside it, and the labels at every
    position, the prompt's too, are its likeliest tokens with their log-probabilities."""
    plans = Plans(MODELS / "target", (0.0,), ANSWER_TOKENS, "1", PROMPTS).make(0, len(PROMPTS))
    texts = written(target, plans, at_once=3)
    reference = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32)
    start = 0
    assert texts.answered_from.tolist() == [len(plan.passages[0].given) - 1 for plan in plans]
    for plan, own in zip(plans, tokens_of(texts), strict=True):
        prompt = list(plan.passages[0].given)
        with torch.no_grad():
            expected = reference.generate(torch.tensor([prompt]), max_new_tokens=ANSWER_TOKENS, do_sample=False)[0]
            rows = reference(torch.tensor([own])).logits[0].log_softmax(-1)
        assert own == expected.tolist()[:-1], "all but the last token, which was not fed"
        found = texts.log_probs[start : start + len(own)].float()
        assert torch.allclose(found, rows.gather(1, texts.likeliest_ids[start : start + len(own)].long()), atol=0.02)
        assert torch.equal(texts.likeliest_ids[start : start + len(own), 0].long(), rows.argmax(1))
        start += len(own)


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[1:]])
def test_few_texts_are_of_many_prompts(prompts: Sequence[str]) -> None:
    """Claim: where prompts are not repeated, as many texts as prompts have them all, and as many more each of them at
    the other temperature. Conclusive: numbers of prompts that are odd and even."""
    count, told = len(prompts), (MODELS / "target", (0.0, 0.7), ANSWER_TOKENS, "1", prompts)
    orders = Plans(*told, is_repeated=False).make(0, 2 * count)
    asked = [(own.passages[0].given, own.passages[0].temperature) for own in orders]
    assert len({given for given, _ in asked[:count]}) == count and {at for _, at in asked[:2]} == {0.0, 0.7}
    every = [(own.passages[0].given, own.passages[0].temperature) for own in Plans(*told).make(0, 2 * count)]
    assert {*asked} == {*every} and len({*every}) == 2 * count


def test_a_text_does_not_depend_on_its_neighbours(target):
    """Claim: sampled texts are the same written alone and five at a time: each has its own seed."""
    plans = Plans(MODELS / "target", (0.7, 1.0), ANSWER_TOKENS, "3", PROMPTS).make(0, 5)
    assert tokens_of(written(target, plans, 5)) == [tokens_of(written(target, [plan], 1))[0] for plan in plans]


def test_an_end_token_ends_a_passage(target):
    """Claim: after an end token the next passage's given tokens follow, without it; after the last nothing does. Shown
    with every token an end: each passage is what was given, and one token of the target's ends it."""
    own = target.description
    plan = TextOrder((Passage((5, 6), 4, 0.0), Passage((7, 8), 4, 0.0)), 0, seed=1)
    with TextWriter(target, 1, plan.length_max) as writer:
        writer._end_token_ids = tuple(range(own.vocabulary_size))
        texts = writer.write([plan])
    assert tokens_of(texts) == [[5, 6, 7, 8]]


def test_files_hold_what_was_written(target, tmp_path: Path):
    """Claim: saved texts are read back equal, and joined in order; another file, and texts of
    another origin, are refused by name."""
    plans = Plans(MODELS / "target", (1.0,), ANSWER_TOKENS, "1", PROMPTS).make(0, 2)
    texts = written(target, plans, 2)
    texts.save(tmp_path / "train-0.safetensors", "ours")
    again = LabelledTexts.load(tmp_path / "train-0.safetensors", "ours")
    assert tokens_of(again) == tokens_of(texts) and torch.equal(again.log_probs, texts.log_probs)
    assert tokens_of(LabelledTexts.joined([texts, again])) == 2 * tokens_of(texts)
    (tmp_path / "other.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="other.safetensors"):
        LabelledTexts.load(tmp_path / "other.safetensors", "ours")
    with pytest.raises(ConfigError, match="another target"):
        LabelledTexts.load(tmp_path / "train-0.safetensors", "theirs")


def test_windows_of_files_are_labelled_and_continued(tmp_path, target):
    """Claim: with --corpus every second text comes from a file of the folder: in turn a window as it is, of which the
    target writes only one token more, and one that it continues; without prompts all do. No file is in both parts, and
    another content of a file makes other texts."""
    contents = {
        f"{name}.txt": f"class {name}:\n" + f"    {name} = {name}({name})\n" * 40 for name in ("One", "Two", "Six")
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    told = {"target": str(MODELS / "target"), "out": tmp_path / "out", "tokens": 1, "text_tokens": 20}
    plans = plans_of(DistillSettings(**told, corpus=tmp_path), TARGET)
    words = tokenizers.Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
    found = {name: set() for name in plans}
    for split, own in plans.items():
        for plan in own.make(0, 40):
            (passage,) = plan.passages
            given = words.decode(list(passage.given), skip_special_tokens=False)
            found[split] |= {name for name, content in contents.items() if given in content and len(given) > 12}
            assert (len(passage.given), passage.max_tokens) in ((20, 1), (5, 15))
    assert not found["heldout"] & found["train"] and len(found["heldout"] | found["train"]) == 3
    mixed = plans_of(DistillSettings(**told, corpus=tmp_path, prompts=PROMPTS_FILE), TARGET)["train"]
    assert [plan.passages[0].max_tokens for plan in mixed.make(0, 6)] == [20, 1, 20, 15, 20, 1]
    before = plans["train"].digest(0, 4, "")
    for name, content in contents.items():
        (tmp_path / name).write_text(content + "#")
    changed = plans_of(DistillSettings(**told, corpus=tmp_path), TARGET)["train"]
    assert changed.digest(0, 4, "") != before
    texts = written(target, mixed.make(0, 4), 4)
    assert texts.lengths.tolist()[1] == 20 and tuple(tokens_of(texts)[1]) == mixed.make(1, 1)[0].passages[0].given


def write_record(file: Path, lines: list[dict]) -> None:
    """Writes a record, by default of three prompt tokens and accepted draft tokens only, at 0.7."""
    whole = {"prompt_ids": [7, 8, 9], "temperature": 0.7}
    every = [whole | {"accepted": "1" * len(line["output_ids"])} | line for line in lines]
    file.write_text("".join(json.dumps(line) + "\n" for line in every))


def test_recorded_texts_are_labelled(tmp_path, target):
    """Claim: with --from-record every second text is a recorded one, as it is: the target writes no token of it that is
    kept, and it counts from its answer on; its labels are the target's. No text is in both parts."""
    write_record(tmp_path / "record", [{"output_ids": list(range(20 + n, 60))} for n in range(11)])
    told = {"target": str(MODELS / "target"), "out": tmp_path / "out", "tokens": 1, "text_tokens": 20}
    plans = plans_of(DistillSettings(**told, from_record=tmp_path / "record", prompts=PROMPTS_FILE), TARGET)
    recorded = {name: own.make(0, 30)[1::2] for name, own in plans.items()}
    starts = {name: {plan.passages[0].given[3] for plan in own} for name, own in recorded.items()}
    assert starts == {"heldout": {20}, "train": set(range(21, 31))}
    texts = written(target, plans["train"].make(0, 4), 4)
    assert tokens_of(texts)[1] == [7, 8, 9, *range(21, 41)]
    assert texts.answered_from.tolist()[1] == texts.learned_from.tolist()[1] == 2
    assert texts.temperatures.tolist()[1] == pytest.approx(0.7)
    alone = plans_of(DistillSettings(**told, from_record=tmp_path / "record"), TARGET)["train"]
    assert [plan.passages[0].given[3] for plan in alone.make(0, 3)] == [21, 22, 23]


def test_the_acceptance_of_a_record_is_told(tmp_path):
    """Claim: draft tokens accepted and tested are counted by temperature; a token without a draft token is neither. By
    hand."""
    lines = [
        {"output_ids": [1, 2, 3, 4], "accepted": "10-1"},
        {"output_ids": [1, 2], "accepted": "--", "temperature": 0},
        {"output_ids": [1, 2], "accepted": "00"},
        {"output_ids": [1], "accepted": "1", "temperature": 0},
    ]
    write_record(tmp_path / "record", lines)
    assert list(recorded_acceptance(records_of(tmp_path / "record", 4096)).items()) == [(0, (1, 1)), (0.7, (2, 5))]


WHOLE = {"prompt_ids": [1], "output_ids": [5, 6], "accepted": "1-", "temperature": 0}
NO_RECORDS = {
    "half a line": json.dumps(WHOLE)[:30],
    "two halves": json.dumps(WHOLE)[:30] + json.dumps(WHOLE),
    "no JSON": "text",
    "no object": "[1]",
    "a field too few": '{"prompt_ids": [1]}',
    "deep": "[" * 100_000,
    "no UTF-8": b"\xff",
    "zero bytes": b"\0" * 40,
    "a sign too few": json.dumps(WHOLE | {"accepted": "1"}),
    "another sign": json.dumps(WHOLE | {"accepted": "1x"}),
    "no token": json.dumps(WHOLE | {"prompt_ids": [], "output_ids": [], "accepted": ""}),
    "a token that is no number": json.dumps(WHOLE | {"prompt_ids": ["1"]}),
    "a token below 0": json.dumps(WHOLE | {"prompt_ids": [-1]}),
    "tokens that are no list": json.dumps(WHOLE | {"prompt_ids": "11"}),
    "no temperature": json.dumps(WHOLE | {"temperature": None}),
    "no number as temperature": json.dumps(WHOLE | {"temperature": float("nan")}),
    "a temperature beyond all": '{"prompt_ids": [1], "output_ids": [], "accepted": "", "temperature": 1e999}',
}


@pytest.mark.parametrize("line", NO_RECORDS.values(), ids=NO_RECORDS)
def test_a_line_that_is_no_record_is_skipped_and_counted(line, tmp_path):
    """Claim: one bad line costs itself and no other: the texts before and after it are learned, and one sentence says
    how many lines are skipped. Conclusive: the same file without the line gives the same texts and no sentence."""
    good = [json.dumps(WHOLE | {"prompt_ids": [number]}).encode() for number in (1, 2)]
    bad = line if isinstance(line, bytes) else line.encode()
    file, told = tmp_path / "record", []
    file.write_bytes(b"\n".join([good[0], bad, b"", good[1]]))
    found = records_of(file, 4096, told.append)
    assert told == [f"--from-record {file}: 1 of 3 lines are no record and are skipped"]
    file.write_bytes(b"\n".join(good) + b"\n")
    assert records_of(file, 4096, told.append) == found and [own.prompt_ids for own in found] == [(1,), (2,)]
    assert len(told) == 1


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("", "has 0 texts; it must have 2, one to test with$"),
        ("text", "has 0 texts; .*; 1 of 1 lines are no record"),
        (json.dumps(WHOLE), "has 1 texts; .*; 0 of 1 lines are no record"),
        (json.dumps(WHOLE | {"output_ids": [5, 4096]}), "ids outside 0 to 4095"),
    ],
)
def test_a_record_that_cannot_be_used_is_refused(content, error, tmp_path):
    """Claim: other files, one text, and tokens of another target are refused, with file and limit; so is no file."""
    (tmp_path / "record").write_text(content)
    with pytest.raises(ConfigError, match=error):
        records_of(tmp_path / "record", 4096)
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        records_of(tmp_path, 4096)


@pytest.mark.parametrize("template", [None, "{% for message in messages %}{{ message.content }}{% endfor %}"])
def test_texts_without_tokens_are_refused(tmp_path: Path, template: str | None) -> None:
    """Claim: a prompt and a file of characters that the tokenizer drops are refused by name when plans are made, with
    and without a chat template. Conclusive: nothing of them can be fed, so the writer would wait for ever."""
    words = tokenizers.Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
    words.normalizer = tokenizers.normalizers.Replace("~", "")
    words.save(str(tmp_path / "tokenizer.json"))
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigError, match="--prompts: '~~' has 0 tokens"):
        Plans(tmp_path, (0.0,), 9, "1", ["total", "~~"]).make(0, 2)
    file = tmp_path / "dropped.txt"
    file.write_text("~~")
    with pytest.raises(ConfigError, match=f"--corpus: {file} has 0 tokens"):
        Plans(tmp_path, (0.0,), 9, "1", ["total"], [file]).make(0, 2)


def test_windows_begin_as_served_texts_do(tmp_path: Path) -> None:
    """Claim: with a tokenizer that puts a token first, each window begins with it, of every part of a file, and it is
    not learned, as with a prompt; a file longer than the tokenizer's own limit is not cut; and the digest has the token
    and reads each file once. Conclusive: the same folder without token and limit gives the same windows."""
    plain = tokenizers.Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
    plain.post_processor = None
    file = tmp_path / "file.txt"
    file.write_text("".join(f"value_{n} = {n * n}\n" for n in range(200)))
    found = {}
    for name in ("plain", "first"):
        (tmp_path / name).mkdir()
        if name == "first":
            plain.post_processor = tokenizers.processors.TemplateProcessing(
                single="<b> $A", special_tokens=[("<b>", 7)]
            )
            plain.enable_truncation(30)
        plain.save(str(tmp_path / name / "tokenizer.json"))
        found[name] = Plans(tmp_path / name, (1.0,), 20, "1", files=[file])
    bare, own = (found[name].make(0, 12) for name in ("plain", "first"))
    for before, after in zip(bare, own, strict=True):
        (passage,), (expected,) = after.passages, before.passages
        assert passage.given == (7, *expected.given) and passage.max_tokens == expected.max_tokens
        assert (before.learned_from, after.learned_from) == (0, 1)
    assert Plans(tmp_path / "first", (1.0,), 20, "1", ["total"]).make(0, 1)[0].learned_from == 1
    assert found["plain"].digest(0, 4, "") != (known := found["first"].digest(0, 4, ""))
    file.unlink()
    assert found["first"].digest(0, 4, "") == known


def test_files_without_text_are_skipped_and_told(tmp_path: Path) -> None:
    """Claim: of a folder with a picture, an index with zero bytes and an empty file, the text files are read, and one
    line tells how many were skipped. Nothing is told of text files alone."""
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text("x")
    lines: list[str] = []
    assert text_files(tmp_path, lines.append) == [tmp_path / "one.txt", tmp_path / "two.txt"] and not lines
    for name, content in {"picture.png": b"\x89PNG", "index": b"DIRC\0\0", "__init__.py": b"\n"}.items():
        (tmp_path / name).write_bytes(content)
    assert text_files(tmp_path, lines.append) == [tmp_path / "one.txt", tmp_path / "two.txt"]
    (line,) = lines
    assert line.startswith(f"--corpus {tmp_path}: 3 of 5 files are no UTF-8 text")


@pytest.mark.parametrize(
    "contents", [{}, {"one.txt": "x"}, {"one.txt": "x", "two.txt": " "}, {"one": "x", "two": b"\xff"}]
)
def test_a_corpus_that_cannot_be_used_is_refused(contents, tmp_path):
    """Claim: fewer than two files, one beside an empty one, and one beside one that is not UTF-8 are refused before
    anything is written."""
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match="--corpus"):
        text_files(tmp_path)
