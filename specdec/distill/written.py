"""The texts of a run and the target's features along them: what is in files is read, what is missing is made first."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from specdec.distill.features import Features, RecordingModel, features_place, record_features, save_features
from specdec.distill.plans import Plans, recorded_acceptance, records_of, text_files
from specdec.distill.settings import DistillSettings
from specdec.distill.start import Start
from specdec.distill.texts import LabelledTexts
from specdec.distill.writing import TextWriter, check_lengths
from specdec.engine.loading.model import load_offline_target
from specdec.engine.loading.model_folder import ModelFolder
from specdec.errors import ConfigError
from specdec.protocol.fields import TEMPERATURE_MIN

FILE_TEXTS = 64  # of one file; the held-out texts are one
HELDOUT_MAX = 16  # of given prompts and files, a tenth: no text of theirs is learned
HELDOUT_TEMPERATURES = (0.0, 0.7, 1.0)  # tested at, whatever the texts to learn from have

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class TextFiles:
    """Texts, with the files they are of and the origin of each."""

    texts: LabelledTexts
    files: tuple[Path, ...]
    origins: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WrittenTexts:
    """The texts to learn from and the held-out ones."""

    learned: TextFiles
    heldout: TextFiles


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


def make_folder(folder: Path, flag: str) -> None:
    """Makes a folder. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{flag} {folder} cannot be made: {error.strerror}") from None


def written_texts(
    settings: DistillSettings,
    folder: ModelFolder,
    start: Start | None,
    device: str,
    console: Console,
    layers: tuple[int, ...] = (),
) -> WrittenTexts:
    """Returns the texts to learn from and the held-out ones; has the target write those that are missing, and keep
    their features that enter these layers, if any."""
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
        model = RecordingModel(model, layers) if layers else model
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
                texts = writer.write(plans[split].make(first, FILE_TEXTS), told)
                texts.save(files[own], origins[own])
                if writer.features is not None:
                    save_features(writer.features, *features_place(files[own], origins[own], layers))
                bar.advance(task, FILE_TEXTS)
    heldout, *learned = (LabelledTexts.load(files[own], origins[own]) for own in wanted)
    paths, digests = tuple(files.values()), tuple(origins.values())
    return WrittenTexts(
        TextFiles(LabelledTexts.joined(learned), paths[1:], digests[1:]), TextFiles(heldout, paths[:1], digests[:1])
    )


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
            folder.path,
            at,
            settings.text_tokens,
            f"{name}/{settings.text_seed}",
            asked,
            read,
            kept,
            folder.beginning,
            is_repeated=name == "heldout",
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


def recorded_features(
    target: Any, layers: tuple[int, ...], texts: TextFiles, device: str, console: Console
) -> Features:
    """Returns the features along texts; records those that are missing. Raises ConfigError."""
    files, origins = zip(*(features_place(*own, layers) for own in zip(texts.files, texts.origins)))
    missing = [index for index, file in enumerate(files) if not file.is_file()]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    if missing:
        with Bars(*columns, console=console) as bar:
            task = bar.add_task("the target's features", total=len(texts.texts.token_ids))
            for index in missing:
                own = LabelledTexts.load(texts.files[index], texts.origins[index])
                told = partial(bar.advance, task)
                record_features(target.to(device), layers, own, files[index], origins[index], told)
    features, token_count = Features(files, origins), len(texts.texts.token_ids)
    if features.row_count != token_count:
        where = files[0].parent
        raise ConfigError(
            f"{where} has {features.row_count} rows of features, the texts {token_count} tokens: remove them"
        )
    return features
