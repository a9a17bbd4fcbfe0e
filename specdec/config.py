"""The settings of every command: one schema each for flags, environment and configuration files.

A settings object is validated when it is made and never changes; unknown keys are errors. Every field has a help text
with its unit and a help group. `specdec.cli.options` reads the values; each service checks its model folder and port.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from specdec.folders import EMBEDDED_MODELS
from specdec.settings import (
    CONNECTION,
    GROUPS,
    LIMITS,
    MODEL,
    OUTPUT,
    PROCESS,
    PROMPT,
    PROPOSERS,
    SAMPLING,
    SECURITY,
    SPECULATION,
    Address,
    HttpSettings,
    LinkSettings,
    ListenAddress,
    LogLevel,
    PeerName,
    ProposerNames,
    RankSettings,
    ServiceSettings,
    Settings,
    SplitSettings,
    TlsSettings,
    is_literal,
    is_loopback,
    read_addresses,
    setting,
    split_address,
)

__all__ = [  # names of the settings module for other packages
    "CONNECTION",
    "GROUPS",
    "OUTPUT",
    "PROMPT",
    "SAMPLING",
    "SPECULATION",
    "ServiceSettings",
    "Settings",
    "TlsSettings",
    "is_literal",
    "is_loopback",
    "read_addresses",
    "split_address",
]

SHARED = frozenset({"log_level", "drain_grace_s", "otlp_traces_endpoint"})  # by the services of one command


class EngineSettings(Settings):
    """Settings of the engine, shared by draft and target."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", MODEL, "Element type of weights and activations; auto selects the model's own."
    )
    device: str = setting(
        "auto", MODEL, "Device of the model: cpu, cuda or cuda:1; auto selects a GPU if there is one."
    )
    threads: int = setting(
        0, MODEL, "CPU threads of each model or rank; 0: one per core; serve with a draft: half of them.", ge=0, le=1024
    )
    max_model_len: int | None = setting(
        None,
        LIMITS,
        "Maximum positions of a session, prompt and output, and the length of the model's tables; absent: its own.",
        ge=2,
    )
    max_num_seqs: int = setting(64, LIMITS, "Maximum number of sessions at a time.", ge=1, le=65536)
    max_num_batched_tokens: int = setting(
        512, LIMITS, "Maximum number of tokens in one forward pass.", ge=64, le=1 << 20
    )
    kv_cache_bytes: int | None = setting(
        None,
        LIMITS,
        "Bytes of the KV cache; absent: space for 16 sessions of full length, at most a quarter of free memory.",
        ge=1 << 12,
    )
    kv_cache_memory_share: float | None = setting(
        None,
        LIMITS,
        "Instead of --kv-cache-bytes: share of the free memory after weights are loaded, on a GPU of its own.",
        gt=0,
        le=0.95,
    )
    block_size: int = setting(
        0,
        LIMITS,
        "Positions in one cache block: a power of two from 8 to 64, on a GPU to 256; 0 selects 64, on a GPU 256.",
        ge=0,
        le=256,
    )
    enforce_eager: bool = setting(False, MODEL, "On a GPU: run every step without captured CUDA graphs.")
    dependent_launch: bool = setting(
        True,
        MODEL,
        "On a GPU of compute capability 9.0 or later: in captured steps begin each kernel before the one before it has "
        "ended; off by itself where replays then differ.",
    )

    @model_validator(mode="after")
    def _check_block_size(self) -> EngineSettings:
        if self.block_size & (self.block_size - 1) or 0 < self.block_size < 8:
            raise ValueError(f"--block-size is {self.block_size}; it must be 0 or a power of two of at least 8")
        if self.kv_cache_bytes is not None and self.kv_cache_memory_share is not None:
            raise ValueError("--kv-cache-bytes and --kv-cache-memory-share both set the cache size; give one of them")
        return self


class PrefixSettings(Settings):
    """Settings of the target's prefix cache."""

    enable_prefix_caching: bool = setting(
        True, LIMITS, "Share cached blocks of committed tokens with later sessions of the same salt and prefix."
    )


class HeadSettings(Settings):
    """Settings of the heads on the target."""

    heads: str = setting(
        "none", MODEL, "Folder of heads on the target, made by specdec distill --heads; none: no heads.", min_length=1
    )


class ModelSettings(ServiceSettings, EngineSettings):
    """Settings of the draft and the target service."""

    model: str = setting(
        ..., MODEL, "Folder or hub id of a causal language model (safetensors, tokenizer.json).", min_length=1
    )
    served_model_name: str | None = setting(None, MODEL, "Name of the served model; absent: the value of --model.")
    allow_peer: tuple[PeerName, ...] = setting(
        (),
        SECURITY,
        "Name of a coordinator that is answered, a DNS name or the common name of its certificate; may be repeated. "
        "Absent: every one of the authority.",
        metavar="NAME",
    )

    @model_validator(mode="after")
    def _check_allow_peer(self) -> ModelSettings:
        if self.allow_peer and not self.has_tls:
            raise ValueError(
                f"--allow-peer {self.allow_peer[0]} is checked against the certificates of clients: give "
                "--ssl-certfile, --ssl-keyfile and --ssl-ca-certs too"
            )
        return self


class TargetSettings(ModelSettings, PrefixSettings, HeadSettings, RankSettings):
    """The target service: the model that defines the target distribution."""

    port: int = setting(50052, CONNECTION, "Port to listen on; 0 selects a free port.", ge=0, le=65535)


class DraftSettings(ModelSettings):
    """The draft service: the small model that proposes tokens."""

    target_tokenizer: str = setting(
        "", MODEL, "The target's folder or hub id, for a draft with another tokenizer; empty: it has the target's."
    )
    port: int = setting(50053, CONNECTION, "Port to listen on; 0 selects a free port.", ge=0, le=65535)


class SpeculationSettings(Settings):
    """The amount of speculation."""

    speculation_policy: Literal["auto", "fixed", "off"] = setting(
        "auto",
        SPECULATION,
        "Default policy of requests: auto measures and adapts, fixed uses the settings below, off never speculates.",
    )
    num_speculative_tokens: int = setting(
        3, SPECULATION, "With policy fixed: draft tokens per verification; 0: plain decoding.", ge=0, le=64
    )
    num_speculative_tokens_max: int = setting(  # by default 32 rows with the token before them: whole tiles
        31, SPECULATION, "Maximum draft tokens per verification, under every policy.", ge=0, le=64
    )
    draft_window_max: int = setting(
        32, SPECULATION, "With policy fixed: maximum draft window, at least --num-speculative-tokens-max.", ge=0, le=64
    )
    draft_nodes_per_step_max: int = setting(
        8, SPECULATION, "With policy fixed: maximum nodes of one request in a draft step.", ge=1, le=64
    )
    draft_siblings_max: int = setting(
        3, SPECULATION, "Maximum siblings of a draft token, under every policy; 0: chains only.", ge=0, le=3
    )
    draft_wait_ms: float = setting(
        50.0, SPECULATION, "With policy fixed: milliseconds a verification waits for draft tokens.", ge=0, le=60000
    )
    proposers: ProposerNames = setting(
        ",".join(PROPOSERS),
        SPECULATION,
        "Sources of draft tokens, separated by commas.",
        metavar="NAME,NAME,…",
    )
    ngram_length_min: int = setting(
        2, SPECULATION, "Least tokens that must match for a guess from the same prompt and output.", ge=1, le=16
    )
    ngram_length_max: int = setting(32, SPECULATION, "Most tokens by which such matches are compared.", ge=1, le=256)
    ngram_window: int = setting(
        16384, SPECULATION, "Last tokens of a prompt that are searched for such matches.", ge=1, le=1 << 20
    )
    suffix_store_mb: int = setting(
        64,
        SPECULATION,
        "Megabytes of generated text kept for guesses, in shares by cache salt; 0: none.",
        ge=0,
        le=1 << 16,
    )
    draft_link_mbit: float | None = setting(
        None,
        SPECULATION,
        "Bandwidth of the link to the draft, in megabits per second; absent: unlimited.",
        gt=0,
        le=1e6,
    )

    @model_validator(mode="after")
    def _check_lengths(self) -> SpeculationSettings:
        if self.num_speculative_tokens > self.num_speculative_tokens_max:
            raise ValueError(
                f"--num-speculative-tokens {self.num_speculative_tokens} is above "
                f"--num-speculative-tokens-max {self.num_speculative_tokens_max}"
            )
        if self.num_speculative_tokens_max > self.draft_window_max:
            raise ValueError(
                f"--num-speculative-tokens-max {self.num_speculative_tokens_max} is above "
                f"--draft-window-max {self.draft_window_max}"
            )
        if self.ngram_length_min > self.ngram_length_max:
            raise ValueError(
                f"--ngram-length-min {self.ngram_length_min} is above --ngram-length-max {self.ngram_length_max}"
            )
        return self


class CallerSettings(Settings):
    """Trust in the callers of a coordinator."""

    trace_parent_sampling: bool = setting(
        False, PROCESS, "Let the sampled flag of a caller's traceparent decide whether its trace is recorded."
    )


class RecordSettings(Settings):
    """Texts kept for the training of drafts."""

    record: Path | None = setting(
        None, OUTPUT, "File to append the token ids of prompts and outputs to, for `specdec distill --from-record`."
    )
    record_notice: bool = setting(False, OUTPUT, "Confirm that clients were told of --record.")
    record_mb_max: int = setting(1024, OUTPUT, "Most megabytes of that file.", ge=1, le=1 << 20)

    @model_validator(mode="after")
    def _check_notice(self) -> RecordSettings:
        if self.record is not None and not self.record_notice:
            raise ValueError("--record keeps what clients send: give --record-notice to confirm that they were told")
        return self


class CoordinatorSettings(ServiceSettings, LinkSettings, SpeculationSettings, CallerSettings, RecordSettings):
    """The coordinator: accepts requests, holds the committed tokens, applies the verification rule."""

    tokenizer: str = setting(..., MODEL, "Folder or hub id of the target model, for its tokenizer.json.", min_length=1)
    max_num_seqs: int = setting(
        64, LIMITS, "Maximum number of generations at a time; more are refused at once.", ge=1, le=65536
    )


class ServeSettings(
    HttpSettings,
    EngineSettings,
    PrefixSettings,
    HeadSettings,
    SplitSettings,
    SpeculationSettings,
    CallerSettings,
    RecordSettings,
):
    """All services on this machine; --host, --port and TLS are the coordinator's, the replicas use loopback."""

    model: str = setting(str(EMBEDDED_MODELS / "target"), MODEL, "Target model: folder or hub id.", min_length=1)
    draft_model: str = setting(
        str(EMBEDDED_MODELS / "draft"),
        MODEL,
        "Draft model: folder or hub id; none: no draft service, only the other proposers.",
        min_length=1,
    )
    served_model_name: str | None = setting(None, MODEL, "Name of the served target; absent: the value of --model.")
    log_level: LogLevel = setting("warning", PROCESS, "Minimum severity of log lines.")
    metrics_address: ListenAddress | None = setting(
        None, CONNECTION, "HOST:PORT of the coordinator's /metrics; target and draft use the next two ports."
    )

    @model_validator(mode="after")
    def _check_metrics_address(self) -> ServeSettings:
        if self.metrics_address and split_address(self.metrics_address, port_min=0)[1] > 65533:
            raise ValueError(f"--metrics-address is {self.metrics_address}; its port must be at most 65533 here")
        return self

    def target_settings(self) -> TargetSettings:
        """Returns the target's settings, on a free loopback port."""
        own = self._shared(TargetSettings, 1)
        own["threads"] = self.threads or max(1, own["threads"] // self.tensor_parallel_size)
        return TargetSettings(**own, model=self.model, served_model_name=self.served_model_name)

    def draft_settings(self) -> DraftSettings:
        """Returns the draft's settings, on a free loopback port."""
        own = self._shared(DraftSettings, 2)
        return DraftSettings(**own, model=self.draft_model, target_tokenizer=self.model)

    @property
    def has_draft(self) -> bool:
        """Whether a draft service is started."""
        return self.draft_model != "none"

    def coordinator_settings(self, target: str, draft: str | None) -> CoordinatorSettings:
        """Returns the coordinator's settings, connected to target and draft, if there is one, on loopback."""
        own = {name: getattr(self, name) for name in CoordinatorSettings.model_fields if hasattr(self, name)}
        own.update(target=(target,), draft=() if draft is None else (draft,), tokenizer=self.model, insecure_links=True)
        return CoordinatorSettings(**own)

    def _metrics_address(self, place: int) -> str | None:
        """Returns the address of the service number `place` after the coordinator: the next port, or a free one."""
        if self.metrics_address is None:
            return None
        host, port = split_address(self.metrics_address, port_min=0)
        return f"{host}:{port + place if port else 0}"

    def _shared(self, service: type[ModelSettings], place: int) -> dict[str, Any]:
        schemas = EngineSettings, PrefixSettings, HeadSettings, SplitSettings
        own = SHARED.union(*(schema.model_fields for schema in schemas))
        own &= service.model_fields.keys()
        model_count = 1 + self.has_draft  # that share this machine
        threads = self.threads or max(1, (os.cpu_count() or 1) // model_count)
        given = {name: getattr(self, name) for name in own}
        return {**given, "port": 0, "threads": threads, "metrics_address": self._metrics_address(place)}


class ClientSettings(TlsSettings):
    """Settings of a client of the coordinator."""

    address: Address = setting("127.0.0.1:50051", CONNECTION, "HOST:PORT of the coordinator.")

    @model_validator(mode="after")
    def _check_address(self) -> ClientSettings:
        self.check_reach(split_address(self.address)[0], "--address")
        return self
