"""A head that reads answers: its chains are those of the plain network, the forecast rounds those that are served."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from specdec.advise import command
from specdec.advise.agreement import ROWS, Reader, agreement_along, proposed
from specdec.advise.chains import CHAIN, ChainReader
from specdec.advise.forecast import expected_draft_tokens, expected_rounds
from specdec.advise.settings import AdviseSettings
from specdec.distill.eagle import EagleLearner, draft_ids_of
from specdec.engine.eagle.folder import load_eagle, save_eagle, target_facts
from specdec.engine.eagle.model import EagleTarget
from specdec.engine.eagle.network import EagleHead
from specdec.engine.eagle.pairs import PairChunk, slots_of
from specdec.engine.loading.model import load_model
from specdec.engine.loading.model_folder import open_model_folder
from specdec.errors import ConfigError, ModelRefused
from specdec.protocol.types import ResolvedSamplingParams, Rule
from specdec.v1 import coordinator_service_pb2 as pb
from tests.support.eagle_heads import features_of, random_head
from tests.support.engine_models import make_tiny_model, model_class, random_tokens
from tests.support.services import fixed, running

TEXT = random_tokens(300, 4)
FIRST = 200  # of the positions that are read: more than one slice, after a prompt of more than one too
VOCABULARY_SIZE = 288


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[Tensor]]:
    """By place and position, the logits that the plain network gives over the whole text before it, in `TEXT[FIRST:]`
    with chains from FIRST on."""
    head = random_head()
    with torch.no_grad():
        reduced, table = head.fc(features_of(folder, "llama", TEXT)), table_of(folder)
        found: list[list[Tensor]] = [[] for _ in range(CHAIN)]
        for root in range(FIRST, len(TEXT)):
            features = reduced[:root]
            for place in range(min(CHAIN, len(TEXT) - root)):
                tokens = torch.tensor(TEXT[1 : root + 1 + place])
                x = head(features[None], table[tokens][None], torch.arange(len(tokens)))[0, -1:]
                own = torch.full((1, VOCABULARY_SIZE), -torch.inf)
                found[place].append(own.index_copy_(1, head.target_ids, head.logits(x))[0])
                features = torch.cat([features, x])
    return found


def table_of(folder: Path) -> Tensor:
    table: Tensor = model_class("llama").from_pretrained(folder, dtype=torch.float32).get_input_embeddings().weight
    return table.detach()


def readers_of(folder: Path, head: EagleHead, is_packed: bool) -> tuple[Reader, ChainReader]:
    model = EagleTarget(load_model(str(folder), dtype="float32", has_stable_rows=False), head, is_packed)
    reader = Reader(model, 512)
    return reader, ChainReader(model, reader.blocks)


def read(readers: tuple[Reader, ChainReader], text: Sequence[int], first: int) -> list[Tensor]:
    """The logits by place, of the last positions of a text, as many as chains reach."""
    parts: list[list[Tensor]] = []
    for _, rows in zip(*(reader.read(text, first) for reader in readers)):
        parts.append([rows, *readers[1].deeper])
    assert [len(part[0]) for part in parts] == [ROWS, len(text) - first - ROWS]
    return [torch.cat(place) for place in zip(*parts)]


def check(found: Sequence[Tensor], expected: Sequence[Sequence[Tensor]]) -> None:
    """Fails unless there are these logits and no others."""
    assert len(found) == len(expected) == CHAIN
    for place, (own, wanted) in enumerate(zip(found, expected)):
        assert own.shape == (len(TEXT) - FIRST - place, VOCABULARY_SIZE)
        assert torch.allclose(own, torch.stack([*wanted]), rtol=0, atol=2e-3), place


def test_chains_are_those_of_the_plain_network(folder: Path, expected: list[list[Tensor]]) -> None:
    """Claim: at every position, and for every place in a chain, the logits are those of the plain network: over pairs
    with the target's features up to the token where the chain begins, and with its own x behind it. So they are after
    another text of the same reader. Conclusive: `EagleHead.forward` over the whole text for every chain and place, at
    every position of two slices; mistakes are found below."""
    readers = readers_of(folder, random_head(), is_packed=False)
    read(readers, random_tokens(250, 9), 150)
    check(read(readers, TEXT, FIRST), expected)


Later = Callable[[ChainReader, Sequence[int], int, int, Tensor], PairChunk]


def a_position_shifted_by_one(real: Later) -> Later:
    def later(self: ChainReader, text: Sequence[int], root: int, place: int, x: Tensor) -> PairChunk:
        return replace(real(self, text, root, place, x), base=root)

    return later


def the_targets_feature_behind_the_first_token(real: Later) -> Later:
    def later(self: ChainReader, text: Sequence[int], root: int, place: int, x: Tensor) -> PairChunk:
        storage = self._model.storage
        before = slots_of(self._blocks, numpy.array([root + place - 1]), storage.block_size)
        return replace(real(self, text, root, place, x), features=storage.read(before))

    return later


def a_token_too_early(real: Later) -> Later:
    def later(self: ChainReader, text: Sequence[int], root: int, place: int, x: Tensor) -> PairChunk:
        return replace(real(self, text, root, place, x), token_ids=[text[root + place - 1]])

    return later


def only_its_own_pair(real: Later) -> Later:
    def later(self: ChainReader, text: Sequence[int], root: int, place: int, x: Tensor) -> PairChunk:
        chunk = real(self, text, root, place, x)
        return replace(chunk, base=root + place, paths=[chunk.paths[0][-1:]])

    return later


@pytest.mark.parametrize(
    "mistake",
    [
        a_position_shifted_by_one,
        the_targets_feature_behind_the_first_token,
        a_token_too_early,
        only_its_own_pair,
    ],
)
def test_mistakes_are_found(
    mistake: Callable[[Later], Later], folder: Path, expected: list[list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: the comparison finds planted mistakes in the pairs behind the first of a chain, and first tokens, which
    need none of these, stay right. Conclusive: the same comparison passes without them."""
    monkeypatch.setattr(ChainReader, "_later", mistake(ChainReader._later))
    found = read(readers_of(folder, random_head(), is_packed=False), TEXT, FIRST)
    assert torch.allclose(found[0], torch.stack(expected[0]), rtol=0, atol=2e-3)
    with pytest.raises(AssertionError):
        check(found, expected)


def test_a_target_is_read_by_several_heads(folder: Path, expected: list[list[Tensor]]) -> None:
    """Claim: after another head, of other layers, the same target gives a head its own features. Conclusive: the
    logits are those of the plain network."""
    target, other, own = load_model(str(folder), dtype="float32", has_stable_rows=False), random_head(1), random_head()
    other.config = replace(other.config, aux_layer_ids=(0, 1, 2))
    for head in (other, own):
        model = EagleTarget(target, head, is_packed=False)
        reader = Reader(model, 512)
        readers = reader, ChainReader(model, reader.blocks)
        found = read(readers, TEXT, FIRST)
        if head is other:
            with pytest.raises(AssertionError):
                check(found, expected)
    check(found, expected)


def test_short_answers_have_the_chains_that_fit(folder: Path) -> None:
    """Claim: of three positions chains have three places, of one position one, and coins as many."""
    readers = readers_of(folder, random_head(), is_packed=True)
    params = ResolvedSamplingParams(Rule.COUPLED, 3, prompt_length=1, temperature=0.7)
    for count in (1, 3):
        own = agreement_along(*readers, TEXT[: 2 + count + 1], 2, params)
        assert len(own) == count
        assert {rule: rows.shape for rule, rows in own.deeper.items()} == (
            {rule: (2, 3) for rule in (Rule.COUPLED, Rule.REJECTION)} if count == 3 else {}
        )


TOKENS = 64
ASKED = [(random_tokens(length, length), temperature) for length in (5, 70) for temperature in (0.0, 0.7)]


def params_of(prompt: Sequence[int], temperature: float) -> ResolvedSamplingParams:
    rule = Rule.COUPLED if temperature else Rule.GREEDY
    return ResolvedSamplingParams(rule, 7 if temperature else 0, prompt_length=len(prompt), temperature=temperature)


@torch.no_grad()
def answered(folder: Path, prompt: Sequence[int], temperature: float) -> list[int]:
    """A prompt and the target's answer to it, by `transformers`."""
    model, ids = model_class("llama").from_pretrained(folder, dtype=torch.float32).eval(), [*prompt]
    while len(ids) < len(prompt) + TOKENS:
        logits = model(torch.tensor([ids])).logits[0, -1:, :VOCABULARY_SIZE]
        ids += proposed(logits, [ids], params_of(prompt, temperature))
    return ids


def remembering_head(folder: Path, texts: Sequence[Sequence[int]]) -> EagleHead:
    """A head that has learned the next tokens of these texts; not those it lacks, one in five, and at each place of a
    chain another token behind one in six."""
    ids = torch.tensor([token for token in range(VOCABULARY_SIZE) if token % 5])
    torch.manual_seed(0)
    head = EagleHead(replace(random_head().config, draft_vocabulary_size=len(ids)), ids)
    plan: Any = SimpleNamespace(device="cpu", bf16=False)
    learner = EagleLearner(head, table_of(folder), 4, plan)
    draft_ids = draft_ids_of(head.target_ids, head.config.vocabulary_size)
    features = [features_of(folder, "llama", text)[None].clone() for text in texts]
    steps = torch.optim.Adam(head.parameters(), lr=3e-3)
    for _ in range(120):
        for text, own in zip(texts, features):
            inputs = torch.tensor([[*text]])
            batch: Any = SimpleNamespace(inputs=inputs, features=own)
            loss = torch.zeros(())
            for step, x in enumerate(learner.states(batch)):
                labels = draft_ids[inputs[0, 2 + step :]].clone()
                labels[inputs[0, 1 + step : -1] % 6 == step] = step
                loss = loss + cross_entropy(head.logits(x[0, : len(labels)]), labels, ignore_index=-1)
            loss.backward()
            steps.step()
            steps.zero_grad()
    return head.requires_grad_(False)


@pytest.mark.more
def test_served_rounds_are_the_predicted_ones(folder: Path, tmp_path: Path) -> None:
    """Claim: along a served text the predicted coins give the accepted and the verified draft tokens of the generation,
    one by one: a head on a real target, under GREEDY and, with the seed, under COUPLED, chains of 3. Conclusive: coins
    are 0 or 1 and rounds have no chance in them; coins of the first place for all give other numbers, and some tokens
    of every place are accepted."""
    head = remembering_head(folder, [answered(folder, *asked) for asked in ASKED])
    save_eagle(head, tmp_path)
    with running(folder, None, dtype="float32", threads=1, heads=str(tmp_path)) as services:
        outcomes = [
            services.client.generate(
                prompt,
                speculative=fixed(3, draft_window=3, draft_nodes_per_step=1),
                max_tokens=TOKENS,
                temperature=temperature,
                seed=params_of(prompt, temperature).seed,
                ignore_eos=True,
            )
            for prompt, temperature in ASKED
        ]
    readers = readers_of(folder, load_eagle(tmp_path, target_facts(open_model_folder(str(folder)))), is_packed=True)
    misfits, by_place = 0, torch.zeros(3)
    for (prompt, temperature), outcome in zip(ASKED, outcomes, strict=True):
        assert outcome.kinds[0] == pb.TOKEN_KIND_BONUS
        params = params_of(prompt, temperature)
        own = agreement_along(*readers, [*prompt, *outcome.token_ids], len(prompt), params)
        assert len(own) == TOKENS - 1
        first, deeper = own.passes[params.rule].tolist(), own.deeper[params.rule].tolist()
        statistics = outcome.finished.statistics
        assert statistics.num_accepted_draft_tokens == TOKENS - 1 - expected_rounds(first, 3, deeper)
        assert statistics.num_draft_tokens == expected_draft_tokens(first, 3, deeper)
        misfits += statistics.num_accepted_draft_tokens != TOKENS - 1 - expected_rounds(first, 3)
        by_place += torch.tensor([sum(first), *map(sum, deeper[:2])])
    assert misfits == len(ASKED) and all(60 < count < 0.9 * 4 * TOKENS for count in by_place.tolist()), by_place


def asked_of(folder: Path, **more: Any) -> AdviseSettings:
    return AdviseSettings(target=str(folder), prompts=Path("none"), **more)


def test_what_is_no_head_of_the_target_is_refused(folder: Path, tmp_path: Path) -> None:
    """Claim: a folder of Medusa's heads, one without a head, and a head of another target's sizes are refused by name
    before a model is loaded; without a draft and a head there is nothing to forecast."""
    (tmp_path / "medusa").mkdir()
    (tmp_path / "medusa" / "heads.json").write_text("{}")
    with pytest.raises(ConfigError, match="--heads .*medusa has Medusa's heads; it must be the folder of an EAGLE-3"):
        command.drafters_of(asked_of(folder, heads=(str(tmp_path / "medusa"),)))
    with pytest.raises(ConfigError, match="--heads /nowhere has no config.json"):
        command.drafters_of(asked_of(folder, heads=("/nowhere",)))
    (tmp_path / "head").mkdir()
    head = random_head()
    save_eagle(head, tmp_path / "head")
    (found,) = command.drafters_of(asked_of(folder, heads=(str(tmp_path / "head"),)))
    assert found.head is not None and found.shown == "head" and found.weight_bytes > 0
    other = make_tiny_model(tmp_path / "wide", "llama", hidden_size=96)
    with pytest.raises(ModelRefused, match="target_hidden_size"):
        command.drafters_of(asked_of(other, heads=(str(tmp_path / "head"),)))
    with pytest.raises(ValueError, match="--draft and --heads are missing"):
        asked_of(folder)
