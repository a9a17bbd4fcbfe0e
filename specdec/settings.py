"""Parts of every settings schema: fields with a group and a help text, addresses, the frozen base class, mutual TLS
for every command that connects or listens, and the common settings of services and of ranks.
"""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
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

ENVIRONMENT_PREFIX = "SPECDEC_"  # of the variables of settings
ADDRESSES_FILE_BYTES_MAX = 1 << 16  # a thousand addresses
VALUE_COUNT_MAX = 64  # of --target and of --draft; each may be a name or a file of many
KERNELS_VARIABLE = "SPECDEC_KERNELS"  # no setting: the engine reads it, in every process of a command


def setting(
    default: Any,
    group: str,
    help: str,
    missing_flag: str = "",
    metavar: str = "",
    positional: bool = False,
    several: bool = False,
    **more: Any,
) -> Any:
    """Returns a settings field; `default` is `...` if a value is required, `metavar` names the value in the help.
    `several`: a list, whose flag takes all values up to the next flag."""
    extra: JsonDict = {"group": group, "missing_flag": missing_flag, "metavar": metavar, "positional": positional}
    extra["several"] = several
    return Field(default, description=help, json_schema_extra=extra, **more)


def flag_of(name: str) -> str:
    """Returns the flag of a setting; `as_json` is --json, because pydantic uses the name `json`."""
    return "--" + name.removeprefix("as_").replace("_", "-")


def is_loopback(host: str) -> bool:
    """Whether packets to or from `host` stay on this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def split_address(address: str, port_min: int = 1) -> tuple[str, int]:
    """Returns (host, port) of `host:port`; ValueError with the expected format."""
    host, separator, port = address.rpartition(":")
    if not (separator and host and port.isdigit() and port_min <= int(port) < 65536):
        raise ValueError("it must be HOST:PORT, such as 127.0.0.1:50051")
    return host, int(port)


def check_address(address: str) -> str:
    split_address(address)
    return address


def is_literal(host: str) -> bool:
    """Whether `host` is an IP address, not a name."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def split_values(given: Any) -> Any:
    """Returns the parts of one text or of several, which are separated by commas or white space."""
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        return given
    return [part for text in texts for part in text.replace(",", " ").split()]


def check_replica(address: str) -> str:
    """Returns HOST:PORT of a replica, an IP address or a name. ValueError for any other text."""
    host, _ = split_address(address)
    if not (is_literal(host) or set(host).isdisjoint(":/[]@ ")):
        raise ValueError("it must be HOST:PORT, such as 127.0.0.1:50052")
    return address


def check_replicas(value: str) -> str:
    """Returns HOST:PORT or @FILE. ValueError for any other text, and for a file that `read_addresses` refuses."""
    if value.startswith("@"):
        read_addresses(Path(value[1:]))
        return value
    try:
        return check_replica(value)
    except ValueError:
        raise ValueError("it must be HOST:PORT, such as 127.0.0.1:50052, or @FILE") from None


def read_addresses(file: Path) -> tuple[str, ...]:
    """Returns the addresses in a file, one HOST:PORT a line; empty lines, and what follows #, are left out. ValueError
    for any other content, and for a file that cannot be read or is too large."""
    try:
        with file.open("rb") as opened:
            data = opened.read(ADDRESSES_FILE_BYTES_MAX + 1)
        text = data.decode()
    except OSError as error:
        raise ValueError(f"the file cannot be read: {error.strerror}") from None
    except ValueError:  # a null byte in its name, or a content that is not UTF-8
        raise ValueError("the file cannot be read as text") from None
    if len(data) > ADDRESSES_FILE_BYTES_MAX:
        raise ValueError(f"the file has more than {ADDRESSES_FILE_BYTES_MAX} bytes")
    addresses = []
    for number, line in enumerate(text.splitlines(), 1):
        if address := line.partition("#")[0].strip():
            try:
                addresses.append(check_replica(address))
            except ValueError:
                raise ValueError(f"line {number} of the file is {address!r:.80}; it must be HOST:PORT") from None
    return tuple(addresses)


def listening_host(host: str) -> str:
    """Returns the host; for `::`, all addresses of a machine, `0.0.0.0` on one without IPv6."""
    if host.strip("[]") == "::":
        try:
            socket.create_server(("::", 0), family=socket.AF_INET6).close()
        except OSError:
            return "0.0.0.0"
    return host


def check_listen_address(address: str) -> str:
    host, port = split_address(address, port_min=0)
    return f"{listening_host(host)}:{port}"


def check_endpoint(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
        raise ValueError("it must be http://HOST:PORT or https://HOST:PORT, such as http://127.0.0.1:4317")
    return endpoint


def check_proposers(names: str) -> str:
    """Returns the names of proposers, separated by commas. ValueError for an unknown one."""
    unknown = [name for name in names.split(",") if name and name not in PROPOSERS]
    if unknown:
        raise ValueError(f"it must be some of {', '.join(PROPOSERS)}, separated by commas, not {unknown[0]}")
    return names


PEER_NAME_LENGTH_MAX = 253  # of a DNS name
PROPOSERS = ("draft", "ngram", "suffix", "prediction", "heads", "grammar")
ProposerNames = Annotated[str, AfterValidator(check_proposers)]
Endpoint = Annotated[str, AfterValidator(check_endpoint)]
Address = Annotated[str, AfterValidator(check_address)]
Replicas = Annotated[tuple[Annotated[str, AfterValidator(check_replicas)], ...], BeforeValidator(split_values)]
ListenHost = Annotated[str, AfterValidator(listening_host)]
ListenAddress = Annotated[str, AfterValidator(check_listen_address)]  # port 0 selects a free port
PeerName = Annotated[str, Field(min_length=1, max_length=PEER_NAME_LENGTH_MAX)]
LogLevel = Literal["debug", "info", "warning", "error"]


class Settings(BaseModel):
    """Base of all settings: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=True, protected_namespaces=())


class TlsSettings(Settings):
    """Mutual TLS: this side's certificate and the trusted authorities."""

    ssl_certfile: Path | None = setting(
        None, SECURITY, "Certificate chain of this side, PEM; reloaded when it changes."
    )
    ssl_keyfile: Path | None = setting(None, SECURITY, "Private key of --ssl-certfile, PEM.")
    ssl_ca_certs: Path | None = setting(
        None, SECURITY, "Certificates of the authorities that sign the other side's certificate, PEM."
    )
    insecure: bool = setting(
        False, SECURITY, "Allow unencrypted connections beyond this machine; anyone on the path can read them."
    )

    @property
    def has_tls(self) -> bool:
        """Whether connections are encrypted and both sides authenticated."""
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
        """Raises ValueError for a `host` beyond this machine with neither TLS nor --insecure."""
        if not (is_loopback(host) or self.has_tls or self.insecure):
            raise ValueError(
                f"{what} {host} reaches beyond this machine: give --ssl-certfile, --ssl-keyfile and --ssl-ca-certs, "
                "or --insecure to go without encryption"
            )


class ServiceSettings(TlsSettings):
    """Settings of every service."""

    host: ListenHost = setting(
        "127.0.0.1",
        CONNECTION,
        "Address to listen on, :: for all of IPv4 and IPv6; one beyond this machine requires TLS or --insecure.",
    )
    port: int = setting(50051, CONNECTION, "Port to listen on; 0 selects a free port.", ge=0, le=65535)
    metrics_address: ListenAddress | None = setting(
        None, CONNECTION, "HOST:PORT of /metrics for Prometheus; port 0 selects a free port. Absent: no metrics."
    )
    health_address: ListenAddress | None = setting(
        None, CONNECTION, "HOST:PORT of a second, unencrypted gRPC port for health checks only. Absent: none."
    )
    drain_grace_s: float = setting(
        30.0,
        PROCESS,
        "Seconds for running generations to finish after a stop signal.",
        ge=0,
        le=86400,
    )
    log_level: LogLevel = setting("info", PROCESS, "Minimum severity of log lines.")
    otlp_traces_endpoint: Endpoint | None = setting(
        None, PROCESS, "Endpoint of traces (OTLP over gRPC); absent: OTEL_EXPORTER_OTLP_ENDPOINT, if set."
    )

    @model_validator(mode="after")
    def _check_host(self) -> ServiceSettings:
        self.check_reach(self.host, "--host")
        return self


class SplitSettings(Settings):
    """The number of processes of a model."""

    tensor_parallel_size: int = setting(
        1,
        RANKS,
        "Number of processes (ranks) of the target, each with its share of weights and cache.",
        missing_flag="-tp",
        ge=1,
        le=1024,
    )
    symmetric_memory: bool = setting(
        False,
        RANKS,
        "On GPUs of one machine: add the ranks' parts in memory that all of them read, inside captured graphs. Not yet "
        "run on two GPUs.",
    )

    @model_validator(mode="after")
    def _check_symmetric(self) -> SplitSettings:
        if self.symmetric_memory and self.tensor_parallel_size == 1:
            raise ValueError("--symmetric-memory is for several ranks: give --tensor-parallel-size of at least 2")
        return self


class RankSettings(SplitSettings, TlsSettings):
    """The machines of a model's ranks and the address where the ranks meet."""

    nnodes: int = setting(1, RANKS, "Number of machines; each runs the same number of ranks.", ge=1, le=1024)
    node_rank: int = setting(0, RANKS, "Number of this machine, from 0; 0 serves, the others follow.", ge=0, le=1023)
    master_addr: str = setting("127.0.0.1", RANKS, "Address of machine 0 where the ranks meet; it listens on no other.")
    master_port: int = setting(0, RANKS, "Port of --master-addr; with one machine none is opened.", ge=0, le=65535)
    insecure_ranks: bool = setting(
        False, SECURITY, "Allow ranks on other machines; their traffic is unencrypted, so keep their network closed."
    )

    @model_validator(mode="after")
    def _check_ranks(self) -> RankSettings:
        if self.tensor_parallel_size % self.nnodes:
            limit = f"it must be a multiple of --nnodes {self.nnodes}"
            raise ValueError(f"--tensor-parallel-size is {self.tensor_parallel_size}; {limit}")
        if self.symmetric_memory and self.nnodes > 1:
            raise ValueError(f"--symmetric-memory needs all ranks on one machine; --nnodes is {self.nnodes}")
        if self.node_rank >= self.nnodes:
            raise ValueError(f"--node-rank is {self.node_rank}; it must be below --nnodes {self.nnodes}")
        if self.nnodes > 1 and not self.master_port:
            raise ValueError("--nnodes above 1 needs --master-addr and --master-port, the same on every machine")
        if not (is_loopback(self.master_addr) or self.insecure_ranks):
            raise ValueError(
                f"--master-addr {self.master_addr} reaches beyond this machine, and traffic between ranks is "
                "unencrypted: keep that network closed to others and give --insecure-ranks"
            )
        return self


class LinkSettings(TlsSettings):
    """The targets and drafts of a coordinator, and its connections to them."""

    target: Replicas = setting(
        ...,
        CONNECTION,
        "HOST:PORT of targets, of which a name stands for all its addresses, or @FILE with an address a line. May be "
        "repeated, or given as a list with commas or spaces.",
        metavar="HOST:PORT|@FILE",
    )
    draft: Replicas = setting(
        (),
        CONNECTION,
        "The same of drafts; absent: only the other proposers.",
        metavar="HOST:PORT|@FILE",
    )
    target_wait_s: float = setting(
        30.0, LIMITS, "Seconds for which texts wait while there is no target; 0: they end at once.", ge=0, le=3600
    )
    insecure_links: bool = setting(
        False, SECURITY, "Connect to targets and drafts without TLS even if this service uses TLS."
    )

    @model_validator(mode="after")
    def _check_links(self) -> LinkSettings:
        for flag, values, count_min in (("--target", self.target, 1), ("--draft", self.draft, 0)):
            if not count_min <= len(values) <= VALUE_COUNT_MAX:
                raise ValueError(f"{flag} has {len(values)} values; it must have {count_min} to {VALUE_COUNT_MAX}")
            for value in values if not self.insecure_links else ():  # what a file will hold is not known
                self.check_reach(value if value.startswith("@") else split_address(value)[0], flag)
        return self

    @property
    def link_tls(self) -> TlsSettings:
        """The TLS settings of the connections to targets and drafts."""
        if self.insecure_links or not self.has_tls:
            return TlsSettings(insecure=True)
        return TlsSettings(ssl_certfile=self.ssl_certfile, ssl_keyfile=self.ssl_keyfile, ssl_ca_certs=self.ssl_ca_certs)


def check_http_reach(host: str, api_keys_file: Path | None, insecure: bool) -> None:
    """Raises ValueError for an HTTP port beyond this machine with neither keys nor --insecure."""
    if not (is_loopback(host) or api_keys_file or insecure):
        raise ValueError(
            f"--host {host} reaches beyond this machine: give --api-keys-file for HTTP, or --insecure to serve anyone"
        )


class HttpSettings(ServiceSettings):
    """A service with the HTTP gateway beside it."""

    http_port: int | None = setting(
        None,
        CONNECTION,
        "Port of OpenAI's HTTP interface, on --host; 0 selects a free port. Absent: none.",
        ge=0,
        le=65535,
    )
    api_keys_file: Path | None = setting(
        None, SECURITY, "File of names and hashes of HTTP keys, made by specdec gateway --new-key; absent: no keys."
    )

    @model_validator(mode="after")
    def _check_http(self) -> HttpSettings:
        if self.http_port is not None:
            check_http_reach(self.host, self.api_keys_file, self.insecure)
        return self
