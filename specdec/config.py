"""The settings of every command: one schema each, from which flags, environment and configuration files are read.

A settings object is checked completely when it is made and never changes; unknown keys are errors. Every field has a
help text with its unit and a group it is shown in. Where values come from (`specdec.cli.options`) and whether a model
folder or port can be used (its service) is not known here.
"""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

EMBEDDED_MODELS = Path(__file__).resolve().parent.parent / "models"

# Groups of settings, in the order help shows them.
GROUPS = PROMPT, CONNECTION, MODEL, SAMPLING, SPECULATION, LIMITS, OUTPUT, SECURITY, PROCESS = (
    "Prompt",
    "Connection",
    "Model",
    "Sampling",
    "Speculation",
    "Limits",
    "Output",
    "Security",
    "Process",
)


def setting(default: Any, group: str, help: str, **limits: Any) -> Any:
    """A field of a settings class; `default` is `...` where a value is required."""
    return Field(default, description=help, json_schema_extra={"group": group}, **limits)


def is_loopback(host: str) -> bool:
    """Whether packets to or from `host` stay on this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of `host:port`; ValueError saying how it is written."""
    host, separator, port = address.rpartition(":")
    if not (separator and host and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError("it must be HOST:PORT, such as 127.0.0.1:50051")
    return host, int(port)


def check_address(address: str) -> str:
    split_address(address)
    return address


Address = Annotated[str, AfterValidator(check_address)]
LogLevel = Literal["debug", "info", "warning", "error"]


class Settings(BaseModel):
    """Base of all settings: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=True, protected_namespaces=())


class TlsSettings(Settings):
    """Mutual TLS: what this side shows, and whom it believes."""

    ssl_certfile: Path | None = setting(
        None, SECURITY, "Certificate chain of this side, PEM. Read again when it changes."
    )
    ssl_keyfile: Path | None = setting(None, SECURITY, "Private key of --ssl-certfile, PEM.")
    ssl_ca_certs: Path | None = setting(
        None, SECURITY, "Certificates of the authorities the other side must be signed by, PEM."
    )
    insecure: bool = setting(
        False, SECURITY, "Allow plain connections beyond this machine. Anyone on the way can read them."
    )

    @property
    def has_tls(self) -> bool:
        """Whether connections are encrypted and both sides prove who they are."""
        return self.ssl_certfile is not None

    @model_validator(mode="after")
    def _check_tls(self) -> TlsSettings:
        files = {
            "--ssl-certfile": self.ssl_certfile,
            "--ssl-keyfile": self.ssl_keyfile,
            "--ssl-ca-certs": self.ssl_ca_certs,
        }
        missing = [flag for flag, path in files.items() if path is None]
        if missing and len(missing) < len(files):
            raise ValueError(f"TLS is mutual and needs three files; give {' and '.join(missing)} too")
        for flag, path in files.items():
            if path is not None and not path.is_file():
                raise ValueError(f"{flag} {path} is not a file")
        return self

    def check_reach(self, host: str, what: str) -> None:
        """ValueError when `host` is beyond this machine and connections would be plain without --insecure."""
        if not (is_loopback(host) or self.has_tls or self.insecure):
            raise ValueError(
                f"{what} {host} reaches beyond this machine: give --ssl-certfile, --ssl-keyfile and --ssl-ca-certs, "
                "or --insecure to go without encryption"
            )


class ServiceSettings(TlsSettings):
    """What every service has."""

    host: str = setting(
        "127.0.0.1", CONNECTION, "Address to listen on. Beyond this machine it needs TLS or --insecure."
    )
    port: int = setting(50051, CONNECTION, "Port to listen on; 0 takes a free one.", ge=0, le=65535)
    drain_grace_s: float = setting(
        30.0,
        PROCESS,
        "Seconds that running generations are given to finish when the service is told to stop.",
        ge=0,
        le=86400,
    )
    log_level: LogLevel = setting("info", PROCESS, "Least severe log lines to write.")

    @model_validator(mode="after")
    def _check_host(self) -> ServiceSettings:
        self.check_reach(self.host, "--host")
        return self


class EngineSettings(Settings):
    """How a model is run: shared by draft and target."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", MODEL, "Element type of weights and activations; auto takes the model's own."
    )
    device: str = setting("auto", MODEL, "Where the model runs: cpu, cuda, cuda:1; auto takes a GPU if there is one.")
    threads: int = setting(
        0, MODEL, "CPU threads for a model; 0 takes one per core, half of that with serve.", ge=0, le=1024
    )
    max_model_len: int | None = setting(
        None,
        LIMITS,
        "Most positions of a session, prompt and output together; absent: what the model was made for.",
        ge=2,
    )
    max_num_seqs: int = setting(64, LIMITS, "Most sessions at a time.", ge=1, le=65536)
    max_num_batched_tokens: int = setting(512, LIMITS, "Most tokens in one forward pass.", ge=64, le=1 << 20)
    kv_cache_bytes: int | None = setting(
        None,
        LIMITS,
        "Bytes for cached keys and values; absent: for 16 sessions of full length, at most a quarter of free memory.",
        ge=1 << 16,
    )
    block_size: int = setting(64, LIMITS, "Positions in one cache block: a power of two.", ge=8, le=128)

    @model_validator(mode="after")
    def _check_block_size(self) -> EngineSettings:
        if self.block_size & (self.block_size - 1):
            raise ValueError(f"--block-size is {self.block_size}; it must be a power of two")
        return self


class ModelSettings(ServiceSettings, EngineSettings):
    """What the draft and the target service have."""

    model: str = setting(
        ..., MODEL, "Folder or hub id of a causal language model (safetensors, tokenizer.json).", min_length=1
    )
    served_model_name: str | None = setting(None, MODEL, "Name to serve the model under; absent: as --model says.")


class TargetSettings(ModelSettings):
    """The target service: the model whose law is kept."""

    port: int = setting(50052, CONNECTION, "Port to listen on; 0 takes a free one.", ge=0, le=65535)


class DraftSettings(ModelSettings):
    """The draft service: the small model that guesses."""

    port: int = setting(50053, CONNECTION, "Port to listen on; 0 takes a free one.", ge=0, le=65535)


class SpeculationSettings(Settings):
    """How much is guessed."""

    speculation_policy: Literal["auto", "fixed", "off"] = setting(
        "auto",
        SPECULATION,
        "Who chooses how much to speculate when a request does not say: a cost model, the settings below, or nobody.",
    )
    num_speculative_tokens: int = setting(
        3, SPECULATION, "With policy fixed: draft tokens in one verification; 0 is plain decoding.", ge=0, le=64
    )
    num_speculative_tokens_max: int = setting(
        16, SPECULATION, "Most draft tokens in one verification, whoever chooses.", ge=0, le=64
    )
    draft_wait_ms: float = setting(
        50.0, SPECULATION, "With policy fixed: milliseconds a verification waits for draft tokens.", ge=0, le=60000
    )
    draft_link_mbit: float | None = setting(
        None, SPECULATION, "Megabits per second that the way to the draft carries; absent: enough.", gt=0, le=1e6
    )

    @model_validator(mode="after")
    def _check_lengths(self) -> SpeculationSettings:
        if self.num_speculative_tokens > self.num_speculative_tokens_max:
            raise ValueError(
                f"--num-speculative-tokens {self.num_speculative_tokens} is above "
                f"--num-speculative-tokens-max {self.num_speculative_tokens_max}"
            )
        return self


class CoordinatorSettings(ServiceSettings, SpeculationSettings):
    """The coordinator: takes requests, holds the committed tokens, applies the rule."""

    target: Address = setting(..., CONNECTION, "HOST:PORT of the target service.")
    draft: Address | None = setting(None, CONNECTION, "HOST:PORT of the draft service; absent: plain decoding.")
    tokenizer: str = setting(
        ..., MODEL, "Folder or hub id of the target model: its tokenizer.json is used.", min_length=1
    )
    max_num_seqs: int = setting(64, LIMITS, "Most generations at a time; more are refused at once.", ge=1, le=65536)
    insecure_links: bool = setting(
        False, SECURITY, "Connect to target and draft without TLS although this service has it itself."
    )

    @model_validator(mode="after")
    def _check_links(self) -> CoordinatorSettings:
        for flag, address in (("--target", self.target), ("--draft", self.draft)):
            if address is not None and not self.insecure_links:
                self.check_reach(split_address(address)[0], flag)
        return self

    @property
    def link_tls(self) -> TlsSettings:
        """What the connections to target and draft are made with."""
        if self.insecure_links or not self.has_tls:
            return TlsSettings(insecure=True)
        return TlsSettings(ssl_certfile=self.ssl_certfile, ssl_keyfile=self.ssl_keyfile, ssl_ca_certs=self.ssl_ca_certs)


class ServeSettings(ServiceSettings, EngineSettings, SpeculationSettings):
    """All three services on this machine; --host, --port and TLS are the coordinator's, the others stay on loopback."""

    model: str = setting(str(EMBEDDED_MODELS / "target"), MODEL, "Target model: folder or hub id.", min_length=1)
    draft_model: str = setting(
        str(EMBEDDED_MODELS / "draft"),
        MODEL,
        "Draft model: folder or hub id; its tokenizer must equal the target's.",
        min_length=1,
    )
    served_model_name: str | None = setting(None, MODEL, "Name to serve the target under; absent: as --model says.")
    log_level: LogLevel = setting("warning", PROCESS, "Least severe log lines to write.")

    def target_settings(self) -> TargetSettings:
        """Of the target, on a free loopback port."""
        return TargetSettings(
            **self._shared(TargetSettings), model=self.model, served_model_name=self.served_model_name
        )

    def draft_settings(self) -> DraftSettings:
        """Of the draft, on a free loopback port."""
        return DraftSettings(**self._shared(DraftSettings), model=self.draft_model)

    def coordinator_settings(self, target: str, draft: str) -> CoordinatorSettings:
        """Of the coordinator, connected to the two on loopback."""
        own = {name: getattr(self, name) for name in CoordinatorSettings.model_fields if hasattr(self, name)}
        own.update(target=target, draft=draft, tokenizer=self.model, insecure_links=True)
        return CoordinatorSettings(**own)

    def _shared(self, service: type[ModelSettings]) -> dict[str, Any]:
        own = (EngineSettings.model_fields.keys() | {"log_level", "drain_grace_s"}) & service.model_fields.keys()
        threads = self.threads or max(1, (os.cpu_count() or 1) // 2)  # two models share this machine
        return {**{name: getattr(self, name) for name in own}, "port": 0, "threads": threads}


class ClientSettings(TlsSettings):
    """How to reach a coordinator."""

    address: Address = setting("127.0.0.1:50051", CONNECTION, "HOST:PORT of the coordinator.")

    @model_validator(mode="after")
    def _check_address(self) -> ClientSettings:
        self.check_reach(split_address(self.address)[0], "--address")
        return self
