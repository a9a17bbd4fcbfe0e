"""The whole recipe at its small size: collect, tokenizer, target, draft; and that a seed repeats it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from models import compare_students, data, distill_draft, evaluate, tokenizer, train_target
from models.sizes import SMALL
from models.training import Budget, Sequences, learning_rate_share
from specdec.errors import ConfigError


@dataclass(frozen=True)
class Pair:
    """Folders the recipe wrote."""

    root: Path

    @property
    def data(self) -> Path:
        return self.root / "data"

    def common(self, *more: str) -> list[str]:
        return ["--data", str(self.data), "--size", "small", "--threads", "1", *more]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The recipe's commands in order, as models/README.md gives them."""
    pair = Pair(tmp_path_factory.mktemp("recipe"))
    words = str(pair.root / "tokenizer")
    data.main(["--out", str(pair.data), "--size", "small"])
    tokenizer.main(["--data", str(pair.data), "--out", words, "--size", "small"])
    train_target.main(pair.common("--tokenizer", words, "--out", str(pair.root / "target")))
    distill_draft.main(pair.common("--target", str(pair.root / "target"), "--out", str(pair.root / "draft")))
    return pair


@pytest.mark.more
def test_the_target_learns(pair: Pair) -> None:
    """Claim: held-out loss falls far below that of a uniform guess.

    Conclusive: the files were never trained on, so only learnt Python lowers it.
    """
    report = json.loads((pair.root / "target" / "training.json").read_text())["report"]
    uniform = math.log(SMALL.vocabulary_size)
    assert report["heldout_loss_after"] < report["heldout_loss_before"] - 0.5
    assert report["heldout_loss_after"] < uniform - 1


@pytest.mark.more
def test_the_draft_learns_the_target(pair: Pair) -> None:
    """Claim: acceptance on held-out texts of the target rises under every rule at every temperature, or is near 1, as
    where greedy texts of so small a target are one token; and the draft is what `specdec distill` makes with the
    recipe's settings: one layer, learned from windows of the training files."""
    facts = json.loads((pair.root / "draft" / "training.json").read_text())
    first, *_, last = (entry["acceptance"] for entry in facts["history"])
    assert len(first) == 5 and all(last[name] > min(first[name] + 0.05, 0.95) for name in first), (first, last)
    assert facts["settings"]["layers"] == 1 and facts["settings"]["loss"] == "kl"
    files = sorted(Path(facts["settings"]["corpus"]).iterdir())
    assert [file.read_text() for file in files] == [own.text for own in data.read_corpus(pair.data / "train.jsonl")]


@pytest.mark.more
@pytest.mark.parametrize(("name", "layer_count"), [("target", SMALL.layer_count), ("draft", 1)])
def test_the_result_is_a_model_folder(pair: Pair, name: str, layer_count: int) -> None:
    """Claim: `transformers` loads model and tokenizer as they lie, in bf16, with `<|end|>` as the end."""
    folder = pair.root / name
    model = AutoModelForCausalLM.from_pretrained(folder)
    words = AutoTokenizer.from_pretrained(folder)
    text = "def f(x):\n    return x + 1  # ünïcode ✓\n"
    assert model.dtype is torch.bfloat16 and model.config.num_hidden_layers == layer_count
    assert model.generation_config.eos_token_id == words.eos_token_id == words.bos_token_id == 0
    assert words.decode(words(text).input_ids) == text
    output = model.generate(**words(text, return_tensors="pt", return_token_type_ids=False), max_new_tokens=8)
    assert output.shape[1] > len(words(text).input_ids)


@pytest.mark.more
def test_evaluate_reports_the_pair(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    """Claim: the last command of the recipe gives losses and acceptances, each acceptance a share."""
    prompts = str(pair.data / "heldout_prompts.jsonl")
    folders = ["--target", str(pair.root / "target"), "--draft", str(pair.root / "draft"), "--data", str(pair.data)]
    capsys.readouterr()
    evaluate.main([*folders, "--prompts", prompts, "--prompt-count", "2", "--tokens", "8", "--json"])
    measurements = json.loads(capsys.readouterr().out)
    assert 0 < measurements["heldout_loss"]["target"] < math.log(SMALL.vocabulary_size)
    assert {entry["temperature"] for entry in measurements["acceptance"]} == {0, 0.7, 1}
    for entry in measurements["acceptance"]:
        rules = {"GREEDY"} if entry["temperature"] == 0 else {"COUPLED", "REJECTION"}
        assert set(entry["acceptance"]) == rules and 0 < entry["bound"] <= 1
        for value, low, high in entry["acceptance"].values():
            assert 0 <= low <= value <= high <= 1


@pytest.mark.more
def test_students_are_compared(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    """Claim: the command trains the students that are named on the same texts, the last with a part of the tokens only,
    and prints a line for each; finished ones are kept. Conclusive: both have their own record, of the same texts."""
    out = pair.root / "students"
    told = ["--data", str(pair.data), "--target", str(pair.root / "target"), "--out", str(out), "--size", "small"]
    told += ["--text-count", "64", "--text-tokens", "32", "--minutes", "0.02", "--students"]
    names = [compare_students.REFERENCE, "a quarter of the vocabulary", compare_students.FILTERED]
    compare_students.main([*told, *names])
    shown = capsys.readouterr().out
    records = sorted(out.glob("*/training.json"))
    assert len(records) == len(names) and all(name.split()[-1] in shown for name in names)
    facts = [json.loads(record.read_text()) for record in records]
    assert {own["settings"]["texts"] for own in facts} == {str(out / "texts")}
    assert [own["history"][-1]["tokens"] > 0 for own in facts] == [True] * len(facts)
    times = [record.stat().st_mtime_ns for record in records]
    compare_students.main([*told, *names])
    assert times == [record.stat().st_mtime_ns for record in records]
    with pytest.raises(ConfigError, match="there are"):
        compare_students.main([*told, "5 layers"])


def test_tokens_behind_the_reference_are_learned() -> None:
    """Claim: of five positions the two are learned whose loss exceeds the reference's most, by hand; not those of the
    largest loss, and the others have no gradient."""
    own = torch.tensor([5.0, 9.0, 3.0, 2.0, 4.0], requires_grad=True)
    chosen = compare_students.farthest_behind(own, torch.tensor([1.0, 8.5, 3.0, 0.0, 6.0]))
    chosen.sum().backward()
    assert chosen.tolist() == [5, 2] and own.grad is not None and own.grad.tolist() == [1, 0, 0, 1, 0]


@pytest.mark.more
def test_equal_seeds_give_equal_weights(pair: Pair) -> None:
    """Claim: a run of given steps is a function of its seed; conclusive because another seed gives other bytes."""
    written = []
    for run, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        out = pair.root / f"target-{run}"
        words = str(pair.root / "tokenizer")
        train_target.main(pair.common("--tokenizer", words, "--out", str(out), "--steps", "3", "--seed", seed))
        written.append((out / "model.safetensors").read_bytes())
    assert written[0] == written[1] != written[2]


@pytest.mark.more
def test_a_second_tokenizer_is_equal(pair: Pair) -> None:
    """Claim: the tokenizer is a function of the files alone."""
    again = pair.root / "tokenizer-again"
    tokenizer.main(["--data", str(pair.data), "--out", str(again), "--size", "small"])
    assert (again / "tokenizer.json").read_bytes() == (pair.root / "tokenizer" / "tokenizer.json").read_bytes()


@pytest.mark.more
def test_every_file_of_the_tokens_begins_with_the_end_token(pair: Pair) -> None:
    """Claim: as many `<|end|>` as files: none inside a text, one before each."""
    token_ids = tokenizer.read_tokens(pair.data, "heldout")
    files = data.read_corpus(pair.data / "heldout.jsonl")
    assert token_ids[0] == 0 and (token_ids == 0).sum() == len(files)


def test_sequences_use_all_tokens_before_any_twice() -> None:
    """Claim: an epoch holds each sequence once; conclusive because sequences start at distinct, known tokens."""
    import numpy

    sequences = Sequences(numpy.arange(101, dtype=numpy.uint16), length=10, seed=0)
    starts = [int(row[0]) for _ in range(5) for row in sequences.batch(2)]
    assert sorted(starts) == list(range(0, 100, 10)) and starts != sorted(starts)


def test_minutes_end_a_run_by_the_clock() -> None:
    """Claim: with --minutes the share is elapsed time, and steps and minutes together are refused."""
    assert Budget(None, 2.0).share(step=7, elapsed_s=60.0) == 0.5
    assert Budget(10, None).share(step=5, elapsed_s=1e9) == 0.5
    for steps, minutes in ((None, None), (1, 1.0), (0, None), (None, 0.0), (None, float("nan"))):
        with pytest.raises(ConfigError):
            Budget(steps, minutes)


def test_learning_rate_rises_then_falls() -> None:
    """Claim: the schedule of the recipe: from near 0 to the peak, then a cosine to a tenth."""
    values = [learning_rate_share(i / 1000) for i in range(1001)]
    peak = values.index(max(values))
    assert values[0] < 0.01 and values[peak] == 1.0 and abs(values[-1] - 0.1) < 1e-9
    assert values[:peak] == sorted(values[:peak]) and values[peak:] == sorted(values[peak:], reverse=True)


@pytest.mark.parametrize("command", [train_target, distill_draft, compare_students, data, tokenizer, evaluate])
def test_help_describes_every_option(command: object, capsys: pytest.CaptureFixture[str]) -> None:
    """Claim: --help ends with success and says what each command does."""
    with pytest.raises(SystemExit) as ended:
        command.main(["--help"])
    assert ended.value.code == 0 and "python -m models." in capsys.readouterr().out
