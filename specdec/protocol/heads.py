"""What heads on a target are asked for and propose, as it comes back in a verification result.

Heads that each guess one position (Medusa: Cai et al. 2024, arXiv 2401.10774) give `HeadProposals`; they are in
`specdec.engine.heads`. A feature head (EAGLE-3: Li et al. 2025, arXiv 2503.01840) reads the hidden states of several
layers and drafts the tree that a `HeadPlan` asks for: a reader of hidden states gets each verification with its
`head_plan` and `head_secret`, and adds the nodes to the sampler output as `head_nodes`. They are those of a draft
service's tree of its own (`growth.GrowingTree`), rooted at the token that the round commits last: names from 1, under
REJECTION drawn with uniform_bits(head_secret, Lane.DRAFT, round_index, name), at most NODES_PER_ITEM_MAX. A description
says `head_passes_max` and `head_pass_times`.
"""

from __future__ import annotations

from typing import NamedTuple

HEADS_MAX = 8  # on a target; later positions are hardly ever right
HEAD_CANDIDATES = 2  # tokens that a head proposes for its position, likeliest first
HEAD_CONFIDENCE_MAX = 255  # of such a token: a byte
HEAD_PASSES_MAX = 16  # of a feature head behind one verification: each keeps all sessions of the step waiting


class HeadPlan(NamedTuple):
    """What a verification asks of a feature head. `window`: positions that its tree may reach past the token that the
    round commits last, and passes at most; 0: it drafts nothing. `nodes_per_step`: nodes that a pass may evaluate; 1 is
    a chain. `siblings`: further children sent with each proposal child."""

    window: int = 0
    nodes_per_step: int = 1
    siblings: int = 0


NO_HEAD_PLAN = HeadPlan()


class HeadToken(NamedTuple):
    """A token that a head proposes. `confidence`: its probability there, times HEAD_CONFIDENCE_MAX, rounded down."""

    token_id: int
    confidence: int


class HeadProposals(NamedTuple):
    """The proposals of the heads on a target after one verification, from its row after the last accepted token.

    Head h = 1, 2, ... proposes tokens h positions after the row's recovered or bonus token. A head does not see the
    tokens between.
    """

    token_ids: tuple[int, ...]  # [heads, HEAD_CANDIDATES] in row-major order, likeliest first
    confidences: bytes  # the same shape

    @property
    def candidates(self) -> list[list[HeadToken]]:
        """The candidates of each head, likeliest first."""
        tokens = list(map(HeadToken, self.token_ids, self.confidences))
        return [tokens[start : start + HEAD_CANDIDATES] for start in range(0, len(tokens), HEAD_CANDIDATES)]
