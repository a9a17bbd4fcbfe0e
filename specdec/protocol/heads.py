"""The proposals of heads on a target, as they come back in a verification result (Medusa: Cai et al. 2024, arXiv
2401.10774). The heads themselves are in `specdec.engine.heads`."""

from __future__ import annotations

from typing import NamedTuple

HEADS_MAX = 8  # on a target; later positions are hardly ever right
HEAD_CANDIDATES = 2  # tokens that a head proposes for its position, likeliest first
HEAD_CONFIDENCE_MAX = 255  # of such a token: a byte


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
