"""The settings of `specdec distill`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import model_validator

from specdec.protocol.heads import HEADS_MAX
from specdec.settings import LIMITS, MODEL, OUTPUT, PROMPT, Settings, setting

OF_EAGLE = ("eagle_steps", "eagle_layers")
OF_NEW_DRAFTS = ("layers", "hidden_size", "target_layers", "draft_vocabulary")


class DistillSettings(Settings):
    """The target, the texts, the student, and the length of the training."""

    target: str = setting(..., MODEL, "Target model: folder or hub id.", min_length=1)
    out: Path = setting(..., OUTPUT, "Folder of the draft or heads; texts and checkpoint lie in it too.")
    device: str = setting("auto", MODEL, "Device: cpu, cuda or cuda:1; auto selects a GPU if there is one.")
    threads: int = setting(0, MODEL, "CPU threads; 0: one per core.", ge=0, le=1024)
    prompts: Path | None = setting(
        None,
        PROMPT,
        "Prompts, one a line, or .jsonl with `prompt`: an encoder's inputs if the target has one; absent: the target "
        "asks itself, as in a chat.",
    )
    corpus: Path | None = setting(
        None, PROMPT, "Folder of text files: every second text is a window of one, as it is or continued."
    )
    from_record: Path | None = setting(
        None,
        PROMPT,
        "File of `specdec coordinator --record`: its texts are learned beside the others, its acceptance is told.",
    )
    texts: Path | None = setting(None, PROMPT, "Folder of texts written before; absent: OUT/texts.")
    text_count: int = setting(2048, PROMPT, "Texts the target writes, in files of 64.", ge=1, le=1 << 24)
    text_tokens: int = setting(192, PROMPT, "Most tokens of an answer.", ge=8, le=1 << 16)
    text_temperatures: str = setting(
        "0,0.7,1", PROMPT, "Temperatures of the texts, in turn; at most 1. Held-out texts have 0, 0.7 and 1 too."
    )
    text_seed: int = setting(0, PROMPT, "Seed of the texts.", ge=0, le=1 << 32)
    heads: int = setting(
        0, MODEL, "Train this many heads on the target, one for each later position; 0: a draft.", ge=0, le=HEADS_MAX
    )
    eagle: bool = setting(False, MODEL, "Train an EAGLE-3 head on the target, which reads its features, not a draft.")
    eagle_steps: int = setting(
        5, MODEL, "Steps of the training-time test of --eagle, each a later draft token.", ge=3, le=7
    )
    eagle_layers: str = setting(
        "", MODEL, "Layers whose inputs --eagle reads, such as 2,15,27; absent: 2, n / 2 and n - 3 of n."
    )
    start: str = setting(
        "",
        MODEL,
        "Draft with the target's tokenizer that learns on, folder or hub id, or with --eagle a head; absent: a new "
        "one.",
    )
    layers: int = setting(1, MODEL, "Layers of a new draft; with an encoder, of its decoder.", ge=1, le=256)
    hidden_size: int = setting(0, MODEL, "Hidden size of a new draft; 0: the target's, and its weights.", ge=0)
    target_layers: str = setting("", MODEL, "Layers it starts from, such as 0,29; absent: first ones, last.")
    draft_vocabulary: int = setting(
        0, MODEL, "Tokens of a new draft or EAGLE-3 head, those the target uses most; 0: all.", ge=0
    )
    loss: Literal["kl", "tv", "nla"] = setting("kl", MODEL, "kl: forward KL; tv: total variation; nla: log acceptance.")
    loss_temperatures: str = setting("1", MODEL, "Temperatures of the loss.")
    learning_rate: float = setting(
        1e-3, MODEL, "Peak learning rate of AdamW; with --start rather 3e-4 or 1e-4.", gt=0, le=1
    )
    bf16: bool = setting(
        False, MODEL, "Compute products in bf16, faster where the device has them; weights stay float32."
    )
    batch_tokens: int = setting(4096, LIMITS, "Tokens of an optimiser step; 512 suit few texts.", ge=16, le=1 << 24)
    tokens: int = setting(0, LIMITS, "Tokens to train on; 0: see --minutes.", ge=0)
    minutes: float = setting(0.0, LIMITS, "Minutes to train instead, evaluation excluded; not repeatable.", ge=0)
    evaluate_tokens: int = setting(200_000, LIMITS, "Tokens between evaluations, each with a checkpoint.", ge=1)
    patience: int = setting(4, LIMITS, "Evaluations in a row without a better acceptance that end the training.", ge=1)
    seed: int = setting(0, LIMITS, "Seed of new weights and of the order.", ge=0, le=1 << 32)

    @model_validator(mode="after")
    def _check(self) -> DistillSettings:
        if (self.tokens > 0) == (self.minutes > 0):
            raise ValueError("give either --tokens or --minutes")
        given = [f"--{name.replace('_', '-')}" for name in OF_NEW_DRAFTS if name in self.model_fields_set]
        if self.heads and (given or self.start):
            raise ValueError(f"{[*given, '--start'][0]} is for drafts: leave it out with --heads")
        self._check_eagle([flag for flag in given if flag != "--draft-vocabulary"])
        given += ["--eagle-layers"] * ("eagle_layers" in self.model_fields_set)
        if self.start and given:
            kind = "heads" if self.eagle else "drafts"
            raise ValueError(f"{given[0]} is for new {kind}: leave it out, --start {self.start} keeps its own")
        for flag, folder in (("--target", self.target), ("--start", self.start)):
            if folder and Path(folder).resolve() == self.out.resolve():
                raise ValueError(f"--out {self.out} is {flag} too; give another folder, and serve that afterwards")
        return self

    def _check_eagle(self, of_drafts: list[str]) -> None:
        """Checks what cannot be given with --eagle, `of_drafts` among it, or without."""
        others = [*of_drafts, *["--heads"] * bool(self.heads)]
        if self.eagle and others:
            raise ValueError(f"{others[0]} is not for EAGLE-3 heads: leave it out with --eagle")
        own = [name for name in OF_EAGLE if name in self.model_fields_set]
        if own and not self.eagle:
            raise ValueError(f"--{own[0].replace('_', '-')} is for EAGLE-3 heads: give --eagle too")
