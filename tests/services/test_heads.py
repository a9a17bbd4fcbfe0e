"""Heads on the target through a real target process: the proposals that a verification gets, and what is refused.

The stream is opened by the test itself: it sends only what a test says.
"""

from __future__ import annotations

import contextlib
import functools
import queue
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import silu

from specdec.config import TargetSettings
from specdec.engine.heads import Heads, save_heads
from specdec.engine.loading.model_folder import open_model_folder
from specdec.errors import ConfigError
from specdec.launch.children import Child, start
from specdec.protocol.heads import HEAD_CANDIDATES, HeadProposals
from specdec.protocol.items import Failure, Open, Verification, VerificationResult
from specdec.protocol.rejection import conclude
from specdec.protocol.types import ResolvedSamplingParams, Rule, point_mass
from specdec.rpc.convert_items import item_from_message, item_to_bytes
from specdec.v1 import target_service_pb2 as target_pb
from specdec.v1 import target_service_pb2_grpc as target_pb_grpc
from specdec.v1 import types_pb2 as types_pb
from tests.support.encoder_decoder_models import START, PairReference, make_encoder_decoder
from tests.support.engine_models import make_tiny_model, model_class, random_tokens

HEAD_COUNT, HIDDEN_SIZE, VOCABULARY_SIZE = 3, 64, 288
GREEDY = ResolvedSamplingParams(Rule.GREEDY, seed=1, prompt_length=1, temperature=0.0)
COUPLED = ResolvedSamplingParams(Rule.COUPLED, seed=9, prompt_length=1, temperature=1.0)
PROMPTS = (random_tokens(9, 1), random_tokens(21, 2), random_tokens(4, 3))
DRAFT = tuple(random_tokens(3, 4))


class Stream:
    """One stream to a target."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._requests: queue.Queue[bytes | None] = queue.Queue()
        method = self._channel.stream_stream("/specdec.v1.TargetService/Verify")
        self._answers = method(iter(self._requests.get, None), timeout=60.0)

    def ask(self, *items: Open | Verification) -> list[VerificationResult | Failure]:
        """Sends items in one message; returns as many answers as there are verifications."""
        self._requests.put(b"".join(item_to_bytes(target_pb.VerifyRequest, item) for item in items))
        found: list[VerificationResult | Failure] = []
        while len(found) < sum(isinstance(item, Verification) for item in items):
            found += map(item_from_message, target_pb.VerifyResponse.FromString(next(self._answers)).items)
        return found

    def close(self) -> None:
        self._answers.cancel()
        self._requests.put(None)
        self._channel.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "llama", "llama")


def drawn_heads() -> Heads:
    """Random heads, each of them sure of some tokens."""
    own = Heads(HEAD_COUNT, HIDDEN_SIZE).requires_grad_(False)
    own.weight.copy_(torch.randn(own.weight.shape, generator=torch.Generator().manual_seed(7)) / 4)
    return own


@pytest.fixture(scope="module")
def heads(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of the model."""
    folder = tmp_path_factory.mktemp("heads")
    save_heads(drawn_heads(), folder, open_model_folder(str(model)).digest())
    return folder


@contextlib.contextmanager
def target(model: Path, heads: Path | str, **more: int) -> Iterator[Child]:
    """A running target."""
    settings = TargetSettings(model=str(model), heads=str(heads), port=0, threads=1, device="cpu", **more)
    child = start("target", settings)
    try:
        child.wait_ready()
        yield child
    finally:
        child.stop()


@contextlib.contextmanager
def stream(model: Path, heads: Path | str, **more: int) -> Iterator[Stream]:
    """A stream to a target of its own."""
    with target(model, heads, **more) as child, contextlib.closing(Stream(child.address)) as own:
        yield own


@pytest.fixture(scope="module")
def running_target(model: Path, heads: Path) -> Iterator[Child]:
    with target(model, heads) as child:
        yield child


@pytest.fixture
def with_heads(running_target: Child) -> Iterator[Stream]:
    """A stream of one test, to a target that serves all: a stream ends when nothing is sent for seconds."""
    with contextlib.closing(Stream(running_target.address)) as own:
        yield own


def describe(child: Child) -> types_pb.DescribeResponse:
    with grpc.insecure_channel(child.address) as channel:
        return target_pb_grpc.TargetServiceStub(channel).Describe(types_pb.DescribeRequest(), timeout=10)


def test_describe_tells_the_heads_and_their_times(running_target: Child) -> None:
    """Claim: a replica's description has the number of its heads, and the time they add to steps of 1 to 16 sessions,
    as measured: never 0, and never less for more sessions."""
    described = describe(running_target)
    assert described.num_heads == HEAD_COUNT
    assert [entry.rows for entry in described.head_times] == [1, 2, 4, 8, 16]
    times_us = [entry.step_us for entry in described.head_times]
    assert len(times_us) > 2 and times_us == sorted(times_us) and times_us[0] > 1


def opened(session: int, params: ResolvedSamplingParams = GREEDY) -> Open:
    return Open(session, 1, params, 64, VOCABULARY_SIZE)


def verification(session: int, prompt: list[int], wants: bool, parents: tuple[int, ...] = ()) -> Verification:
    return Verification(session, 1, 0, len(prompt), tuple(prompt), DRAFT, parents=parents, wants_heads=wants)


@functools.cache
def plain_model(model: Path) -> Any:
    """The model as `transformers` has it."""
    return model_class("llama").from_pretrained(model, dtype=torch.float32).eval()


def expected(model: Path, heads: Path, path: Sequence[int]) -> torch.Tensor:
    """Probabilities of the heads after a path, from `transformers` and the formula.  # [heads, vocabulary]"""
    plain = plain_model(model)
    weights = {name: value.float() for name, value in load_file(heads / "heads.safetensors").items()}
    with torch.inference_mode():
        x = plain.base_model(torch.tensor([[*path]])).last_hidden_state[0, -1]
        each = [x + silu(x @ weights["weight"][head] + weights["bias"][head]) for head in range(HEAD_COUNT)]
        return plain.lm_head(torch.stack(each))[..., :VOCABULARY_SIZE].softmax(-1)


def check_proposals(found: HeadProposals, probabilities: torch.Tensor) -> None:
    """Candidates are the likeliest two, in order; confidences their probabilities times 255, rounded down; near ties
    and near borders may fall either way."""
    assert len(found.candidates) == HEAD_COUNT
    for head, candidates in enumerate(found.candidates):
        top = probabilities[head].topk(HEAD_CANDIDATES)
        for candidate, wanted in zip(candidates, top.values.tolist()):
            own = float(probabilities[head, candidate.token_id])
            assert abs(own - wanted) < 1e-4, head
            assert int(255 * own - 0.1) <= candidate.confidence <= int(255 * own + 0.1)


def continuation(stream: Stream, session: int, params: ResolvedSamplingParams, prompt: list[int]) -> list[int]:
    """The tokens that the target puts after a prompt, one more than a draft has, from sessions of their own."""
    found: list[int] = []
    for length in range(len(DRAFT) + 1):
        ask = Verification(session + length, 1, 0, len(prompt) + length, (*prompt, *found))
        (answer,) = stream.ask(opened(session + length, params), ask)
        found += answer.output.recovered_token_ids
    return found


@pytest.mark.parametrize("rank_count", [1, pytest.param(2, marks=[pytest.mark.more, pytest.mark.lengthy])])
def test_proposals_are_those_after_the_last_accepted_token(model: Path, heads: Path, rank_count: int) -> None:
    """Claim: sessions that want proposals, several in a step, get those of the row that the coordinator's verdict
    commits last, the likeliest two tokens of every head with their probabilities, under each rule, after chains and in
    a tree; on one rank and on two. Conclusive: probabilities are computed by `transformers` and the paper's formula,
    text by text; drafts are the target's own text up to each length, so each row is the last of one; and the proposals
    of different texts differ, so a wrong row would show."""
    rejection = ResolvedSamplingParams(Rule.REJECTION, seed=4, prompt_length=1, temperature=0.02)
    rows, firsts, together = set(), set(), 0
    with stream(model, heads, tensor_parallel_size=rank_count) as own:
        opens: dict[int, Open] = {}
        asks: list[Verification] = []
        for number, params in enumerate((GREEDY, COUPLED, rejection)):
            prompt, first = PROMPTS[number], 100 * (number + 1)
            text = continuation(own, first, params, prompt)
            wrong = [(token + 1) % VOCABULARY_SIZE for token in text]
            drafts = [((*text[:length], *wrong[length : len(DRAFT)]), ()) for length in range(len(DRAFT) + 1)]
            drafts.append(((wrong[0], text[0], text[1]), (0, 0, 2)))
            for offset, (draft, parents) in enumerate(drafts):
                session = first + 50 + offset
                probs = tuple(map(point_mass, draft)) if params is rejection else ()
                opens[session] = opened(session, params)
                asks.append(
                    Verification(
                        session, 1, 0, len(prompt), tuple(prompt), draft, probs, parents=parents, wants_heads=True
                    )
                )
        asked = {ask.session: ask for ask in asks}
        for answer in own.ask(*opens.values(), *asks):
            ask, params = asked[answer.session], opens[answer.session].params
            verdict = conclude(params, ask, answer.output)
            together = max(together, answer.step_sessions)
            path = [*ask.suffix_token_ids, *(ask.draft_token_ids[index] for index in verdict.accepted)]
            check_proposals(answer.output.head_proposals, expected(model, heads, path))
            rows.add((params.rule, bool(ask.parents), verdict.last_row))
            firsts.add(answer.output.head_proposals.token_ids)
    assert rows == {
        (rule, is_tree, row) for rule in Rule for is_tree in (False, True) for row in ((3,) if is_tree else range(4))
    }
    assert together > 1
    assert len(firsts) == 3 * (len(DRAFT) + 1)  # of the tree: a chain has the same path


def test_only_who_asks_gets_proposals_and_they_change_nothing_else(with_heads: Stream, model: Path) -> None:
    """Claim: of two sessions of one step with the same tokens only the one that wants proposals has some, and their
    recovered tokens are equal; a target without heads answers the same request without proposals, and tells no times
    of heads."""
    asks: list[Open | Verification] = [opened(11, COUPLED), opened(12, COUPLED)]
    asks += [verification(11, PROMPTS[0], True), verification(12, PROMPTS[0], False)]
    answers = {answer.session: answer.output for answer in with_heads.ask(*asks)}
    assert answers[11].head_proposals is not None and answers[12].head_proposals is None
    assert answers[11]._replace(head_proposals=None) == answers[12]
    with target(model, "none") as child, contextlib.closing(Stream(child.address)) as without:
        (answer,) = without.ask(opened(1, COUPLED), verification(1, PROMPTS[0], True))
        assert describe(child).step_times and not describe(child).head_times
    assert answer.output == answers[12]


def test_a_round_sent_again_has_its_proposals_again(with_heads: Stream) -> None:
    """Claim: the same round is answered from memory with its proposals; asked without them it is another question and
    refused, as with other tokens (design, section 4)."""
    ask = verification(21, PROMPTS[1], True)
    (first,) = with_heads.ask(opened(21), ask)
    (again,) = with_heads.ask(ask)
    assert again == first and again.output.head_proposals
    (refused,) = with_heads.ask(verification(21, PROMPTS[1], False))
    assert isinstance(refused, Failure) and refused.field == "round_index"


@pytest.mark.more
def test_heads_of_another_target_and_no_heads_are_refused_before_serving(
    model: Path, heads: Path, table_models: tuple[Path, Path], tmp_path: Path
) -> None:
    """Claim: a target with heads of another one, with a folder without heads, or without hidden states, does not
    serve; its error names folder and reason."""
    other = make_tiny_model(tmp_path / "other", "llama", seed=1)
    for folder, own, sentence in (
        (other, heads, f"{heads} has heads of another target"),
        (model, tmp_path, f"{tmp_path} has no heads.json"),
        (table_models[0], heads, f"--heads is {heads}; table model (protocol tests only) has no hidden states"),
    ):
        with pytest.raises(ConfigError) as refused, target(folder, own):
            pass
        assert sentence in str(refused.value)


@pytest.mark.parametrize("kind", ["t5-gated", pytest.param("t5-gated-tied", marks=pytest.mark.more)])
def test_an_encoder_decoder_proposes_after_its_output(kind: str, tmp_path: Path) -> None:
    """Claim: the proposals of such a target are those of its decoder's last committed row, after chains of every
    accepted length, with an output layer of its own and with one that scales its rows. Conclusive: `transformers` and
    the paper's formula, with an input that the rows see by cross attention alone."""
    folder = make_encoder_decoder(tmp_path / "t5", kind, seed=1)
    save_heads(drawn_heads(), tmp_path, open_model_folder(str(folder)).digest())
    plain = PairReference(folder).model
    scale = plain.config.d_model**-0.5 if plain.config.scale_decoder_outputs else 1.0
    weights = {name: value.float() for name, value in load_file(tmp_path / "heads.safetensors").items()}
    source = random_tokens(17, 5)
    prompt = [*source, START, 9]
    params = ResolvedSamplingParams(Rule.GREEDY, 1, len(prompt), temperature=0.0, encoder_length=len(source))
    with stream(folder, tmp_path) as own:
        text = continuation(own, 1, params, prompt)
        for length in range(len(DRAFT) + 1):
            wrong = [(token + 1) % VOCABULARY_SIZE for token in text[length : len(DRAFT)]]
            draft = (*text[:length], *wrong)
            ask = Verification(90 + length, 1, 0, len(prompt), tuple(prompt), draft, wants_heads=True)
            (answer,) = own.ask(opened(90 + length, params), ask)
            output = [*prompt[len(source) :], *text[:length]]
            with torch.inference_mode():
                encoded = plain.encoder(torch.tensor([source])).last_hidden_state
                x = plain.decoder(torch.tensor([output]), encoder_hidden_states=encoded).last_hidden_state[0, -1]
                each = [x + silu(x @ weights["weight"][head] + weights["bias"][head]) for head in range(HEAD_COUNT)]
                rows = plain.lm_head(scale * torch.stack(each))[..., :VOCABULARY_SIZE]
            check_proposals(answer.output.head_proposals, rows.softmax(-1))
