"""The proofs about a fleet, in short: real processes, real signals."""

from __future__ import annotations

import pytest

from tests.chaos.test_load import missed


@pytest.mark.slow
def test_a_fleet_hides_the_loss_of_its_replicas() -> None:
    """Claim: of a fleet whose targets and drafts are killed, frozen, cut off and stopped no client meets an error or
    another token, and a text with every sampling parameter moves at each of its first tokens.

    Conclusive: each fault strikes texts under way; the bars name texts, errors and points.
    """
    assert not missed("fleet", "--streams", "8", "--points", "4", "--gap-points", "1", "--tokens", "8")


@pytest.mark.slow
def test_texts_that_move_have_the_targets_distribution() -> None:
    """Claim: under REJECTION texts whose targets are lost again and again follow the target distribution.
    Conclusive: the same sample rejects a mixture with 3 % of the draft's."""
    assert not missed("fleet-rejection")


@pytest.mark.slow
def test_a_lost_rank_is_hidden() -> None:
    """Claim: texts of a target of two ranks that loses one go on at another one, and are told of its numerics.
    Conclusive: both parts are compared with what each kind of target makes of the same beginning."""
    assert not missed("fleet-ranks", "--points", "8", "--streams", "8", "--strikes", "rank 1 killed", "rank 0 frozen")


@pytest.mark.slow
def test_a_fleet_is_updated_under_load() -> None:
    """Claim: all services of a fleet are updated in turn, between faults, without a wrong token or an error, but those
    of a stopped coordinator's texts, which are resumed. Conclusive: every text is compared; updates are counted."""
    assert not missed("fleet-soak", "--minutes", "6", "--period-s", "10")
