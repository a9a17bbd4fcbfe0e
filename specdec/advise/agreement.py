"""How a draft, or a head on the target, agrees with the target along its texts: one pass of each, every rule at once.

For a text drawn from the target, the draft's token at a position passes with probability min(1, q(x) / p(x)), x being
the text's token there (Leviathan et al. 2023, given the outcome). So one text gives the distribution of all rounds of
chains under REJECTION; under GREEDY and COUPLED, which need the text's seed, a token passes or does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from specdec.decoding.proposal import ProposalRequest, propose
from specdec.engine.interface import CausalModel, Chunk, RaggedBatch
from specdec.engine.loading.devices import default_block_size, find_device
from specdec.engine.retokenizer import Reading
from specdec.engine.transformers_model import TransformersModel
from specdec.errors import NumericsError
from specdec.protocol.types import DraftProbs, ResolvedSamplingParams, Rule

ROWS = 64  # of a forward; two distributions of each in double precision are held
SMALL = 1e-300


@dataclass(frozen=True, slots=True)
class Agreement:
    """Measures at the positions of one text, all [positions] float64.

    `passes`: by rule, the probability that the draft's token passes, given the text; `accepted`: the same before the
    text's token is known, which varies less. Of the distributions at the text's temperature (at 1 if it is 0):
    `variation`, the total variation distance; `divergence`, KL(target || draft) over the tokens the draft has, in nats;
    `entropy` of the target, in nats; `reachable`, the target's probability of the tokens the draft has. `confidence`:
    the draft's in its likeliest token, and `is_likeliest`: whether that is the text's. `cosine` of the final hidden
    states of both, nan where their sizes differ: a diagnosis, from which no acceptance follows.

    All these are of the first token of a chain. `deeper`: by rule, `passes` of the second, the third, ..., those before
    it being the text's, [later tokens, positions], 0 where no chain reaches; none where all pass as the first does.
    """

    passes: dict[Rule, Tensor]
    accepted: dict[Rule, Tensor]
    variation: Tensor
    divergence: Tensor
    entropy: Tensor
    reachable: Tensor
    confidence: Tensor
    is_likeliest: Tensor
    cosine: Tensor
    deeper: dict[Rule, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.variation)

    @classmethod
    def joined(cls, parts: Sequence[Agreement]) -> Agreement:
        """Returns the positions of all parts, in order."""
        first = parts[0]
        whole = {name: torch.cat([getattr(part, name) for part in parts]) for name in cls.__slots__[2:-1]}
        passes, accepted, deeper = (
            {rule: torch.cat([getattr(part, name)[rule] for part in parts], -1) for rule in getattr(first, name)}
            for name in ("passes", "accepted", "deeper")
        )
        return cls(passes, accepted, **whole, deeper=deeper)


class TextReader(Protocol):
    """What reads texts: a model, or a head behind its target (`chains.ChainReader`).

    Of the rows that `read` gave last: `hidden` [rows, hidden], final hidden states, None where there are none;
    `deeper`: logits of the second, third, ... token of chains, of the last of these rows, as many as chains reach.
    """

    hidden: Tensor | None
    deeper: Sequence[Tensor]

    def read(self, token_ids: Sequence[int], first: int, encoder_length: int = 0) -> Iterator[Tensor]:
        """Yields logits of positions first, first + 1, ..., ROWS at a time.  # [rows, vocabulary] float32"""


class Reader:
    """A `TextReader`: runs a model along given texts of at most `length_max` tokens. It takes the model's cache
    storage; a text's positions are in the blocks `blocks`."""

    def __init__(self, model: CausalModel, length_max: int, device: str = "cpu") -> None:
        self._model = model
        self.hidden: Tensor | None = None
        self.deeper: Sequence[Tensor] = ()
        self._encoder_length = 0  # of the text that is read
        if isinstance(model, TransformersModel):
            model.asked.hidden = True  # steps captured before return none; `allocate` drops them
        block_size = default_block_size(find_device(device))
        block_count = -(-length_max // block_size)
        model.allocate(1 + block_count, block_size)
        self.blocks = range(1, 1 + block_count)

    def read(self, token_ids: Sequence[int], first: int, encoder_length: int = 0) -> Iterator[Tensor]:
        """Yields logits of positions first, first + 1, ..., ROWS at a time.  # [rows, vocabulary] float32

        `encoder_length`: the first tokens, which are an encoder's input. Raises NumericsError for logits that are no
        numbers.
        """
        own, rows = own_tokens(self._model, token_ids, first)
        self._encoder_length, fed = encoder_length, 0
        for end in [*range(max(ROWS, encoder_length), rows[0], ROWS), rows[0]]:
            self._forward(own, fed, end, end)
            fed = end
        for start in range(0, len(rows), ROWS):
            wanted = rows[start : start + ROWS]
            logits = self._forward(own, min(fed, wanted[0]), wanted[-1] + 1, wanted[0])
            fed = wanted[-1] + 1
            chosen = [row - wanted[0] for row in wanted]
            if self.hidden is not None:
                self.hidden = self.hidden[chosen]
            yield logits[chosen]

    def _forward(self, own: Sequence[int], start: int, end: int, wanted_from: int) -> Tensor:
        """Feeds tokens [start, end); returns the logits from `wanted_from` on."""
        if start == end:
            return torch.empty(0)
        chunk = Chunk(self.blocks, start, own[start:end], end - wanted_from, encoder_length=self._encoder_length)
        output = self._model.forward(RaggedBatch((chunk,)))
        if not all(output.is_finite):
            raise NumericsError(f"the logits of {self._model.description.model_name} are no numbers")
        self.hidden = None if output.hidden is None else output.hidden.float().cpu()
        return output.logits.float().cpu()


def own_tokens(model: CausalModel, token_ids: Sequence[int], first: int) -> tuple[Sequence[int], Sequence[int]]:
    """Returns the tokens a model reads for a text, and the rows of the positions from `first` on: a draft with another
    tokenizer reads the prompt as text, then one token after another, as it does in its service."""
    vocabulary = model.description.vocabulary
    if vocabulary is None or vocabulary.retokenizer is None:
        return token_ids, range(first, len(token_ids))
    reading, rows = Reading(vocabulary.retokenizer), []
    for length in range(first + 1, len(token_ids) + 1):
        reading.read(token_ids[:length])
        rows.append(len(reading.tokens) - 1)
    return reading.tokens, rows


def agreement_along(
    target: TextReader, draft: TextReader, token_ids: Sequence[int], first: int, params: ResolvedSamplingParams
) -> Agreement:
    """Returns the agreement at the positions first to the last but one of a text, which the target drew with `params`
    (GREEDY, or COUPLED with their seed). Position i predicts token i + 1."""
    parts, start = [], first
    asked = token_ids[:-1], first, params.encoder_length
    for target_rows, draft_rows in zip(target.read(*asked), draft.read(*asked)):
        paths = [token_ids[: start + row + 1] for row in range(len(target_rows))]
        following = torch.tensor(token_ids[start + 1 : start + 1 + len(target_rows)])
        own = agreement_of(target_rows, draft_rows, paths, following, params, draft.deeper)
        if target.hidden is not None and draft.hidden is not None and target.hidden.shape == draft.hidden.shape:
            own = replace(own, cosine=cosine_similarity(target.hidden, draft.hidden, dim=1).double())
        parts.append(own)
        start += len(target_rows)
    return Agreement.joined(parts)


def agreement_of(
    target_logits: Tensor,
    draft_logits: Tensor,
    paths: Sequence[Sequence[int]],
    following: Tensor,
    params: ResolvedSamplingParams,
    deeper: Sequence[Tensor] = (),
) -> Agreement:
    """Returns the agreement of rows; `paths`: the tokens before each, `following` [rows] int64: the text's next token.

    target_logits, draft_logits: [rows, vocabulary] float32; -inf for tokens the draft does not have; deeper: see
    `TextReader`
    """
    draft_logits = fitted(draft_logits, target_logits.shape[1])
    temperature = params.temperature or 1.0
    p, q = ((rows.double() / temperature).softmax(1) for rows in (target_logits, draft_logits))
    is_known = draft_logits > -torch.inf
    reachable = torch.where(is_known, p, 0.0).sum(1)
    terms = p * (p.clamp_min(SMALL).log() - q.clamp_min(SMALL).log() - reachable.clamp_min(SMALL).log()[:, None])
    likeliest = q.max(1)
    passes, accepted = coins_of(p, draft_logits, paths, following, params)
    later: dict[Rule, list[Tensor]] = {rule: [] for rule in passes if deeper}
    for logits in deeper:
        start = len(p) - len(logits)
        behind, _ = coins_of(p[start:], fitted(logits, p.shape[1]), paths[start:], following[start:], params)
        for rule, coins in behind.items():
            later[rule].append(torch.cat([coins.new_zeros(start), coins]))
    return Agreement(
        passes,
        accepted,
        1 - torch.minimum(p, q).sum(1),
        torch.where(is_known, terms, 0.0).sum(1) / reachable.clamp_min(SMALL),
        -(p * p.clamp_min(SMALL).log()).sum(1),
        reachable,
        likeliest.values,
        (likeliest.indices == following).double(),
        torch.full((len(p),), torch.nan, dtype=torch.float64),
        {rule: torch.stack(rows) for rule, rows in later.items()},
    )


def fitted(draft_logits: Tensor, size: int) -> Tensor:
    """Returns logits of the target's tokens: -inf for those the draft does not have.  # [rows, size]"""
    if draft_logits.shape[1] < size:
        missing = draft_logits.new_full((len(draft_logits), size - draft_logits.shape[1]), -torch.inf)
        draft_logits = torch.cat([draft_logits, missing], 1)
    return draft_logits[:, :size]


def coins_of(
    p: Tensor, draft_logits: Tensor, paths: Sequence[Sequence[int]], following: Tensor, params: ResolvedSamplingParams
) -> tuple[dict[Rule, Tensor], dict[Rule, Tensor]]:
    """Returns `Agreement.passes` and `accepted` of rows.  p: the target's distributions, [rows, vocabulary] float64"""
    rule = params.rule
    guessed = proposed(draft_logits, paths, params)
    equal = torch.tensor([proposal == token for proposal, token in zip(guessed, following.tolist())]).double()
    passes, accepted = {rule: equal}, {rule: equal}
    if rule is Rule.COUPLED:
        sent = sent_distributions(draft_logits, paths, replace(params, rule=Rule.REJECTION))
        passes[Rule.REJECTION] = (of(sent, following) / of(p, following).clamp_min(SMALL)).clamp_max(1.0)
        accepted[Rule.REJECTION] = torch.minimum(p, sent).sum(1)
    return passes, accepted


def of(probs: Tensor, token_ids: Tensor) -> Tensor:
    """Each row's probability of its token.  probs: [n, vocabulary]  # [n]"""
    return probs.gather(1, token_ids[:, None])[:, 0]


def proposed(logits: Tensor, paths: Sequence[Sequence[int]], params: ResolvedSamplingParams) -> list[int]:
    """The tokens that a draft service proposes at these rows."""
    requests = [ProposalRequest(params, path, logits.shape[1]) for path in paths]
    return [proposal.token_id for proposal in propose(requests, logits)]


def sent_distributions(logits: Tensor, paths: Sequence[Sequence[int]], params: ResolvedSamplingParams) -> Tensor:
    """The draft distributions as they are sent under REJECTION.  # [n, vocabulary] float64"""
    requests = [ProposalRequest(params, path, logits.shape[1]) for path in paths]
    sent = torch.zeros(logits.shape, dtype=torch.float64)
    for row, proposal in enumerate(propose(requests, logits)):
        probs = proposal.draft_probs
        assert isinstance(probs, DraftProbs)
        sent[row, list(probs.token_ids)] = torch.tensor(probs.weights, dtype=torch.float64) / probs.total
    return sent
