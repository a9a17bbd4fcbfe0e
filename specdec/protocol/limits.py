"""The limit of every field of the wire: one table, by message and field.

A repeated field has two limits: of its entries, and, under its name with `[]`, of each entry (messages have fields of
their own); so have numbers packed in bytes. Strings are counted in characters, or in bytes (`is_bytes`). `Limit.fields`
is written in groups: `A,B.x,y` are the fields x and y of the messages A and B. Sizes of what a peer sends are checked
before it is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from specdec.protocol import heads, items, report, request, types

BOTH_SAMPLING = "SamplingParams,ResolvedSamplingParams"


@dataclass(frozen=True, slots=True)
class Limit:
    """The range [low, high] of numbers or sizes, its name, the reason for it, and the fields that have it."""

    name: str
    high: float
    reason: str
    fields: str
    low: float = 0
    is_bytes: bool = False

    def field_names(self) -> Iterator[str]:
        """Yields `Message.field` for each field."""
        for group in self.fields.split():
            messages, _, names = group.partition(".")
            yield from (f"{message}.{name}" for message in messages.split(",") for name in names.split(","))


TOKENS = (
    Limit(
        "TOKENS_MAX",
        types.TOKENS_MAX,
        "no model has more positions or token ids; those of the served model are checked once it is known",
        f"""TokenIds.ids,ids[] Resume.output_token_ids,output_token_ids[] {BOTH_SAMPLING}.stop_token_ids[],min_tokens
        SamplingParams,Started.max_tokens ResolvedSamplingParams,Started.prompt_length LogitBias,TreeNode.token_id
        OpenItem.length_max,vocabulary_size DescribeResponse.vocabulary_size,positions_max,end_token_ids[]
        DescribeResponse.draft_vocabulary_size ExtendItem.start_position,token_ids[] MissingTokensItem.known_length
        DraftProbs.token_id_steps[]
        VerifyItem.base_position,suffix_token_ids[],draft_token_ids[] CommitItem.committed_length,suffix_token_ids[]
        VerificationResultItem.recovered_token_ids[],head_token_ids[],cached_prompt_tokens
        Logprobs,TokenLogprobs.top_token_ids[]
        NodesItem.root_length Moved.first_output_index Delta.first_output_index,token_ids[] Finished.stop_token_id
        Round.draft_token_ids[] Usage.prompt_tokens,output_tokens Statistics.cached_prompt_tokens""",
    ),
    Limit(
        "EXTEND_TOKEN_COUNT_MAX",
        items.EXTEND_TOKEN_COUNT_MAX,
        "a longer item would keep those of other sessions waiting",
        "ExtendItem.token_ids VerifyItem,CommitItem.suffix_token_ids",
        low=1,
    ),
    Limit(
        "DELTA_TOKEN_COUNT_MAX",
        report.DELTA_TOKEN_COUNT_MAX,
        "with log-probabilities, text and rounds a message stays below a client's own limit of 4 MiB",
        "Delta.token_ids,kinds,text_lengths,logprobs,proposers,rounds",
        low=1,
    ),
)
SAMPLING = (
    Limit(
        "TEMPERATURE_MAX",
        types.TEMPERATURE_MAX,
        "the target distribution is flat there; between 0 and TEMPERATURE_MIN float64 fails",
        f"{BOTH_SAMPLING}.temperature",
    ),
    Limit("TOP_K_MAX", types.TOP_K_MAX, "above every vocabulary", f"{BOTH_SAMPLING}.top_k"),
    Limit("probability", 1, "a probability", f"{BOTH_SAMPLING}.top_p,min_p Statistics.draft_acceptance_rate"),
    Limit(
        "REPETITION_PENALTY_MAX",
        types.REPETITION_PENALTY_MAX,
        "a seen token is as good as certain or impossible there",
        f"{BOTH_SAMPLING}.repetition_penalty",
        low=types.REPETITION_PENALTY_MIN,
    ),
    Limit(
        "PENALTY_MAX",
        types.PENALTY_MAX,
        "the range of other inference servers",
        f"{BOTH_SAMPLING}.presence_penalty,frequency_penalty",
        low=-types.PENALTY_MAX,
    ),
    Limit(
        "LOGIT_BIAS_COUNT_MAX",
        types.LOGIT_BIAS_COUNT_MAX,
        "each entry is work for the sampler at every position",
        f"{BOTH_SAMPLING}.logit_bias",
    ),
    Limit(
        "LOGIT_BIAS_MAX",
        types.LOGIT_BIAS_MAX,
        "a token is certain or impossible there",
        "LogitBias.bias",
        low=-types.LOGIT_BIAS_MAX,
    ),
    Limit("SEED_LIMIT", types.SEED_LIMIT - 1, "64 bits", f"{BOTH_SAMPLING},Started.seed"),
    Limit(
        "STOP_STRING_COUNT_MAX",
        request.STOP_STRING_COUNT_MAX,
        "each is searched for after every token",
        "SamplingParams.stop",
    ),
    Limit(
        "STOP_STRING_BYTES_MAX",
        request.STOP_STRING_BYTES_MAX,
        "as much text is held back",
        "SamplingParams.stop[] Finished.stop_string",
        is_bytes=True,
    ),
    Limit(
        "STOP_TOKEN_COUNT_MAX",
        request.STOP_TOKEN_COUNT_MAX,
        "each is masked at every position before min_tokens",
        "SamplingParams.stop_token_ids",
    ),
    Limit(
        "PARAMS_STOP_TOKEN_COUNT_MAX",
        types.PARAMS_STOP_TOKEN_COUNT_MAX,
        "the stop tokens of a request and the end tokens of its model together",
        "ResolvedSamplingParams.stop_token_ids DescribeResponse.end_token_ids",
    ),
    Limit(
        "LOGPROBS_MAX",
        types.LOGPROBS_MAX,
        "as many are sorted out and sent for every position",
        f"{BOTH_SAMPLING}.logprobs TokenLogprobs.top_token_ids,top_logprobs",
    ),
    Limit(
        "log-probability",
        0,
        "a logarithm of a probability",
        "TokenLogprobs.logprob,top_logprobs[] Logprobs.draft[],recovered[],top[]",
        low=-math.inf,
    ),
    Limit("one text", 1, "several texts per request are not offered", "SamplingParams.n", low=1),
)
NAMES = (
    Limit(
        "REPLICA_COUNT_MAX",
        types.REPLICA_COUNT_MAX,
        "of a pool: each has a connection with pings",
        "CoordinatorDescribeResponse.targets,drafts",
    ),
    Limit("LABEL_LENGTH_MAX", request.LABEL_LENGTH_MAX, "every log line contains it", "GenerateRequest.label"),
    Limit(
        "PROMPT_CACHE_KEY_LENGTH_MAX",
        request.PROMPT_CACHE_KEY_LENGTH_MAX,
        "enough for a random name; it is digested",
        "GenerateRequest.prompt_cache_key",
    ),
    Limit(
        "INSTANCE_LENGTH_MAX",
        types.INSTANCE_LENGTH_MAX,
        "a random number in hexadecimal",
        "DescribeResponse.instance",
    ),
    Limit(
        "CACHE_SALT_LENGTH_MAX",
        types.CACHE_SALT_LENGTH_MAX,
        "enough for a random salt; it is digested with the blocks",
        "GenerateRequest,OpenItem.cache_salt",
    ),
    Limit(
        "UINT32_MAX",
        items.UINT32_MAX,
        "sessions, incarnations, rounds, epochs, nodes and stamps are numbered from 0 or 1, for the life of a stream",
        """OpenItem,ExtendItem,CloseItem,VerifyItem,CommitItem.session,incarnation
        MissingTokensItem,ErrorItem,VerificationResultItem,NodesItem.session,incarnation
        VerifyItem,VerificationResultItem,Round.round_index NodesItem.epoch TreeNode.node_id,parent_back
        LinkStamp.sequence,echo_sequence""",
    ),
    Limit("trace id", 16, "W3C trace context", "TraceContext.trace_id", is_bytes=True),
    Limit("span id", 8, "W3C trace context", "TraceContext.span_id", is_bytes=True),
    Limit("hexadecimal id", 32, "16 bytes in hexadecimal digits", "Started.request_id Finished.trace_id"),
    Limit(
        "DIGEST_LENGTH_MAX",
        types.DIGEST_LENGTH_MAX,
        "twice the hexadecimal digits of SHA-256",
        "DescribeResponse,Started,ReplicaGroup.model_digest DescribeResponse.tokenizer_fingerprint",
    ),
    Limit(
        "NAME_LENGTH_MAX",
        types.NAME_LENGTH_MAX,
        "the name of a model may be the path of its folder",
        "DescribeResponse.model_name,trace_service ReplicaGroup.model_name NumericsProfile.dtype,device,libraries",
    ),
    Limit(
        "FAILURE_WORD_LENGTH_MAX",
        types.FAILURE_WORD_LENGTH_MAX,
        "a word for programs, or the path of a field; a longer one is cut",
        "ErrorItem.reason,field",
    ),
    Limit(
        "FAILURE_TEXT_LENGTH_MAX",
        types.FAILURE_TEXT_LENGTH_MAX,
        "a sentence for people; a longer one of a replica is cut",
        """ErrorItem.message Started,Statistics.rule_reason Statistics.policy_reason
        CoordinatorDescribeResponse.draft_absent_reason""",
    ),
)
SPECULATION = (
    Limit(
        "DRAFT_LENGTH_LIMIT",
        types.DRAFT_LENGTH_LIMIT,
        "draft tokens of a round, and positions of a draft tree: deeper ones are hardly ever committed",
        """VerifyItem.draft_token_ids,draft_probs,parents,parents[] CommitItem.window,wait_length
        Round.draft_token_ids,parents,parents[],proposers,accepted,accepted[]
        SpeculativePolicy.num_speculative_tokens,draft_window
        CoordinatorDescribeResponse.num_speculative_tokens,num_speculative_tokens_max,draft_window_max""",
    ),
    Limit(
        "positions of a round",
        types.DRAFT_LENGTH_LIMIT + 1,
        "its draft tokens, and the recovered or bonus token",
        """VerificationResultItem.recovered_token_ids Round.num_output_tokens
        Statistics.acceptance_histogram,mean_acceptance_length""",
    ),
    Limit(
        "target probabilities",
        8 * types.DRAFT_LENGTH_LIMIT,
        "a float64 for each draft token",
        "VerificationResultItem.target_probs",
        is_bytes=True,
    ),
    Limit(
        "target probability",
        1,
        "packed float64s, which hold any number",
        "VerificationResultItem.target_probs[]",
    ),
    Limit(
        "candidates of heads",
        heads.HEADS_MAX * heads.HEAD_CANDIDATES,
        "HEAD_CANDIDATES of each head",
        "VerificationResultItem.head_token_ids",
    ),
    Limit(
        "their confidences",
        heads.HEADS_MAX * heads.HEAD_CANDIDATES,
        "a byte for each candidate",
        "VerificationResultItem.head_confidences",
        is_bytes=True,
    ),
    Limit(
        "log-probabilities of a round",
        4 * (types.DRAFT_LENGTH_LIMIT + 1),
        "a float32 for each position",
        "Logprobs.draft,recovered",
        is_bytes=True,
    ),
    Limit(
        "likeliest tokens of a round",
        types.LOGPROBS_MAX * (types.DRAFT_LENGTH_LIMIT + 1),
        "LOGPROBS_MAX for each position",
        "Logprobs.top_token_ids",
    ),
    Limit(
        "their log-probabilities",
        4 * types.LOGPROBS_MAX * (types.DRAFT_LENGTH_LIMIT + 1),
        "a float32 for each of the likeliest tokens",
        "Logprobs.top",
        is_bytes=True,
    ),
    Limit(
        "DRAFT_PROBS_TOKEN_COUNT_MAX",
        types.DRAFT_PROBS_TOKEN_COUNT_MAX,
        "the draft draws from its likeliest tokens only; the codes are bytes",
        "DraftProbs.token_id_steps,weight_codes",
        low=1,
        is_bytes=True,
    ),
    Limit(
        "NODES_PER_STEP_LIMIT",
        types.NODES_PER_STEP_LIMIT,
        "the likeliest 8 contain nearly all committed ones",
        """CommitItem.nodes_per_step SpeculativePolicy.draft_nodes_per_step
        CoordinatorDescribeResponse.draft_nodes_per_step_max""",
    ),
    Limit(
        "NODES_PER_ITEM_MAX",
        types.NODES_PER_ITEM_MAX,
        "each evaluated node sends its children and, once, itself; further nodes count as malformed",
        "NodesItem.nodes",
    ),
    Limit(
        "SIBLINGS_MAX",
        types.SIBLINGS_MAX,
        "a further one would be right once in thirty misses",
        "CommitItem.siblings SpeculativePolicy.draft_siblings CoordinatorDescribeResponse.draft_siblings_max",
    ),
    Limit("CONFIDENCE_MAX", types.CONFIDENCE_MAX, "the bins of a confidence", "TreeNode.confidence"),
    Limit("proposers", len(types.Proposer) - 1, "each is named once at most", "SpeculativePolicy.proposers"),
    Limit(
        "DRAFT_WAIT_MS_MAX",
        request.DRAFT_WAIT_MS_MAX,
        "a minute; a draft token is worth milliseconds",
        "SpeculativePolicy.draft_wait_ms",
    ),
)
MEASUREMENTS = (
    Limit("HEADS_MAX", heads.HEADS_MAX, "later positions are hardly ever right", "DescribeResponse.num_heads"),
    Limit(
        "STEP_TIME_COUNT_MAX",
        types.STEP_TIME_COUNT_MAX,
        "rows grow by factors",
        "DescribeResponse.step_times,head_times",
    ),
    Limit(
        "32 bits",
        items.UINT32_MAX,
        "reported or compared; no memory depends on it",
        """DescribeResponse.protocol_version NumericsProfile.tensor_parallel_size CacheSize.block_count,block_size
        StepTime.rows,step_us ErrorItem.code,retry_after_ms NodesItem.step_us,step_rows,worked_us
        NodesItem.active_sessions Delta.text_lengths[]
        VerificationResultItem.queue_us,forward_us,sampling_us,step_rows,step_sessions,active_sessions
        VerificationResultItem.step_count,preemptions Statistics.rounds,num_spec_steps,num_draft_tokens
        Statistics.num_accepted_draft_tokens,acceptance_histogram[],draft_waits_expired,num_evaluated_nodes
        Statistics.num_branch_nodes,num_recovered_lookups,num_recovered_hits,num_bonus_lookups,num_bonus_hits
        Statistics.num_branch_tokens_accepted,num_rounds_off,preemptions,num_rounds_exploring,num_paths
        Statistics.num_target_changes,num_draft_changes OpenItem.age_ms Load.sessions,load_thousandths
        ReplicaGroup.num_replicas
        Statistics.num_model_draft_tokens,num_model_accepted_tokens,num_ngram_draft_tokens,num_ngram_accepted_tokens
        Statistics.num_suffix_draft_tokens,num_suffix_accepted_tokens,num_heads_draft_tokens,num_heads_accepted_tokens
        Statistics.num_prediction_draft_tokens,num_prediction_accepted_tokens""",
    ),
    Limit(
        "64 bits",
        (1 << 64) - 1,
        "reported or compared; no memory depends on it",
        """CacheSize.bytes LinkStamp.sent_time_us,echo_held_us,wall_time_us
        VerificationResultItem.server_us Statistics.draft_link_bytes,target_link_bytes,step_sessions,active_sessions""",
    ),
    Limit("a share", 1.0, "of all", "DescribeResponse.draft_vocabulary_share"),
    Limit(
        "float64",
        math.inf,
        "reported to the client only",
        """Statistics.predicted_tokens_per_s,observed_tokens_per_s,exploration_loss_s
        TimeSplit.time_to_first_token_s,total_s Round.round_s
        TimeSplit,Round.draft_wait_s,target_queue_s,target_forward_s,target_sampling_s,target_link_s""",
    ),
)
MESSAGES = (
    Limit(
        "ITEM_COUNT_MAX",
        items.ITEM_COUNT_MAX,
        "10 ms of reading, and several items for each of the usual 64 sessions",
        "VerifyRequest,VerifyResponse,DraftRequest,DraftResponse.items",
    ),
    Limit(
        "message size",
        (1 << 32) - 1,
        "the size of a message is limited by the connection, before it is parsed (specdec.rpc.limits)",
        "GenerateRequest,Prediction.text Delta.text",
    ),
)
LIMITS = (*TOKENS, *SAMPLING, *NAMES, *SPECULATION, *MEASUREMENTS, *MESSAGES)
