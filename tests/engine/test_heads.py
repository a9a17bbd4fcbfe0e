"""Heads on a target: their arithmetic, the hidden states they read, and folders that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import silu

from specdec.engine.heads import CONFIG_FILE, WEIGHTS_FILE, Heads, load_heads, save_heads
from specdec.engine.interface import HiddenStates
from specdec.engine.loading.model import load_model
from specdec.engine.scheduling.feed import Feed
from specdec.engine.scheduling.runner import StepRunner
from specdec.errors import ModelRefused
from tests.support.device_models import load_on_device
from tests.support.engine_models import Driver, make_tiny_model, model_class, random_tokens

DIGEST, HIDDEN_SIZE = "d" * 64, 64
TOLERANCE = 2e-4  # as in test_transformers_equality


def random_heads(head_count: int = 3, hidden_size: int = HIDDEN_SIZE) -> Heads:
    heads = Heads(head_count, hidden_size).requires_grad_(False)
    generator = torch.Generator().manual_seed(5)
    for parameter in heads.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / hidden_size**0.5)
    return heads


def test_each_head_is_one_residual_block() -> None:
    """Claim: head h gives x + silu(x W_h + b_h) (Cai et al. 2024, section 2.1), and a new set gives x. Conclusive: the
    formula is computed here in float64, for random weights."""
    heads, x = random_heads(), torch.randn(5, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1))
    found = heads(x)
    assert found.shape == (5, 3, HIDDEN_SIZE)
    for index in range(3):
        inside = x.double() @ heads.weight[index].double() + heads.bias[index].double()
        torch.testing.assert_close(found[:, index].double(), x.double() + silu(inside), rtol=1e-5, atol=1e-5)
    assert torch.equal(Heads(2, HIDDEN_SIZE)(x), torch.stack([x, x], 1))


@pytest.mark.parametrize(
    "architecture",
    ["llama", "gemma2", pytest.param("cohere", marks=pytest.mark.more), pytest.param("phi", marks=pytest.mark.more)],
)
@pytest.mark.parametrize("is_on_device", [False, True])
def test_hidden_states_and_output_layer_are_those_of_transformers(
    architecture: str, is_on_device: bool, tmp_path: Path
) -> None:
    """Claim: a model asked for hidden states returns the inputs of its output layer for the rows with logits, and the
    returned layer makes their logits: with logit scales, caps and biases, on a CPU, and on a GPU's code in steps of
    their own shape and in captured ones; a model that was not asked returns none.

    Conclusive: the hidden states are compared with those of `transformers`; a row of another sequence would differ.
    """
    folder = make_tiny_model(tmp_path / architecture, architecture)
    plain = model_class(architecture).from_pretrained(folder, dtype=torch.float32).eval()
    for with_graphs in (False, True) if is_on_device else (False,):
        model = load_on_device(folder, with_graphs) if is_on_device else load_model(str(folder))
        assert isinstance(model, HiddenStates) and model.hidden_size == HIDDEN_SIZE
        output, driver = model.return_hidden(), Driver(model)
        texts = [random_tokens(9, 1), random_tokens(4, 2)]
        tables = [driver.open(12) for _ in texts]
        driver.step([(table, text[:-2], 1) for table, text in zip(tables, texts)])
        step = driver.step([(table, text[-2:], 2) for table, text in zip(tables, texts)])
        with torch.inference_mode():
            for text, hidden in zip(texts, step.hidden.split(2)):
                wanted = plain.base_model(torch.tensor([text])).last_hidden_state[0, -2:]
                assert float((hidden - wanted).abs().max()) < TOLERANCE
            assert float((output(step.hidden) - step.logits).abs().max()) < TOLERANCE
        assert not is_on_device or bool(model.backend.graph_count) == with_graphs
    other = Driver(load_model(str(folder)))
    assert other.step([(other.open(4), texts[1], 1)]).hidden is None


def test_each_request_gets_its_own_hidden_states_also_when_a_step_is_repeated(tmp_path: Path) -> None:
    """Claim: the reader of hidden states gets those of each request's rows with logits, in the order of the requests;
    so it does when the forward of all, or the sampler, fails and requests are repeated one by one.

    Conclusive: the hidden states in three runs, one plain and two with planted failures, are compared bit for bit; a
    CPU's rows do not depend on the rest of the step.
    """
    driver = Driver(load_model(str(make_tiny_model(tmp_path, "llama"))))
    model = driver.model
    model.return_hidden()
    texts = [random_tokens(6, 1), random_tokens(9, 2), random_tokens(5, 3)]
    counts = [2, 0, 3]
    forward = model.forward

    def run(fails_forward: bool, fails_sampler: bool) -> dict[int, torch.Tensor]:
        def planted(batch):
            if fails_forward and len(batch.chunks) > 1:
                raise RuntimeError("planted")
            return forward(batch)

        def sample(payloads, *_):
            if fails_sampler and len(payloads) > 1:
                raise RuntimeError("planted")
            return list(payloads)

        def read(payloads, chunks, hidden, answers):
            assert [list(chunk.token_ids) for chunk in chunks] == [texts[payload] for payload in payloads]
            assert len(payloads) == len(hidden) == len(answers)
            return [(payload, own.clone()) for payload, own in zip(payloads, hidden)]

        model.forward = planted
        runner = StepRunner(model, driver.cache, sample, read)
        feeds = [Feed(driver.open(12), 0, text, count, i) for i, (text, count) in enumerate(zip(texts, counts))]
        outcomes = runner.run([(feed, feed.chunk()) for feed in feeds]).outcomes
        for feed in feeds:
            driver.cache.release(feed.table)
        assert outcomes[1] is None
        return {payload: hidden for payload, hidden in (outcomes[0], outcomes[2])}

    plain = run(False, False)
    assert {index: len(own) for index, own in plain.items()} == {0: 2, 2: 3}
    for found in (run(True, False), run(False, True)):
        assert all(torch.equal(found[index], own) for index, own in plain.items())


def test_heads_that_fail_cost_their_proposals_only(tmp_path: Path) -> None:
    """Claim: an exception of the reader of hidden states leaves the sampler's answers as they are."""
    driver = Driver(load_model(str(make_tiny_model(tmp_path, "llama"))))
    driver.model.return_hidden()

    def read(payloads, chunks, hidden, answers):
        raise RuntimeError("planted")

    runner = StepRunner(driver.model, driver.cache, lambda payloads, *_: list(payloads), read)
    feeds = [Feed(driver.open(12), 0, random_tokens(5, index), 2, index) for index in range(2)]
    assert runner.run([(feed, feed.chunk()) for feed in feeds]).outcomes == [0, 1]


def test_a_saved_set_is_read_again(tmp_path: Path) -> None:
    """Claim: what was saved is loaded, to the rounding of bfloat16, without gradients."""
    heads = random_heads()
    save_heads(heads, tmp_path, DIGEST)
    loaded = load_heads(tmp_path, DIGEST, HIDDEN_SIZE)
    assert torch.equal(loaded.weight, heads.weight.bfloat16().float()) and not loaded.weight.requires_grad


def _changed(**facts: object):
    def change(folder: Path) -> None:
        config = json.loads((folder / CONFIG_FILE).read_text())
        (folder / CONFIG_FILE).write_text(json.dumps(config | facts))

    return change


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda folder: (folder / CONFIG_FILE).unlink(), "has no heads.json"),
        (lambda folder: (folder / WEIGHTS_FILE).write_bytes(b"no"), "is not a safetensors file"),
        (_changed(target_digest="e" * 64), "has heads of another target (digest eeeeeeeeeeee, of this target dddd"),
        (_changed(head_count=0), "head_count is 0; it must be 1 to 8"),
        (_changed(head_count=2), "weight has shape [3, 64, 64]; it must be [2, 64, 64]"),
        (_changed(hidden_size=32), "hidden_size is 32; the target has 64"),
    ],
)
def test_a_wrong_folder_is_refused_by_name(change, sentence: str, tmp_path: Path) -> None:
    """Claim: a folder without heads, of another target or of other sizes is refused in one line with folder, value and
    limit. Conclusive: each differs in one thing from a folder that is loaded."""
    save_heads(random_heads(), tmp_path, DIGEST)
    change(tmp_path)
    with pytest.raises(ModelRefused) as refused:
        load_heads(tmp_path, DIGEST, HIDDEN_SIZE)
    assert sentence in str(refused.value) and str(tmp_path) in str(refused.value)
