"""The settings of `specdec advise`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, model_validator

from specdec.settings import LIMITS, MODEL, OUTPUT, PROMPT, Settings, setting

Names = Annotated[tuple[str, ...], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]


class AdviseSettings(Settings):
    """The target, the drafts and heads, the prompts, and the machine to predict for."""

    target: str = setting(..., MODEL, "Target model: folder or hub id.", min_length=1)
    draft: Names = setting((), MODEL, "Draft model: folder or hub id; may be repeated.")
    heads: Names = setting((), MODEL, "Folder of an EAGLE-3 head on the target; may be repeated, beside drafts too.")
    device: str = setting("auto", MODEL, "Device: cpu, cuda or cuda:1; auto selects a GPU if there is one.")
    threads: int = setting(
        0, MODEL, "CPU threads of this command and of each served model; 0: one per core, and one each.", ge=0, le=1024
    )
    prompts: Path = setting(..., PROMPT, "Prompts, one a line, or .jsonl with `prompt` and, if given, `class`.")
    text_tokens: int = setting(96, PROMPT, "Most tokens of an answer.", ge=3, le=1 << 16)
    text_temperatures: str = setting("0,0.7,1", PROMPT, "Temperatures; each prompt is answered once at each.")
    text_seed: int = setting(0, PROMPT, "Seed of the texts.", ge=0, le=1 << 32)
    target_ms: float = setting(0.0, LIMITS, "Step of the target, one row; 0: measured on this machine.", ge=0)
    draft_ms: float = setting(0.0, LIMITS, "Step of the draft, one node; 0: measured on this machine.", ge=0)
    rtt_ms: float = setting(0.0, LIMITS, "Round trip between coordinator and draft; a head has none.", ge=0, le=10_000)
    overhead_ms: float = setting(0.0, LIMITS, "Rest of a round, beside steps and round trip; 0: measured here.", ge=0)
    target_price: float = setting(0.0, LIMITS, "Price of an hour of the target's machine.", ge=0)
    draft_price: float = setting(0.0, LIMITS, "Price of an hour of the draft's machine.", ge=0)
    check: bool = setting(False, OUTPUT, "Also serve each pair with the recommended plan and compare.")
    plot: Path | None = setting(None, OUTPUT, "Picture to write: acceptance by class, tokens/s by round trip.")
    as_json: bool = setting(False, OUTPUT, "Print only one JSON object.")

    @model_validator(mode="after")
    def _check_drafters(self) -> AdviseSettings:
        if not self.draft and not self.heads:
            raise ValueError("--draft and --heads are missing: give at least one of them to forecast")
        return self
