"""`specdec distill` with an encoder-decoder target: an input is the encoder's, and the output alone is learned."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import T5ForConditionalGeneration

from specdec.advise.agreement import Reader
from specdec.distill.learners import DraftLearner, HeadsLearner, losses_of
from specdec.distill.plans import records_of
from specdec.distill.settings import DistillSettings
from specdec.distill.student import StudentShape, build_student, save_student
from specdec.distill.texts import LabelledTexts
from specdec.distill.training import Data, Plan
from specdec.distill.writing import TextWriter
from specdec.distill.written import plans_of
from specdec.engine.heads import load_heads
from specdec.engine.loading.model import load_model
from specdec.engine.loading.model_folder import open_model_folder
from specdec.engine.transformers_model import read_weights
from specdec.errors import ConfigError
from tests.support.distilling import distilled
from tests.support.encoder_decoder_models import START, VOCABULARY_SIZE, PairReference, make_encoder_decoder
from tests.support.engine_models import make_tiny_model

PROMPTS = ("def total(values):", "return sum(value for value in values)", "for value in", "if value is not " * 20)
ANSWER_TOKENS = 12
PLAN = Plan("kl", (0.7, 1.0), 1e-3, 256, 1000, 0.0, 1000, 1, 0, "cpu", False, "settings", "texts")


@pytest.fixture(scope="module", params=["t5-gated", "t5-gated-tied"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with an output layer of its own, and one without."""
    return make_encoder_decoder(tmp_path_factory.mktemp("t5") / "target", request.param, seed=1)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    return tmp_path / "prompts.txt"


def settings(target: Path, **own: Any) -> DistillSettings:
    return DistillSettings(target=str(target), out=target.parent / "out", tokens=1, text_tokens=ANSWER_TOKENS, **own)


def written(target: Path, plans: Sequence[Any], at_once: int) -> LabelledTexts:
    model = load_model(str(target), dtype="float32", positions_max=2048)
    with TextWriter(model, at_once, max(plan.length_max for plan in plans)) as writer:
        return writer.write(plans)


def test_texts_and_labels_are_the_targets_own(target: Path, prompts: Path) -> None:
    """Claim: a greedy text is the one `transformers` generates for the prompt as its input, whatever is written beside
    it; labels are its distributions after each token of the output, the start token among them; the input is kept
    apart. Sampled texts do not depend on how many are written at a time.

    Conclusive: the library's own forward gives the rows; inputs of several lengths, one of more than a chunk.
    """
    plans = plans_of(settings(target, prompts=prompts, text_temperatures="0,0.7"), open_model_folder(str(target)))
    orders = plans["train"].make(0, 6)
    texts, reference = written(target, orders, 3), PairReference(target)
    assert torch.equal(texts.token_ids, written(target, orders, 1).token_ids)
    start, outputs = 0, texts.token_ids.split(texts.lengths.tolist())
    for order, own, ids in zip(orders, outputs, texts.inputs, strict=True):
        source, read = ids.tolist(), own.tolist()
        assert (*source, START) == order.passages[0].given and read[0] == START
        if not order.passages[0].temperature:
            assert read[1:] == reference.generate(source, ANSWER_TOKENS)[: len(read) - 1]
        rows = reference.logits(source, read).log_softmax(-1)
        places = slice(start, start + len(own))
        found = texts.log_probs[places].float()
        assert torch.allclose(found, rows.gather(1, texts.likeliest_ids[places].long()), atol=0.02)
        start += len(own)
    assert texts.answered_from.tolist() == texts.learned_from.tolist() == [0] * 6
    assert start == len(texts.log_probs) == len(texts.token_ids) and texts.length_max > 64


def record(file: Path, *lines: dict[str, Any]) -> Path:
    whole = {"prompt_ids": [7, 8, 9, START], "output_ids": [5, 6], "accepted": "10", "temperature": 0.7}
    file.write_text("".join(json.dumps(whole | line) + "\n" for line in lines))
    return file


def test_a_record_keeps_its_input_apart(target: Path, tmp_path: Path) -> None:
    """Claim: the input of a recorded text is the encoder's, whole, and labels are those of its output alone; a line
    whose input leaves no token of the prompt is no record. Conclusive: an input of more tokens than are kept of what
    precedes a text of a decoder alone, and the labels are the library's of the same input and output."""
    source, output = [index % 200 + 1 for index in range(600)], [*range(40, 48)]
    long = {"prompt_ids": [*source, START, 9], "encoder_length": 600, "output_ids": output, "accepted": "1" * 8}
    file = record(tmp_path / "record", long, long, {"encoder_length": 4}, {"encoder_length": -1})
    told: list[str] = []
    assert [own.encoder_length for own in records_of(file, 288, told.append, True)] == [600, 600]
    assert "2 of 4 lines are no record" in told[0]
    plans = plans_of(settings(target, from_record=file), open_model_folder(str(target)))
    texts = written(target, plans["train"].make(0, 1), 1)
    assert texts.inputs[0].tolist() == source and texts.token_ids.tolist() == [START, 9, *output]
    assert texts.answered_from.tolist() == texts.learned_from.tolist() == [1]
    rows = PairReference(target).logits(source, texts.token_ids.tolist()).log_softmax(-1)
    assert torch.allclose(texts.log_probs.float(), rows.gather(1, texts.likeliest_ids.long()), atol=0.02)


def data_of(target: Path, prompts: Path) -> Data:
    plans = plans_of(settings(target, prompts=prompts), open_model_folder(str(target)))
    texts = written(target, plans["train"].make(0, 6), 6)
    return Data(texts, texts.learned_from, None)


def test_a_step_learns_what_the_library_computes(target: Path, prompts: Path) -> None:
    """Claim: a draft's loss and gradients are those of `transformers`' own forward of input and output, text by text;
    heads begin with the loss of the target's own next token at their distance. Conclusive: texts of a batch have inputs
    of other lengths, so one that saw another's padding would differ; every parameter is compared."""
    folder = open_model_folder(str(target))
    batch = data_of(target, prompts).batch(range(6))
    assert batch.sources is not None and batch.is_source is not None and not batch.is_source.all()
    student, reference = (build_student(folder, StudentShape(1), None, 0) for _ in range(2))
    loss = DraftLearner(student, VOCABULARY_SIZE, PLAN).backward(batch)

    def logits_of(model: Any, index: int) -> torch.Tensor:
        assert batch.sources is not None and batch.is_source is not None
        source = batch.sources[index][batch.is_source[index]][None]
        rows: torch.Tensor = model(input_ids=source, decoder_input_ids=batch.inputs[index][None]).logits[0]
        return rows[:, :VOCABULARY_SIZE]

    rows = torch.cat([logits_of(reference, index)[batch.learned[index]] for index in range(6)])
    expected = losses_of(PLAN, batch.labels, rows).mean()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-4)
    whole = dict(reference.named_parameters())
    for name, own in student.named_parameters():
        assert torch.allclose(own.grad, whole[name].grad, rtol=1e-3, atol=1e-5), name
    model = read_weights(str(target), folder, folder.digest, torch.float32)
    heads = HeadsLearner(model, 1, VOCABULARY_SIZE, PLAN)
    later = batch.learned.clone()
    later[:, 0] = False
    with torch.no_grad():
        before = torch.cat([logits_of(model, index)[:-1][later[index, 1:]] for index in range(6)])
    kept = later[batch.learned]
    labels = type(batch.labels)(batch.labels.own_ids[kept], batch.labels.log_probs[kept])
    assert heads.backward(batch) == pytest.approx(losses_of(PLAN, labels, before).mean().item(), rel=1e-4)


def test_a_student_has_the_encoder_and_chosen_layers(target: Path, tmp_path: Path) -> None:
    """Claim: a student has the target's encoder, embeddings, output layer and bias of distances, and its chosen decoder
    layers; saved, it is a draft of the same kind, with the logits of the student. Conclusive: every weight is compared,
    and layers differ."""
    folder = open_model_folder(str(target))
    source = T5ForConditionalGeneration.from_pretrained(target, dtype=torch.float32).state_dict()
    student = build_student(folder, StudentShape(1, target_layers=(1,)), None, seed=0)
    for name, own in student.state_dict().items():
        moved = name.replace("decoder.block.0.", "decoder.block.1.")
        assert torch.equal(own, source[moved if moved in source else name]), name
    save_student(student, folder, None, 1.0, tmp_path / "out", {})
    saved = load_model(str(tmp_path / "out"), dtype="float32")
    assert saved.description.beginning_token_ids == (START,)
    source_ids, output = [5, 6, 7, 8], [START, 9, 10]
    rows = torch.cat([*Reader(saved, 64).read([*source_ids, *output], 4, 4)])
    with torch.no_grad():
        exact = student.to(torch.bfloat16).float()
        expected = exact(input_ids=torch.tensor([source_ids]), decoder_input_ids=torch.tensor([output])).logits[0]
    assert torch.allclose(rows, expected[:, :VOCABULARY_SIZE], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("target", ["t5-gated"], indirect=True)
def test_the_command_makes_drafts_and_heads(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: `specdec distill` trains a draft of one decoder layer whose acceptance rises, one that learns on, and
    heads that load for their target. Conclusive: the student begins without a layer that the target has."""
    texts = ("--texts", str(tmp_path / "texts"))
    assert distilled(monkeypatch, target, tmp_path / "draft", *texts, prompts=prompts) == 0
    history = json.loads((tmp_path / "draft" / "training.json").read_text())["history"]
    first, last = (sum(own["acceptance"].values()) for own in (history[0], history[-1]))
    assert last > first and open_model_folder(str(tmp_path / "draft")).has_encoder
    assert (
        distilled(monkeypatch, target, tmp_path / "on", "--start", str(tmp_path / "draft"), *texts, prompts=prompts)
        == 0
    )
    assert distilled(monkeypatch, target, tmp_path / "heads", "--heads", "2", *texts, prompts=prompts) == 0
    heads = load_heads(tmp_path / "heads", open_model_folder(str(target)).digest(), 64)
    assert heads.head_count == 2 and bool(heads.weight.abs().sum())


@pytest.mark.parametrize("target", ["t5-gated"], indirect=True)
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--hidden-size 32", "--hidden-size is 32; it must be 0 or the target's 64: a draft of an encoder-decoder has"),
        ("--draft-vocabulary 99", "--draft-vocabulary is 99; it must be 0, for all tokens: a draft of an encoder-"),
        ("--layers 3", "--layers is 3; the target has 2"),
        ("--corpus {parent}", "is an encoder-decoder model, and --corpus has texts without inputs: give --prompts"),
        ("--start {decoder}", "is a decoder alone, the target an encoder-decoder model: a draft must be of its target"),
        ("--from-record {parent}/record", "has texts without an encoder's input: of another target"),
        ("--prompts {parent}/long", "the longest input has 300 tokens; the target's encoder has 256 positions"),
    ],
)
def test_what_does_not_fit_is_refused(
    target: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: str,
    sentence: str,
) -> None:
    """Claim: a shape without the target's encoder, texts without an input, a draft of another kind and an input beyond
    the encoder's positions are refused in one line by flag, value and limit, before anything is written."""
    decoder = make_tiny_model(tmp_path / "decoder", "llama") if "decoder}" in flags else None
    record(tmp_path / "record", {}, {})
    (tmp_path / "long").write_text("def\n" + "~" * 300)
    given = flags.format(parent=tmp_path, decoder=decoder).split()
    capsys.readouterr()
    assert distilled(monkeypatch, target, tmp_path / "out", *given, prompts=prompts) in (1, 2)
    said = capsys.readouterr().err.replace("\n", " ")
    assert sentence in said and not (tmp_path / "out").exists(), said


def test_a_record_with_inputs_is_of_another_target(tmp_path: Path) -> None:
    """Claim: texts with an encoder's input are refused for a decoder alone, which would learn the input as its own."""
    file = record(tmp_path / "record", {"encoder_length": 3}, {"encoder_length": 3})
    with pytest.raises(ConfigError, match="has texts with an encoder's input: of another target"):
        records_of(file, 288)
