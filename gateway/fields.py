"""Every field of a request, and what becomes of it: honoured, metadata that changes nothing, or refused.

This is the one table: openapi.json has its words; the request models and docs/http.md are tested against it. A refused
field may have a value that asks for nothing (`neutral`), which clients send; absent and null always ask for nothing.
Nothing else is accepted and ignored.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from specdec.client.request import FIELDS

# Sampling parameters that have another form over HTTP, or none; the other numbers and flags are as in gRPC.
OTHER_FORM = (
    "max_tokens",
    "top_k",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "logprobs",
    "n",
    "prompt_logprobs",
    "grammar",
    "bad_words",
    "allowed_token_ids",
)
SAME_FORM = {
    name: field
    for name, field in FIELDS.items()
    if field.containing_type.name == "SamplingParams" and name not in OTHER_FORM
}


class Fate(enum.Enum):
    """What becomes of a field."""

    HONOURED = "honoured"
    METADATA = "metadata"
    REFUSED = "refused"


CHAT, COMPLETIONS = "chat", "completions"
BOTH = (CHAT, COMPLETIONS)


@dataclass(frozen=True, slots=True)
class Field:
    """One field. `where`: the endpoints that know it; `meaning`: what it becomes, or why it is refused."""

    name: str
    fate: Fate
    meaning: str
    where: tuple[str, ...] = BOTH
    neutral: tuple[Any, ...] = ()


def _honoured(name: str, meaning: str, where: tuple[str, ...] = BOTH) -> Field:
    return Field(name, Fate.HONOURED, meaning, where)


def _metadata(name: str, meaning: str, where: tuple[str, ...] = BOTH) -> Field:
    return Field(name, Fate.METADATA, meaning, where)


def _refused(name: str, meaning: str, *neutral: Any, where: tuple[str, ...] = BOTH) -> Field:
    return Field(name, Fate.REFUSED, meaning, where, neutral)


GUIDED = "use `structured_outputs`"
TABLE = (
    _honoured("model", "the served name; another is 404"),
    _honoured("messages", "the prompt, by the model's chat template; `prompt.token_ids`", (CHAT,)),
    _honoured("prompt", "text or token ids, or at most 64 of them: `n` choices each", (COMPLETIONS,)),
    _honoured(
        "decoder_prompt",
        "`decoder_prompt`, text or token ids: begins the output of an encoder-decoder model, whose input the prompt is",
        (COMPLETIONS,),
    ),
    _honoured(
        "max_completion_tokens",
        "`sampling.max_tokens`; chat without: what fits; completions: 16; 0 with log-probabilities of the prompt only",
    ),
    _honoured("max_tokens", "older name of `max_completion_tokens`; both must be equal"),
    *(_honoured(name, f"`sampling.{name}`") for name in SAME_FORM),
    _honoured("top_k", "`sampling.top_k`; -1 is all, as 0"),
    _honoured("logit_bias", "`sampling.logit_bias`"),
    _honoured("seed", "`sampling.seed`: its 64 bits, also of a negative one"),
    _honoured("n", "`sampling.n`, 1 to 16: choice i has seed + i, and of several prompts n choices each, in order"),
    _honoured("best_of", "as `n`, or absent: all texts are returned, none is picked", (COMPLETIONS,)),
    _honoured("stop", "`sampling.stop`; the text of a special token is its id in `sampling.stop_token_ids` too"),
    _honoured("stop_token_ids", "`sampling.stop_token_ids`"),
    _honoured("bad_words", "`sampling.bad_words`"),
    _honoured("allowed_token_ids", "`sampling.allowed_token_ids`"),
    _honoured("logprobs", "`sampling.logprobs`; chat: true or false, completions: 0 to 20"),
    _honoured("prompt_logprobs", "`sampling.prompt_logprobs`, in vLLM's form; not in a stream; 400 with an encoder"),
    _honoured(
        "echo",
        "the prompt before its answer; with `logprobs` they are the prompt's too; 400 with an encoder",
        (COMPLETIONS,),
    ),
    _honoured("top_logprobs", "`sampling.logprobs`, 0 to 20; needs `logprobs`", (CHAT,)),
    _honoured("return_tokens_as_token_ids", "tokens of log-probabilities are `token_id:ID`"),
    _honoured("return_token_ids", "`prompt_token_ids`, and `token_ids` of each choice"),
    _honoured("stream", "server-sent events"),
    _honoured(
        "stream_options",
        "`include_usage`: a last chunk with the usage; `continuous_usage_stats`: the usage so far on each chunk",
    ),
    _honoured("prediction", "`prediction.text`: guesses, never a change of the text"),
    _honoured("cache_salt", "`cache_salt`, with the name of the key"),
    _honoured("speculative", "`speculative`; also `statistics` and `rounds` of the answer"),
    _honoured(
        "tools",
        "given to the template; calls in the text are `tool_calls`; of a tool with `strict` only with arguments of its "
        "schema",
        (CHAT,),
    ),
    _honoured(
        "tool_choice",
        "`auto`; `none`: as without `tools`; `required`, or one tool by its name: a call, under a grammar",
        (CHAT,),
    ),
    _honoured("response_format", "`json_schema` and `json_object`: `sampling.grammar`; with tools that, or calls"),
    _honoured(
        "structured_outputs",
        "`json`, `json_object`, `regex`, `choice`, or `grammar` in Lark: `sampling.grammar`; "
        "`disable_any_whitespace` false: its `allow_whitespace`",
    ),
    _honoured("parallel_tool_calls", "false: the answer ends after its first call", (CHAT,)),
    _honoured("add_generation_prompt", "of the template; true by default", (CHAT,)),
    _honoured("continue_final_message", "the answer continues the last message", (CHAT,)),
    _honoured("chat_template_kwargs", "variables that the template names; another is 400", (CHAT,)),
    _honoured("reasoning_effort", "that variable of the template; 400 if it names none", (CHAT,)),
    _metadata("user", "a name of the client's own"),
    _metadata("metadata", "at most 16 pairs of the client's own"),
    _metadata("safety_identifier", "a name of the client's own"),
    _metadata("prompt_cache_key", "prefixes are found by their tokens"),
    _metadata("store", "false only: nothing is stored"),
    _metadata("service_tier", "`auto` or `default`: there is one"),
    _refused("use_beam_search", "text is drawn, not searched", False),
    _refused("length_penalty", "of beam search", 1, 1.0),
    _refused("suffix", "text is not inserted", "", where=(COMPLETIONS,)),
    _refused("guided_json", GUIDED),
    _refused("guided_regex", GUIDED),
    _refused("guided_choice", GUIDED),
    _refused("guided_grammar", GUIDED),
    _refused("logits_processors", "no code of clients is run", []),
    _refused("functions", "use `tools`", [], where=(CHAT,)),
    _refused("function_call", "use `tool_choice`", "none", "auto", where=(CHAT,)),
    _refused("audio", "text only", where=(CHAT,)),
    _refused("modalities", "text only", ["text"], where=(CHAT,)),
    _refused("web_search_options", "nothing is searched", where=(CHAT,)),
    _refused("moderation", "nothing is moderated", where=(CHAT,)),
    _refused("verbosity", "no template knows it", "medium", where=(CHAT,)),
    _refused("prompt_cache_options", "prefixes are cached as there is space", where=(CHAT,)),
    _refused("prompt_cache_retention", "prefixes are cached as there is space", "in_memory", where=(CHAT,)),
    _refused("chat_template", "templates of requests are not run", where=(CHAT,)),
    _refused("documents", "use `messages`", [], where=(CHAT,)),
    _refused("prompt_embeds", "prompts are text or token ids", where=(COMPLETIONS,)),
    _refused("mm_processor_kwargs", "text only", where=(CHAT,)),
    _refused(
        "add_special_tokens", "the tokenizer's own rules hold; the template's in chat", True, where=(COMPLETIONS,)
    ),
    _refused("skip_special_tokens", "special tokens have no text", True),
    _refused("spaces_between_special_tokens", "special tokens have no text", True),
    _refused("include_stop_str_in_output", "a stop string is not part of the text", False),
    _refused("truncate_prompt_tokens", "a prompt is not shortened"),
    _refused("priority", "requests have none", 0),
)
BY_ENDPOINT = {endpoint: {field.name: field for field in TABLE if endpoint in field.where} for endpoint in BOTH}
