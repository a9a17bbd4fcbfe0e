"""The settings of `specdec generate`, and the request message it sends."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from specdec.client.request import FIELDS, Request, make_request
from specdec.config import OUTPUT, PROMPT, SAMPLING, SPECULATION, ClientSettings
from specdec.errors import ConfigError
from specdec.settings import CONNECTION, ProposerNames, setting

UINT32_MAX = (1 << 32) - 1
UINT64_MAX = (1 << 64) - 1


def option(group: str, help: str, default: Any = None, metavar: str = "", **more: Any) -> Any:
    """Returns a field of GenerateSettings; absent values are not sent."""
    return setting(default, group, help, metavar=metavar, **more)


def split_ids(value: Any) -> Any:
    """Returns "1,2" and ["1,2", "3"] as lists of ids; other values unchanged, for the type to check."""
    parts = [value] if isinstance(value, (str, int)) else value
    if not isinstance(parts, (list, tuple)):
        return value
    return [piece for part in parts for piece in (part.split(",") if isinstance(part, str) else [part])]


def split_biases(value: Any) -> Any:
    """Returns ["5=-1.5"] and {5: -1.5} as pairs; ValueError with the expected format."""
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
    """One generation, and its output format."""

    prompt: str | None = option(PROMPT, "The text to continue; - reads it from standard input.", positional=True)
    prompt_ids: TokenIds = option(PROMPT, "Token ids to continue instead of a text.", (), "ID,ID,…")
    resume_ids: TokenIds = option(
        PROMPT, "Output token ids of an interrupted stream; give its --seed too.", (), "ID,ID,…"
    )
    label: str = option(PROMPT, "Name of the request in logs.", "")
    cache_salt: str = option(PROMPT, "Only requests with the same salt share cached prefixes.", "", metavar="TEXT")
    max_tokens: int | None = option(SAMPLING, "Maximum number of output tokens.", ge=0, le=UINT32_MAX)
    min_tokens: int | None = option(SAMPLING, "Minimum number of output tokens before a stop.", ge=0, le=UINT32_MAX)
    temperature: float | None = option(SAMPLING, "0 selects the likeliest token; otherwise 0.01 to 100. Absent: 1.")
    top_k: int | None = option(SAMPLING, "Number of likeliest tokens to sample from; 0: all.", ge=0, le=UINT32_MAX)
    top_p: float | None = option(
        SAMPLING, "Cumulative probability of the likeliest tokens to sample from; above 0, at most 1."
    )
    min_p: float | None = option(SAMPLING, "Drop tokens below this share of the likeliest's probability; 0 to 1.")
    repetition_penalty: float | None = option(SAMPLING, "Penalty for tokens in prompt or output; 1: none.")
    presence_penalty: float | None = option(SAMPLING, "Penalty, once, for tokens in the output; -2 to 2.")
    frequency_penalty: float | None = option(SAMPLING, "Penalty per occurrence of tokens in the output; -2 to 2.")
    logit_bias: Biases = option(SAMPLING, "Number added to a token's logit; may be repeated.", (), "ID=BIAS")
    seed: int | None = option(SAMPLING, "Makes the text reproducible, with any draft.", ge=0, le=UINT64_MAX)
    stop: Texts = option(SAMPLING, "String that ends the text; may be repeated.", ())
    stop_token_ids: TokenIds = option(SAMPLING, "Token ids that end the text.", (), "ID,ID,…")
    ignore_eos: bool | None = option(SAMPLING, "Continue after the model's end tokens.")
    logprobs: int | None = option(
        SAMPLING,
        "0: log-probability of each token; N: also of the N likeliest; printed with --json.",
        ge=0,
        le=UINT32_MAX,
    )
    speculative: bool | None = option(
        SPECULATION, "Use the draft and every other proposer; the distribution of the text is the same without."
    )
    num_speculative_tokens: int | None = option(
        SPECULATION, "Maximum draft tokens per verification; absent: the server's setting.", ge=0, le=UINT32_MAX
    )
    policy: Literal["auto", "fixed", "off"] | None = option(
        SPECULATION,
        "auto measures and adapts, fixed uses the flags below, off disables speculation; absent: the server's.",
    )
    draft_window: int | None = option(
        SPECULATION, "With --policy fixed: maximum positions the draft runs ahead.", ge=0, le=UINT32_MAX
    )
    draft_nodes_per_step: int | None = option(
        SPECULATION, "With --policy fixed: tree nodes the draft evaluates per step; 1: a chain.", ge=0, le=UINT32_MAX
    )
    draft_wait_ms: float | None = option(
        SPECULATION, "With --policy fixed: maximum wait for draft tokens before a verification; 0: none."
    )
    draft_siblings: int | None = option(
        SPECULATION,
        "With --policy fixed: siblings of each draft token, verified with it as a tree; at most 3.",
        ge=0,
        le=UINT32_MAX,
    )
    proposers: ProposerNames = option(
        SPECULATION, "Sources of draft tokens, of those the server has; absent: all.", "", "NAME,NAME,…"
    )
    prediction: Path | None = option(
        SPECULATION, "File with the text expected in the answer, such as the text to edit: guesses for verification."
    )
    rule: Literal["greedy", "rejection", "coupled"] | None = option(
        SPECULATION, "Verification rule; absent: by the sampling parameters."
    )
    rounds: bool = option(
        OUTPUT, "Print a table of the rounds after the text, to standard error; with --json deltas carry them.", False
    )
    as_json: bool = option(OUTPUT, "Print every message of the stream as one line of JSON.", False)
    color: Literal["auto", "always", "never"] = option(
        OUTPUT, "Accepted tokens by proposer, recovered tokens yellow, bonus tokens plain; auto: on a terminal.", "auto"
    )
    resume_s: float = option(
        CONNECTION,
        "Seconds for which a text is resumed when its stream is lost, from its last token on; 0: the error ends it.",
        60.0,
        ge=0,
    )
    timeout_s: float | None = option(OUTPUT, "Maximum seconds for the request; absent: no limit.", gt=0)


def build_request(settings: GenerateSettings, prompt: str | None) -> Request:
    """Returns the message; `prompt` is the text, None with --prompt-ids. Raises ConfigError for invalid values."""
    given = {name: getattr(settings, name, None) for name in FIELDS}
    given["enabled"] = settings.speculative
    given["report_rounds"] = settings.rounds or None
    given["proposers"] = [name for name in settings.proposers.split(",") if name]
    predicted: str | tuple[int, ...] = ()
    if settings.prediction is not None:
        try:
            predicted = settings.prediction.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"--prediction {settings.prediction} cannot be read: {error}") from error
    return make_request(
        settings.prompt_ids if prompt is None else prompt,
        settings.resume_ids,
        predicted,
        settings.label,
        settings.cache_salt,
        **given,
    )
