"""The proof about drafts, in short: real services on table models, a real draft and a lying one."""

from __future__ import annotations

import random
from functools import partial

import pytest

from tests.chaos.byzantine import BEHAVIOURS, ByzantineDraft
from tests.chaos.proofs.draft import struck
from tests.chaos.tables import table_texts, tables
from tests.chaos.texts import Readers, references_of
from tests.support.waiting import until

LONG_S = 120.0  # on a machine that others use
TEXT_PAIRS_MAX = 20
NAMES = random.Random(1).sample(list(BEHAVIOURS), len(BEHAVIOURS))


def has_read(readers: Readers, count: int) -> bool:
    """Whether this number of texts was read."""
    return readers.text_count >= count


@pytest.mark.more
def test_a_draft_that_dies_freezes_or_crawls_changes_no_token() -> None:
    """Claim: texts whose draft is killed, frozen or a hundred times slower are those without it, and no request fails.
    Conclusive: each strikes at four points, in the midst of texts."""
    with tables(has_draft=True) as place:
        readers = Readers(references_of(place.coordinator.address, table_texts(6, 200)), (0.0, 0.0), seed=1)
        readers.start([place.coordinator.address] * 4)
        points = struck(place, readers, 4, random.Random(1))
        readers.stop()
    assert not readers.wrong and not readers.codes
    assert len(points) == 3 and all(len(own) >= 4 for own in points.values())


@pytest.mark.parametrize(
    "names", [pytest.param(NAMES[::2], marks=pytest.mark.more), pytest.param(NAMES[1::2], marks=pytest.mark.slow)]
)
def test_no_lie_of_a_draft_changes_a_token_or_fails_a_request(names: list[str]) -> None:
    """Claim (reliability table): whatever a draft sends, each text under GREEDY and COUPLED is the one without it, and
    no request fails.

    Conclusive: the references come from the same services without speculation; each behaviour lasts until several
    texts met it and the draft has sent an item.
    """
    with tables(has_draft=False) as place:
        readers = Readers(references_of(place.coordinator.address, table_texts(6, 200)), (0.0, 0.0), seed=1)
        liar = ByzantineDraft(place.described().target.tokenizer_fingerprint, place.draft_port)
        try:
            until(lambda: place.has_draft, LONG_S)
            readers.start([place.coordinator.address] * 3)
            for name in names:
                until(lambda: place.has_draft, LONG_S)
                liar.behave(name)
                for _ in range(TEXT_PAIRS_MAX):  # a policy that has learned to do without the draft asks it seldom
                    until(partial(has_read, readers, readers.text_count + 2), LONG_S)
                    if liar.behave(name) or name == "silence":
                        break
                else:
                    pytest.fail(f"no item was sent: {name}")
        finally:
            readers.stop()
            liar.stop()
    assert not readers.wrong and not readers.codes
