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
    """The proposals of the heads on a target after each row of a verification.

    Head h = 1, 2, ... proposes tokens h positions after the row's own next one: with the recovered or bonus token of
    the row committed, those of head 1 follow it. A head does not see the tokens between.
    """

    token_ids: tuple[int, ...]  # [rows, heads, HEAD_CANDIDATES] in row-major order, likeliest first
    confidences: bytes  # the same shape
    head_count: int

    def after(self, row: int) -> list[list[HeadToken]]:
        """Returns the candidates of each head after a row, likeliest first."""
        size = self.head_count * HEAD_CANDIDATES
        own = slice(row * size, (row + 1) * size)
        tokens = list(map(HeadToken, self.token_ids[own], self.confidences[own]))
        return [tokens[start : start + HEAD_CANDIDATES] for start in range(0, size, HEAD_CANDIDATES)]
