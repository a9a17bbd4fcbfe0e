"""`specdec distill` as a user runs it: it learns, continues after SIGKILL bit for bit, and its drafts are served."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM

from specdec.cli.main import main
from specdec.config import DraftSettings
from specdec.decoding.proposal import proposals
from specdec.distill.command import distill
from specdec.distill.settings import DistillSettings
from specdec.distill.student import StudentShape, build_student, save_student
from specdec.distill.written import plans_of
from specdec.draft_service.drafter import TREE_CELLS
from specdec.draft_service.service import make_drafter
from specdec.engine.loading.architectures import SUPPORTED
from specdec.engine.loading.model import load_model
from specdec.engine.loading.model_folder import open_model_folder
from specdec.engine.scheduling.scheduler import Engine
from specdec.engine.vocabulary_map import VOCABULARY_FILE
from specdec.errors import ModelRefused
from specdec.protocol.types import DraftVocabulary
from specdec.replica.loading import describe
from specdec.telemetry.tracing import Tracing
from tests.support.engine_models import ARCHITECTURES, DIFFERENT, SEVERAL_ARCHITECTURES, Driver, make_tiny_model
from tests.support.services import MODELS, SHAPES, fixed, running

PROMPTS_FILE = MODELS / "heldout_prompts.jsonl"
PROMPTS = [json.loads(line)["prompt"] for line in PROMPTS_FILE.read_text().splitlines()[:4]]
DRAFT_VOCABULARY = 1500  # of 4,096 tokens


def command(out: Path, texts: Path, *more: str) -> list[str]:
    told = {
        "--target": MODELS / "target",
        "--out": out,
        "--texts": texts,
        "--prompts": PROMPTS_FILE,
        "--text-count": 64,
        "--text-tokens": 24,
        "--draft-vocabulary": DRAFT_VOCABULARY,
        "--tokens": 12_000,
        "--evaluate-tokens": 2_000,
        "--batch-tokens": 1024,
        "--patience": 100,
        "--threads": 1,
        "--device": "cpu",
    }
    flags = [str(part) for pair in told.items() for part in pair]
    return [sys.executable, "-m", "specdec.cli", "distill", *flags, *more]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("texts")


@pytest.fixture(scope="module")
def draft(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft with a part of the vocabulary, from a run that was not disturbed."""
    out = tmp_path_factory.mktemp("draft")
    done = subprocess.run(command(out, texts), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "specdec draft --model" in done.stderr and "GREEDY 0" in done.stderr
    return out


@pytest.mark.more
def test_it_learns(draft: Path):
    """Claim: held-out acceptance under every rule and temperature rises far above that of the untrained student, which
    starts from the target's embeddings and last layer."""
    history = json.loads((draft / "training.json").read_text())["history"]
    first, last = history[0]["acceptance"], history[-1]["acceptance"]
    assert set(last) == {"GREEDY 0", "COUPLED 0.7", "REJECTION 0.7", "COUPLED 1", "REJECTION 1"}
    assert all(last[name] > first[name] + 0.03 for name in last), (first, last)


@pytest.mark.more
def test_it_continues_after_a_kill_bit_for_bit(draft: Path, texts: Path, tmp_path: Path):
    """Claim: a run killed with SIGKILL after a checkpoint, and started again, ends with the bits of the undisturbed
    run; the texts are not written again."""
    before = {file.name: file.stat().st_mtime_ns for file in texts.iterdir()}
    process = subprocess.Popen(command(tmp_path, texts), stderr=subprocess.PIPE, text=True)
    deadline_s = time.monotonic() + 120
    while not (tmp_path / "training.checkpoint").is_file():
        assert process.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not (tmp_path / "model.safetensors").is_file(), "it was killed before the end"
    done = subprocess.run(command(tmp_path, texts), capture_output=True, text=True)
    assert done.returncode == 0 and "continuing after" in done.stderr, done.stderr
    whole, continued = (load_file(folder / "model.safetensors") for folder in (draft, tmp_path))
    assert whole.keys() == continued.keys() and all(torch.equal(whole[name], continued[name]) for name in whole)
    assert before == {file.name: file.stat().st_mtime_ns for file in texts.iterdir()}


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--layers", "13"], "--layers is 13; the target has 12"),
        (["--target-layers", "12"], "--target-layers is [12]; it must name 1 of 0 to 11"),
        (["--target-layers", "x"], "--target-layers is 'x'; it must be numbers"),
        (["--hidden-size", "97"], "--hidden-size is 97; it must be a multiple of 2, at most the target's 256"),
        (["--hidden-size", "512"], "--hidden-size is 512; it must be a multiple of"),
        (["--draft-vocabulary", "9"], "--draft-vocabulary is 9; it must be 0, for all tokens, or at least 64"),
        (["--loss-temperatures", "0"], "--loss-temperatures is '0'; it must be temperatures, 0.01 to 1"),
        (["--text-temperatures", "-1"], "--text-temperatures is '-1'; it must be temperatures, 0 or 0.01 to 1"),
        (["--text-tokens", "4000"], "the target has 2048 positions"),
        (["--prompts", "nothing"], "--prompts nothing has no prompts"),
        (["--minutes", "1"], "give either --tokens or --minutes"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    sentence: str,
):
    """Claim: each is refused in one line that names flag, value and limit; no text, no checkpoint is there after it."""
    monkeypatch.setattr(sys, "argv", ["specdec", *command(tmp_path, tmp_path / "texts", *flags)[3:]])
    assert end_of_main() in (1, 2)
    said = capsys.readouterr().err
    assert sentence in said and len(said.splitlines()) == 1, said
    assert not list(tmp_path.iterdir())


def end_of_main() -> int | str | None:
    """Runs the command of sys.argv in this process; returns its exit code."""
    thread_count = torch.get_num_threads()
    with pytest.raises(SystemExit) as ended:
        main()
    torch.set_num_threads(thread_count)
    return ended.value.code


@pytest.mark.more
def test_what_belongs_to_other_settings_is_refused(
    draft: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Claim: with another loss, OUT's checkpoint is not continued, with another length of texts or prompts the texts
    are not learned; the sentence says what to do."""
    for out, flags, sentence in (
        (draft, ["--loss", "tv"], "is of other settings: remove it, or give another --out"),
        (tmp_path, ["--text-tokens", "25"], "another target, prompts or settings: give another --texts folder"),
    ):
        monkeypatch.setattr(sys, "argv", ["specdec", *command(out, texts, *flags)[3:]])
        assert end_of_main() == 1 and sentence in (said := capsys.readouterr().err), said


def test_no_prompt_is_learned_and_tested():
    """Claim: of given prompts a tenth is held out, and no text to learn from begins with one, though one is there
    twice."""
    settings = DistillSettings(target=str(MODELS / "target"), out=Path("x"), prompts=PROMPTS_FILE, tokens=1)
    plans = plans_of(settings, open_model_folder(str(MODELS / "target")))
    given = {split: {plan.passages[0].given for plan in own.make(0, 700)} for split, own in plans.items()}
    assert len(given["heldout"]) == 16 and len(given["train"]) > 150 and not given["heldout"] & given["train"]


@pytest.mark.more
def test_its_draft_is_served_and_changes_no_text(draft: Path):
    """Claim: a draft that knows a third of the vocabulary is served beside the whole target; texts with it are those
    without, greedy and sampled, in every shape of speculation, and some of its tokens are accepted."""
    asks = [
        {"prompt": prompt, "max_tokens": 32, "ignore_eos": True, "temperature": temperature, "seed": 5}
        for prompt in PROMPTS
        for temperature in (0.0, 0.9)
    ]
    with running(MODELS / "target", draft, threads=1) as services:
        plain = services.client.generate_all([ask | {"speculative": SHAPES["off"]} for ask in asks], 4)
        for shape in ("chain", "tree", "synchronous"):  # the last waits for its draft tokens
            found = services.client.generate_all([ask | {"speculative": SHAPES[shape]} for ask in asks], 4)
            assert [own.comparable for own in found] == [own.comparable for own in plain], shape
        accepted = sum(own.finished.statistics.num_accepted_draft_tokens for own in found)
        drawn = services.client.generate(
            PROMPTS[0], max_tokens=32, temperature=1.0, speculative=fixed(3, rule="RULE_REJECTION")
        )
    assert accepted > 0 and len(drawn.token_ids) > 0


@pytest.mark.more
def test_tokens_it_lacks_are_never_proposed(draft: Path):
    """Claim: for contexts of tokens that it knows and that it does not, the draft's logits are those of `transformers`
    for its own ids, and minus infinity at every id outside its map; such a folder is refused as a target."""
    known = json.loads((draft / VOCABULARY_FILE).read_text())["target_token_ids"]
    assert len(known) == DRAFT_VOCABULARY == len(set(known))
    model = load_model(str(draft), has_stable_rows=False)
    assert model.description.vocabulary_size == 4096
    driver = Driver(model)
    unknown = next(token for token in range(4096) if token not in known)
    logits = driver.step([(driver.open(), [known[5], unknown, known[1]], 3)]).logits
    is_known = torch.zeros(4096, dtype=torch.bool)
    is_known[known] = True
    reference = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32)
    with torch.no_grad():
        own = reference(torch.tensor([[5, DRAFT_VOCABULARY, 1]])).logits[0, :, :DRAFT_VOCABULARY]
    assert torch.allclose(logits[:, known], own, atol=0.2)
    assert torch.equal(logits[:, known].argmax(1), own.argmax(1))
    assert bool(logits[:, is_known].isfinite().all()) and bool((logits[:, ~is_known] == -torch.inf).all())
    with pytest.raises(ModelRefused, match="can only be a draft"):
        load_model(str(draft))


@pytest.mark.more
def test_a_draft_with_a_part_of_the_tokens_says_so(draft: Path, texts: Path) -> None:
    """Claim: Describe and the log tell that it has a part of the target's tokens, their number, and their share of the
    tokens that the target wrote in the held-out texts. Conclusive: the share is counted here, token by token."""
    known = set(json.loads((draft / VOCABULARY_FILE).read_text())["target_token_ids"])
    (file,) = texts.glob("heldout-*")
    held = load_file(file)
    begin, written = 0, []
    for length, answered_from in zip(held["lengths"].tolist(), held["answered_from"].tolist()):
        written += held["token_ids"][begin + answered_from + 1 : begin + length].tolist()
        begin += length
    share = sum(token_id in known for token_id in written) / len(written)
    assert 0.5 < share < 1
    model = load_model(str(draft), has_stable_rows=False)
    described = describe(model, DraftSettings(model=str(draft), block_size=16), TREE_CELLS)
    assert (described.draft_vocabulary, described.draft_vocabulary_size) == (DraftVocabulary.SUBSET, DRAFT_VOCABULARY)
    assert described.draft_vocabulary_share == pytest.approx(share)
    with capture_logs() as logs:
        settings = DraftSettings(model=str(draft))
        make_drafter(Engine(model, 24, 16, proposals), described, settings, Tracing())
    assert f"is a part of the target: it proposes 1,500 of 4,096 tokens, {share:.0%} of those" in logs[0]["relation"]


@pytest.mark.more
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in DIFFERENT)) for name in ARCHITECTURES]
)
def test_every_architecture_is_distilled(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: the command writes texts of a target of every supported architecture and trains a draft for it, which
    `transformers` and the engine load; its bars tell tokens per second and the time left, and each evaluation its
    tokens, seconds and acceptance by rule and temperature. Conclusive: a tiny target of each; the weights are not those
    the draft began with."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, as for a user
    folder = make_tiny_model(tmp_path / "target", name, pad_token_id=287)
    (tmp_path / "prompts.txt").write_text("\n".join(f"{word} is" for word in "a b c d e f g h i j k".split()))
    told = {"text_count": 64, "text_tokens": 8, "tokens": 600, "evaluate_tokens": 300, "batch_tokens": 128}
    settings = DistillSettings(
        target=str(folder), out=tmp_path / "out", prompts=tmp_path / "prompts.txt", device="cpu", threads=1, **told
    )
    assert distill(settings) == 0
    said = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)  # without colours and movements
    for part in ("the target writes", "the draft learns", "tokens/s", "GREEDY 0", "COUPLED 0.7", "REJECTION 1"):
        assert part in said, said
    assert re.search(r"\d:\d\d:\d\d", said) and re.search(r"\d{3} tokens +\d+ s +COUPLED", said), said
    began = build_student(open_model_folder(str(folder)), StudentShape(1), None, seed=0).state_dict()
    model = AutoModelForCausalLM.from_pretrained(settings.out, dtype=torch.float32)
    assert any(not torch.allclose(own, began[key], atol=1e-3) for key, own in model.state_dict().items())
    assert load_model(str(settings.out), has_stable_rows=False).description.vocabulary_size == 288


@pytest.mark.parametrize("name", SEVERAL_ARCHITECTURES)
def test_every_architecture_gets_a_student(name: str, tmp_path: Path):
    """Claim: for every supported architecture of a decoder alone a student of one layer, of the target's size and of
    another, is loaded by `transformers` and by the engine; with the target's size and all its layers it is the
    target."""
    assert {kind for kind, _ in ARCHITECTURES.values()} == {own.class_name for own in SUPPORTED if not own.has_encoder}
    target = open_model_folder(str(make_tiny_model(tmp_path / "target", name, pad_token_id=287)))
    layer_count = 3
    whole = build_student(target, StudentShape(layer_count, target_layers=(0, 1, 2)), None, seed=0)
    reference = AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32)
    asked = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        assert torch.equal(whole(input_ids=asked).logits, reference(input_ids=asked).logits)
    token_ids = torch.arange(0, 288, 2)
    for shape in (
        StudentShape(1),
        StudentShape(1, draft_vocabulary_size=144),
        StudentShape(1, hidden_size=32, draft_vocabulary_size=144),
    ):
        kept = token_ids if shape.draft_vocabulary_size else None
        student = build_student(target, shape, kept, seed=0)
        out = tmp_path / f"{shape.hidden_size}-{shape.draft_vocabulary_size}"
        save_student(student, target, kept, 1.0, out, {})
        AutoModelForCausalLM.from_pretrained(out)
        assert load_model(str(out), has_stable_rows=False).description.vocabulary_size == 288
