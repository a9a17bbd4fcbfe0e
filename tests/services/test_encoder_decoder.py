"""Encoder-decoder models through the running services: a tiny T5, and a draft that resembles it.

The reference for what the model says is `transformers`; for what speculation, resuming and faults must not change it is
the text without speculation.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, processors

from specdec.client.events import event_of
from specdec.client.run import Run
from specdec.config import DraftSettings, TargetSettings
from specdec.v1 import draft_service_pb2 as draft_pb
from specdec.v1 import open_item_pb2 as open_item_pb
from specdec.v1 import target_service_pb2 as target_pb
from tests.chaos.fleets import Fleet, Member, Stream, fleet, wait_under_way
from tests.chaos.tables import REPLICA
from tests.sameness.comparison import compare
from tests.sameness.generations import HEADS_WAY, WAYS, generations
from tests.services.test_bad_input import draft_answers, refused, target_answers, violations
from tests.support.encoder_decoder_models import START, PairReference, make_encoder_decoder, make_resembling
from tests.support.engine_models import END_TOKEN, make_tiny_model
from tests.support.gateways import ask, gateway
from tests.support.services import SHAPES, Outcome, Services, running

END = 0
INPUT_MAX = 256  # of the encoder; a sequence has twice as many positions
TEXTS = (
    "def total(values):",
    "return sum(value for value in values if value is not None)",
    "def total(values): return sum(value for value in values if value is not None) " * 3,
)
COUNT = 32
ASKED: dict[str, Any] = {"max_tokens": COUNT, "ignore_eos": True, "logprobs": 2}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "coupled": {"temperature": 0.9, "seed": 11},
    "coupled, penalised": {"temperature": 0.7, "seed": 12, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
}


def ends_inputs(folder: Path) -> Path:
    """A folder whose tokenizer ends a prompt with the end token, as that of T5 does."""
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END_TOKEN}", special_tokens=[(END_TOKEN, END)]
    )
    tokenizer.save(file)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and its draft."""
    folder = tmp_path_factory.mktemp("t5")
    target = ends_inputs(make_encoder_decoder(folder / "target", "t5-gated", seed=1))
    return target, make_resembling(folder / "draft", target)


@pytest.fixture(scope="module")
def pair(models: tuple[Path, Path]) -> Iterator[Services]:
    """The services of the pair."""
    with running(*models, threads=1, dtype="float32") as services:
        yield services


@pytest.fixture(scope="module")
def reference(models: tuple[Path, Path]) -> PairReference:
    """The target in the hands of `transformers`."""
    return PairReference(models[0])


@pytest.fixture(scope="module")
def tokenizer(models: tuple[Path, Path]) -> Tokenizer:
    return Tokenizer.from_file(str(models[0] / "tokenizer.json"))


@pytest.fixture(scope="module")
def plain(pair: Services) -> dict[tuple[str, str], Outcome]:
    """The texts without speculation, by kind of sampling and prompt."""
    names = [(kind, text) for kind in SAMPLING for text in TEXTS]
    asked = [{"prompt": text, **ASKED, **SAMPLING[kind], "speculative": {"enabled": False}} for kind, text in names]
    return dict(zip(names, pair.client.generate_all(asked, 4), strict=True))


def test_a_text_is_that_of_transformers(
    pair: Services, reference: PairReference, tokenizer: Tokenizer, plain: dict[tuple[str, str], Outcome]
) -> None:
    """Claim: the greedy text of a prompt is that of `transformers` for the same text, tokenised by its own rules; the
    start and the end of a stream tell how many tokens of the prompt are the input, and Describe says the kind.

    Conclusive: a library that this project did not write generates from the ids that it encodes itself, of inputs
    within a block of the cache and of several chunks.
    """
    for text in TEXTS:
        ids, found = tokenizer.encode(text).ids, plain["greedy", text]
        assert ids[-1] == END and found.token_ids == reference.generate(ids, COUNT)
        assert (found.started.prompt_length, found.started.encoder_length) == (len(ids) + 1, len(ids))
        usage = found.finished.usage
        assert (usage.prompt_tokens, usage.encoder_tokens, usage.output_tokens) == (len(ids) + 1, len(ids), COUNT)
    for own in (pair.client.described().target, pair.client.described().draft):
        assert (own.encoder_positions_max, own.positions_max) == (INPUT_MAX, 2 * INPUT_MAX)
        assert list(own.beginning_token_ids) == [START]


@pytest.mark.parametrize("shape", SHAPES)
def test_no_way_to_speculate_changes_a_text(pair: Services, plain: dict[tuple[str, str], Outcome], shape: str) -> None:
    """Claim: tokens, text, log-probabilities and usage under GREEDY and COUPLED are bit for bit those of plain decoding
    with chains, trees, waits, and proposers that search input and output.

    Conclusive: all kinds of sampling and prompts, several at a time; where rounds wait, draft tokens are accepted.
    """
    asked = [{"prompt": text, **ASKED, **SAMPLING[kind], "speculative": SHAPES[shape]} for kind, text in plain]
    found = pair.client.generate_all([own | {"prediction": TEXTS[0]} for own in asked], 3)
    for name, own in zip(plain, found, strict=True):
        assert own.comparable == plain[name].comparable, name
    if shape in ("synchronous", "ahead"):
        assert sum(own.finished.statistics.num_model_accepted_tokens for own in found) > 0


def test_held_out_prompts_are_the_same(pair: Services, models: tuple[Path, Path]) -> None:
    """Claim: of held-out prompts up to the encoder's positions none differs with speculation, in every way to
    speculate. Conclusive: the short form of `python -m tests.sameness --models`, eight at a time."""
    ways = [way for way in WAYS if way != HEADS_WAY]
    asked = generations(4 * len(ways), ways, models[0], INPUT_MAX)
    found = list(compare(pair.client, asked, 8, 8, lambda: None))
    assert {len(one.generation.prompt) for one in found} >= {INPUT_MAX}
    assert [str(one) for one in found if not one.is_same] == [] and any(one.accepted_count for one in found)


def test_rejection_draws_from_the_target(pair: Services, plain: dict[tuple[str, str], Outcome]) -> None:
    """Claim: under REJECTION, chains and trees, the text at a temperature at which the likeliest token is certain is
    the greedy one, and draft tokens are accepted. Conclusive: compared up to the first position at which the second
    token is within 0.3 nats, which is e^30 times less likely at this temperature before it."""
    for _ in range(10):  # a draft that reads its prompt is not waited for
        accepted = 0
        for text in TEXTS:
            greedy = plain["greedy", text]
            tops = [own[2] for own in greedy.logprobs]
            sure = next((at for at, (first, second) in enumerate(tops) if first - second < 0.3), COUNT)
            assert sure > 0
            for shape in ("chain", "waiting siblings"):
                own = {"rule": "RULE_REJECTION", **SHAPES[shape]}
                found = pair.client.generate(text, **ASKED, temperature=0.01, speculative=own)
                assert found.token_ids[:sure] == greedy.token_ids[:sure]
                accepted += found.finished.statistics.num_model_accepted_tokens
        if accepted > 0:
            return
    raise AssertionError("no draft token was accepted")


@pytest.mark.parametrize("kind", SAMPLING)
def test_a_text_is_resumed_at_every_token(pair: Services, plain: dict[tuple[str, str], Outcome], kind: str) -> None:
    """Claim: resumed after any number of its tokens, also at a coordinator that never saw it, a text continues with the
    same tokens and log-probabilities. Conclusive: every token of the text is such a place."""
    whole = plain[kind, TEXTS[1]]
    asked = {"prompt": TEXTS[1], **ASKED, **SAMPLING[kind], "speculative": SHAPES["waiting tree"]}
    with pair.coordinator_with() as client:
        found = client.generate_all([asked | {"resume": whole.token_ids[:count]} for count in range(COUNT)], 3)
    for count, own in enumerate(found):
        assert (own.token_ids, own.logprobs) == (whole.token_ids[count:], whole.logprobs[count:]), count
        assert own.finished.usage == whole.finished.usage


def test_choices_are_the_single_requests_and_the_input_is_read_once(pair: Services) -> None:
    """Claim: choice i is the request with seed + i, and of all choices but the first the target finds the input in its
    cache, though no block of the cache ends where the input does; so does the same input with another beginning, and no
    other input, nor another salt. Conclusive: the numbers of tokens found are the target's own."""
    text, seed = TEXTS[2] + "choices", 21
    asked = ASKED | {"temperature": 0.9, "speculative": SHAPES["tree"]}
    found = pair.client.choices(text, n=3, seed=seed, **asked)
    length = found[0].started.encoder_length
    assert length % pair.client.described().target.cache.block_size
    for index, own in enumerate(found):
        assert own.comparable == pair.client.generate(text, seed=seed + index, **asked).comparable
    cached = [own.finished.statistics.cached_prompt_tokens for own in found]
    assert cached[0] == 0 and min(cached[1:]) >= length
    others = {"beginning": {"decoder_prompt": [START, 7]}, "salt": {"cache_salt": "other"}, "input": {}}
    for name, more in others.items():
        own = pair.client.generate(text + "!" * (name == "input"), seed=seed, **asked, **more)
        assert own.finished.statistics.cached_prompt_tokens == (length if name == "beginning" else 0)


def test_a_beginning_is_the_clients_or_the_models(
    pair: Services, tokenizer: Tokenizer, plain: dict[tuple[str, str], Outcome]
) -> None:
    """Claim: a beginning of token ids takes the place of the model's, text follows it, and both count as prompt: a text
    whose first tokens are given as its beginning continues as it did. Conclusive: greedy texts cut at three places,
    byte by byte but for the text of the beginning."""
    text = TEXTS[1]
    whole = plain["greedy", text]
    for count in (1, 4, 17):
        rest = COUNT - count
        asked = ASKED | {"temperature": 0, "max_tokens": rest, "speculative": SHAPES["tree"]}
        found = pair.client.generate(text, decoder_prompt=[START, *whole.token_ids[:count]], **asked)
        assert (found.token_ids, found.logprobs) == (whole.token_ids[count:], whole.logprobs[count:])
        usage = found.finished.usage
        assert usage.prompt_tokens == usage.encoder_tokens + 1 + count and usage.output_tokens == rest
    words = "return total"
    ids = [START, *tokenizer.encode(words, add_special_tokens=False).ids]
    texts = [pair.client.generate(text, decoder_prompt=own, temperature=0, **ASKED) for own in (words, ids)]
    assert texts[0].comparable == texts[1].comparable and texts[0].token_ids != whole.token_ids


def test_a_penalty_does_not_count_the_input(pair: Services, reference: PairReference, tokenizer: Tokenizer) -> None:
    """Claim: the repetition penalty is that of `transformers` for such a model: tokens of beginning and output count,
    those of the input do not. Conclusive: each token is the likeliest of the reference's logits, penalised so, of an
    input that has all 256 bytes; with the input penalised too the text is another."""
    penalty, ids = 1.7, [*range(1, 200), END]
    found = pair.client.generate(ids, repetition_penalty=penalty, temperature=0, **ASKED).token_ids

    def text_of(counted: list[int]) -> list[int]:
        tokens = [START]
        for _ in range(COUNT):
            logits = reference.logits(ids, tokens)[-1].clone()
            seen = torch.tensor(sorted({*counted, *tokens}))
            chosen = logits[seen]
            logits[seen] = torch.where(chosen > 0, chosen / penalty, chosen * penalty)
            tokens.append(int(logits.argmax()))
        return tokens[1:]

    assert found == text_of([]) != text_of(ids)


def test_log_probabilities_of_a_prompt_are_those_of_its_beginning(
    pair: Services, reference: PairReference, tokenizer: Tokenizer
) -> None:
    """Claim: log-probabilities of the prompt are those of the beginning's tokens but the first, by their index in the
    prompt, as `transformers` computes them, without a token generated; a beginning of one token has none."""
    ids, beginning = tokenizer.encode(TEXTS[2]).ids, [START, 9, 8, 7, 200, 5]
    asked = {"prompt_logprobs": 3, "max_tokens": 0, "temperature": 0}
    run = Run()
    for response in pair.client.stub.Generate(pair.client.request(TEXTS[2], decoder_prompt=beginning, **asked)):
        run.take(event_of(response))
    (part,) = run.prompt_logprobs
    assert part.first_index == len(ids) + 1 and list(part.token_ids) == beginning[1:] and not run.token_ids
    expected = reference.logits(ids, beginning).double().log_softmax(-1)
    for at, (token_id, logprob) in enumerate(zip(part.token_ids, part.logprobs, strict=True)):
        assert abs(expected[at, token_id].item() - logprob) < 1e-3
    events = [own.WhichOneof("event") for own in pair.client.stub.Generate(pair.client.request(TEXTS[2], **asked))]
    assert events == ["started", "finished"]


REFUSED: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    "no input": ("", {}, "prompt.text", "at least one character long"),
    "no ids": ([], {}, "prompt.token_ids", "at least one token id"),
    "input too long": ([1] * (INPUT_MAX + 1), {}, "prompt.token_ids", f"at most {INPUT_MAX} tokens"),
    "text too long": ("x " * INPUT_MAX, {}, "prompt.text", f"at most {INPUT_MAX} tokens"),
    "unknown input token": ([1, 288], {}, "prompt.token_ids[1]", "0 to 287"),
    "unknown beginning token": ([1], {"decoder_prompt": [START, 288]}, "decoder_prompt.token_ids[1]", "0 to 287"),
    "empty beginning": ([1], {"decoder_prompt": ""}, "decoder_prompt.text", "at least one character long"),
    "beginning too long": ([1], {"decoder_prompt": [1] * 512}, "prompt", "at most 511 tokens"),
    "output too long": ([1] * 200, {"max_tokens": 312}, "sampling.max_tokens", "at most 311"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_inputs_are_refused_by_name(pair: Services, case: str) -> None:
    """Claim: an input or beginning that the model cannot take is refused by field, value and limit, and the service
    goes on. Conclusive: a request at the limits is served."""
    prompt, asked, field, limit = REFUSED[case]
    error = refused(pair.client, prompt, **asked)
    assert violations(error) == [field] and limit in str(error.details())
    assert len(pair.client.generate([1] * INPUT_MAX, max_tokens=2, ignore_eos=True).token_ids) == 2


def opened(**own: Any) -> open_item_pb.OpenItem:
    """An item that opens a session with an input of three tokens."""
    params = open_item_pb.ResolvedSamplingParams(rule=1, **{"prompt_length": 4, "encoder_length": 3, **own})
    params.sampling.temperature = 0
    return open_item_pb.OpenItem(session=1, incarnation=1, params=params, length_max=300, vocabulary_size=288)


VERIFICATION = {"session": 1, "incarnation": 1, "base_position": 4, "suffix_token_ids": [1, 2, 3, START]}
COMMIT = {"session": 1, "incarnation": 1, "committed_length": 3, "suffix_token_ids": [1, 2, 3], "window": 3}


def test_replicas_refuse_what_does_not_lie_behind_the_input(pair: Services) -> None:
    """Claim: target and draft refuse a session without an input, and items that build on a part of the input, by field;
    the target also an input longer than its encoder's positions. Conclusive: the same items with the right values are
    answered."""

    def asked(item: open_item_pb.OpenItem, **own: Any) -> target_pb.VerifyResponseItem:
        items = target_pb.VerifyRequestItem(open=item), target_pb.VerifyRequestItem(verify=VERIFICATION | own)
        return target_answers(pair, *items, count=1)[0]

    assert asked(opened()).HasField("result")
    assert asked(opened(encoder_length=0)).error.field == "params.encoder_length"
    assert asked(opened(encoder_length=4)).error.field == "encoder_length"
    beyond = asked(opened(prompt_length=299, encoder_length=INPUT_MAX + 1)).error
    assert beyond.field == "params.encoder_length" and f"at most {INPUT_MAX}, the positions" in beyond.message
    behind = asked(opened(), base_position=3, suffix_token_ids=[1, 2, 3])
    assert behind.error.field == "base_position" and "above encoder_length 3" in behind.error.message
    scored = asked(opened(), prompt_logprobs_start=3)
    assert scored.error.field == "prompt_logprobs_start"
    assert pair.draft is not None
    for item, field in ((opened(), "committed_length"), (opened(encoder_length=0), "params.encoder_length")):
        items = draft_pb.DraftRequestItem(open=item), draft_pb.DraftRequestItem(commit=COMMIT)
        assert draft_answers(pair, *items, count=1)[0].error.field == field


@pytest.mark.more
@pytest.mark.parametrize("is_encoder_draft", [False, True], ids=["decoder draft", "encoder-decoder draft"])
def test_a_draft_of_another_kind_is_not_used(is_encoder_draft: bool, models: tuple[Path, Path], tmp_path: Path) -> None:
    """Claim: a draft that is a decoder alone does not draft for an encoder-decoder target, nor the reverse: Describe
    names both kinds, and texts decode without it. Conclusive: the other model is one that serves, with the same
    tokenizer."""
    decoder = make_tiny_model(tmp_path / "decoder", "llama")
    target, draft = (decoder, models[1]) if is_encoder_draft else (models[0], decoder)
    with running(target, draft, threads=1, dtype="float32") as services:
        said = services.client.described()
        kinds = ["a decoder alone", "an encoder-decoder model"]
        own, others = reversed(kinds) if is_encoder_draft else kinds
        assert said.draft_absent_reason == f"the draft is {own}, the target {others}"
        assert not said.HasField("draft") and not said.drafts
        found = services.client.generate([1, 2, 3], max_tokens=8, ignore_eos=True, temperature=0)
        assert len(found.token_ids) == 8 and found.finished.statistics.num_draft_tokens == 0
        if is_encoder_draft:
            error = refused(services.client, [1], decoder_prompt=[START])
            assert violations(error) == ["decoder_prompt"] and "absent" in str(error.details())


@pytest.mark.more
def test_preempted_texts_are_the_same(models: tuple[Path, Path]) -> None:
    """Claim: in a cache that is too small for all texts at once sessions are preempted, and all texts are those of a
    large cache. Conclusive: the target counts preemptions."""
    prompts = [[seed, *range(1, 20 + seed), END] for seed in range(5)]  # each new one fits, and then they grow
    asked = [{"prompt": own, **ASKED, "max_tokens": 220, "temperature": 0.9, "seed": 5} for own in prompts]
    block_bytes = 2 * 64 * 2 * 4 * 12 * 4  # layers, cells, keys and values, heads, their size, float32
    with running(*models, threads=1, dtype="float32", target={"kv_cache_bytes": 12 * block_bytes}) as services:
        crowded = services.client.generate_all(asked, 6)
        alone = services.client.generate_all(asked, 1)
    assert [own.comparable for own in crowded] == [own.comparable for own in alone]
    assert sum(own.finished.statistics.preemptions for own in crowded) > 0


@pytest.fixture(scope="module")
def place(models: tuple[Path, Path]) -> Iterator[Fleet]:
    """Two targets and two drafts behind slow links, so that texts last."""
    target, draft = (
        kind(**REPLICA, dtype="float32", model=str(model))
        for kind, model in zip((TargetSettings, DraftSettings), models, strict=True)
    )
    coordinator = {"speculation_policy": "fixed", "draft_wait_ms": 2000.0, "tokenizer": str(models[0])}
    with fleet([target] * 2, [draft] * 2, [coordinator], delay_ms=10.0) as made:
        yield made


@pytest.mark.more
@pytest.mark.parametrize("shape", ["synchronous", "waiting siblings"])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_text_outlives_a_replica(place: Fleet, role: str, shape: str) -> None:
    """Claim: when a target or a draft is killed in the midst of texts they go on at another one, as without the fault:
    the new target reads input and output again. Conclusive: all texts are under way at the kill, and some say that they
    changed replicas; they are compared with texts without faults."""
    client = place.clients[0]

    def begin(**own: Any) -> list[Stream]:
        asked = {"max_tokens": 150, "ignore_eos": True, "logprobs": 1, "speculative": SHAPES[shape], **own}
        kinds = [{"temperature": float(seed % 2), "seed": seed} for seed in range(4)]
        return [Stream(client, client.request(TEXTS[seed % 3], **asked, **kind)) for seed, kind in enumerate(kinds)]

    expected = [stream.join().outcome.comparable for stream in begin(speculative={"enabled": False})]
    members: list[Member] = place.targets if role == "target" else place.drafts
    for member in members:  # all texts take the nearer draft, whichever that is
        streams = begin()
        wait_under_way(streams, 20)
        member.kill()
        for stream in streams:
            assert stream.join().error is None
        assert [stream.outcome.comparable for stream in streams] == expected
        changed = [getattr(stream.statistics, f"num_{role}_changes") for stream in streams]
        member.restart()
        place.wait_whole()
        if sum(changed) > 0:
            return
    raise AssertionError(f"no text changed its {role}")


def test_the_command_and_http_take_a_beginning(pair: Services, models: tuple[Path, Path]) -> None:
    """Claim: `specdec generate` and /v1/completions give the text of gRPC, with a beginning of text or token ids; what
    has no meaning for such a model, and both beginnings at once, are refused by name. Conclusive: real processes, and
    the text is compared with that of gRPC."""
    for beginning, flags in (("return", ("--decoder-prompt", "return")), ([START, 9], ("--decoder-prompt-ids", "3,9"))):
        asked = {"max_tokens": 12, "temperature": 0}
        expected = pair.client.generate(TEXTS[0], decoder_prompt=beginning, **asked)
        more = ["--address", pair.client.address, "--max-tokens", "12", "--temperature", "0", "--json", *flags]
        lines = command(TEXTS[0], *more).stdout.splitlines()
        told = [json.loads(line) for line in lines]
        assert "".join(own["delta"].get("text", "") for own in told if "delta" in own) == expected.text
        assert int(told[-1]["finished"]["usage"]["encoder_tokens"]) == expected.started.encoder_length
        with gateway(pair.client.address, model=models[0], served_model_name="t5") as own:
            body = {"prompt": TEXTS[0], "decoder_prompt": beginning, **asked}
            answer = ask(own.address, "/v1/completions", body).json
            assert answer["choices"][0]["text"] == expected.text
            assert answer["usage"]["prompt_tokens"] == expected.started.prompt_length
            for name, value in (("echo", True), ("prompt_logprobs", 1)):
                error = ask(own.address, "/v1/completions", body | {name: value})
                assert error.status == 400 and error.error["param"] == name and "encoder" in error.error["message"]
            chat = ask(own.address, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
            assert chat.status == 400 and "no chat template" in chat.error["message"]
            long = ask(own.address, "/v1/completions", {"prompt": [1] * (INPUT_MAX + 1), "max_tokens": 1})
            assert long.status == 400 and str(INPUT_MAX) in long.error["message"]
    both = command(TEXTS[0], "--decoder-prompt", "x", "--decoder-prompt-ids", "1", "--address", pair.client.address)
    assert both.returncode != 0 and "--decoder-prompt-ids exclude each other" in both.stderr


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `specdec generate`."""
    line = [sys.executable, "-m", "specdec.cli", "generate", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
