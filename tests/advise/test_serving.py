"""What `specdec advise` asks of a served pair, and the device that its texts are written on."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specdec.advise import command
from specdec.advise.measuring import EVERYTHING, Text, written
from specdec.advise.serving import (
    PROBED,
    Outcome,
    acceptance_of,
    asked_of,
    mean_length_of,
    observe,
    probe,
    probed,
    rate_of,
)
from specdec.advise.settings import AdviseSettings
from specdec.client.events import event_of
from specdec.client.run import Run
from specdec.client.stream import Client
from specdec.config import ServeSettings
from specdec.distill.plans import Plans
from specdec.distill.texts import LabelledTexts
from specdec.distill.writing import TextOrder, TextWriter, params_of
from specdec.engine.loading.model import load_model
from specdec.engine.loading.model_folder import open_model_folder
from specdec.errors import ConfigError
from specdec.protocol.limits import UINT64_MAX
from specdec.protocol.types import ResolvedSamplingParams, Rule
from specdec.v1 import coordinator_service_pb2 as coordinator_pb
from specdec.v1 import types_pb2 as types_pb
from tests.support.engine_models import make_tiny_model
from tests.support.services import MODELS

TOKENS = 12
NO_MACHINE_HAS = "cuda:999"
QUIET = Console(quiet=True)


def text_of(seed: int, temperature: float) -> Text:
    rule = Rule.COUPLED if temperature else Rule.GREEDY
    params = ResolvedSamplingParams(rule=rule, seed=seed, prompt_length=1, temperature=temperature)
    return Text(EVERYTHING, params, (5, 6, 7, 8, 9), 2)


@pytest.mark.parametrize("seed", [0, 7, 1 << 63, UINT64_MAX])
def test_a_served_text_is_a_new_generation_of_the_same_prompt(seed: int) -> None:
    """Claim: --check asks for the prompt of a text, at its temperature, with another seed, which is one that a request
    may have; with rounds of drafts and without it is the same, so that both generate one text."""
    text = text_of(seed, 0.7)
    plain, drafted = (asked_of(text, length, TOKENS) for length in (0, 3))
    for request in (plain, drafted):
        assert list(request.token_ids.ids) == [5, 6, 7]
        assert request.sampling.temperature == pytest.approx(0.7) and request.sampling.max_tokens == TOKENS
        assert request.sampling.HasField("seed") and request.sampling.seed != seed
    assert plain.sampling.seed == drafted.sampling.seed


def test_seeds_of_served_texts_differ_and_greedy_ones_have_none() -> None:
    """Claim: texts with different seeds are asked with different ones; a greedy text has none, as nothing is drawn."""
    seeds = {asked_of(text_of(seed, 1.0), 1, TOKENS).sampling.seed for seed in range(50)}
    assert len(seeds) == 50
    assert not asked_of(text_of(3, 0.0), 1, TOKENS).sampling.HasField("seed")


def test_rejection_is_asked_for_by_name_and_without_a_seed() -> None:
    """Claim: under REJECTION a sampled text is asked at its temperature with the rule's name and no seed, which that
    rule refuses; otherwise no rule is named, as seed and temperature decide it."""
    asked = asked_of(text_of(3, 0.7), 2, TOKENS, rule=Rule.REJECTION)
    assert asked.speculative.rule == types_pb.RULE_REJECTION and not asked.sampling.HasField("seed")
    assert asked.sampling.temperature == pytest.approx(0.7)
    for rule, temperature in ((Rule.COUPLED, 0.7), (Rule.GREEDY, 0.0), (None, 0.7)):
        assert not asked_of(text_of(3, temperature), 2, TOKENS, rule=rule).speculative.rule


def test_observed_values_are_those_of_all_outcomes() -> None:
    """Claim: acceptance, tokens of a round and rate are of all outcomes together, and outcomes of one prompt are one
    sample of the interval. By hand: 3 and 0 of 4 draft tokens in 2 rounds each, 10 tokens in 2 and 3 s."""
    first, second = (Outcome(text_of(3, 0.7), Rule.REJECTION, own, 4.0, 2.0, 10.0, s) for own, s in ((3, 2), (0, 3)))
    values = [of([first, second]) for of in (acceptance_of, mean_length_of, rate_of)]
    assert [value.value for value in values] == pytest.approx([3 / 8, 7 / 4, 4])
    assert all(value.low == value.high for value in values[1:])
    assert values[0].low < values[0].value < values[0].high  # of one prompt: others may be unlike it
    other = replace(second, text=replace(second.text, token_ids=(1, 2, 3, 4)))
    lengths = mean_length_of([first, other])
    assert (lengths.low, lengths.high) == pytest.approx((1, 5 / 2)) and acceptance_of([first, other]).low == 0


def texts_of(prompt_count: int, *temperatures: float) -> list[Text]:
    """Texts in the order in which they are written: all temperatures of a prompt, then the next prompt."""
    return [
        replace(text_of(7, temperature), token_ids=(prompt, 6, 7, 8))
        for prompt in range(prompt_count)
        for temperature in temperatures
    ]


@pytest.mark.parametrize("prompt_count", [1, 2, 3, 6, 40])
@pytest.mark.parametrize("temperatures", [(0.0,), (0.0, 0.7), (0.0, 0.7, 1.0), (0.0, 0.3, 0.5, 0.7, 1.0)])
def test_rounds_of_every_temperature_are_timed(prompt_count: int, temperatures: tuple[float, ...]) -> None:
    """Claim: of every temperature as many texts are timed, at least 3 in all where there are, none twice, and of as
    many prompts as texts, if there are. Conclusive: three at equal distances in the list have, with 3 temperatures and
    3 or 6 prompts, one temperature, and with 5 temperatures never all."""
    chosen = probed(texts_of(prompt_count, *temperatures))
    counts = {at: sum(text.params.temperature == at for text in chosen) for at in temperatures}
    assert len({*counts.values()}) == 1 and len({*chosen}) == len(chosen)
    assert len(chosen) >= min(3, prompt_count * len(temperatures))
    assert len({text.prompt_ids for text in chosen}) >= min(prompt_count, len(chosen))


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Fills with the requests that a pair is sent; each is answered by a token a second, in as many rounds."""
    sent: list[Any] = []

    async def answer(client: Client, request: Any) -> Run:
        sent.append(request)
        count = request.sampling.max_tokens
        ended = coordinator_pb.Finished(reason=1, statistics=coordinator_pb.Statistics(rounds=count))
        run = Run(list(range(count)), deltas=[(0.0, 1), (count - 1.0, count - 1)])
        run.take(event_of(coordinator_pb.GenerateResponse(finished=ended)))
        return run

    monkeypatch.setattr(Client, "read", answer)
    return sent


@pytest.mark.parametrize(("text_tokens", "asked"), [(3, 3), (47, 47), (49, 48), (4000, 48)])
def test_timed_rounds_fit_where_the_texts_did(requests: list[Any], text_tokens: int, asked: int) -> None:
    """Claim: rounds are timed on at most as many tokens as the texts may have, for which there are positions, and at
    most on 48; every number of draft tokens has its mean, here of a second a round. Conclusive: with 48 for every text
    the first two cases ask for more."""
    rounds_s = asyncio.run(probe("127.0.0.1:1", texts_of(2, 0.0, 0.7), text_tokens, QUIET))
    assert {request.sampling.max_tokens for request in requests} == {asked} and len(requests) == 4 * len(PROBED)
    assert rounds_s == [(length, pytest.approx(1.0)) for length in PROBED]


def test_serving_shows_how_far_it_is(requests: list[Any]) -> None:
    """Claim: a terminal shows a bar while rounds are timed and while the plan is served, that ends full; what is asked
    is the same: each text under its rule, then without drafts, a sampled one then under REJECTION. Without a terminal
    nothing is printed."""
    shown, silent = (Console(file=io.StringIO(), force_terminal=own, width=80) for own in (True, False))
    texts = texts_of(2, 0.0, 0.7)
    for console in (shown, silent):
        asyncio.run(probe("127.0.0.1:1", texts, TOKENS, console))
        outcomes = asyncio.run(observe("127.0.0.1:1", texts, 2, TOKENS, console))
        assert [outcome.rule for outcome in outcomes[:5]] == [Rule.GREEDY, None, Rule.COUPLED, None, Rule.REJECTION]
    assert all(line in shown.file.getvalue() for line in ("rounds are timed", "the plan is served"))
    assert shown.file.getvalue().count("100%") >= 2 and silent.file.getvalue() == ""


@pytest.mark.parametrize(("told", "of_each"), [(0, 1), (3, 3)])
def test_the_pair_is_served_with_the_threads_that_are_told(
    told: int, of_each: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Claim: --threads N gives N threads to target and draft as they are served; without it each has one. Conclusive:
    the settings of both services, at the place where they are started."""
    started: list[ServeSettings] = []

    @contextmanager
    def running(settings: ServeSettings) -> Iterator[None]:
        started.append(settings)
        raise ConfigError("not started")
        yield

    monkeypatch.setattr("specdec.launch.serving.running", running)
    monkeypatch.setattr(command, "measured", lambda *_: [[]])
    monkeypatch.setattr(command, "prepare_libraries", lambda threads: None)
    asked = AdviseSettings(
        target=str(MODELS / "target"), draft=str(MODELS / "draft"), prompts=tmp_path, threads=told, device="cpu"
    )
    with pytest.raises(ConfigError, match="not started"):
        command.advise(asked)
    (own,) = started
    assert own.target_settings().threads == own.draft_settings().threads == of_each


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "llama", "llama")


def test_the_new_seed_gives_another_text(folder: Path) -> None:
    """Claim: the seed that --check asks with gives another text than the one that was predicted from, for every prompt.
    Conclusive: a real tiny model writes both; with the seed of the predicted one it writes that again."""
    model = load_model(str(folder), dtype="float32", has_stable_rows=False)
    plans = Plans(folder, (1.0,), TOKENS, "advise/0", ["total", "value", "return"]).make(0, 3)

    def texts_with(seeds: list[int]) -> list[list[int]]:
        own: list[TextOrder] = [replace(plan, seed=seed) for plan, seed in zip(plans, seeds, strict=True)]
        with TextWriter(model, 3, max(plan.length_max for plan in own)) as writer:
            texts: LabelledTexts = writer.write(own)
        return [part.tolist() for part in texts.token_ids.split(texts.lengths.tolist())]

    predicted = texts_with([plan.seed for plan in plans])
    every = [(params_of(plan, plan.passages[0]), plan.passages[0].given) for plan in plans]
    asked = [asked_of(Text(EVERYTHING, params, given, 0), 2, TOKENS) for params, given in every]
    new = texts_with([own.sampling.seed for own in asked])
    assert all(before != after for before, after in zip(predicted, new, strict=True))
    assert texts_with([plan.seed for plan in plans]) == predicted


@pytest.mark.parametrize("longest", [1, 2])
def test_answers_without_a_round_are_refused(folder: Path, longest: int) -> None:
    """Claim: if every answer ends within 2 tokens, the first of which comes with the prompt, --prompts is refused; with
    3 it is not. Conclusive: a model writes them, and nothing to read is left, or a rate of 0."""
    model = load_model(str(folder), dtype="float32", has_stable_rows=False)
    about = model, open_model_folder(str(folder))
    with pytest.raises(ConfigError, match="answers to --prompts all end within 2 tokens"):
        written(*about, ("0,1", longest, 0), {"total": EVERYTHING}, QUIET)
    assert written(*about, ("0,1", 3, 0), {"total": EVERYTHING}, QUIET)


def test_texts_are_written_on_the_device_that_is_named(folder: Path) -> None:
    """Claim: `written` gives the device's name to the writer, whose blocks and free memory are then that device's.
    Conclusive without a GPU: a device that no machine has is refused by name, by the writer and nothing before it."""
    model = load_model(str(folder), has_stable_rows=False)
    about = model, open_model_folder(str(folder)), ("0", 4, 0), {"total": EVERYTHING}, QUIET
    assert len(written(*about, "cpu")) == 1
    with pytest.raises(ConfigError, match=NO_MACHINE_HAS):
        written(*about, NO_MACHINE_HAS)
