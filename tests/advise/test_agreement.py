"""What `specdec advise` predicts is what the services then do."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from functools import partial
from itertools import takewhile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.advise.agreement import Agreement, Reader, agreement_along, agreement_of, proposed
from specdec.advise.forecast import expected_rounds
from specdec.engine.interface import Chunk, RaggedBatch
from specdec.engine.loading.model import load_model
from specdec.protocol.types import ResolvedSamplingParams, Rule
from specdec.v1 import coordinator_service_pb2 as pb
from tests.support.device_models import load_on_device
from tests.support.engine_models import make_tiny_model
from tests.support.services import MODELS, fixed, running

TOKENS = 96
PROMPTS = [json.loads(line)["prompt"] for line in (MODELS / "heldout_prompts.jsonl").read_text().splitlines()[:4]]


@pytest.mark.more
@pytest.mark.parametrize("draft", ["draft", "smollm2-draft"])
@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.7, marks=pytest.mark.slow)])
def test_served_rounds_are_the_predicted_ones(temperature, draft):
    """Claim: along a served text the predicted coins give the accepted draft tokens of every served generation, one by
    one: under GREEDY and, with the seed, under COUPLED, coins are 0 or 1 and rounds have no chance in them. Through
    real services, chains of 3 that wait; float32, so that no token is decided by rounding. Also for a draft with
    another tokenizer, whose reading of the text is then the services' own."""
    with running(MODELS / "target", MODELS / draft, dtype="float32", threads=1) as services:
        outcomes = [
            services.client.generate(
                prompt,
                speculative=fixed(3, draft_window=3, draft_wait_ms=2000),
                max_tokens=TOKENS,
                temperature=temperature,
                seed=7 + index if temperature else 0,
                ignore_eos=True,
            )
            for index, prompt in enumerate(PROMPTS)
        ]
    told = {"dtype": "float32", "has_stable_rows": False, "target_tokenizer": str(MODELS / "target")}
    models = [load_model(str(MODELS / name), **told) for name in ("target", draft)]
    readers = [Reader(model, 512) for model in models]
    tokenizer = words(MODELS / "target")
    for index, (prompt, outcome) in enumerate(zip(PROMPTS, outcomes)):
        ids = tokenizer.encode(prompt).ids
        assert len(ids) == outcome.finished.usage.prompt_tokens
        rule = Rule.COUPLED if temperature else Rule.GREEDY
        params = ResolvedSamplingParams(rule=rule, seed=7 + index, prompt_length=len(ids), temperature=temperature)
        text = [*ids, *outcome.token_ids]
        own = agreement_along(*readers, text, len(ids) - 1, params)
        assert len(own) == TOKENS
        statistics = outcome.finished.statistics
        coins = own.passes[rule].tolist()
        # The first token comes with the prompt, and more until the draft has read it: no round waits for that.
        start = len(list(takewhile(lambda kind: kind == pb.TOKEN_KIND_BONUS, outcome.kinds)))
        assert 1 <= start < TOKENS / 2
        assert statistics.num_accepted_draft_tokens == TOKENS - start - expected_rounds(coins[start:], 3)


def words(folder: Path):
    import tokenizers

    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_measures_are_those_of_transformers_distributions():
    """Claim: variation, divergence, entropy and confidence are those of the softmax of `transformers` over the same
    text, at its temperature, in every slice that the reader takes, and the cosine is that of its hidden states;
    acceptance under REJECTION is close to 1 - TV: the distribution as sent has fewer tokens and rounded weights."""
    folders = [MODELS / "target", MODELS / "draft"]
    readers = [Reader(load_model(str(folder), dtype="float32", has_stable_rows=False), 512) for folder in folders]
    ids = words(folders[0]).encode("\n".join(PROMPTS)).ids[:150]
    params = ResolvedSamplingParams(rule=Rule.COUPLED, seed=3, prompt_length=1, temperature=0.7)
    own = agreement_along(*readers, ids, 20, params)
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders]
    with torch.no_grad():
        p, q = ((model(torch.tensor([ids])).logits[0, 20:-1].double() / 0.7).softmax(1) for model in models)
        states = [model.base_model(torch.tensor([ids])).last_hidden_state[0, 20:-1] for model in models]
    assert len(own) == len(p) == 129
    close = {"rtol": 0, "atol": 1e-3}
    assert torch.allclose(own.variation, (p - q).abs().sum(1) / 2, **close)
    assert torch.allclose(own.divergence, (p * (p / q).log()).sum(1), **close)
    assert torch.allclose(own.entropy, -(p * p.log()).sum(1), **close)
    assert torch.allclose(own.confidence, q.max(1).values, **close)
    assert (own.reachable > 0.999).all()
    assert torch.allclose(own.cosine, torch.cosine_similarity(*states, dim=1).double(), **close)
    assert abs((1 - own.variation - own.accepted[Rule.REJECTION]).mean()) < 0.03


@pytest.mark.parametrize("has_graphs", [False, True])
def test_readers_of_one_model_do_not_meet(tmp_path: Path, has_graphs: bool) -> None:
    """Claim: a model that was read before, as the target is for every draft, gives a later reader the hidden states of
    a fresh one, also if its steps were captured before; and a reader keeps its own while another reads. Conclusive:
    texts, so states, differ; a step captured without hidden states returns none."""
    made = make_tiny_model(tmp_path / "llama", "llama")
    load = partial(load_on_device, made, True) if has_graphs else partial(load_model, str(made), "float32")
    model, fresh = (load(has_stable_rows=False) for _ in range(2))
    model.allocate(3, 16)
    model.forward(RaggedBatch((Chunk([1, 2], 0, [5, 6, 7], 1),)))
    first, ids, others = Reader(model, 64), list(range(2, 14)), list(range(14, 26))
    list(first.read(ids, 3))
    kept = first.hidden
    second, alone = Reader(model, 64), Reader(fresh, 64)
    list(second.read(others, 3))
    list(alone.read(others, 3))
    assert first.hidden is kept is not None and second.hidden is not None and alone.hidden is not None
    assert second.hidden.shape == kept.shape == (9, 64) and not torch.allclose(kept, second.hidden, atol=0.1)
    assert torch.equal(second.hidden, alone.hidden)


def test_tokens_the_draft_lacks_never_pass():
    """Claim: a token without a draft logit passes under no rule, its probability is not reachable, and the divergence
    is that of the others; all by hand, for two tokens of three."""
    target = torch.tensor([[0.5, 0.25, 0.25]]).log()
    draft = torch.tensor([[0.5, 0.5]]).log()
    params = ResolvedSamplingParams(rule=Rule.COUPLED, seed=1, prompt_length=1, temperature=1.0)

    def of(token: int) -> Agreement:
        return agreement_of(target, draft, [[0]], torch.tensor([token]), params)

    assert of(2).passes == {Rule.COUPLED: torch.tensor([0.0]), Rule.REJECTION: torch.tensor([0.0])}
    assert of(1).passes[Rule.REJECTION].item() == 1 and of(0).passes[Rule.REJECTION].item() == pytest.approx(1)
    assert of(0).reachable.item() == pytest.approx(0.75) and of(0).variation.item() == pytest.approx(0.25)
    expected = (2 / 3) * torch.tensor(4 / 3).log() + (1 / 3) * torch.tensor(2 / 3).log()
    assert of(0).divergence.item() == pytest.approx(expected.item())


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_an_equal_draft_passes_and_one_of_other_tokens_never(temperature):
    """Claim: with the target's own logits every token of its text passes under GREEDY and COUPLED, and TV is 0; with
    logits of other tokens none passes under any rule, and TV is 1. Conclusive: one shared position would show."""
    logits = 2 * torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    rule = Rule.COUPLED if temperature else Rule.GREEDY
    params = ResolvedSamplingParams(rule=rule, seed=5, prompt_length=1, temperature=temperature)
    paths = [[1, *range(index)] for index in range(40)]
    drawn = torch.tensor(proposed(logits, paths, params))
    same = agreement_of(logits, logits, paths, drawn, params)
    assert same.passes[rule].tolist() == [1.0] * 40 and same.variation.abs().max() < 1e-12
    low, high = logits.clone(), logits.clone()
    low[:, 25:], high[:, :25] = -1e4, -1e4
    other = agreement_of(low, high, paths, torch.tensor(proposed(low, paths, params)), params)
    assert all(not passes.any() for passes in other.passes.values())
    assert all(not accepted.any() for accepted in other.accepted.values()) and (other.variation == 1).all()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The JSON of two drafts, the second the target itself, for prompts of two classes."""
    folder = tmp_path_factory.mktemp("advice")
    lines = [{"prompt": prompt, "class": "ab"[index % 2]} for index, prompt in enumerate(PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = subprocess.run(
        [*command(folder / "prompts.jsonl"), "--json", "--check", "--draft", str(MODELS / "target")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def command(prompts: Path) -> list[str]:
    flags = {"--target": MODELS / "target", "--draft": MODELS / "draft", "--prompts": prompts, "--text-tokens": 24}
    told = [str(part) for pair in flags.items() for part in pair]
    return [sys.executable, "-m", "specdec.cli", "advise", *told, "--text-temperatures", "0,1", "--threads", "1"]


@pytest.mark.more
def test_the_report_is_what_is_then_served(report):
    """Claim: for the target as its own draft nearly every token passes (of a wide distribution only the likeliest are
    sent), in the prediction and as served; for the small draft served tokens a round and acceptance lie near the
    prediction, the latter also under every rule that it names. Cells exist for every class and temperature, and for all
    together. No time is judged."""
    small, same = report["drafts"]
    cells = [(cell["prompt_class"], cell["temperature"]) for cell in small["cells"]]
    assert cells == [(name, temperature) for name in ("a", "b", "every class") for temperature in (0.0, 1.0)]
    assert list(small["cells"][1]["acceptance"]) == ["COUPLED", "REJECTION"]
    for cell in same["cells"]:
        for rule, value in cell["acceptance"].items():
            assert value["value"] > (0.75 if rule == "REJECTION" else 0.93), (rule, value)  # rounding: 3 of 46
    for draft, check in zip(report["drafts"], report["checks"]):
        assert list(check["rules"]) == ["GREEDY", "REJECTION", "COUPLED"]
        predicted, seen = check["values"]["tokens a round"]
        assert abs(seen["value"] - predicted["value"]) < 0.15 * predicted["value"], draft["draft"]
        for part, near in [(check, 0.15), *((part, 0.3) for part in check["rules"].values())]:  # of 4 texts, drawn anew
            predicted, seen = part["values"]["acceptance"]
            assert abs(seen["value"] - predicted["value"]) < near and part["draft_tokens"] > 0, draft["draft"]


@pytest.mark.more
def test_the_tables_fit_80_columns_and_recommend(tmp_path):
    """Claim: on 80 columns nothing is cut, and a sentence names the plan and where it ends to pay; with a given round
    trip of a second plain decoding is recommended."""
    (tmp_path / "prompts.txt").write_text("\n".join(prompt.replace("\n", " ") for prompt in PROMPTS[:2]))
    told = [*command(tmp_path / "prompts.txt"), "--rtt-ms", "1000"]
    if has_plots := importlib.util.find_spec("matplotlib") is not None:
        told += ["--plot", str(tmp_path / "plot.png")]
    done = subprocess.run(told, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not has_plots or (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"
    assert "Plain decoding is faster" in done.stdout and "…" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.more
@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--draft", "/nonexistent"], "no such folder"),
        (["--text-temperatures", "0,3"], "--text-temperatures is '0,3'"),
        (["--prompts", "/dev/null"], "has no prompts"),
        (["--text-tokens", "4000"], "the target has 2048 positions"),
    ],
)
def test_bad_settings_are_refused(flags, error, tmp_path):
    """Claim: one line on standard error, nothing on standard output."""
    (tmp_path / "prompts.txt").write_text("def f\n")
    done = subprocess.run([*command(tmp_path / "prompts.txt"), *flags], capture_output=True, text=True)
    assert done.returncode in (1, 2) and done.stdout == ""
    assert error in done.stderr and len(done.stderr.strip().splitlines()) == 1
