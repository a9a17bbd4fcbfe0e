"""`specdec distill --eagle`: features, training-time test, and the command. What a head computes, and its folders, are
tested in tests/engine/test_eagle_network.py and test_eagle_folder.py."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from specdec.distill.eagle import EagleLearner, head_sizes, new_head
from specdec.distill.features import Features, features_file, features_place, record_features, save_features
from specdec.distill.learners import losses_of
from specdec.distill.losses import Labels
from specdec.distill.texts import LabelledTexts
from specdec.distill.training import Data, Plan, Trainer
from specdec.distill.written import TextFiles, recorded_features
from specdec.engine.eagle.features import final_norm_of, gain_of, states_entering
from specdec.engine.eagle.folder import load_eagle, target_facts
from specdec.engine.eagle.network import default_layers
from specdec.engine.loading.model_folder import open_model_folder
from specdec.engine.transformers_model import read_weights
from specdec.errors import ConfigError
from tests.support.distilling import CYCLE, cyclic_texts, distilled
from tests.support.engine_models import SEVERAL_ARCHITECTURES, make_tiny_model
from tests.support.gguf_models import make_tiny_gguf

LAYERS = (0, 2, 3)  # of three: the last is what leaves them
STEPS = 4
SIZES = (1.0, 2.0, 4.0)


def model_of(folder: Path) -> Any:
    opened = open_model_folder(str(folder))
    return read_weights(str(folder), opened, opened.digest, torch.float32).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "llama", "llama")


def features_of(model: Any, texts: LabelledTexts, file: Path) -> Features:
    record_features(model, LAYERS, texts, file, "origin")
    return Features([file], ["origin"])


def learner_of(folder: Path, target_ids: Tensor, plan: Plan) -> EagleLearner:
    """A new head on a target, that proposes these tokens."""
    model = model_of(folder)
    sizes = head_sizes(model.config, target_facts(open_model_folder(str(folder))), LAYERS, len(target_ids))
    head, table = new_head(model, sizes, target_ids, SIZES, 0), model.get_input_embeddings().weight
    return EagleLearner(head, table, STEPS, plan, SIZES[-1])


def plan_of(tokens: int, rate: float = 1e-2) -> Plan:
    return Plan("kl", (1.0,), rate, 256, tokens, 0.0, tokens // 4, 9, 0, "cpu", False, "settings", "texts")


@pytest.mark.parametrize("architecture", SEVERAL_ARCHITECTURES)
def test_features_are_the_states_that_enter_layers(architecture: str, tmp_path: Path) -> None:
    """Claim: for every family, features are the residual stream before layers, and under the number of layers after the
    last one, before the final norm; recorded in texts of several lengths they are those of each text alone.

    Conclusive: `transformers`' own list of hidden states, of which the last one has been normed; the norm applied to
    ours is equal. The gain that a head takes over gives the norm of any row, but for the bias.
    """
    model = model_of(make_tiny_model(tmp_path / "model", architecture))
    base, ids = model.base_model, torch.arange(11)[None] % 7
    with torch.no_grad(), states_entering(base, LAYERS) as found:
        told = base(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        assert torch.equal(found[0], told[0]) and torch.equal(found[2], told[2])
        norm = final_norm_of(base)
        assert torch.equal(norm(found[3]), told[3]) and not torch.equal(found[3], told[3])
        row = torch.randn(64, generator=torch.Generator().manual_seed(1))
        row = (row - row.mean()) / (row - row.mean()).square().mean().sqrt()
        assert torch.allclose((norm(row) - norm(-row)) / 2, gain_of(norm, 64) * row, atol=1e-3)
    texts = cyclic_texts(5, 0)
    texts = LabelledTexts(
        *(own[:-13] for own in (texts.token_ids, texts.likeliest_ids, texts.log_probs)),
        torch.tensor([20, 20, 20, 20, 7], dtype=torch.int32),
        *(texts.learned_from, texts.answered_from, texts.temperatures),
    )
    features = features_of(model, texts, tmp_path / "features.safetensors")
    for start, end in ((0, 20), (40, 60), (80, 87)):
        with torch.no_grad(), states_entering(base, LAYERS) as alone:
            base(input_ids=texts.token_ids[start:end].long()[None], use_cache=False)
        wanted = torch.cat([alone[layer][0] for layer in LAYERS], 1)
        assert torch.allclose(features.rows(start, end).float(), wanted, rtol=2**-7, atol=2e-2)


def test_each_step_sees_what_drafting_sees(target: Path, tmp_path: Path) -> None:
    """Claim: row s of step j is x of the chain that is drafted behind token s + 1: pairs with the target's features up
    to that of token s, then j pairs whose feature is the head's own x, beside the text's tokens.

    Conclusive: `EagleHead.forward` itself over that chain, attending to all pairs before; it is held against numpy in
    tests/engine. A key too many or too few, or a position one off, is far outside the tolerance.
    """
    learner = learner_of(target, torch.arange(40), plan_of(1))
    head, model, texts = learner.head, model_of(target), cyclic_texts(2, 3)
    data = Data(texts, texts.learned_from, None, features=features_of(model, texts, tmp_path / "f.safetensors"))
    batch = data.batch([0, 1])
    assert batch.features is not None
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        states, reduced = learner.states(batch), head.fc(batch.features.float())
        assert [x.shape[1] for x in states] == [19, 18, 17, 16]
        for text, row in ((0, 0), (0, 9), (1, 15)):
            chain = reduced[text, : row + 1]
            for step in range(STEPS):
                tokens = batch.inputs[text, 1 : row + 2 + step]
                x = head(chain[None], table[tokens][None], torch.arange(len(chain)))[0, -1]
                assert torch.allclose(states[step][text, row], x, atol=1e-4), (text, row, step)
                chain = torch.cat([chain, x[None]])


def test_gradients_are_those_of_the_weighted_losses(target: Path, tmp_path: Path) -> None:
    """Claim: the gradients that are added part by part are those of the mean losses of the steps, weighted 1, 0.8,
    0.64 ..., of the labels at their distance: row s of step j learns the label of token s + 1 + j, of positions that
    are learned. Tokens that the head does not have are no token of it. Beside them x learns the feature of the last
    layer of that token, divided by its size.

    Conclusive: one loss written out over texts and rows, differentiated in one go.
    """
    ids = torch.arange(2, 40)
    learner = learner_of(target, ids, plan_of(1))
    texts = cyclic_texts(3, 1)
    features = features_of(model_of(target), texts, tmp_path / "f.safetensors")
    batch = Data(texts, texts.learned_from, None, features=features).batch([0, 1, 2])
    total = learner.backward(batch)
    found = {name: weight.grad.clone() for name, weight in learner.head.named_parameters() if weight.grad is not None}
    learner.head.zero_grad()
    loss, weights = torch.zeros(()), [0.8**step for step in range(STEPS)]
    for step, x in enumerate(learner.states(batch)):
        rows, labels, wanted_x = [], [], []
        for text in range(3):
            for token in range(2, 20):  # learned from the third token on
                if token - 1 - step >= 0:
                    rows.append(x[text, token - 1 - step])
                    labels.append(20 * text + token)
                    wanted_x.append(features.rows(20 * text, 20 * text + 20)[token, 128:].float() / SIZES[-1])
        at = torch.tensor(labels)
        own = texts.likeliest_ids[at].long()
        own = torch.where(own < 2, -1, own - 2)
        every = losses_of(plan_of(1), Labels(own, texts.log_probs[at].float()), learner.head.logits(torch.stack(rows)))
        distance = (torch.stack(rows) - torch.stack(wanted_x)).abs()
        of_features = torch.where(distance < 1, distance.square() / 2, distance - 0.5)
        loss = loss + weights[step] / sum(weights) * (every.mean() + of_features.mean())
    loss.backward()
    assert total == pytest.approx(loss.item(), rel=1e-4)
    wanted = {name: weight.grad for name, weight in learner.head.named_parameters()}
    assert found.keys() == wanted.keys() and len(found) == 13
    for name, gradient in wanted.items():
        assert gradient is not None and torch.allclose(found[name], gradient, rtol=1e-3, atol=1e-6), name


def test_a_new_head_begins_at_its_target(target: Path) -> None:
    """Claim: its output layer has the target's rows of its tokens, its norm the target's gain, its feature is that of
    the last layer in size 1, and rows attend to their own token. Two with one seed are equal, which a run that
    continues needs; random numbers of others are not drawn."""
    ids, model = torch.tensor([5, 8, 200]), model_of(target)
    before = torch.get_rng_state()
    one, other = (learner_of(target, ids, plan_of(1)).head for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.lm_head.weight, model.get_output_embeddings().weight[ids])
    assert torch.allclose(one.norm.weight, model.base_model.norm.weight, atol=1e-4)
    assert all(torch.equal(weight, other.state_dict()[name]) for name, weight in one.state_dict().items())
    feature = torch.tensor(SIZES).repeat_interleave(64) * torch.randn(192, generator=torch.Generator().manual_seed(2))
    assert torch.corrcoef(torch.stack([one.fc(feature), feature[128:]]))[0, 1] > 0.95
    assert one.fc(feature).square().mean().sqrt().item() == pytest.approx(1, abs=0.3)
    own = one.project(torch.zeros(1, 9, 64), model.get_input_embeddings().weight[None, :9], torch.arange(9))
    scores = own.queries[:, ::2] @ own.keys.transpose(-2, -1)
    assert torch.equal(scores.argmax(-1), torch.arange(9).expand(1, 2, 9)), "a row attends to its own token"


@pytest.mark.more
def test_acceptance_rises_at_every_position(target: Path, tmp_path: Path) -> None:
    """Claim: trained on texts in which every token decides the next one, a head on a frozen random target is right at
    nearly all held-out positions of a chain of four, under each rule.

    Conclusive: the rule of the text is satisfied at one distance only: a step whose labels, tokens or rows are one
    position off has acceptance 0; the held-out texts begin elsewhere.
    """
    plan = plan_of(60_000, 3e-3)
    learner = learner_of(target, torch.arange(40), plan)
    model, parts = model_of(target), []
    for name, texts in (("train", cyclic_texts(24, 0)), ("heldout", cyclic_texts(CYCLE, 7))):
        begins = texts.learned_from if name == "train" else texts.answered_from
        parts.append(Data(texts, begins, None, features=features_of(model, texts, tmp_path / f"{name}.safetensors")))
    trainer = Trainer(learner, plan, *parts, tmp_path / "checkpoint.safetensors")
    trainer.run()
    first, last = trainer.progress.history[0]["acceptance"], trainer.progress.history[-1]["acceptance"]
    rules = ("GREEDY 0", "REJECTION 0.7", "COUPLED 0.7")
    assert set(last) == {f"{rule} position {step}" for rule in rules for step in range(1, STEPS + 1)}
    assert all(value < 0.5 for value in first.values()) and all(value > 0.9 for value in last.values()), (first, last)


def history_of(out: Path) -> Any:
    return json.loads((out / "training.json").read_text())["history"]


def distilled_head(monkeypatch: pytest.MonkeyPatch, target: Path, out: Path, *more: str, tokens: int = 1500) -> int:
    told = ("--eagle", "--eagle-steps", "3", "--draft-vocabulary", "100")
    return distilled(monkeypatch, target, out, *told, *more, tokens=tokens)


def test_the_command_makes_a_head_of_its_target_and_continues(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Claim: `specdec distill --eagle` writes a folder of the hub's layout that loads for its target, with the tokens
    the target uses most, settings, share and held-out acceptance by rule and position, and says how to serve it. Run
    again it continues where it ended, with the features of before; so does another run with the same texts. Other
    settings are refused.
    """
    out = tmp_path / "head"
    assert distilled_head(monkeypatch, target, out) == 0
    said = capsys.readouterr().err.replace("\n", "")
    assert f"--heads {out}" in said and "GREEDY 0 position 3" in said
    head = load_eagle(out, target_facts(open_model_folder(str(target))))
    assert head.config.draft_vocabulary_size == 100 and head.config.aux_layer_ids == default_layers(3) == (1, 2, 3)
    assert head.embed_tokens is None and head.config.hidden_size == 64
    facts = json.loads((out / "training.json").read_text())
    assert facts["settings"]["eagle"] and 0 < facts["share"] <= 1 and facts["layers"] == [1, 2, 3]
    names = set(facts["history"][-1]["acceptance"])
    assert {"GREEDY 0 position 1", "COUPLED 0.7 position 2", "REJECTION 1 position 3"} < names and len(names) == 15
    files = {file: file.stat().st_mtime_ns for file in (out / "texts").iterdir()}
    assert len(files) == 4 and features_file(out / "texts" / "train-0000000.safetensors", (1, 2, 3)) in files
    assert distilled_head(monkeypatch, target, out) == 0
    assert "continuing after" in capsys.readouterr().err
    assert distilled_head(monkeypatch, target, tmp_path / "other", "--texts", str(out / "texts")) == 0
    assert {file: file.stat().st_mtime_ns for file in (out / "texts").iterdir()} == files
    assert history_of(tmp_path / "other")[-1]["acceptance"] == facts["history"][-1]["acceptance"]
    assert distilled_head(monkeypatch, target, out, "--eagle-layers", "0,3") != 0
    assert "is of other settings: remove it, or give another --out" in capsys.readouterr().err


def test_a_stopped_run_ends_with_the_same_head(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: stopped after its first evaluation and run again, training gives the head of an undisturbed run, bit for
    bit, and its acceptances."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert distilled_head(monkeypatch, target, whole) == 0
    save = Trainer.save

    def stop(trainer: Trainer) -> None:
        save(trainer)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "save", stop)
        try:
            distilled_head(patch, target, stopped)
        except KeyboardInterrupt:
            pass
    assert not (stopped / "model.safetensors").exists() and (stopped / "training.checkpoint").exists()
    assert distilled_head(monkeypatch, target, stopped) == 0
    found, wanted = (load_file(folder / "model.safetensors") for folder in (stopped, whole))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    acceptances = [[entry["acceptance"] for entry in history_of(folder)] for folder in (stopped, whole)]
    assert acceptances[0] == acceptances[1] and len(acceptances[0]) > 2


def test_a_head_learns_on(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Claim: with --start a head begins as it is in its folder, which is not changed, keeps layers and tokens, and
    learns on; a folder that is no head of the target is refused by name.

    Conclusive: with a learning rate that changes no weight the result has the bits of the start.
    """
    first, on, same = (tmp_path / name for name in ("first", "on", "same"))
    assert distilled_head(monkeypatch, target, first, "--eagle-layers", "0,3", tokens=600) == 0
    before = {file: file.read_bytes() for file in first.iterdir() if file.is_file()}
    told = ("--eagle", "--eagle-steps", "3", "--texts", str(first / "texts"), "--start", str(first))
    assert distilled(monkeypatch, target, on, *told) == 0
    began, ended = (history_of(on)[place]["acceptance"] for place in (0, -1))
    assert all(ended[name] > began[name] for name in began if name.startswith("REJECTION 1"))
    assert distilled(monkeypatch, target, same, *told, "--learning-rate", "1e-30") == 0
    wanted, kept = (load_file(folder / "model.safetensors") for folder in (first, same))
    assert wanted.keys() == kept.keys() and all(torch.equal(kept[name], wanted[name]) for name in wanted)
    assert before == {file: file.read_bytes() for file in before}
    assert distilled(monkeypatch, target, tmp_path / "none", *told[:-1], str(target)) != 0
    assert "architectures is" in " ".join(capsys.readouterr().err.split())


@pytest.mark.more
@pytest.mark.parametrize("architecture", ["gpt2", "gemma3", "gpt_neox", "cohere", "phi3"])
def test_other_families_have_heads(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: a head is made for families with other names, norms, positions and head sizes, and loads for its
    target."""
    folder = make_tiny_model(tmp_path / "target", architecture)
    assert distilled_head(monkeypatch, folder, tmp_path / "head") == 0
    assert load_eagle(tmp_path / "head", target_facts(open_model_folder(str(folder)))).config.hidden_size == 64


def test_a_head_of_a_packed_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: a head is learned from the features of a GGUF file as it is served, and belongs to that target. They are
    kept while texts are written, those of the first text without the rows by which the engine tried the model before;
    of texts whose features are missing they are recorded anew, and are the same. Conclusive: both are those of the
    weights as the folder's reader unpacks them, up to roundings to bfloat16."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target_file = make_tiny_gguf(tmp_path, "llama", "Q8_0")
    assert distilled_head(monkeypatch, target_file, tmp_path / "head") == 0
    opened = open_model_folder(str(target_file))
    layers = load_eagle(tmp_path / "head", target_facts(opened)).config.aux_layer_ids
    files = [tmp_path / "head" / "texts" / f"{name}-0000000.safetensors" for name in ("heldout", "train")]
    model = read_weights(str(target_file), opened, opened.digest, torch.float32).eval()
    for out in ("first", "second"):  # kept, then recorded
        for file in files:
            texts, recorded = load_file(file), load_file(features_file(file, layers))["features"]
            assert recorded.dtype == torch.bfloat16 and len(recorded) == len(texts["token_ids"]) > 0
            start = 0
            for length in texts["lengths"].tolist():
                ids = texts["token_ids"][start : start + length].long()[None]
                with torch.no_grad(), states_entering(model.base_model, layers) as states:
                    model.base_model(input_ids=ids)
                wanted = torch.cat([states[layer][0] for layer in layers], 1)
                error = (recorded[start : start + length].float() - wanted).square().mean().sqrt()
                assert error < 0.03 * wanted.square().mean().sqrt()
                start += length
            features_file(file, layers).unlink()
        told = ("--texts", str(tmp_path / "head" / "texts"))
        assert distilled_head(monkeypatch, target_file, tmp_path / out, *told) == 0


REFUSED: Sequence[tuple[tuple[str, ...], str]] = [
    (("--layers", "2"), "--layers is not for EAGLE-3 heads: leave it out with --eagle"),
    (("--start", "a/head"), "--draft-vocabulary is for new heads: leave it out, --start a/head keeps its own"),
    (("--heads", "2"), "--draft-vocabulary is for drafts: leave it out with --heads"),
    (("--eagle-steps", "8"), "eagle-steps"),
    (("--eagle-layers", "2,1"), "--eagle-layers is [2, 1]; it must name at most 8 of 0 to 3, ascending"),
    (("--eagle-layers", "2,4"), "--eagle-layers is [2, 4]; it must name at most 8 of 0 to 3, ascending"),
    (("--eagle-layers", "last"), "--eagle-layers is 'last'; it must be numbers with commas between them"),
    (("--draft-vocabulary", "9"), "--draft-vocabulary is 9; it must be 0, for all tokens, or at least 64"),
]


@pytest.mark.parametrize(("flags", "reason"), REFUSED)
def test_flags_that_do_not_fit_are_refused(
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    reason: str,
) -> None:
    """Claim: flags of drafts and values that a head cannot have are refused before a text is written, not ignored."""
    assert distilled_head(monkeypatch, target, tmp_path / "head", *flags) != 0
    assert reason in " ".join(capsys.readouterr().err.split()) and not (tmp_path / "head").exists()


def test_flags_of_eagle_alone_are_refused(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Claim: without --eagle its flags are refused, and with it --heads is."""
    assert distilled(monkeypatch, target, tmp_path / "head", "--eagle-steps", "4") != 0
    assert "--eagle-steps is for EAGLE-3 heads: give --eagle too" in " ".join(capsys.readouterr().err.split())
    assert distilled(monkeypatch, target, tmp_path / "head", "--eagle", "--heads", "2") != 0
    assert "--heads is not for EAGLE-3 heads" in " ".join(capsys.readouterr().err.split())


def test_features_of_other_texts_are_refused(target: Path, tmp_path: Path) -> None:
    """Claim: a file of features states what it is of; another, and one that is none, are refused by name, and those of
    more or fewer tokens than the texts have."""
    file = tmp_path / "features.safetensors"
    texts = cyclic_texts(1, 0)
    features_of(model_of(target), texts, file)
    found = Features([file], ["origin"])
    assert len(found.sizes(3)) == 3 and found.row_count == len(texts.token_ids)
    own = TextFiles(texts, (tmp_path / "texts.safetensors",), ("texts",))
    place, origin = features_place(own.files[0], "texts", LAYERS)
    save_features(torch.zeros(1 + found.row_count, 3, dtype=torch.bfloat16), place, origin)
    with pytest.raises(
        ConfigError, match=f"{1 + found.row_count} rows of features, the texts {found.row_count} tokens"
    ):
        recorded_features(None, LAYERS, own, "cpu", Console())
    with pytest.raises(ConfigError, match="has features of other texts or layers: remove it"):
        Features([file], ["another"])
    file.write_bytes(b"no features")
    with pytest.raises(ConfigError, match="has no features"):
        Features([file], ["origin"])
