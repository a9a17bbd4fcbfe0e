"""The recipe of the encoder-decoder pair at its small size: pairs, target, draft, measurements; and that it continues
from a checkpoint as if it had not stopped."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from models import (
    data,
    distill_encoder_decoder,
    evaluate_encoder_decoder,
    formatting,
    tokenizer,
    train_encoder_decoder,
)
from models.encoder_decoder import build_draft, build_model, certain_texts, pair_data
from models.sizes import ENCODER_DECODER_FULL, ENCODER_DECODER_SMALL
from specdec.engine.loading.folder_files import MANIFEST_FILE
from specdec.errors import ConfigError

TEXT = """\
class Counter:
    \"\"\"Counts.\"\"\"

    def add(self, count):
        self.total += count
        return self.total


VALUE = [1,
         2]
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe's commands in order, as models/README.md gives them, in one folder."""
    root = tmp_path_factory.mktemp("recipe")
    data.main(["--out", str(root / "data"), "--size", "small"])
    tokenizer.main(["--data", str(root / "data"), "--out", str(root / "tokenizer"), "--size", "small"])
    formatting.main(["--data", str(root / "data"), "--tokenizer", str(root / "tokenizer")])
    train_encoder_decoder.main([*common(root, "target"), "--tokenizer", str(root / "tokenizer")])
    distill_encoder_decoder.main([*common(root, "draft"), "--target", str(root / "target")])
    return root


def common(root: Path, out: str) -> list[str]:
    """The options of both trainings."""
    return ["--data", str(root / "data"), "--size", "small", "--threads", "1", "--out", str(root / out)]


def test_passages_are_the_file_and_never_leave_their_block() -> None:
    """Claim: passages in order have every line of the file but empty ones, without the indentation of their first line,
    and end before a line that is indented less; on one line each is its words with one space between them."""
    found = list(formatting.passages(TEXT, random.Random(0)))
    lines = [line.strip() for text in found for line in text.splitlines() if line.strip()]
    assert lines == [line.strip() for line in TEXT.splitlines() if line.strip()]
    assert all(text and not text[0].isspace() and text == text.rstrip() for text in found)
    deep = list(formatting.passages("    if x:\n        y()\n    z()\nw()\n", random.Random(0)))
    assert deep == ["if x:\n    y()\nz()", "w()"]
    assert formatting.flattened(deep[0]) == "if x: y() z()"


def test_a_batch_predicts_each_next_token_and_the_end() -> None:
    """Claim: the labels of a pair are the next tokens of its output and, last, the end; its input is beside it, the
    filling marked. Conclusive: pairs of distinct, known tokens and lengths, in an order that is not theirs."""
    pairs = formatting.Pairs(
        torch.tensor([5, 6, 0, 7, 0], dtype=torch.int32),
        torch.tensor([3, 2], dtype=torch.int32),
        torch.tensor([0, 8, 0, 5, 9, 6], dtype=torch.int32),
        torch.tensor([2, 4], dtype=torch.int32),
    )
    batch = pair_data(certain_texts(pairs), pairs).batch([1, 0])
    assert batch.inputs.tolist() == [[0, 5, 9, 6], [0, 8, 0, 0]] and batch.learned.sum(1).tolist() == [4, 2]
    assert batch.labels.own_ids.flatten().tolist() == [5, 9, 6, 0, 8, 0]
    assert batch.sources.tolist() == [[7, 0, 0], [5, 6, 0]] and batch.is_source.sum(1).tolist() == [2, 3]


def test_a_draft_starts_from_the_first_layer_of_the_target() -> None:
    """Claim: a draft has the target's embeddings, encoder, bias of distances and first decoder layer: one of a target
    with one decoder layer writes what the target writes. Conclusive: any other weight would change the logits."""
    torch.manual_seed(0)
    target = build_model(ENCODER_DECODER_SMALL, 64, 1).eval()
    ids = torch.randint(1, 64, (2, 9))
    told = [model(ids, decoder_input_ids=ids).logits for model in (target, build_draft(target, ENCODER_DECODER_SMALL))]
    assert torch.equal(*told)
    deep = build_model(ENCODER_DECODER_SMALL, 64, 2)
    draft = build_draft(deep, ENCODER_DECODER_SMALL)
    assert torch.equal(
        draft.decoder.block[0].layer[1].EncDecAttention.k.weight,
        deep.decoder.block[0].layer[1].EncDecAttention.k.weight,
    )


def test_a_fresh_model_copies_its_input() -> None:
    """Claim: before any training, a model of the recipe writes the input's token behind the last one that it wrote.
    Conclusive: tokens of an input are all different and drawn, so that chance is 1 in 1,000, and another input's tokens
    are not written."""
    torch.manual_seed(0)
    model = build_model(ENCODER_DECODER_FULL, 1024, 2).eval()
    inputs = torch.stack([torch.randperm(1024)[:40] for _ in range(16)])
    likeliest = model(inputs, decoder_input_ids=inputs).logits.argmax(-1)
    assert (likeliest[:, :-1] == inputs[:, 1:]).float().mean() > 0.9
    likeliest = model(inputs.roll(1, 0), decoder_input_ids=inputs).logits.argmax(-1)
    assert (likeliest[:, :-1] == inputs[:, 1:]).float().mean() < 0.05


@pytest.mark.more
def test_the_target_learns_and_the_draft_learns_the_target(made: Path) -> None:
    """Claim: the share of held-out tokens that the target predicts rises, and so does acceptance of the draft's drawn
    tokens on held-out texts of the target, under both rules, from its first steps on; all five of a draft are measured.

    Conclusive for draws at 1, which many tokens of a distribution decide; greedy texts of so small a target are few
    tokens in a circle. A draft begins as a part of the target, and its first steps cost it some of that.
    """
    histories = [json.loads((made / name / "training.json").read_text())["history"] for name in ("target", "draft")]
    (first, *_, last), (_, before, *_, after) = ([entry["acceptance"] for entry in history] for history in histories)
    assert last["GREEDY 0"] > first["GREEDY 0"] + 0.05
    assert len(before) == 5
    for rule in ("REJECTION 1", "COUPLED 1"):
        assert after[rule] > min(before[rule] + 0.01, 0.95), (before, after)


@pytest.mark.more
@pytest.mark.parametrize("name", ["target", "draft"])
def test_the_result_is_a_model_folder(made: Path, name: str) -> None:
    """Claim: `transformers` loads model and tokenizer as they lie, in bf16; an input ends with `<|end|>`, which begins
    and ends the output too, and the folder lists its files."""
    folder = made / name
    model, words = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.dtype is torch.bfloat16
    assert model.config.decoder_start_token_id == model.generation_config.eos_token_id == 0
    asked = words("def f(x): return x", return_tensors="pt", return_token_type_ids=False)
    assert asked.input_ids[0, -1] == 0 and model.generate(**asked, max_new_tokens=4)[0, 0] == 0
    listed = {line.split("  ")[1] for line in (folder / MANIFEST_FILE).read_text().splitlines()}
    assert {"model.safetensors", "tokenizer.json", "config.json", "generation_config.json"} <= listed


@pytest.mark.more
def test_the_pair_is_measured(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Claim: the last command gives shares, of each rule one, and rounds of at most the draft's tokens and one more."""
    asked = ["--target", str(made / "target"), "--draft", str(made / "draft"), "--prompt-count", "4", "--json"]
    evaluate_encoder_decoder.main([*asked, "--prompts", str(made / "data" / "formatting_prompts.jsonl")])
    found = json.loads(capsys.readouterr().out)
    assert set(found["acceptance"]) == {
        "0 GREEDY",
        *(f"{at} {rule}" for at in (0.7, 1) for rule in ("REJECTION", "COUPLED")),
    }
    assert all(0 <= value <= 1 for value, _ in found["acceptance"].values())
    assert all(1 <= value <= int(length) + 1 for length, value in found["tokens_a_round"].items())


@pytest.mark.more
def test_a_stopped_training_continues(made: Path) -> None:
    """Claim: a run that ends after half its evaluations and is started again, its length unchanged, gives the bytes of
    the run that was not stopped; another seed gives others, and its checkpoint is refused."""
    told = ["--tokenizer", str(made / "tokenizer"), "--tokens", "4000"]
    whole, halved = ([*common(made, out), *told] for out in ("whole", "halved"))
    train_encoder_decoder.main(whole)

    class Stopped(Exception):
        """Stops a run."""

    saved = 0
    save = train_encoder_decoder.Trainer.save

    def save_and_stop(self: object) -> None:
        nonlocal saved
        save(self)
        saved += 1
        if saved == 2:
            raise Stopped

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(train_encoder_decoder.Trainer, "save", save_and_stop)
        train_encoder_decoder.main(halved)
    train_encoder_decoder.main(halved)
    weights = [(made / out / "model.safetensors").read_bytes() for out in ("whole", "halved")]
    assert weights[0] == weights[1]
    with pytest.raises(ConfigError, match="other settings"):
        train_encoder_decoder.main([*whole, "--seed", "1"])


@pytest.mark.parametrize(
    "command", [formatting, train_encoder_decoder, distill_encoder_decoder, evaluate_encoder_decoder]
)
def test_help_describes_every_option(command: object, capsys: pytest.CaptureFixture[str]) -> None:
    """Claim: --help ends with success and says what each command does."""
    with pytest.raises(SystemExit) as ended:
        command.main(["--help"])
    assert ended.value.code == 0 and "python -m models." in capsys.readouterr().out


def test_pairs_of_long_passages_are_left_out() -> None:
    """Claim: a passage whose output has more than the most tokens has no pair, and none at all is an error."""
    words = Tokenizer.from_file(str(train_encoder_decoder.EMBEDDED_MODELS / "target" / "tokenizer.json"))
    long = "\n".join(f"x{i} = {i}" for i in range(200))
    pairs = formatting.pairs_of(words, [long, "x = 1\ny = 2"])
    assert len(pairs) == 1 and pairs.inputs[-1] == pairs.outputs[0] == 0
    with pytest.raises(ConfigError, match="none of 1 passages"):
        formatting.pairs_of(words, [long])
