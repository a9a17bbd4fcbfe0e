"""A generation request: prompt, sampling, speculation, resume; and the resolved sampling parameters.

Checked at construction for everything that does not depend on the model; `GenerationRequest.params` and
`GenerationRequest.check_model` do the rest.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, fields
from typing import Any

from specdec.errors import InvalidRequest
from specdec.protocol.fields import CommonSamplingParams, SamplingFields, SpeculativeFields
from specdec.protocol.limits import (
    LABEL_LENGTH_MAX,
    PROMPT_CACHE_KEY_LENGTH_MAX,
    TOKENS_MAX,
    check_salt,
    check_token_ids,
)
from specdec.protocol.types import Description, Proposer, ResolvedSamplingParams, Rule

MAX_TOKENS_DEFAULT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(SamplingFields):
    """The sampling parameters and stop conditions of a request; fields and limits as in coordinator_service.proto."""

    def __post_init__(self) -> None:
        self.check_others()
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            limit = f"an integer from 1 to {TOKENS_MAX}; 0 only with prompt_logprobs"
            raise InvalidRequest("sampling.max_tokens", self.max_tokens, limit)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("sampling.min_tokens", self.min_tokens, f"at most max_tokens, {self.max_tokens}")
        self.check_common()
        biased = [token_id for token_id, _ in self.logit_bias]
        if len(set(biased)) != len(biased):
            raise InvalidRequest("sampling.logit_bias", sorted(biased), "without any token id twice")
        if self.grammar is not None and self.ignore_eos:
            raise InvalidRequest("sampling.ignore_eos", True, "absent or false with a grammar, which ends the text")


class SpeculationMode(enum.Enum):
    """The source of the plan: measurements (AUTO), the request and the settings (FIXED), or no speculation (OFF)."""

    AUTO = 1
    FIXED = 2
    OFF = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativePolicy(SpeculativeFields):
    """How a request speculates; never changes the distribution of its text. None leaves it to the server.

    `draft_window`, `draft_nodes_per_step`, `draft_wait_ms` and `draft_siblings` belong to mode FIXED, which must be
    named with them. `proposers`: those that may propose; empty: with FIXED the draft model, otherwise all of the
    server. `report_rounds`, `report_statistics`: the client wants to see the rounds, and the statistics so far.
    """

    rule: Rule | None = None
    mode: SpeculationMode | None = None
    proposers: tuple[Proposer, ...] = ()

    def __post_init__(self) -> None:
        self.check_all()
        for name in ("draft_window", "draft_nodes_per_step", "draft_wait_ms", "draft_siblings"):
            if getattr(self, name) is not None and self.mode is not SpeculationMode.FIXED:
                raise InvalidRequest(f"speculative.{name}", getattr(self, name), "absent, or policy FIXED with it")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request: `text` or `token_ids` is the prompt, of an encoder-decoder model the encoder's input; `decoder_text`
    or `decoder_token_ids` begins the output of such a model, its own beginning if both are absent;
    `resumed_token_ids` were generated before; `predicted_text` or `predicted_token_ids` is expected in the answer."""

    text: str | None = None
    token_ids: tuple[int, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    speculative: SpeculativePolicy = field(default_factory=SpeculativePolicy)
    resumed_token_ids: tuple[int, ...] = ()
    label: str = ""
    cache_salt: str = ""
    predicted_text: str | None = None
    predicted_token_ids: tuple[int, ...] = ()
    prompt_cache_key: str = ""
    decoder_text: str | None = None
    decoder_token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.text == "":
            raise InvalidRequest("prompt.text", "", "at least one character long")
        if self.text is None and not self.token_ids:
            raise InvalidRequest("prompt.token_ids", [], "at least one token id")
        if self.decoder_text == "":
            raise InvalidRequest("decoder_prompt.text", "", "at least one character long, or no decoder_prompt")
        if self.decoder_token_ids == ():
            raise InvalidRequest("decoder_prompt.token_ids", [], "at least one token id, or no decoder_prompt")
        if len(self.label) > LABEL_LENGTH_MAX:
            raise InvalidRequest("label", f"{len(self.label)} characters", f"at most {LABEL_LENGTH_MAX} characters")
        check_salt(self.cache_salt)
        if len(self.prompt_cache_key) > PROMPT_CACHE_KEY_LENGTH_MAX:
            limit = f"at most {PROMPT_CACHE_KEY_LENGTH_MAX} characters"
            raise InvalidRequest("prompt_cache_key", f"{len(self.prompt_cache_key)} characters", limit)
        if self.sampling.max_tokens == 0 and self.resumed_token_ids:
            limit = "none with max_tokens 0"
            raise InvalidRequest("resume.output_token_ids", f"{len(self.resumed_token_ids)} tokens", limit)
        if self.withheld_proposers.intersection(self.speculative.proposers):
            limit = "absent or false with proposer SUFFIX, or a cache_salt with it: guesses are texts of the same salt"
            raise InvalidRequest("speculative.report_rounds", True, limit)
        if self.resumed_token_ids and self.sampling.n > 1:
            raise InvalidRequest("sampling.n", self.sampling.n, "1 with resume: each choice is resumed by itself")
        self.rule()

    @property
    def withheld_proposers(self) -> frozenset[Proposer]:
        """Proposers whose guesses the client may not see: rounds have the tokens that were not accepted too, and those
        of SUFFIX are texts of all clients with the same salt, without one of all others."""
        is_common = self.speculative.report_rounds and not self.cache_salt
        return frozenset({Proposer.SUFFIX}) if is_common else frozenset()

    @property
    def has_decoder_prompt(self) -> bool:
        """Whether the request says how the output begins."""
        return self.decoder_text is not None or self.decoder_token_ids is not None

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are to be sent: they came already where output tokens did."""
        return self.sampling.prompt_logprobs is not None and not self.resumed_token_ids

    def rule(self) -> tuple[Rule, str] | None:
        """Returns the rule that the request names or implies, and the reason in one line; None: the server's choice.

        Raises InvalidRequest if rule and sampling parameters contradict each other.
        """
        asked, seed, is_greedy = self.speculative.rule, self.sampling.seed, self.sampling.temperature == 0
        if is_greedy and asked not in (None, Rule.GREEDY):
            raise InvalidRequest("speculative.rule", asked.name, "GREEDY with temperature 0")
        if asked is Rule.GREEDY and not is_greedy:
            raise InvalidRequest("speculative.rule", "GREEDY", "REJECTION or COUPLED with a temperature above 0")
        if asked is Rule.REJECTION and seed is not None:
            raise InvalidRequest("speculative.rule", "REJECTION", "COUPLED with a seed: REJECTION cannot honour one")
        if asked is not None:
            return asked, "named by the request"
        if is_greedy:
            return Rule.GREEDY, "temperature 0"
        return None if seed is None else (Rule.COUPLED, "the request has a seed")

    def max_tokens(self, prompt_length: int, positions_max: int) -> int:
        """Returns the limit of output tokens. Raises InvalidRequest if prompt and output do not fit the model."""
        positions_left = positions_max - prompt_length
        if positions_left < 1:
            limit = f"at most {positions_max - 1} tokens, so that one more fits the model's {positions_max} positions"
            raise InvalidRequest("prompt", f"{prompt_length} tokens", limit)
        asked = self.sampling.max_tokens
        if asked is not None and asked > positions_left:
            limit = (
                f"at most {positions_left}, the model's {positions_max} positions less {prompt_length} prompt tokens"
            )
            raise InvalidRequest("sampling.max_tokens", asked, limit)
        most = min(MAX_TOKENS_DEFAULT, positions_left) if asked is None else asked
        if self.sampling.min_tokens > most:
            raise InvalidRequest("sampling.min_tokens", self.sampling.min_tokens, f"at most max_tokens, here {most}")
        return most

    def check_model(self, prompt: tuple[int, ...], target: Description) -> None:
        """Raises InvalidRequest for token ids the target does not have, for a grammar without end tokens, and for a
        prompt of another kind of model than the target is. `prompt`: the tokens of the request's prompt."""
        size, most = target.vocabulary_size, target.encoder_positions_max
        if target.has_encoder and len(prompt) > most:
            field = "prompt.token_ids" if self.text is None else "prompt.text"
            raise InvalidRequest(field, f"{len(prompt)} tokens", f"at most {most} tokens, the positions of the encoder")
        if not target.has_encoder and self.has_decoder_prompt:
            limit = "absent: the model is a decoder alone, whose output the prompt begins"
            raise InvalidRequest("decoder_prompt", "set", limit)
        if self.sampling.grammar is not None and not target.end_token_ids:
            raise InvalidRequest("grammar", self.sampling.grammar.kind, "absent: the model has no end token to end it")
        check_token_ids("prompt.token_ids", prompt, size)
        check_token_ids("decoder_prompt.token_ids", self.decoder_token_ids or (), size)
        check_token_ids("resume.output_token_ids", self.resumed_token_ids, size)
        check_token_ids("prediction.token_ids", self.predicted_token_ids, size)
        check_token_ids("sampling.stop_token_ids", self.sampling.stop_token_ids, size)
        check_token_ids("sampling.logit_bias", tuple(entry[0] for entry in self.sampling.logit_bias), size)
        check_token_ids("sampling.allowed_token_ids", self.sampling.allowed_token_ids, size)

    def stop_token_ids(self, end_token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the request's own stop tokens, and the model's unless they are ignored; ascending."""
        ends = () if self.sampling.ignore_eos else end_token_ids
        return tuple(sorted({*self.sampling.stop_token_ids, *ends}))

    def params(
        self,
        rule: Rule,
        prompt_length: int,
        drawn_seed: int,
        end_token_ids: tuple[int, ...],
        bad_words: tuple[tuple[int, ...], ...] = (),
        encoder_length: int = 0,
    ) -> ResolvedSamplingParams:
        """Returns the resolved sampling parameters under a rule; `drawn_seed` is used if the request has no seed.
        `bad_words`: their tokens; `encoder_length`: of the encoder's input among the prompt."""
        sampling = self.sampling
        seed = drawn_seed if sampling.seed is None else sampling.seed
        common = {own.name: getattr(sampling, own.name) for own in fields(CommonSamplingParams)}
        common["logit_bias"] = tuple(sorted(sampling.logit_bias))
        common["allowed_token_ids"] = tuple(sorted(set(sampling.allowed_token_ids)))
        ends = () if sampling.grammar is None else tuple(sorted(end_token_ids))
        stops = self.stop_token_ids(end_token_ids)
        tokens: dict[str, Any] = {"stop_token_ids": stops, "end_token_ids": ends, "bad_words": bad_words}
        return ResolvedSamplingParams(rule, seed, prompt_length, encoder_length=encoder_length, **tokens, **common)
