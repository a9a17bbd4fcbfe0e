"""`specdec distill`: from a target to a small draft that imitates it, with no other data than the target's own text.

First the target writes texts, with its distribution at every position; they lie in OUT/texts and are used again. Then a
student learns them. Both parts continue where they were stopped.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from specdec.distill.plans import Plans
from specdec.distill.settings import DistillSettings
from specdec.distill.student import StudentShape, build_student, most_used, save_student
from specdec.distill.texts import LabelledTexts, load_texts
from specdec.distill.training import Data, Plan, Progress, Trainer
from specdec.distill.writing import TextWriter
from specdec.engine.devices import find_device, prepare_libraries
from specdec.engine.model import load_model
from specdec.engine.model_folder import open_model_folder
from specdec.engine.vocabulary_map import VocabularyMap
from specdec.errors import ConfigError

SHARD_TEXTS = 64  # of one file
HELDOUT_TEXTS = 48
CHECKPOINT_FILE = "checkpoint.safetensors"


def numbers(text: str, flag: str) -> tuple[float, ...]:
    """Returns the numbers of a list with commas. Raises ConfigError."""
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"{flag} is {text!r}; it must be numbers with commas between them, such as 0,0.7,1") from None


def prompts_of(file: Path | None) -> list[str]:
    """Returns the prompts of a file: one a line, or with the suffix .jsonl the `prompt` of an object a line. Raises
    ConfigError."""
    if file is None:
        return []
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        return [str(json.loads(line)["prompt"]) for line in lines] if file.suffix == ".jsonl" else lines
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--prompts {file} has no prompts: {error}") from None


def distill(settings: DistillSettings) -> int:
    """Writes texts, trains, saves. Raises SpecdecError."""
    console = Console(stderr=True)
    prepare_libraries(settings.threads or None)
    device = str(find_device(settings.device))
    folder = open_model_folder(settings.target)
    texts, heldout = written_texts(settings, folder.path, device, console)
    token_ids = own_ids = None
    if settings.draft_vocabulary:
        token_ids = most_used(texts, settings.draft_vocabulary, folder.end_token_ids)
        own_ids = VocabularyMap(token_ids, folder.token_string_count).own_ids
    layers = tuple(int(layer) for layer in numbers(settings.target_layers, "--target-layers"))
    shape = StudentShape(settings.layers, settings.hidden_size, layers, settings.draft_vocabulary)
    student = build_student(folder, shape, token_ids, settings.seed)
    own_size = folder.token_string_count if token_ids is None else len(token_ids)
    plan = Plan(
        settings.loss,
        numbers(settings.loss_temperatures, "--loss-temperatures"),
        settings.learning_rate,
        settings.batch_tokens,
        settings.tokens,
        settings.minutes,
        settings.evaluate_tokens,
        settings.patience,
        settings.seed,
        device,
    )
    settings.out.mkdir(parents=True, exist_ok=True)
    learned, tested = (Data(own, own_ids, own_size) for own in (texts, heldout))
    trainer = Trainer(student, own_size, plan, learned, tested, settings.out / CHECKPOINT_FILE)
    if trainer.resume():
        console.print(f"continuing after {trainer.progress.tokens:,} tokens")
    train(trainer, console)
    facts: dict[str, Any] = {"settings": settings.model_dump(mode="json"), "history": trainer.progress.history}
    facts["parameters"] = sum(weight.numel() for weight in student.parameters())
    save_student(student, folder, token_ids, settings.out, facts)
    console.print(f"{settings.out} holds the draft; serve it: specdec draft --model {settings.out}", soft_wrap=True)
    return 0


def written_texts(
    settings: DistillSettings, folder: Path, device: str, console: Any
) -> tuple[LabelledTexts, LabelledTexts]:
    """Returns the texts to learn from and the held-out ones; has the target write those that are missing."""
    where = settings.texts or settings.out / "texts"
    wanted = [("heldout", 0, HELDOUT_TEXTS)]
    for first in range(0, settings.text_count, SHARD_TEXTS):
        wanted.append(("train", first, min(SHARD_TEXTS, settings.text_count - first)))
    files = [where / f"{split}-{first:07d}.safetensors" for split, first, _ in wanted]
    missing = [(file, *own) for file, own in zip(files, wanted) if not file.is_file()]
    if missing:
        temperatures = numbers(settings.text_temperatures, "--text-temperatures")
        plans = Plans(folder, temperatures, settings.text_tokens, prompts_of(settings.prompts))
        longest = max(plan.length_max for plan in plans.make(0, 256, settings.seed))
        model = load_model(settings.target, device=device, has_stable_rows=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with (
            TextWriter(model, SHARD_TEXTS, longest, device) as writer,
            Bars(*columns, TextColumn("{task.fields[note]}"), console=console) as bar,
        ):
            task = bar.add_task("the target writes", total=sum(count for *_, count in missing), note="")
            began_s, count = time.monotonic(), 0

            def told(token_count: int) -> None:
                nonlocal count
                count += token_count
                bar.update(task, note=f"{count / (time.monotonic() - began_s):.0f} tokens/s")

            for file, split, first, text_count in missing:
                seed = settings.seed + (split == "heldout") * (1 << 33)
                writer.write(plans.make(first, text_count, seed), told).save(file)
                bar.advance(task, text_count)
    return load_texts(files[1:]), load_texts(files[:1])


def train(trainer: Trainer, console: Any) -> None:
    """Trains with a bar, and prints a line for every evaluation."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
    shown = 0

    def tell(progress: Progress) -> None:
        nonlocal shown
        for entry in progress.history[shown:]:
            values = "  ".join(f"{name} {value:.3f}" for name, value in entry["acceptance"].items())
            console.print(f"{entry['tokens']:>12,} tokens  {entry['seconds']:>7.0f} s  {values}", soft_wrap=True)
        shown = len(progress.history)

    with Bars(*columns, console=console) as bar:
        task = bar.add_task("the draft learns", total=1.0, note="")

        def told(loss: float, progress: Progress) -> None:
            tell(progress)
            rate = progress.tokens / max(progress.seconds, 1e-9)
            bar.update(task, completed=trainer.share(), note=f"loss {loss:.3f}, {rate:.0f} tokens/s")

        trainer.run(told)
    tell(trainer.progress)
