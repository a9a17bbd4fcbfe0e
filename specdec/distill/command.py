"""`specdec distill`: from a target to a small draft that imitates it, or to heads on it, with no other data than the
target's own text.

First the target writes texts, with its distribution at every position; they lie in OUT/texts and are used again. Then a
student learns them: a new one, or a draft that learns on. Both parts continue where they were stopped.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from specdec.distill.learners import DraftLearner, HeadsLearner
from specdec.distill.plans import Plans, recorded_acceptance, records_of, text_files
from specdec.distill.settings import DistillSettings
from specdec.distill.start import Start, open_start
from specdec.distill.student import (
    StudentShape,
    build_student,
    check_shape,
    most_used,
    save_student,
    share_of,
    write_facts,
)
from specdec.distill.texts import LabelledTexts
from specdec.distill.training import Data, Learner, Plan, Progress, Trainer, check_checkpoint
from specdec.distill.writing import TextWriter, check_lengths
from specdec.engine.heads import save_heads
from specdec.engine.loading.devices import find_device, prepare_libraries
from specdec.engine.loading.model import load_offline_target
from specdec.engine.loading.model_folder import ModelFolder, open_model_folder
from specdec.engine.transformers_model import read_weights
from specdec.engine.vocabulary_map import VocabularyMap
from specdec.errors import ConfigError
from specdec.protocol.fields import TEMPERATURE_MIN
from specdec.terminal import make_console

MAY_CHANGE = {
    "out",
    "texts",
    "device",
    "threads",
    "tokens",
    "minutes",
    "patience",
}  # when a run continues
FILE_TEXTS = 64  # of one file; the held-out texts are one
CHECKPOINT_FILE = "checkpoint.safetensors"
HELDOUT_MAX = 16  # of given prompts and files, a tenth: no text of theirs is learned
HELDOUT_TEMPERATURES = (0.0, 0.7, 1.0)  # tested at, whatever the texts to learn from have

Item = TypeVar("Item")


def temperatures_of(text: str, flag: str, may_be_zero: bool = True) -> tuple[float, ...]:
    """Returns the temperatures of a list with commas. Raises ConfigError."""
    try:
        values = tuple(map(float, text.split(",")))
    except ValueError:
        values = ()
    allowed = [one for one in values if TEMPERATURE_MIN <= one <= 1 or (one == 0 and may_be_zero)]
    if not values or len(allowed) < len(values):
        limit = f"{'0 or ' * may_be_zero}{TEMPERATURE_MIN:g} to 1"
        raise ConfigError(f"{flag} is {text!r}; it must be temperatures, {limit}, with commas between them")
    return values


def layers_of(text: str) -> tuple[int, ...]:
    """Returns the layers of a list with commas. Raises ConfigError."""
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdigit() for part in parts):
        raise ConfigError(f"--target-layers is {text!r}; it must be numbers with commas between them, such as 0,29")
    return tuple(map(int, parts))


def prompts_of(file: Path | None) -> list[str]:
    """Returns the prompts of a file: one a line, or with the suffix .jsonl the `prompt` of an object a line. Raises
    ConfigError."""
    if file is None:
        return []
    try:
        lines = [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
        found = [json.loads(line)["prompt"] for line in lines] if file.suffix == ".jsonl" else lines
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--prompts {file} has no prompts: {error}") from None
    for prompt in found:
        if not isinstance(prompt, str) or not prompt.strip():
            raise ConfigError(f"--prompts {file} has the prompt {prompt!r}; each must be a text")
    return list(dict.fromkeys(found))


def distill(
    settings: DistillSettings,
    make_draft_learner: Callable[[Any, int, Plan], Learner] = DraftLearner,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Writes texts, trains, saves. `make_draft_learner` is given the arguments of DraftLearner; `clock` gives seconds,
    for a budget in minutes. Raises SpecdecError."""
    console = make_console(is_for_errors=True)
    prepare_libraries(settings.threads or None)
    device = str(find_device(settings.device))
    folder = open_model_folder(settings.target)
    temperatures_of(settings.loss_temperatures, "--loss-temperatures", False)
    check_shape(folder, shape_of(settings))
    start = open_start(settings.start, folder) if settings.start else None
    check_checkpoint(settings.out / CHECKPOINT_FILE, kept_settings(settings))
    texts, heldout = written_texts(settings, folder, start, device, console)
    make_folder(settings.out, "--out")
    plan = plan_of(settings, device, digest_of(start, texts, heldout))
    if settings.heads:
        learn_heads(settings, folder, plan, texts, heldout, clock, console)
    else:
        learn_draft(settings, folder, start, plan, texts, heldout, make_draft_learner, clock, console)
    return 0


def shape_of(settings: DistillSettings) -> StudentShape:
    """Returns the shape of a new draft. Raises ConfigError."""
    layers = layers_of(settings.target_layers)
    return StudentShape(settings.layers, settings.hidden_size, layers, settings.draft_vocabulary)


def kept_settings(settings: DistillSettings) -> str:
    """Returns the settings that a run must have when it continues."""
    return settings.model_dump_json(exclude=MAY_CHANGE)


def plan_of(settings: DistillSettings, device: str, texts_digest: str) -> Plan:
    """Returns the plan of a run. Raises ConfigError."""
    return Plan(
        settings.loss,
        temperatures_of(settings.loss_temperatures, "--loss-temperatures", False),
        settings.learning_rate,
        settings.batch_tokens,
        settings.tokens,
        settings.minutes,
        settings.evaluate_tokens,
        settings.patience,
        settings.seed,
        device,
        settings.bf16,
        kept_settings(settings),
        texts_digest,
    )


def learn_draft(
    settings: DistillSettings,
    folder: ModelFolder,
    start: Start | None,
    plan: Plan,
    texts: LabelledTexts,
    heldout: LabelledTexts,
    make_draft_learner: Callable[[Any, int, Plan], Learner],
    clock: Callable[[], float],
    console: Console,
) -> None:
    """Trains a draft, a new one without `start`, and saves it. Raises SpecdecError."""
    if start is not None:
        start.check_length(max(texts.length_max, heldout.length_max))
        token_ids, student = start.token_ids, start.load()
    else:
        size = settings.draft_vocabulary
        token_ids = most_used(texts, size, folder.end_token_ids) if size else None
        student = build_student(folder, shape_of(settings), token_ids, settings.seed)
    own_ids = None if token_ids is None else VocabularyMap(token_ids, folder.token_string_count).own_ids
    own_size = folder.token_string_count if token_ids is None else len(token_ids)
    learned = Data(texts, texts.learned_from, own_ids, own_size)
    tested = Data(heldout, heldout.answered_from, own_ids, own_size)
    learner = make_draft_learner(student, own_size, plan)
    trainer = Trainer(learner, plan, learned, tested, settings.out / CHECKPOINT_FILE, clock)
    train(trainer, "the draft learns", console)
    share = 1.0 if token_ids is None else share_of(token_ids, heldout)
    save_student(student, folder, token_ids, share, settings.out, facts_of(settings, trainer))
    console.print(f"{settings.out} holds the draft; serve it: specdec draft --model {settings.out}", soft_wrap=True)


def learn_heads(
    settings: DistillSettings,
    folder: ModelFolder,
    plan: Plan,
    texts: LabelledTexts,
    heldout: LabelledTexts,
    clock: Callable[[], float],
    console: Console,
) -> None:
    """Trains heads on the target and saves them. Raises SpecdecError."""
    target = read_weights(settings.target, folder, folder.digest, torch.float32)
    learner = HeadsLearner(target, settings.heads, folder.token_string_count, plan)
    learned = Data(texts, texts.learned_from, None)
    tested = Data(heldout, heldout.answered_from, None)
    trainer = Trainer(learner, plan, learned, tested, settings.out / CHECKPOINT_FILE, clock)
    train(trainer, "the heads learn", console)
    save_heads(learner.student, settings.out, folder.digest())
    write_facts(settings.out, facts_of(settings, trainer))
    served = f"specdec target --model {settings.target} --heads {settings.out}"
    console.print(f"{settings.out} holds the heads; serve them: {served}", soft_wrap=True)


def facts_of(settings: DistillSettings, trainer: Trainer) -> dict[str, Any]:
    """Returns the facts of a finished run: its settings, its evaluations, and the size of what it trained."""
    facts: dict[str, Any] = {"settings": settings.model_dump(mode="json"), "history": trainer.progress.history}
    facts["parameters"] = sum(weight.numel() for weight in trainer.student.parameters())
    return facts


def make_folder(folder: Path, flag: str) -> None:
    """Makes a folder. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{flag} {folder} cannot be made: {error.strerror}") from None


def digest_of(start: Start | None, *parts: LabelledTexts) -> str:
    """Returns a digest of the draft that learns on, if one does, and of texts: their tokens, which decide a new
    student's vocabulary, and everything after them."""
    whole = hashlib.sha256(start.folder.digest().encode() if start else b"")
    for part in parts:
        for tensor in (part.token_ids, part.likeliest_ids, part.log_probs, part.input_ids):
            whole.update(tensor.numpy().tobytes())
    return whole.hexdigest()


def written_texts(
    settings: DistillSettings, folder: ModelFolder, start: Start | None, device: str, console: Console
) -> tuple[LabelledTexts, LabelledTexts]:
    """Returns the texts to learn from and the held-out ones; has the target write those that are missing."""
    where = settings.texts or settings.out / "texts"
    plans = plans_of(settings, folder, partial(console.print, soft_wrap=True))
    tell_recorded(plans, console)
    wanted = [("heldout", 0), *(("train", first) for first in range(0, settings.text_count, FILE_TEXTS))]
    files = {own: where / f"{own[0]}-{own[1]:07d}.safetensors" for own in wanted}
    digest = folder.digest()
    origins = {own: plans[own[0]].digest(own[1], FILE_TEXTS, digest) for own in wanted}
    missing = [own for own in wanted if not files[own].is_file()]
    if missing:
        orders = (order for split, first in missing for order in plans[split].make(first, FILE_TEXTS))
        lengths = [(order.length_max, order.encoder_length) for order in orders]
        if start is not None:
            start.check_length(max(lengths)[0])
        model = load_offline_target(settings.target, device)
        longest = check_lengths(lengths, settings.text_tokens, model.description)
        make_folder(where, "--texts")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with (
            TextWriter(model, FILE_TEXTS, longest, device) as writer,
            Bars(*columns, TextColumn("{task.fields[note]}"), console=console) as bar,
        ):
            task = bar.add_task("the target writes", total=len(missing) * FILE_TEXTS, note="")
            began_s, count = time.monotonic(), 0

            def told(token_count: int) -> None:
                nonlocal count
                count += token_count
                bar.update(task, note=f"{count / (time.monotonic() - began_s):.0f} tokens/s")

            for own in missing:
                split, first = own
                writer.write(plans[split].make(first, FILE_TEXTS), told).save(files[own], origins[own])
                bar.advance(task, FILE_TEXTS)
    heldout, *learned = (LabelledTexts.load(files[own], origins[own]) for own in wanted)
    return LabelledTexts.joined(learned), heldout


def plans_of(
    settings: DistillSettings, folder: ModelFolder, told: Callable[[str], None] = lambda line: None
) -> dict[str, Plans]:
    """Returns the plans of the held-out texts and of those to learn from; no prompt and no file is in both. `told` is
    given lines about files and records that are skipped. Raises ConfigError."""
    temperatures = temperatures_of(settings.text_temperatures, "--text-temperatures")
    prompts = prompts_of(settings.prompts)
    if settings.prompts and len(prompts) < 2:
        raise ConfigError(f"--prompts {settings.prompts} has {len(prompts)} prompts; it must have 2, one to test with")
    files = text_files(settings.corpus, told)
    records = records_of(settings.from_record, folder.token_string_count, told, folder.has_encoder)
    heldout = tuple(sorted({*HELDOUT_TEMPERATURES, *temperatures}))
    parts = zip(("heldout", "train"), (heldout, temperatures), split(prompts), split(files), split(records))
    return {
        name: Plans(
            folder.path, at, settings.text_tokens, f"{name}/{settings.text_seed}", asked, read, kept, folder.beginning
        )
        for name, at, asked, read, kept in parts
    }


def tell_recorded(plans: dict[str, Plans], console: Console) -> None:
    """Prints the acceptance of recorded texts, if any: what a draft of the same traffic is compared with."""
    found = recorded_acceptance([record for own in plans.values() for record in own.records])
    values = [f"{own / tested:.3f} at {at:g} ({tested:,} tested)" for at, (own, tested) in found.items() if tested]
    if found:
        told = ", ".join(values) or "no draft token was tested"
        console.print(f"recorded acceptance, of all proposers: {told}", soft_wrap=True)


def split(items: list[Item]) -> tuple[list[Item], list[Item]]:
    """Returns a tenth to test with, at least one and at most HELDOUT_MAX, and the rest."""
    count = min(HELDOUT_MAX, max(1, len(items) // 10))
    return items[:count], items[count:]


def train(trainer: Trainer, activity: str, console: Console) -> None:
    """Trains with a bar, from the checkpoint on if there is one, and prints a line for every evaluation."""
    if trainer.resume():
        console.print(f"continuing after {trainer.progress.tokens:,} tokens")
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
    shown = 0

    def tell(progress: Progress) -> None:
        nonlocal shown
        for entry in progress.history[shown:]:
            values = "  ".join(f"{name} {value:.3f}" for name, value in entry["acceptance"].items())
            console.print(f"{entry['tokens']:>12,} tokens  {entry['seconds']:>7.0f} s  {values}", soft_wrap=True)
        shown = len(progress.history)

    with Bars(*columns, console=console) as bar:
        task = bar.add_task(activity, total=1.0, note="")

        def told(loss: float, progress: Progress) -> None:
            tell(progress)
            rate = progress.tokens / max(progress.seconds, 1e-9)
            bar.update(task, completed=trainer.share(), note=f"loss {loss:.3f}, {rate:.0f} tokens/s")

        trainer.run(told)
    tell(trainer.progress)
