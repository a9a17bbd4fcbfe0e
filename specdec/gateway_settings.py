"""The settings of `specdec gateway`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import model_validator

from specdec.config import ServeSettings
from specdec.folders import EMBEDDED_MODELS
from specdec.settings import (
    CONNECTION,
    LIMITS,
    MODEL,
    OUTPUT,
    PROCESS,
    SECURITY,
    Address,
    ListenAddress,
    ListenHost,
    LogLevel,
    TlsSettings,
    check_http_reach,
    setting,
    split_address,
)


def beside(serve: ServeSettings, coordinator: str) -> GatewaySettings:
    """Returns the settings of the gateway that `specdec serve` starts before its coordinator, on --http-port."""
    own = {name: getattr(serve, name) for name in GatewaySettings.model_fields if hasattr(serve, name)}
    return GatewaySettings(**own | {"port": serve.http_port, "address": (coordinator,), "metrics_address": None})


class GatewaySettings(TlsSettings):
    """The HTTP gateway; --ssl-certfile, --ssl-keyfile and --ssl-ca-certs are for its connections to coordinators."""

    host: ListenHost = setting(
        "127.0.0.1",
        CONNECTION,
        "Address to listen on, :: for all of IPv4 and IPv6; one beyond this machine requires keys or --insecure.",
    )
    port: int = setting(8000, CONNECTION, "Port to listen on; 0 selects a free port.", ge=0, le=65535)
    address: tuple[Address, ...] = setting(
        ("127.0.0.1:50051",),
        CONNECTION,
        "HOST:PORT of a coordinator; may be repeated. All serve the same model.",
        metavar="HOST:PORT",
        min_length=1,
        max_length=64,
    )
    metrics_address: ListenAddress | None = setting(
        None, CONNECTION, "HOST:PORT of a /metrics without keys; absent: only /metrics of the main port."
    )
    model: str = setting(
        str(EMBEDDED_MODELS / "target"),
        MODEL,
        "Folder or hub id of the target model, for its tokenizer and chat template.",
        min_length=1,
    )
    served_model_name: str | None = setting(None, MODEL, "Name that requests give; absent: the target's own.")
    generation_config: Literal["none", "model"] = setting(
        "none", MODEL, "Sampling defaults: none as in gRPC, model those of the model's generation_config.json."
    )
    tool_call_format: Literal["auto", "hermes", "llama3"] = setting(
        "auto", MODEL, "Form of a tool call in the model's text; auto: that of the chat template."
    )
    api_keys_file: Path | None = setting(
        None, SECURITY, "File of names and hashes of keys, read again when it changes; absent: no keys."
    )
    new_key: str | None = setting(
        None, SECURITY, "Print a new key of this name, once, and its line for --api-keys-file; then end."
    )
    allowed_origins: tuple[str, ...] = setting(
        (), SECURITY, "Origin whose pages a browser lets use this server (CORS); may be repeated. Absent: none."
    )
    http_ssl_certfile: Path | None = setting(None, SECURITY, "Certificate chain of the HTTP port, PEM.")
    http_ssl_keyfile: Path | None = setting(None, SECURITY, "Private key of --http-ssl-certfile, PEM.")
    connection_count_max: int = setting(1024, LIMITS, "Maximum number of HTTP connections.", ge=1, le=65536)
    request_timeout_s: float = setting(600.0, LIMITS, "Longest time of a request, in seconds.", gt=0, le=86400)
    resume_timeout_s: float = setting(
        30.0, LIMITS, "Seconds for which a text is resumed when its target or coordinator is lost.", ge=0, le=3600
    )
    drain_grace_s: float = setting(
        30.0, PROCESS, "Seconds for running requests to finish after a stop signal.", ge=0, le=86400
    )
    log_level: LogLevel = setting("info", OUTPUT, "Minimum severity of log lines.")

    @model_validator(mode="after")
    def _check(self) -> GatewaySettings:
        check_http_reach(self.host, self.api_keys_file, self.insecure)
        for address in self.address:
            self.check_reach(split_address(address)[0], "--address")
        if (self.http_ssl_certfile is None) != (self.http_ssl_keyfile is None):
            raise ValueError("--http-ssl-certfile and --http-ssl-keyfile belong together; give both")
        for flag, path in (
            ("--http-ssl-certfile", self.http_ssl_certfile),
            ("--http-ssl-keyfile", self.http_ssl_keyfile),
            ("--api-keys-file", self.api_keys_file),
        ):
            if path is not None and not path.is_file():
                raise ValueError(f"{flag} {path} is not a file")
        return self
