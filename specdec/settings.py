"""What every settings schema is made of: fields with a group and a help text, addresses, the frozen base
class, mutual TLS, which every command that connects or listens has, and what every service has.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic.config import JsonDict

# Groups of settings, in the order help shows them.
GROUPS = PROMPT, CONNECTION, MODEL, RANKS, SAMPLING, SPECULATION, LIMITS, OUTPUT, SECURITY, PROCESS = (
    "Prompt",
    "Connection",
    "Model",
    "Ranks",
    "Sampling",
    "Speculation",
    "Limits",
    "Output",
    "Security",
    "Process",
)


def setting(
    default: Any, group: str, help: str, short_flag: str = "", metavar: str = "", positional: bool = False, **more: Any
) -> Any:
    """A field of a settings class; `default` is `...` where a value is required, `metavar` what help shows for it."""
    extra: JsonDict = {"group": group, "short_flag": short_flag, "metavar": metavar, "positional": positional}
    return Field(default, description=help, json_schema_extra=extra, **more)


def is_loopback(host: str) -> bool:
    """Whether packets to or from `host` stay on this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def split_address(address: str, port_min: int = 1) -> tuple[str, int]:
    """(host, port) of `host:port`; ValueError saying how it is written."""
    host, separator, port = address.rpartition(":")
    if not (separator and host and port.isdigit() and port_min <= int(port) < 65536):
        raise ValueError("it must be HOST:PORT, such as 127.0.0.1:50051")
    return host, int(port)


def check_address(address: str) -> str:
    split_address(address)
    return address


def check_listen_address(address: str) -> str:
    split_address(address, port_min=0)
    return address


def check_endpoint(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
        raise ValueError("it must be http://HOST:PORT or https://HOST:PORT, such as http://127.0.0.1:4317")
    return endpoint


Endpoint = Annotated[str, AfterValidator(check_endpoint)]
Address = Annotated[str, AfterValidator(check_address)]
ListenAddress = Annotated[str, AfterValidator(check_listen_address)]  # port 0 takes a free one
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
    metrics_address: ListenAddress | None = setting(
        None, CONNECTION, "HOST:PORT to serve /metrics on, for Prometheus; port 0 takes a free one. Absent: nowhere."
    )
    health_address: ListenAddress | None = setting(
        None, CONNECTION, "HOST:PORT of a second, plain gRPC port that answers health checks only. Absent: none."
    )
    drain_grace_s: float = setting(
        30.0,
        PROCESS,
        "Seconds that running generations are given to finish when the service is told to stop.",
        ge=0,
        le=86400,
    )
    log_level: LogLevel = setting("info", PROCESS, "Least severe log lines to write.")
    otlp_traces_endpoint: Endpoint | None = setting(
        None, PROCESS, "Where to send traces (OTLP over gRPC); absent: as OTEL_EXPORTER_OTLP_ENDPOINT says, or nowhere."
    )

    @model_validator(mode="after")
    def _check_host(self) -> ServiceSettings:
        self.check_reach(self.host, "--host")
        return self
