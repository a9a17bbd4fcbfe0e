"""The acceptance of a draft's tokens by the target, measured with the functions of the services (specdec.decoding).

The target writes a text from its own distribution; at each position the draft proposes after the same text. GREEDY and
COUPLED: the share of positions where the proposal is the target's token. REJECTION: the mean of sum min(target, draft),
the probability that a token drawn from the draft distribution is accepted, so nothing is drawn for it. BOUND is the
same sum with the draft's whole distribution.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from specdec.decoding.distribution import dense_scores
from specdec.decoding.edits import PathContext
from specdec.decoding.proposal import ProposalRequest, propose
from specdec.decoding.verification import VerificationRequest, verify
from specdec.protocol.types import DraftProbs, ResolvedSamplingParams, Rule

BOUND = "BOUND"  # named beside the rules: the acceptance of the best possible rule


@dataclass(frozen=True, slots=True)
class Text:
    """A text the target wrote: prompt, output, and the target's logits at each output position."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    logits: Tensor  # [output, vocab] float32

    def before(self, index: int) -> tuple[int, ...]:
        """Returns every token before an output position."""
        return self.prompt + self.output[:index]


@dataclass(frozen=True, slots=True)
class Share:
    """A mean over prompts and its standard error, by prompts and not tokens: neighbouring tokens are dependent."""

    mean: float
    error: float

    @classmethod
    def over(cls, values: Sequence[float]) -> Share:
        """Returns the share from one value per prompt."""
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        return cls(statistics.fmean(values), error)


def params_at(temperature: float, seed: int, prompt_length: int) -> ResolvedSamplingParams:
    """Returns the plain sampling parameters at a temperature: GREEDY at 0, else COUPLED."""
    rule = Rule.GREEDY if temperature == 0 else Rule.COUPLED
    return ResolvedSamplingParams(rule=rule, seed=seed, prompt_length=prompt_length, temperature=temperature)


@torch.no_grad()
def write_text(
    target: LlamaForCausalLM, prompt: tuple[int, ...], params: ResolvedSamplingParams, token_count: int
) -> Text:
    """Decodes plainly with the sampling parameters; `<|end|>` does not end the text."""
    cache = DynamicCache()
    fed, output, rows = list(prompt), list[int](), list[Tensor]()
    for _ in range(token_count):
        result = target(input_ids=torch.tensor([fed]), past_key_values=cache, logits_to_keep=1)
        rows.append(result.logits[0].float())  # [1, vocab] float32
        request = VerificationRequest(params, round_index=0, committed=prompt + tuple(output))
        fed = [verify([request], [1], rows[-1])[0].recovered_token_ids[0]]
        output += fed
    return Text(prompt, tuple(output), torch.cat(rows))


@torch.no_grad()
def draft_logits(draft: LlamaForCausalLM, text: Text) -> Tensor:
    """The draft's logits at each output position.  # [output, vocab] float32"""
    token_ids = torch.tensor([text.before(len(text.output) - 1)])
    logits: Tensor = draft(input_ids=token_ids, logits_to_keep=len(text.output)).logits[0]
    return logits.float()


def equal_share(text: Text, logits: Tensor, params: ResolvedSamplingParams) -> float:
    """The share of output positions where the draft proposes the target's token.  logits: [output, vocab] float32"""
    proposals = propose(requests_along(text, params), logits)
    return statistics.fmean(proposal.token_id == token for proposal, token in zip(proposals, text.output, strict=True))


def rejection_share(text: Text, logits: Tensor, params: ResolvedSamplingParams) -> float:
    """The mean probability that a token of the draft distribution is accepted.  logits: [output, vocab] float32"""
    drawn_distribution = replace(params, rule=Rule.REJECTION)
    proposals = propose(requests_along(text, drawn_distribution), logits)
    context = PathContext(drawn_distribution, text.prompt, text.output[:-1])
    target_probs = dense_scores(text.logits, [context]).softmax(dim=1)  # [output, vocab] float64
    pairs = zip(target_probs, proposals, strict=True)
    return statistics.fmean(overlap(probs, proposal.draft_probs) for probs, proposal in pairs)


def bound(text: Text, logits: Tensor, params: ResolvedSamplingParams) -> float:
    """The mean of sum min(target, draft) over whole distributions: no rule accepts more.  logits: [output, vocab]

    REJECTION stays below it by the tokens that the sent distribution omits, COUPLED by its coupling.
    """
    context = PathContext(params, text.prompt, text.output[:-1])
    target_probs, draft_probs = (dense_scores(rows, [context]).softmax(dim=1) for rows in (text.logits, logits))
    return torch.minimum(target_probs, draft_probs).sum(dim=1).mean().item()


def requests_along(text: Text, params: ResolvedSamplingParams) -> list[ProposalRequest]:
    """Returns one proposal request per output position."""
    return [ProposalRequest(params, text.before(index), text.logits.shape[1]) for index in range(len(text.output))]


def overlap(target_probs: Tensor, row: DraftProbs | None) -> float:
    """sum min(target, draft) over the draft distribution's tokens.  target_probs: [vocab] float64"""
    if row is None:
        raise ValueError("a proposal under REJECTION has its distribution")
    draft_probs = torch.tensor(row.weights, dtype=torch.float64) / row.total
    return torch.minimum(target_probs[list(row.token_ids)], draft_probs).sum().item()


def acceptance(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    prompts: Sequence[tuple[int, ...]],
    temperature: float,
    token_count: int,
) -> dict[str, Share]:
    """Share per rule over texts of `token_count` tokens, one per prompt; the prompt's number is the seed."""
    shares: dict[str, list[float]] = {}
    for seed, prompt in enumerate(prompts):
        params = params_at(temperature, seed, len(prompt))
        text = write_text(target, prompt, params, token_count)
        logits = draft_logits(draft, text)
        shares.setdefault(params.rule.name, []).append(equal_share(text, logits, params))
        if params.rule is Rule.COUPLED:
            shares.setdefault(Rule.REJECTION.name, []).append(rejection_share(text, logits, params))
            shares.setdefault(BOUND, []).append(bound(text, logits, params))
    return {name: Share.over(values) for name, values in sorted(shares.items())}
