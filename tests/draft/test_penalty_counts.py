"""What the drafter reads of a long context under penalties, over whole steps of its engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.decoding.proposal import proposals
from specdec.draft_service.drafter import Drafter
from specdec.engine.loading.model import load_model
from specdec.engine.scheduling.scheduler import Engine
from specdec.engine.table_model import write_table_model
from specdec.protocol.items import Commit, Nodes, Open
from specdec.protocol.types import Description, ResolvedSamplingParams, Rule
from specdec.replica.handler import ItemHandler
from tests.support.read_list import ReadList

VOCABULARY_SIZE, POSITIONS_MAX, BLOCK_SIZE = 7, 4400, 8
WINDOW, NODES_PER_STEP = 12, 4
READ_PER_COMMIT = 4  # the new token where it is held, followed, counted and fed


class CountedDraft:
    """A drafter on a table model, stepped by hand, with one session whose reads of its committed tokens are counted."""

    def __init__(self, folder: Path, rule: Rule, length: int, penalties: dict[str, float]) -> None:
        self.engine = Engine(
            load_model(str(folder), "float32"), POSITIONS_MAX // BLOCK_SIZE + 32, BLOCK_SIZE, proposals
        )
        own = self.engine.model.description
        known = own.model_digest, "", own.model_name, VOCABULARY_SIZE, POSITIONS_MAX, (), own.dtype, "cpu", ""
        self.drafter = Drafter(self.engine, Description(*known))
        self.handler = ItemHandler(self.drafter, 1)
        self.committed = [1 + position % (VOCABULARY_SIZE - 1) for position in range(length)]
        self.node_count = 0
        params = ResolvedSamplingParams(rule, 1, 2, temperature=0.0 if rule is Rule.GREEDY else 1.0, **penalties)
        self.tell(Open(1, 1, params, POSITIONS_MAX, VOCABULARY_SIZE))
        self.tell(Commit(1, 1, length, tuple(self.committed), WINDOW, NODES_PER_STEP))
        self.settle()
        (self.session,) = self.handler.sessions.values()
        self.tokens = self.session.tokens = ReadList(self.session.tokens)

    def tell(self, item: object) -> None:
        self.handler.handle(self, [item], self.take)

    def take(self, answer: object) -> None:
        assert isinstance(answer, Nodes), answer
        self.node_count += sum(node.proposal for node in answer.nodes)

    def settle(self) -> None:
        """Steps until the window is full."""
        while (turn := self.drafter.next_step()).feeds:
            turn.done(self.engine.run(turn.feeds))

    def commit(self, token_id: int) -> None:
        self.committed.append(token_id)
        self.tell(Commit(1, 1, len(self.committed), (token_id,), WINDOW, NODES_PER_STEP))
        self.settle()


@pytest.mark.parametrize("rule", [Rule.GREEDY, Rule.COUPLED, Rule.REJECTION], ids=lambda rule: rule.name)
@pytest.mark.parametrize("penalties", [{"repetition_penalty": 1.3}, {"frequency_penalty": 0.2}], ids=["all", "output"])
def test_the_reads_of_a_draft_do_not_grow_with_its_context(
    tmp_path: Path, rule: Rule, penalties: dict[str, float]
) -> None:
    """Claim: after a commit a draft fills its window of 12 nodes reading the new committed token and none of the 4,000
    before it, whether the commit follows the tree or leaves it. Source: counted anew for each node, with two copies of
    the context, a window read 100,000 tokens. Conclusive: every read of the session's tokens is counted, and a count,
    a copy or a search of the context by any node is a thousand times the bound."""
    write_table_model(tmp_path, VOCABULARY_SIZE, POSITIONS_MAX)
    for length in (40, 4000):
        draft = CountedDraft(tmp_path, rule, length, penalties)
        assert draft.node_count >= WINDOW
        for is_inside in (True, False) * 3:
            root, epoch = draft.session.growth.root, draft.session.growth.epoch
            assert root is not None and root.proposal is not None
            stranger = next(token_id for token_id in range(1, VOCABULARY_SIZE) if token_id not in root.children)
            draft.tokens.read_count, draft.node_count = 0, 0
            draft.commit(root.proposal.token_id if is_inside else stranger)
            assert draft.session.growth.epoch == epoch + (not is_inside) and draft.node_count > 0
            assert draft.tokens.read_count <= READ_PER_COMMIT, (length, is_inside)
        assert draft.session.tokens == draft.committed and draft.session.counts is not None
