"""The settings of every command: one schema each, from which flags, environment and configuration files are read.

A settings object is checked completely when it is made and never changes; unknown keys are errors. Every field has a
help text with its unit and a group it is shown in. Where values come from (`specdec.cli.options`) and whether a model
folder or port can be used (its service) is not known here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from specdec.settings import (
    CONNECTION,
    GROUPS,
    LIMITS,
    MODEL,
    OUTPUT,
    PROCESS,
    PROMPT,
    RANKS,
    SAMPLING,
    SECURITY,
    SPECULATION,
    Address,
    ListenAddress,
    LogLevel,
    ServiceSettings,
    Settings,
    TlsSettings,
    is_loopback,
    setting,
    split_address,
)

__all__ = [  # of the settings module, for clients and other packages, beside what is defined here
    "CONNECTION",
    "GROUPS",
    "OUTPUT",
    "PROMPT",
    "SAMPLING",
    "SPECULATION",
    "ServiceSettings",
    "Settings",
    "TlsSettings",
    "split_address",
]

SHARED = frozenset({"log_level", "drain_grace_s", "otlp_traces_endpoint"})  # by the services that one command runs


def find_embedded_models() -> Path:
    """The folder of the embedded pair: in the installed package, otherwise beside it, as in a checkout."""
    package = Path(__file__).resolve().parent
    folder = package / "models"
    return folder if folder.is_dir() else package.parent / "models"


EMBEDDED_MODELS = find_embedded_models()


class EngineSettings(Settings):
    """How a model is run: shared by draft and target."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", MODEL, "Element type of weights and activations; auto takes the model's own."
    )
    device: str = setting("auto", MODEL, "Where the model runs: cpu, cuda, cuda:1; auto takes a GPU if there is one.")
    threads: int = setting(
        0, MODEL, "CPU threads for a model, of each rank; 0 takes one per core, half of that with serve.", ge=0, le=1024
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
        ge=1 << 12,
    )
    kv_cache_memory_share: float | None = setting(
        None,
        LIMITS,
        "Instead of --kv-cache-bytes: share of the memory that is free once weights are loaded, on a GPU of its own.",
        gt=0,
        le=0.95,
    )
    block_size: int = setting(
        0,
        LIMITS,
        "Positions in one cache block, a power of two from 8 to 128, on a GPU to 256; 0 takes 64, on a GPU 256.",
        ge=0,
        le=256,
    )
    enforce_eager: bool = setting(False, MODEL, "On a GPU: run every step kernel by kernel, without captured graphs.")

    @model_validator(mode="after")
    def _check_block_size(self) -> EngineSettings:
        if self.block_size & (self.block_size - 1) or 0 < self.block_size < 8:
            raise ValueError(f"--block-size is {self.block_size}; it must be a power of two from 8 on, or 0")
        if self.kv_cache_bytes is not None and self.kv_cache_memory_share is not None:
            raise ValueError("--kv-cache-bytes and --kv-cache-memory-share both say how large the cache is; give one")
        return self


class PrefixSettings(Settings):
    """What the target does with cached prefixes."""

    enable_prefix_caching: bool = setting(
        True, LIMITS, "Keep cached blocks of committed tokens for later sessions of the same salt that begin with them."
    )


class ModelSettings(ServiceSettings, EngineSettings):
    """What the draft and the target service have."""

    model: str = setting(
        ..., MODEL, "Folder or hub id of a causal language model (safetensors, tokenizer.json).", min_length=1
    )
    served_model_name: str | None = setting(None, MODEL, "Name to serve the model under; absent: as --model says.")


class SplitSettings(Settings):
    """Over how many processes a model is split."""

    tensor_parallel_size: int = setting(
        1,
        RANKS,
        "Processes (ranks) the target is split over, each with its share of weights and cache.",
        short_flag="-tp",
        ge=1,
        le=1024,
    )


class RankSettings(SplitSettings, TlsSettings):
    """Where the ranks of a model run and how they meet."""

    nnodes: int = setting(1, RANKS, "Machines the ranks are spread over, equally many on each.", ge=1, le=1024)
    node_rank: int = setting(0, RANKS, "Which of them this is, from 0; 0 serves, the others follow.", ge=0, le=1023)
    master_addr: str = setting(
        "127.0.0.1", RANKS, "Address of machine 0 on which the ranks meet; nothing else is used."
    )
    master_port: int = setting(0, RANKS, "Port of --master-addr; 0 takes a free one, on one machine.", ge=0, le=65535)
    insecure_ranks: bool = setting(
        False, SECURITY, "Let ranks meet beyond this machine: they talk unencrypted, so keep their network closed."
    )

    @model_validator(mode="after")
    def _check_ranks(self) -> RankSettings:
        if self.tensor_parallel_size % self.nnodes:
            limit = f"it must be a multiple of --nnodes {self.nnodes}"
            raise ValueError(f"--tensor-parallel-size is {self.tensor_parallel_size}; {limit}")
        if self.node_rank >= self.nnodes:
            raise ValueError(f"--node-rank is {self.node_rank}; it must be below --nnodes {self.nnodes}")
        if self.nnodes > 1 and not self.master_port:
            raise ValueError("--nnodes above 1 needs --master-addr and --master-port, the same on every machine")
        if not (is_loopback(self.master_addr) or self.insecure_ranks):
            raise ValueError(
                f"--master-addr {self.master_addr} reaches beyond this machine, where ranks talk unencrypted: keep "
                "that network closed to others and give --insecure-ranks"
            )
        return self


class TargetSettings(ModelSettings, PrefixSettings, RankSettings):
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
        "Who chooses how much to speculate when a request does not say: measurement, the settings below, or nobody.",
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


class ServeSettings(ServiceSettings, EngineSettings, PrefixSettings, SplitSettings, SpeculationSettings):
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
    metrics_address: ListenAddress | None = setting(
        None, CONNECTION, "HOST:PORT of the coordinator's /metrics; target and draft take the two ports after it."
    )

    @model_validator(mode="after")
    def _check_metrics_address(self) -> ServeSettings:
        if self.metrics_address and split_address(self.metrics_address, port_min=0)[1] > 65533:
            raise ValueError(f"--metrics-address is {self.metrics_address}; its port must be at most 65533 here")
        return self

    def target_settings(self) -> TargetSettings:
        """Of the target, on a free loopback port."""
        own = self._shared(TargetSettings, 1)
        own["threads"] = self.threads or max(1, own["threads"] // self.tensor_parallel_size)
        return TargetSettings(**own, model=self.model, served_model_name=self.served_model_name)

    def draft_settings(self) -> DraftSettings:
        """Of the draft, on a free loopback port."""
        return DraftSettings(**self._shared(DraftSettings, 2), model=self.draft_model)

    def coordinator_settings(self, target: str, draft: str) -> CoordinatorSettings:
        """Of the coordinator, connected to the two on loopback."""
        own = {name: getattr(self, name) for name in CoordinatorSettings.model_fields if hasattr(self, name)}
        own.update(target=target, draft=draft, tokenizer=self.model, insecure_links=True)
        return CoordinatorSettings(**own)

    def _metrics_address(self, place: int) -> str | None:
        """Of the service at this place after the coordinator: its port and the ones after it, or any free ones."""
        if self.metrics_address is None:
            return None
        host, port = split_address(self.metrics_address, port_min=0)
        return f"{host}:{port + place if port else 0}"

    def _shared(self, service: type[ModelSettings], place: int) -> dict[str, Any]:
        schemas = EngineSettings, PrefixSettings, SplitSettings
        own = SHARED.union(*(schema.model_fields for schema in schemas))
        own &= service.model_fields.keys()
        threads = self.threads or max(1, (os.cpu_count() or 1) // 2)  # two models share this machine
        given = {name: getattr(self, name) for name in own}
        return {**given, "port": 0, "threads": threads, "metrics_address": self._metrics_address(place)}


class ClientSettings(TlsSettings):
    """How to reach a coordinator."""

    address: Address = setting("127.0.0.1:50051", CONNECTION, "HOST:PORT of the coordinator.")

    @model_validator(mode="after")
    def _check_address(self) -> ClientSettings:
        self.check_reach(split_address(self.address)[0], "--address")
        return self
