"""What surrounds texts of an encoder-decoder pair: heads on its target, a trace, metrics; on real services."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from specdec.engine.heads import Heads, save_heads
from specdec.engine.loading.model_folder import open_model_folder
from tests.support.encoder_decoder_models import make_encoder_decoder, make_resembling
from tests.support.otlp_receiver import Receiver
from tests.support.pages import Watched, watched
from tests.support.services import fixed
from tests.support.traces import SOON, attributes, environment, trace_of

PROMPT = "return sum(value for value in values)"
SAMPLING = {"greedy": {"temperature": 0.0}, "coupled": {"temperature": 0.8, "seed": 4}}


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with Receiver() as started:
        yield started


@pytest.fixture(scope="module")
def place(receiver: Receiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A traced pair with pages; its target has heads that repeat its own next token."""
    folder = tmp_path_factory.mktemp("t5")
    target = make_encoder_decoder(folder / "target", "t5-gated-tied", seed=1)
    draft = make_resembling(folder / "draft", target)
    save_heads(Heads(2, 64), folder, open_model_folder(str(target)).digest())
    traced = {"otlp_traces_endpoint": receiver.endpoint}
    own = {"coordinator": dict(traced), "target": {"heads": str(folder)}, "dtype": "float32", **traced}
    with environment(**SOON), watched((target, draft), **own) as started:
        yield started


@pytest.mark.parametrize("kind", SAMPLING)
def test_heads_propose_and_change_no_text(place: Watched, kind: str) -> None:
    """Claim: heads on such a target propose tokens, which are verified, and the text is that of plain decoding.
    Conclusive: what heads propose is proved with the rows of other kinds, and here with a model of this one
    (test_heads.py); the proposers are named, so none else takes part."""
    client = place.services.client
    asked = {"max_tokens": 40, "ignore_eos": True, "logprobs": 1, **SAMPLING[kind]}
    plain = client.generate(PROMPT, **asked, speculative={"enabled": False})
    found = client.generate(PROMPT, **asked, speculative=fixed(2, proposers=["PROPOSER_HEADS"]))
    assert found.comparable == plain.comparable
    assert found.finished.statistics.num_heads_draft_tokens > 20 > found.finished.statistics.num_model_draft_tokens


def test_a_trace_is_whole_and_the_command_reads_it(place: Watched, receiver: Receiver) -> None:
    """Claim: a generation is one trace of three services without orphans, which tells the tokens of input and beginning
    together, and `specdec trace` shows it. Conclusive: sent by the real exporter, and read by the real command."""
    outcome = place.services.client.generate(PROMPT, max_tokens=30, ignore_eos=True, temperature=0.0)
    trace = trace_of(receiver, outcome)
    assert not trace.orphans and set(trace.services.values()) == {f"specdec-{own}" for own in place.addresses}
    (root,) = trace.named("Generate")
    own, usage = attributes(root), outcome.finished.usage
    assert own["gen_ai.usage.input_tokens"] == usage.prompt_tokens == usage.encoder_tokens + 1
    with receiver.serve_http() as jaeger:
        line = [sys.executable, "-m", "specdec.cli", "trace", outcome.finished.trace_id, "--jaeger", jaeger]
        shown = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert shown.returncode == 0 and "prefill" in shown.stdout and "30 tokens" in shown.stdout, shown


def test_metrics_count_both_parts_of_a_prompt(place: Watched) -> None:
    """Claim: the coordinator counts tokens of prompts and those among them of inputs, as the usage tells. Conclusive:
    the page before and after one generation, and nothing else is asked meanwhile."""
    names = "vllm:prompt_tokens_total", "specdec_encoder_tokens_total"
    before = [place.page("coordinator").value(name) for name in names]
    usage = place.services.client.generate(PROMPT, max_tokens=5, temperature=0.0).finished.usage
    after = [place.page("coordinator").value(name) for name in names]
    assert [new - old for old, new in zip(before, after, strict=True)] == [usage.prompt_tokens, usage.encoder_tokens]
