"""The colours of a text on a terminal, and the line after it."""

from __future__ import annotations

import pytest

from specdec.cli.generate import COLORS, LEGEND, PROPOSER_COLORS, RESET, colored, shares, summary
from specdec.cli.rounds import table_of
from specdec.client.events import event_of
from specdec.protocol.report import Delta, Round
from specdec.protocol.types import Proposer, TokenKind
from specdec.v1 import coordinator_service_pb2 as pb


def test_it_has_the_statistics_and_the_trace_id():
    """Claim: tokens, speed, acceptance, length, and the trace id as `specdec trace` takes it."""
    finished = pb.Finished(reason=pb.FINISH_REASON_STOP, trace_id="ab" * 16)
    finished.usage.output_tokens = 50
    finished.statistics.time.total_s = 2.0
    finished.statistics.acceptance_histogram.extend([1, 3])
    finished.statistics.draft_acceptance_rate = 0.75
    finished.statistics.mean_acceptance_length = 1.75
    line = "50 tokens, 25.0 tokens/s, acceptance 0.75, 1.75 tokens a speculating round; trace " + "ab" * 16
    assert summary(event_of(pb.GenerateResponse(finished=finished))) == line


def delta(kind: int, proposers: tuple[int, ...] = ()) -> Delta:
    """Two tokens: a bonus token, and one of that kind."""
    sources = (pb.PROPOSER_UNSPECIFIED, *proposers) if proposers else ()
    message = pb.Delta(text="onetwo", text_lengths=[3, 3], kinds=[pb.TOKEN_KIND_BONUS, kind], proposers=sources)
    event = event_of(pb.GenerateResponse(delta=message))
    assert isinstance(event, Delta)
    return event


@pytest.mark.parametrize("proposer", PROPOSER_COLORS, ids=lambda proposer: proposer.name)
def test_accepted_tokens_have_the_colour_of_their_proposer(proposer: int) -> None:
    """Claim: an accepted token has the colour of its proposer, which is no other's and is in the legend; other tokens
    of the delta keep theirs. Conclusive: the whole text is compared."""
    color = PROPOSER_COLORS[proposer]
    assert colored(delta(pb.TOKEN_KIND_ACCEPTED, (proposer,))) == f"one{color}two{RESET}"
    others = [own for name, own in PROPOSER_COLORS.items() if name != proposer]
    assert color not in (*others, COLORS[TokenKind.RECOVERED]) and color in LEGEND


def test_colours_without_proposers() -> None:
    """Claim: every proposer of the protocol has a colour; a delta without proposers has the draft model's for accepted
    tokens, and recovered tokens have their own."""
    assert {pb.PROPOSER_UNSPECIFIED, *PROPOSER_COLORS} == set(pb.Proposer.values())
    draft, recovered = PROPOSER_COLORS[Proposer.DRAFT], COLORS[TokenKind.RECOVERED]
    assert colored(delta(pb.TOKEN_KIND_ACCEPTED)) == f"one{draft}two{RESET}"
    assert colored(delta(pb.TOKEN_KIND_RECOVERED)) == f"one{recovered}two{RESET}"
    assert colored(delta(pb.TOKEN_KIND_RECOVERED, (pb.PROPOSER_UNSPECIFIED,))) == f"one{recovered}two{RESET}"


def test_shares_of_proposers() -> None:
    """Claim: accepted and verified tokens of each proposer that offered some, in order; nothing for a draft alone."""
    statistics = pb.Statistics(num_model_draft_tokens=9, num_model_accepted_tokens=4)
    assert shares(pb.Statistics()) == shares(statistics) == ""
    for number, name in enumerate(("ngram", "suffix", "prediction", "heads"), 1):
        alone = pb.Statistics(**{f"num_{name}_draft_tokens": 8, f"num_{name}_accepted_tokens": number})
        assert shares(alone) == f" ({name} {number}/8)"
        statistics.MergeFrom(alone)
    assert shares(statistics) == " (draft 4/9, ngram 1/8, suffix 2/8, prediction 3/8, heads 4/8)"


def test_the_table_of_rounds() -> None:
    """Claim: the rounds of all deltas have a line each, with times, counts, proposers and draft tokens, discarded ones
    in brackets; a round that ended with the text has no token of the target. By hand: the whole table is compared."""
    tree = (4, 5, 6), (0, 1, 0), (Proposer.DRAFT, Proposer.DRAFT, Proposer.NGRAM)
    first = Round(0, (), (), (), (), 1, 0.0125, 0.0, 0.001, 0.01, 0.00025, 0.00125)
    second = Round(1, *tree, (0,), 2, 0.02)
    third = Round(2, (7, 8), (), (Proposer.HEADS,) * 2, (0, 1), 1, 0.003)
    accepted, recovered, bonus = TokenKind.ACCEPTED, TokenKind.RECOVERED, TokenKind.BONUS
    deltas = [
        Delta(0, (3, 4, 9), (bonus, accepted, recovered), "abc", (1, 1, 1), rounds=(first, second)),
        Delta(3, (7,), (accepted,), "d", (1,), rounds=(third,)),
    ]
    assert table_of(deltas).splitlines() == [
        "round     ms  wait  queue  forward  sampling  heads  link  accepted  next       offered           draft"
        " tokens",
        "    0  12.50  0.00   1.00    10.00      0.25   0.00  1.25         0  bonus",
        "    1  20.00  0.00   0.00     0.00      0.00   0.00  0.00         1  recovered  draft 2, ngram 1  4 (5) (6)",
        "    2   3.00  0.00   0.00     0.00      0.00   0.00  0.00         2             heads 2           7 8",
    ]
