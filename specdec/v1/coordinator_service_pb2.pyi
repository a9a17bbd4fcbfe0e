from specdec.v1 import field_pb2 as _field_pb2
from specdec.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Proposer(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROPOSER_UNSPECIFIED: _ClassVar[Proposer]
    PROPOSER_DRAFT: _ClassVar[Proposer]
    PROPOSER_NGRAM: _ClassVar[Proposer]
    PROPOSER_SUFFIX: _ClassVar[Proposer]
    PROPOSER_PREDICTION: _ClassVar[Proposer]
    PROPOSER_HEADS: _ClassVar[Proposer]
    PROPOSER_GRAMMAR: _ClassVar[Proposer]

class Policy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POLICY_UNSPECIFIED: _ClassVar[Policy]
    POLICY_AUTO: _ClassVar[Policy]
    POLICY_FIXED: _ClassVar[Policy]
    POLICY_OFF: _ClassVar[Policy]

class TokenKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOKEN_KIND_UNSPECIFIED: _ClassVar[TokenKind]
    TOKEN_KIND_ACCEPTED: _ClassVar[TokenKind]
    TOKEN_KIND_RECOVERED: _ClassVar[TokenKind]
    TOKEN_KIND_BONUS: _ClassVar[TokenKind]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
PROPOSER_UNSPECIFIED: Proposer
PROPOSER_DRAFT: Proposer
PROPOSER_NGRAM: Proposer
PROPOSER_SUFFIX: Proposer
PROPOSER_PREDICTION: Proposer
PROPOSER_HEADS: Proposer
PROPOSER_GRAMMAR: Proposer
POLICY_UNSPECIFIED: Policy
POLICY_AUTO: Policy
POLICY_FIXED: Policy
POLICY_OFF: Policy
TOKEN_KIND_UNSPECIFIED: TokenKind
TOKEN_KIND_ACCEPTED: TokenKind
TOKEN_KIND_RECOVERED: TokenKind
TOKEN_KIND_BONUS: TokenKind
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason

class GenerateRequest(_message.Message):
    __slots__ = ("text", "token_ids", "sampling", "speculative", "resume", "label", "cache_salt", "prediction", "prompt_cache_key", "decoder_prompt")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_CACHE_KEY_FIELD_NUMBER: _ClassVar[int]
    DECODER_PROMPT_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: TokenIds
    sampling: SamplingParams
    speculative: SpeculativePolicy
    resume: Resume
    label: str
    cache_salt: str
    prediction: Prediction
    prompt_cache_key: str
    decoder_prompt: DecoderPrompt
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., speculative: _Optional[_Union[SpeculativePolicy, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., label: _Optional[str] = ..., cache_salt: _Optional[str] = ..., prediction: _Optional[_Union[Prediction, _Mapping]] = ..., prompt_cache_key: _Optional[str] = ..., decoder_prompt: _Optional[_Union[DecoderPrompt, _Mapping]] = ...) -> None: ...

class DecoderPrompt(_message.Message):
    __slots__ = ("text", "token_ids")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: TokenIds
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ...) -> None: ...

class Prediction(_message.Message):
    __slots__ = ("text", "token_ids")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: TokenIds
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "stop", "stop_token_ids", "ignore_eos", "logprobs", "n", "grammar", "prompt_logprobs", "bad_words", "allowed_token_ids")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[_types_pb2.LogitBias]
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: int
    n: int
    grammar: Grammar
    prompt_logprobs: int
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[_types_pb2.LogitBias, _Mapping]]] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., logprobs: _Optional[int] = ..., n: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., prompt_logprobs: _Optional[int] = ..., bad_words: _Optional[_Iterable[str]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("json_schema", "json_object", "regex", "choice", "lark", "allow_whitespace")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    ALLOW_WHITESPACE_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    json_object: bool
    regex: str
    choice: Choice
    lark: str
    allow_whitespace: bool
    def __init__(self, json_schema: _Optional[str] = ..., json_object: bool = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[Choice, _Mapping]] = ..., lark: _Optional[str] = ..., allow_whitespace: bool = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class SpeculativePolicy(_message.Message):
    __slots__ = ("enabled", "num_speculative_tokens", "rule", "policy", "draft_window", "draft_nodes_per_step", "draft_wait_ms", "draft_siblings", "proposers", "report_rounds", "report_statistics")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    DRAFT_WINDOW_FIELD_NUMBER: _ClassVar[int]
    DRAFT_NODES_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    DRAFT_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SIBLINGS_FIELD_NUMBER: _ClassVar[int]
    PROPOSERS_FIELD_NUMBER: _ClassVar[int]
    REPORT_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    REPORT_STATISTICS_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    num_speculative_tokens: int
    rule: _types_pb2.Rule
    policy: Policy
    draft_window: int
    draft_nodes_per_step: int
    draft_wait_ms: float
    draft_siblings: int
    proposers: _containers.RepeatedScalarFieldContainer[Proposer]
    report_rounds: bool
    report_statistics: bool
    def __init__(self, enabled: bool = ..., num_speculative_tokens: _Optional[int] = ..., rule: _Optional[_Union[_types_pb2.Rule, str]] = ..., policy: _Optional[_Union[Policy, str]] = ..., draft_window: _Optional[int] = ..., draft_nodes_per_step: _Optional[int] = ..., draft_wait_ms: _Optional[float] = ..., draft_siblings: _Optional[int] = ..., proposers: _Optional[_Iterable[_Union[Proposer, str]]] = ..., report_rounds: bool = ..., report_statistics: bool = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("output_token_ids",)
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, output_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "delta", "finished", "moved", "prompt_logprobs", "choice")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    started: Started
    delta: Delta
    finished: Finished
    moved: Moved
    prompt_logprobs: _types_pb2.PromptLogprobs
    choice: int
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., moved: _Optional[_Union[Moved, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_types_pb2.PromptLogprobs, _Mapping]] = ..., choice: _Optional[int] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("request_id", "seed", "rule", "model_digest", "numerics", "prompt_length", "max_tokens", "rule_reason", "encoder_length")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RULE_REASON_FIELD_NUMBER: _ClassVar[int]
    ENCODER_LENGTH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    seed: int
    rule: _types_pb2.Rule
    model_digest: str
    numerics: _types_pb2.NumericsProfile
    prompt_length: int
    max_tokens: int
    rule_reason: str
    encoder_length: int
    def __init__(self, request_id: _Optional[str] = ..., seed: _Optional[int] = ..., rule: _Optional[_Union[_types_pb2.Rule, str]] = ..., model_digest: _Optional[str] = ..., numerics: _Optional[_Union[_types_pb2.NumericsProfile, _Mapping]] = ..., prompt_length: _Optional[int] = ..., max_tokens: _Optional[int] = ..., rule_reason: _Optional[str] = ..., encoder_length: _Optional[int] = ...) -> None: ...

class Moved(_message.Message):
    __slots__ = ("first_output_index", "numerics")
    FIRST_OUTPUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    first_output_index: int
    numerics: _types_pb2.NumericsProfile
    def __init__(self, first_output_index: _Optional[int] = ..., numerics: _Optional[_Union[_types_pb2.NumericsProfile, _Mapping]] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("first_output_index", "token_ids", "kinds", "text", "logprobs", "text_lengths", "proposers", "rounds", "statistics")
    FIRST_OUTPUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TEXT_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    PROPOSERS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    first_output_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    kinds: _containers.RepeatedScalarFieldContainer[TokenKind]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    text_lengths: _containers.RepeatedScalarFieldContainer[int]
    proposers: _containers.RepeatedScalarFieldContainer[Proposer]
    rounds: _containers.RepeatedCompositeFieldContainer[Round]
    statistics: Statistics
    def __init__(self, first_output_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., kinds: _Optional[_Iterable[_Union[TokenKind, str]]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., text_lengths: _Optional[_Iterable[int]] = ..., proposers: _Optional[_Iterable[_Union[Proposer, str]]] = ..., rounds: _Optional[_Iterable[_Union[Round, _Mapping]]] = ..., statistics: _Optional[_Union[Statistics, _Mapping]] = ...) -> None: ...

class Round(_message.Message):
    __slots__ = ("round_index", "draft_token_ids", "parents", "proposers", "accepted", "num_output_tokens", "round_s", "draft_wait_s", "target_queue_s", "target_forward_s", "target_sampling_s", "target_link_s", "target_heads_s")
    ROUND_INDEX_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    PROPOSERS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROUND_S_FIELD_NUMBER: _ClassVar[int]
    DRAFT_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    TARGET_QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    TARGET_FORWARD_S_FIELD_NUMBER: _ClassVar[int]
    TARGET_SAMPLING_S_FIELD_NUMBER: _ClassVar[int]
    TARGET_LINK_S_FIELD_NUMBER: _ClassVar[int]
    TARGET_HEADS_S_FIELD_NUMBER: _ClassVar[int]
    round_index: int
    draft_token_ids: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    proposers: _containers.RepeatedScalarFieldContainer[Proposer]
    accepted: _containers.RepeatedScalarFieldContainer[int]
    num_output_tokens: int
    round_s: float
    draft_wait_s: float
    target_queue_s: float
    target_forward_s: float
    target_sampling_s: float
    target_link_s: float
    target_heads_s: float
    def __init__(self, round_index: _Optional[int] = ..., draft_token_ids: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., proposers: _Optional[_Iterable[_Union[Proposer, str]]] = ..., accepted: _Optional[_Iterable[int]] = ..., num_output_tokens: _Optional[int] = ..., round_s: _Optional[float] = ..., draft_wait_s: _Optional[float] = ..., target_queue_s: _Optional[float] = ..., target_forward_s: _Optional[float] = ..., target_sampling_s: _Optional[float] = ..., target_link_s: _Optional[float] = ..., target_heads_s: _Optional[float] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_token_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "stop_string", "stop_token_id", "usage", "statistics", "trace_id")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    stop_string: str
    stop_token_id: int
    usage: Usage
    statistics: Statistics
    trace_id: str
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., statistics: _Optional[_Union[Statistics, _Mapping]] = ..., trace_id: _Optional[str] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "output_tokens", "encoder_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENCODER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    output_tokens: int
    encoder_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., encoder_tokens: _Optional[int] = ...) -> None: ...

class Statistics(_message.Message):
    __slots__ = ("rounds", "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "draft_link_bytes", "target_link_bytes", "draft_waits_expired", "time", "num_evaluated_nodes", "num_branch_nodes", "num_recovered_lookups", "num_recovered_hits", "num_bonus_lookups", "num_bonus_hits", "num_branch_tokens_accepted", "num_rounds_off", "predicted_tokens_per_s", "observed_tokens_per_s", "policy_reason", "step_sessions", "active_sessions", "cached_prompt_tokens", "preemptions", "rule", "rule_reason", "num_rounds_exploring", "exploration_loss_s", "num_model_draft_tokens", "num_model_accepted_tokens", "num_ngram_draft_tokens", "num_ngram_accepted_tokens", "num_suffix_draft_tokens", "num_suffix_accepted_tokens", "num_prediction_draft_tokens", "num_prediction_accepted_tokens", "num_heads_draft_tokens", "num_heads_accepted_tokens", "num_paths", "num_target_changes", "num_draft_changes", "num_grammar_draft_tokens", "num_grammar_accepted_tokens")
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    NUM_SPEC_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MEAN_ACCEPTANCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ACCEPTANCE_RATE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LINK_BYTES_FIELD_NUMBER: _ClassVar[int]
    TARGET_LINK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_WAITS_EXPIRED_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    NUM_EVALUATED_NODES_FIELD_NUMBER: _ClassVar[int]
    NUM_BRANCH_NODES_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOVERED_LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOVERED_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_BONUS_LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    NUM_BONUS_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_BRANCH_TOKENS_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_OFF_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    POLICY_REASON_FIELD_NUMBER: _ClassVar[int]
    STEP_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    RULE_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_EXPLORING_FIELD_NUMBER: _ClassVar[int]
    EXPLORATION_LOSS_S_FIELD_NUMBER: _ClassVar[int]
    NUM_MODEL_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_MODEL_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_NGRAM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_NGRAM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SUFFIX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SUFFIX_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREDICTION_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREDICTION_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PATHS_FIELD_NUMBER: _ClassVar[int]
    NUM_TARGET_CHANGES_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_CHANGES_FIELD_NUMBER: _ClassVar[int]
    NUM_GRAMMAR_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_GRAMMAR_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    rounds: int
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: _containers.RepeatedScalarFieldContainer[int]
    draft_link_bytes: int
    target_link_bytes: int
    draft_waits_expired: int
    time: TimeSplit
    num_evaluated_nodes: int
    num_branch_nodes: int
    num_recovered_lookups: int
    num_recovered_hits: int
    num_bonus_lookups: int
    num_bonus_hits: int
    num_branch_tokens_accepted: int
    num_rounds_off: int
    predicted_tokens_per_s: float
    observed_tokens_per_s: float
    policy_reason: str
    step_sessions: int
    active_sessions: int
    cached_prompt_tokens: int
    preemptions: int
    rule: _types_pb2.Rule
    rule_reason: str
    num_rounds_exploring: int
    exploration_loss_s: float
    num_model_draft_tokens: int
    num_model_accepted_tokens: int
    num_ngram_draft_tokens: int
    num_ngram_accepted_tokens: int
    num_suffix_draft_tokens: int
    num_suffix_accepted_tokens: int
    num_prediction_draft_tokens: int
    num_prediction_accepted_tokens: int
    num_heads_draft_tokens: int
    num_heads_accepted_tokens: int
    num_paths: int
    num_target_changes: int
    num_draft_changes: int
    num_grammar_draft_tokens: int
    num_grammar_accepted_tokens: int
    def __init__(self, rounds: _Optional[int] = ..., num_spec_steps: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_draft_tokens: _Optional[int] = ..., mean_acceptance_length: _Optional[float] = ..., draft_acceptance_rate: _Optional[float] = ..., acceptance_histogram: _Optional[_Iterable[int]] = ..., draft_link_bytes: _Optional[int] = ..., target_link_bytes: _Optional[int] = ..., draft_waits_expired: _Optional[int] = ..., time: _Optional[_Union[TimeSplit, _Mapping]] = ..., num_evaluated_nodes: _Optional[int] = ..., num_branch_nodes: _Optional[int] = ..., num_recovered_lookups: _Optional[int] = ..., num_recovered_hits: _Optional[int] = ..., num_bonus_lookups: _Optional[int] = ..., num_bonus_hits: _Optional[int] = ..., num_branch_tokens_accepted: _Optional[int] = ..., num_rounds_off: _Optional[int] = ..., predicted_tokens_per_s: _Optional[float] = ..., observed_tokens_per_s: _Optional[float] = ..., policy_reason: _Optional[str] = ..., step_sessions: _Optional[int] = ..., active_sessions: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., rule: _Optional[_Union[_types_pb2.Rule, str]] = ..., rule_reason: _Optional[str] = ..., num_rounds_exploring: _Optional[int] = ..., exploration_loss_s: _Optional[float] = ..., num_model_draft_tokens: _Optional[int] = ..., num_model_accepted_tokens: _Optional[int] = ..., num_ngram_draft_tokens: _Optional[int] = ..., num_ngram_accepted_tokens: _Optional[int] = ..., num_suffix_draft_tokens: _Optional[int] = ..., num_suffix_accepted_tokens: _Optional[int] = ..., num_prediction_draft_tokens: _Optional[int] = ..., num_prediction_accepted_tokens: _Optional[int] = ..., num_heads_draft_tokens: _Optional[int] = ..., num_heads_accepted_tokens: _Optional[int] = ..., num_paths: _Optional[int] = ..., num_target_changes: _Optional[int] = ..., num_draft_changes: _Optional[int] = ..., num_grammar_draft_tokens: _Optional[int] = ..., num_grammar_accepted_tokens: _Optional[int] = ...) -> None: ...

class TimeSplit(_message.Message):
    __slots__ = ("time_to_first_token_s", "total_s", "draft_wait_s", "target_queue_s", "target_forward_s", "target_sampling_s", "target_link_s", "target_heads_s")
    TIME_TO_FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    DRAFT_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    TARGET_QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    TARGET_FORWARD_S_FIELD_NUMBER: _ClassVar[int]
    TARGET_SAMPLING_S_FIELD_NUMBER: _ClassVar[int]
    TARGET_LINK_S_FIELD_NUMBER: _ClassVar[int]
    TARGET_HEADS_S_FIELD_NUMBER: _ClassVar[int]
    time_to_first_token_s: float
    total_s: float
    draft_wait_s: float
    target_queue_s: float
    target_forward_s: float
    target_sampling_s: float
    target_link_s: float
    target_heads_s: float
    def __init__(self, time_to_first_token_s: _Optional[float] = ..., total_s: _Optional[float] = ..., draft_wait_s: _Optional[float] = ..., target_queue_s: _Optional[float] = ..., target_forward_s: _Optional[float] = ..., target_sampling_s: _Optional[float] = ..., target_link_s: _Optional[float] = ..., target_heads_s: _Optional[float] = ...) -> None: ...

class CoordinatorDescribeResponse(_message.Message):
    __slots__ = ("target", "draft", "draft_absent_reason", "num_speculative_tokens_max", "num_speculative_tokens", "draft_window_max", "draft_nodes_per_step_max", "draft_siblings_max", "targets", "drafts")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ABSENT_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_WINDOW_MAX_FIELD_NUMBER: _ClassVar[int]
    DRAFT_NODES_PER_STEP_MAX_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SIBLINGS_MAX_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    target: _types_pb2.DescribeResponse
    draft: _types_pb2.DescribeResponse
    draft_absent_reason: str
    num_speculative_tokens_max: int
    num_speculative_tokens: int
    draft_window_max: int
    draft_nodes_per_step_max: int
    draft_siblings_max: int
    targets: _containers.RepeatedCompositeFieldContainer[ReplicaGroup]
    drafts: _containers.RepeatedCompositeFieldContainer[ReplicaGroup]
    def __init__(self, target: _Optional[_Union[_types_pb2.DescribeResponse, _Mapping]] = ..., draft: _Optional[_Union[_types_pb2.DescribeResponse, _Mapping]] = ..., draft_absent_reason: _Optional[str] = ..., num_speculative_tokens_max: _Optional[int] = ..., num_speculative_tokens: _Optional[int] = ..., draft_window_max: _Optional[int] = ..., draft_nodes_per_step_max: _Optional[int] = ..., draft_siblings_max: _Optional[int] = ..., targets: _Optional[_Iterable[_Union[ReplicaGroup, _Mapping]]] = ..., drafts: _Optional[_Iterable[_Union[ReplicaGroup, _Mapping]]] = ...) -> None: ...

class ReplicaGroup(_message.Message):
    __slots__ = ("model_digest", "model_name", "numerics", "num_replicas")
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    NUM_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    model_digest: str
    model_name: str
    numerics: _types_pb2.NumericsProfile
    num_replicas: int
    def __init__(self, model_digest: _Optional[str] = ..., model_name: _Optional[str] = ..., numerics: _Optional[_Union[_types_pb2.NumericsProfile, _Mapping]] = ..., num_replicas: _Optional[int] = ...) -> None: ...
