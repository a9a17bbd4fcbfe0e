"""Fields of a request: values, checks and meanings. Made from proto/ by `make proto`; change that."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.protocol import limits
from specdec.protocol.grammar import Grammar

TEMPERATURE_MIN = 0.01
TEMPERATURE_MAX = 100.0  # the target distribution is flat there; between 0 and 0.01 float64 fails
TOP_K_MAX = 1000000  # above every vocabulary
TOP_P_MAX = 1.0  # a probability
MIN_P_MAX = 1.0  # a probability
REPETITION_PENALTY_MIN = 0.01
REPETITION_PENALTY_MAX = 100.0  # a seen token is as good as certain or impossible there
PRESENCE_PENALTY_MIN = -2.0
PRESENCE_PENALTY_MAX = 2.0  # the range of other inference servers
FREQUENCY_PENALTY_MIN = -2.0
FREQUENCY_PENALTY_MAX = 2.0  # the range of other inference servers
LOGIT_BIAS_COUNT_MAX = 1024  # each entry is work for the sampler at every position
LOGIT_BIAS_BIAS_MIN = -100.0
LOGIT_BIAS_BIAS_MAX = 100.0  # a token is certain or impossible there
STOP_COUNT_MAX = 16  # each is searched for after every token
STOP_TOKEN_IDS_COUNT_MAX = 64  # each is masked at every position before min_tokens
N_MIN = 1
N_MAX = 16  # each is a generation with a place of its own
BAD_WORDS_COUNT_MAX = 64  # their ends are searched for at every position
ALLOWED_TOKEN_IDS_COUNT_MAX = 4096  # sent whenever a replica opens the session
DRAFT_WAIT_MS_MAX = 60000.0  # a minute; a draft token is worth milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonSamplingParams:
    """The fields that target and draft get too."""

    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] = ()

    def check_common(self) -> None:
        """Raises InvalidRequest for a field outside its limits."""
        limits.check_integer("min_tokens", self.min_tokens, 0, limits.TOKENS_MAX)
        limits.check_number("temperature", self.temperature, TEMPERATURE_MIN, TEMPERATURE_MAX, is_zero_allowed=True)
        limits.check_integer("top_k", self.top_k, 0, TOP_K_MAX)
        limits.check_number("top_p", self.top_p, 0, TOP_P_MAX, is_above_low=True)
        limits.check_number("min_p", self.min_p, 0, MIN_P_MAX)
        limits.check_number(
            "repetition_penalty", self.repetition_penalty, REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX
        )
        limits.check_number("presence_penalty", self.presence_penalty, PRESENCE_PENALTY_MIN, PRESENCE_PENALTY_MAX)
        limits.check_number("frequency_penalty", self.frequency_penalty, FREQUENCY_PENALTY_MIN, FREQUENCY_PENALTY_MAX)
        limits.check_count("logit_bias", self.logit_bias, LOGIT_BIAS_COUNT_MAX, "entries")
        for token_id, bias in self.logit_bias:
            limits.check_integer("logit_bias.token_id", token_id, 0, limits.TOKENS_MAX)
            limits.check_number("logit_bias.bias", bias, LOGIT_BIAS_BIAS_MIN, LOGIT_BIAS_BIAS_MAX)
        if self.logprobs is not None:
            limits.check_integer("logprobs", self.logprobs, 0, limits.LOGPROBS_MAX)
        if self.prompt_logprobs is not None:
            limits.check_integer("prompt_logprobs", self.prompt_logprobs, 0, limits.LOGPROBS_MAX)
        limits.check_count("allowed_token_ids", self.allowed_token_ids, ALLOWED_TOKEN_IDS_COUNT_MAX, "ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFields(CommonSamplingParams):
    """SamplingParams."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    bad_words: tuple[str, ...] = ()

    def check_others(self) -> None:
        """Raises InvalidRequest for a field outside its limits."""
        if self.max_tokens is not None:
            limits.check_integer("sampling.max_tokens", self.max_tokens, 0, limits.TOKENS_MAX)
        if self.seed is not None:
            limits.check_integer("sampling.seed", self.seed, 0, limits.SEED_MAX)
        limits.check_count("sampling.stop", self.stop, STOP_COUNT_MAX, "strings")
        limits.check_texts("sampling.stop", self.stop, limits.STOP_STRING_BYTES_MAX)
        limits.check_count("sampling.stop_token_ids", self.stop_token_ids, STOP_TOKEN_IDS_COUNT_MAX, "ids")
        limits.check_integer("sampling.n", self.n, N_MIN, N_MAX)
        limits.check_count("sampling.bad_words", self.bad_words, BAD_WORDS_COUNT_MAX, "strings")
        limits.check_texts("sampling.bad_words", self.bad_words, limits.BAD_WORD_BYTES_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeFields:
    """SpeculativePolicy, without enums."""

    enabled: bool = True
    num_speculative_tokens: int | None = None
    draft_window: int | None = None
    draft_nodes_per_step: int | None = None
    draft_wait_ms: float | None = None
    draft_siblings: int | None = None
    report_rounds: bool = False
    report_statistics: bool = False

    def check_all(self) -> None:
        """Raises InvalidRequest for a field outside its limits."""
        if self.num_speculative_tokens is not None:
            limits.check_integer(
                "speculative.num_speculative_tokens", self.num_speculative_tokens, 0, limits.DRAFT_LENGTH_LIMIT
            )
        if self.draft_window is not None:
            limits.check_integer("speculative.draft_window", self.draft_window, 0, limits.DRAFT_LENGTH_LIMIT)
        if self.draft_nodes_per_step is not None:
            limits.check_integer(
                "speculative.draft_nodes_per_step", self.draft_nodes_per_step, 1, limits.NODES_PER_STEP_LIMIT
            )
        if self.draft_wait_ms is not None:
            limits.check_number("speculative.draft_wait_ms", self.draft_wait_ms, 0, DRAFT_WAIT_MS_MAX)
        if self.draft_siblings is not None:
            limits.check_integer("speculative.draft_siblings", self.draft_siblings, 0, limits.SIBLINGS_MAX)


MEANINGS = {
    "SamplingParams.max_tokens": (
        "Most output tokens; at least 1, with prompt_logprobs 0: none is generated; prompt and output, one "
        "token at least, must fit the model. Absent: 256, or what fits if less."
    ),
    "SamplingParams.min_tokens": (
        "Fewest output tokens before a stop token or stop string may end the text; at most max_tokens. Absent: 0."
    ),
    "SamplingParams.temperature": ("0 takes the likeliest token; otherwise 0.01 to 100. Absent: 1."),
    "SamplingParams.top_k": ("Keep this many most likely tokens, at most 1000000; 0 keeps all. Absent: 0."),
    "SamplingParams.top_p": ("Keep the smallest most likely set with at least this probability; in (0, 1]. Absent: 1."),
    "SamplingParams.min_p": ("Drop tokens less likely than this share of the likeliest; in [0, 1]. Absent: 0."),
    "SamplingParams.repetition_penalty": (
        "Weakens tokens seen in prompt or output: divides their positive and multiplies their negative "
        "logits; in [0.01, 100]. An encoder's input does not count. Absent: 1, neutral."
    ),
    "SamplingParams.presence_penalty": (
        "Weakens tokens seen in the output: subtracted once from their logits; in [-2, 2]. Absent: 0."
    ),
    "SamplingParams.frequency_penalty": (
        "Weakens tokens seen in the output: subtracted from their logits per occurrence; in [-2, 2]. Absent: 0."
    ),
    "SamplingParams.logit_bias": ("Added to single logits; at most 1024, no id twice."),
    "SamplingParams.seed": (
        "With a seed the text does not depend on the draft (RULE_COUPLED). Absent: drawn by the server."
    ),
    "SamplingParams.stop": (
        "Strings that end the text and are not part of it; at most 16, each 1 to 256 bytes of UTF-8."
    ),
    "SamplingParams.stop_token_ids": (
        "Token ids that end the text; at most 64. They count as output, their text is not shown."
    ),
    "SamplingParams.ignore_eos": ("True: the model's end tokens do not end the text. Absent: false."),
    "SamplingParams.logprobs": (
        "Log-probabilities: absent none, 0 of each output token, n (at most 20) also of the n likeliest."
    ),
    "SamplingParams.n": (
        "Number of texts, the choices, 1 to 16; 1 with `resume`. Choice i is, byte for byte, the text of the "
        "same request with n 1 and seed + i (modulo 2^64), except under REJECTION, whose texts depend on the "
        "draft. All places are taken together, or the request is refused; the prompt is computed once. "
        "Absent: 1."
    ),
    "SamplingParams.grammar": (
        "What the output must be: illegal tokens have probability 0, and an end token is legal where the "
        "output may end. It goes before min_tokens; ignore_eos with it, and a model without end tokens, are "
        "INVALID_ARGUMENT. Absent: any text."
    ),
    "SamplingParams.prompt_logprobs": (
        "Log-probabilities of the prompt's tokens but the first: absent none, 0 of each token, n (at most 20) "
        "also of the n likeliest at its position. They come before the first output token, so with output "
        "tokens in `resume` none is sent. An encoder's input has none: of an encoder-decoder model they are "
        "those of its beginning but the first."
    ),
    "SamplingParams.bad_words": (
        "Words that the output does not contain, as the tokens of the text with and without a space before; "
        "at most 64, each 1 to 256 bytes of UTF-8 and at most 32 tokens. Other tokens of the same text are "
        "not found."
    ),
    "SamplingParams.allowed_token_ids": (
        "The only tokens that the output may consist of; at most 4096. End tokens that are not among them do "
        "not end the text. Empty: all."
    ),
    "SpeculativePolicy.enabled": ("False: plain decoding, without draft and every other proposer. Absent: true."),
    "SpeculativePolicy.num_speculative_tokens": (
        "Most draft tokens in one verification; 0 is plain decoding; at most the server's maximum. Absent: "
        "with FIXED the server's default, otherwise its maximum."
    ),
    "SpeculativePolicy.rule": (
        "The rule. Unspecified: GREEDY at temperature 0, COUPLED with a seed, otherwise the server chooses "
        "REJECTION or COUPLED by their measured speed; `started` reports rule and reason. REJECTION with "
        "temperature 0 or a seed, and GREEDY or COUPLED against the temperature, are INVALID_ARGUMENT."
    ),
    "SpeculativePolicy.policy": (
        "The choice of plans. Unspecified: the server's own policy. Never changes the distribution of the text."
    ),
    "SpeculativePolicy.draft_window": (
        "FIXED only: the draft window, positions past the committed tokens the draft tree may reach; from "
        "num_speculative_tokens, or with siblings from 0, to the server's maximum. Absent: one more than "
        "num_speculative_tokens, if allowed."
    ),
    "SpeculativePolicy.draft_nodes_per_step": (
        "FIXED only: nodes the draft evaluates per step, 1 to the server's maximum; 1 grows a chain without "
        "branches. Absent: 1."
    ),
    "SpeculativePolicy.draft_wait_ms": (
        "FIXED only: longest wait of a verification for num_speculative_tokens draft tokens, in milliseconds, "
        "0 to 60000; 0 never waits. Absent: the server's own."
    ),
    "SpeculativePolicy.draft_siblings": (
        "FIXED only: siblings of each draft token that the draft sends for verification, 0 to 3; with some, a "
        "verification is a tree. Absent: 0."
    ),
    "SpeculativePolicy.proposers": (
        "The proposers that may propose draft tokens for this request. Empty: with FIXED the draft model "
        "alone, otherwise all that the server has."
    ),
    "SpeculativePolicy.report_rounds": (
        "True: deltas carry their rounds, with the draft tokens that were not accepted. Those of "
        "PROPOSER_SUFFIX are texts of others with the same cache salt: without a salt it does not propose "
        "then, and naming it is INVALID_ARGUMENT. Absent: false."
    ),
    "SpeculativePolicy.report_statistics": (
        "True: deltas carry the statistics so far, so that a client that resumes a lost stream has the sums "
        "over both. Absent: false."
    ),
}
