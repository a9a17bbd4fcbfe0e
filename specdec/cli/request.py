"""What `specdec generate` is asked, and the message it sends.

Ranges are the server's to check: it knows the model, and its answer names field and limit. Only what cannot be put into
the message at all is refused here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from specdec.config import OUTPUT, PROMPT, SAMPLING, SPECULATION, ClientSettings
from specdec.errors import ConfigError
from specdec.settings import setting

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from specdec.v1 import coordinator_service_pb2 as coordinator_pb

UINT32_MAX = (1 << 32) - 1
UINT64_MAX = (1 << 64) - 1


def option(group: str, help: str, default: Any = None, metavar: str = "", **more: Any) -> Any:
    """A field of GenerateSettings; absent values are not sent."""
    return setting(default, group, help, metavar=metavar, **more)


def split_ids(value: Any) -> Any:
    """ "1,2" and ["1,2", "3"] as lists of ids; anything else as it is, for the type to judge."""
    parts = [value] if isinstance(value, (str, int)) else value
    if not isinstance(parts, (list, tuple)):
        return value
    return [piece for part in parts for piece in (part.split(",") if isinstance(part, str) else [part])]


def split_biases(value: Any) -> Any:
    """["5=-1.5"] and {5: -1.5} as pairs; ValueError saying how one is written."""
    if isinstance(value, dict):
        return list(value.items())
    pairs = []
    for part in [value] if isinstance(value, str) else value:
        if isinstance(part, str):
            token_id, equals, bias = part.partition("=")
            if not equals:
                raise ValueError("it must be ID=BIAS, such as 5=-1.5")
            part = (token_id, bias)
        pairs.append(part)
    return pairs


TokenId = Annotated[int, Field(ge=0, le=UINT32_MAX)]
TokenIds = Annotated[tuple[TokenId, ...], BeforeValidator(split_ids)]
Biases = Annotated[tuple[tuple[TokenId, float], ...], BeforeValidator(split_biases)]
Texts = Annotated[tuple[str, ...], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]


class GenerateSettings(ClientSettings):
    """One generation, and how to show it."""

    prompt: str | None = option(PROMPT, "The text to continue; - reads it from standard input.", positional=True)
    prompt_ids: TokenIds = option(PROMPT, "Token ids to continue instead of a text.", (), "ID,ID,…")
    resume_ids: TokenIds = option(
        PROMPT, "Output token ids of a stream that broke off; give its --seed too.", (), "ID,ID,…"
    )
    label: str = option(PROMPT, "Your name for the request, for logs.", "")
    cache_salt: str = option(
        PROMPT, "Cached prefixes are shared only among requests of the same salt.", "", metavar="TEXT"
    )
    max_tokens: int | None = option(SAMPLING, "Most output tokens.", ge=0, le=UINT32_MAX)
    min_tokens: int | None = option(SAMPLING, "Fewest output tokens before a stop counts.", ge=0, le=UINT32_MAX)
    temperature: float | None = option(SAMPLING, "0 takes the likeliest token; otherwise 0.01 to 100. Absent: 1.")
    top_k: int | None = option(SAMPLING, "Keep so many likeliest tokens; 0 keeps all.", ge=0, le=UINT32_MAX)
    top_p: float | None = option(SAMPLING, "Keep the likeliest tokens with so much probability; above 0, at most 1.")
    min_p: float | None = option(SAMPLING, "Drop tokens below this share of the likeliest; 0 to 1.")
    repetition_penalty: float | None = option(SAMPLING, "Weakens tokens seen in prompt or output; 1 is neutral.")
    presence_penalty: float | None = option(SAMPLING, "Weakens tokens seen in the output, once; -2 to 2.")
    frequency_penalty: float | None = option(SAMPLING, "Weakens tokens seen in the output, per time; -2 to 2.")
    logit_bias: Biases = option(SAMPLING, "Adds to a token's logit; may be repeated.", (), "ID=BIAS")
    seed: int | None = option(SAMPLING, "Makes the text repeatable, whatever the draft does.", ge=0, le=UINT64_MAX)
    stop: Texts = option(SAMPLING, "String that ends the text; may be repeated.", ())
    stop_token_ids: TokenIds = option(SAMPLING, "Token ids that end the text.", (), "ID,ID,…")
    ignore_eos: bool | None = option(SAMPLING, "Go on past the model's end tokens.")
    logprobs: int | None = option(
        SAMPLING,
        "Log-probabilities: 0 of each token, N also of the N likeliest; shown with --json.",
        ge=0,
        le=UINT32_MAX,
    )
    speculative: bool | None = option(SPECULATION, "Whether a draft may guess; the law of the text is the same.")
    num_speculative_tokens: int | None = option(
        SPECULATION, "Most draft tokens in one verification; absent: as the server is set.", ge=0, le=UINT32_MAX
    )
    policy: Literal["auto", "fixed", "off"] | None = option(
        SPECULATION, "Who chooses how much to speculate: measurement, these flags, or nobody; absent: the server's."
    )
    draft_window: int | None = option(
        SPECULATION, "With --policy fixed: positions the draft may run ahead.", ge=0, le=UINT32_MAX
    )
    draft_leaves: int | None = option(
        SPECULATION, "With --policy fixed: places the draft evaluates per step; 1 is a chain.", ge=0, le=UINT32_MAX
    )
    draft_wait_ms: float | None = option(
        SPECULATION, "With --policy fixed: longest wait for draft tokens before a verification; 0: none."
    )
    rule: Literal["greedy", "rejection", "coupled"] | None = option(
        SPECULATION, "Verification rule; absent: by sampling."
    )
    as_json: bool = option(OUTPUT, "Print every message of the stream as one line of JSON.", False)
    color: Literal["auto", "always", "never"] = option(
        OUTPUT, "Accepted draft tokens green, corrections yellow, bonus tokens plain; auto: on a terminal.", "auto"
    )
    timeout_s: float | None = option(OUTPUT, "Give up after so many seconds; absent: never.", gt=0)


def build_request(settings: GenerateSettings, prompt: str | None) -> coordinator_pb.GenerateRequest:
    """The message; `prompt` is the text to send, None with --prompt-ids. ConfigError where it cannot be built."""
    from specdec.v1 import coordinator_service_pb2 as coordinator_pb
    from specdec.v1 import types_pb2 as types_pb

    def given(message: type[Message]) -> dict[str, Any]:
        """Its fields of the same names; None leaves a field absent, which the generated annotations do not say."""
        return {field.name: getattr(settings, field.name, None) for field in message.DESCRIPTOR.fields}

    biases = [types_pb.LogitBias(token_id=key, bias=bias) for key, bias in settings.logit_bias]
    speculative = given(coordinator_pb.SpeculativePolicy) | {
        "enabled": settings.speculative,
        "rule": f"RULE_{settings.rule.upper()}" if settings.rule else None,
        "policy": f"POLICY_{settings.policy.upper()}" if settings.policy else None,
    }
    try:
        request = coordinator_pb.GenerateRequest(
            text=prompt,
            token_ids=coordinator_pb.TokenIds(ids=settings.prompt_ids) if prompt is None else None,
            sampling=coordinator_pb.SamplingPolicy(**given(coordinator_pb.SamplingPolicy) | {"logit_bias": biases}),
            speculative=coordinator_pb.SpeculativePolicy(**speculative),
            label=settings.label,
            cache_salt=settings.cache_salt,
        )
    except (UnicodeEncodeError, ValueError) as error:
        raise ConfigError(f"the request cannot be sent, its texts must be UTF-8: {error}") from error
    if settings.resume_ids:
        request.resume.output_token_ids.extend(settings.resume_ids)
    return request
