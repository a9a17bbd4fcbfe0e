"""The settings of `specdec generate`, and the request message it sends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, create_model

from specdec.client.request import FIELDS, WORDS, Request, make_request
from specdec.config import OUTPUT, PROMPT, SAMPLING, SPECULATION, ClientSettings
from specdec.errors import ConfigError, ReplicaUnavailable
from specdec.protocol.fields import MEANINGS
from specdec.protocol.limits import UINT32_MAX, UINT64_MAX
from specdec.settings import CONNECTION, ProposerNames, TlsSettings, flag_of, setting

WITHOUT_FLAG = ("report_rounds", "report_statistics", "grammar")  # --rounds reports them; each kind has its own
GRAMMAR_FLAGS = ("json_schema", "json_object", "regex", "choice", "lark", "allow_whitespace")
FLAG_NAMES = {"enabled": "speculative"}  # others have the name of their field


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


def flag(field: Any) -> tuple[Any, Any]:
    """Returns type and setting of the flag for a field of the wire, with its comment as help."""
    message = field.containing_type.name
    group, meaning = SAMPLING if message == "SamplingParams" else SPECULATION, MEANINGS[f"{message}.{field.name}"]
    if field.enum_type and field.is_repeated:
        return ProposerNames, option(group, meaning, "", "NAME,NAME,…")
    if field.enum_type:
        return Literal[*WORDS[field.name]] | None, option(group, meaning)
    if field.message_type:
        return Biases, option(group, f"{meaning} May be repeated.", (), "ID=BIAS")
    if field.is_repeated:
        if field.type == field.TYPE_STRING:
            return Texts, option(group, f"{meaning} May be repeated.", ())
        return TokenIds, option(group, meaning, (), "ID,ID,…")
    if field.type in (field.TYPE_BOOL, field.TYPE_DOUBLE):
        return (bool if field.type == field.TYPE_BOOL else float) | None, option(group, meaning)
    most = UINT32_MAX if field.type == field.TYPE_UINT32 else UINT64_MAX
    return int | None, option(group, meaning, ge=0, le=most)


if TYPE_CHECKING:

    class WireSettings(ClientSettings):
        """Those of its fields that are named in code."""

        seed: int | None = None
        n: int | None = None
        speculative: bool | None = None
        policy: str | None = None
else:
    flags = {FLAG_NAMES.get(name, name): flag(own) for name, own in FIELDS.items() if name not in WITHOUT_FLAG}
    WireSettings = create_model("WireSettings", __base__=ClientSettings, **flags)


class TextSettings(WireSettings):
    """How texts are generated: sampling parameters and speculation, by the names of their fields, and grammars."""

    json_schema: str | None = option(
        SAMPLING, "The text is JSON that is valid by this JSON schema: a file, or the schema itself.", metavar="SCHEMA"
    )
    json_object: bool | None = option(SAMPLING, "The text is a JSON object.")
    regex: str | None = option(SAMPLING, "The whole text matches this regular expression.")
    choice: Texts = option(SAMPLING, "The text is one of these. May be repeated.", ())
    lark: str | None = option(
        SAMPLING, "The text is one of this Lark grammar: a file, or the grammar itself.", metavar="GRAMMAR"
    )
    allow_whitespace: bool | None = option(SAMPLING, "JSON under a grammar may have white space between its parts.")


class GenerateSettings(TextSettings):
    """One generation, and its output format."""

    prompt: str | None = option(
        PROMPT,
        "The text to continue, or an encoder-decoder model's input; - reads it from standard input.",
        positional=True,
    )
    prompt_ids: TokenIds = option(PROMPT, "Token ids instead of a text.", (), "ID,ID,…")
    decoder_prompt: str | None = option(
        PROMPT,
        "Text with which an encoder-decoder model's output begins, after the model's own beginning.",
        metavar="TEXT",
    )
    decoder_prompt_ids: TokenIds = option(
        PROMPT, "Token ids in place of an encoder-decoder model's own beginning.", (), "ID,ID,…"
    )
    resume_ids: TokenIds = option(
        PROMPT, "Output token ids of an interrupted stream; give its --seed too.", (), "ID,ID,…"
    )
    label: str = option(PROMPT, "Name of the request in logs.", "")
    cache_salt: str = option(PROMPT, "Only requests with the same salt share cached prefixes.", "", metavar="TEXT")
    prediction: Path | None = option(
        SPECULATION, "File with the text expected in the answer, such as the text to edit: guesses for verification."
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


def grammar_of(settings: TextSettings) -> dict[str, Any] | None:
    """Returns the grammar of the flags, None without. Raises ConfigError for a file that cannot be read."""
    found = {name: own for name in GRAMMAR_FLAGS if (own := getattr(settings, name)) not in (None, ())}
    for name in ("json_schema", "lark"):
        if name in found:
            found[name] = text_or_file(name, found[name])
    return found or None


def text_or_file(name: str, value: str) -> str:
    """Returns the text of a flag: that of the file it names if there is one, else itself."""
    try:
        file = Path(value)
        return file.read_text(encoding="utf-8") if file.is_file() else value
    except (OSError, UnicodeError) as error:
        if "\n" in value or "{" in value or len(value) > 255:  # no name of a file
            return value
        raise ConfigError(f"{flag_of(name)} {value} cannot be read: {error}") from error


def fields_of(settings: TextSettings) -> dict[str, Any]:
    """Returns what `make_request` takes by name, None for what is absent. Raises ConfigError for a grammar's file that
    cannot be read."""
    given = {name: getattr(settings, FLAG_NAMES.get(name, name), None) for name in FIELDS}
    given["proposers"] = [name for name in (given["proposers"] or "").split(",") if name]
    given["grammar"] = grammar_of(settings)
    return given


@contextmanager
def naming_address(settings: TlsSettings) -> Iterator[None]:
    """What is raised within because nothing answers at --address says so."""
    try:
        yield
    except ReplicaUnavailable as error:
        if not str(error).startswith(("ipv4:", "ipv6:")):
            raise
        hint = "" if settings.has_tls else ", and whether it requires TLS (--ssl-certfile …)"
        raise ReplicaUnavailable(f"no connection to {error}; check --address{hint}") from error


def build_request(settings: GenerateSettings, prompt: str | None) -> Request:
    """Returns the message; `prompt` is the text, None with --prompt-ids. Raises ConfigError for invalid values."""
    given = fields_of(settings)
    given["report_rounds"] = settings.rounds or None
    if settings.decoder_prompt is not None and settings.decoder_prompt_ids:
        raise ConfigError("--decoder-prompt and --decoder-prompt-ids exclude each other: give one of the two")
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
        settings.decoder_prompt_ids if settings.decoder_prompt is None else settings.decoder_prompt,
        **given,
    )
