"""The drafter of a draft with another tokenizer: its trees are its own model's, below the text in its own tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from specdec.decoding.proposal import proposals
from specdec.draft_service.drafter import TREE_CELLS, Drafter
from specdec.engine.interface import Chunk, RaggedBatch
from specdec.engine.loading.model import load_model
from specdec.engine.scheduling.scheduler import Engine
from specdec.engine.vocabulary_map import VocabularyMap
from specdec.folders import EMBEDDED_MODELS
from specdec.protocol.items import Commit, Failure
from specdec.replica.handler import ItemHandler
from tests.draft.test_drafter import BLOCK_SIZE, LENGTH_MAX, Draft
from tests.engine.test_retokenizer import trained
from tests.support.engine_models import make_tiny_model
from tests.support.trees import OwnTree

TARGET = EMBEDDED_MODELS / "target"
TEXT = "def total(values):\n    return sum(values)  # café 日本\n"


class OtherDraft(Draft):
    """A hand-stepped drafter whose model has 288 tokens, nearly all single bytes, for a target of 4,096."""

    vocabulary_size = 4096

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.model = load_model(str(folder), "float32", has_stable_rows=False, target_tokenizer=str(TARGET))
        self.engine = Engine(self.model, 400, BLOCK_SIZE, proposals)
        own, known = self.model.description, self.model.description.vocabulary
        assert isinstance(known, VocabularyMap) and known.retokenizer is not None
        self.map, self.retokenizer = known, known.retokenizer
        description = type(self.drafter.description)(
            own.model_digest, "", own.model_name, own.vocabulary_size, own.positions_max, (), own.dtype, "cpu", ""
        )
        self.drafter = Drafter(self.engine, description, None, self.retokenizer)
        self.handler = ItemHandler(self.drafter, 8)
        self.reference.allocate(2 * LENGTH_MAX // BLOCK_SIZE + 2, BLOCK_SIZE)

    def next_token(self, path: list[int]) -> int:
        """The model's likeliest common token after the text read so far and the nodes below it, from nothing."""
        (session,) = self.sessions
        below = path[len(session.tokens) :]
        own = self.map.own(torch.tensor([*session.read_tokens, *below])).tolist()
        blocks = range(1, len(own) // BLOCK_SIZE + 2)
        with torch.inference_mode():
            output = self.reference.forward(RaggedBatch((Chunk(list(blocks), 0, own, 1),)))
        return int(self.map.spread(output.logits[:, self.map.columns]).argmax())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("draft"), "llama", vocabulary_size=288)


@pytest.fixture
def draft(folder: Path) -> Iterator[OtherDraft]:
    yield OtherDraft(folder)


def test_every_branch_is_evaluated_below_the_text_in_the_drafts_tokens(draft: OtherDraft) -> None:
    """Claim: every proposal is the likeliest common token of the draft's own model, run from nothing on its own tokens
    for the committed text and the nodes below, over commits along the tree, at strangers the draft lacks, and of
    several tokens. Conclusive: each is compared, in positions and cells that differ from the target's."""
    rng = random.Random(5)
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    draft.open(1, tokenizer.encode(TEXT).ids)
    unknown = sorted(set(range(300, 4096)) - draft.retokenizer.own_of.keys())
    kinds = {"tree": 0, "common": 0, "stranger": 0, "several": 0, "other": 0}
    while len(draft.trees[1].committed) < LENGTH_MAX // 2:
        for _ in range(rng.randrange(1, 5)):
            draft.step()
        path = [node.token_id for node in draft.trees[1].proposal_path(3)]
        strangers = [rng.choice(unknown) for _ in range(3)]
        kind = rng.choice([name for name in kinds if path or name != "tree"])
        kinds[kind] += 1
        chosen = {"tree": path, "common": [66], "stranger": path + strangers[:1], "several": strangers}.get(kind)
        if chosen is None:  # a coordinator that starts again from an earlier token
            draft.trees[1] = OwnTree([*draft.trees[1].committed[:-2], strangers[0], 66, strangers[1]])
            committed = draft.trees[1].committed
            draft.tell(Commit(1, 1, len(committed), tuple(committed[-3:]), 8, 8))
        else:
            draft.commit(1, *chosen)
        (session,) = draft.sessions
        assert session.shift > 0 or not draft.failures
    draft.settle()
    assert not draft.failures and all(kinds.values()), (draft.failures, kinds)
    assert session.shift > 20, "single bytes"


def test_a_text_too_long_for_the_draft_ends_its_session_alone(draft: OtherDraft) -> None:
    """Claim: when the draft's tokens for a text are more than it has cells, its session ends with CACHE_EXHAUSTED; the
    cache is whole after it."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    four = next(one for one in range(4096) if len(tokenizer.decode([one])) == 4 and one not in draft.retokenizer.own_of)
    draft.open(1, [four] * 60)
    draft.settle()
    assert [type(one) for one in draft.failures] == [Failure] and draft.failures[0].reason == "CACHE_EXHAUSTED"
    assert not draft.sessions and TREE_CELLS
    draft.engine.cache.check_integrity()


def test_a_prompt_of_which_the_draft_can_read_nothing(tmp_path: Path) -> None:
    """Claim: a prompt that the draft's tokenizer drops whole is an unknown token to it, so that a step has one: the
    draft proposes, and reads the text that follows. Conclusive: without it the step raises."""
    folder = make_tiny_model(tmp_path / "draft", "llama", vocabulary_size=288)
    trained("words").save(str(folder / "tokenizer.json"))
    draft = OtherDraft(folder)
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    prompt, following = (tokenizer.encode(text).ids for text in ("\n", " total"))
    assert draft.retokenizer.read(prompt, is_start=True)[0] == []
    draft.open(1, prompt)
    draft.settle()
    draft.commit(1, *following)
    draft.settle()
    (session,) = draft.sessions
    assert not draft.failures and len(session.read_tokens) > 1
    assert session.read_tokens[0] == draft.vocabulary_size + draft.retokenizer.unknown
