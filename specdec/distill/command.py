"""`specdec distill`: from a target to a small draft that imitates it, or to heads on it, with no other data than the
target's own text.

First the target writes texts, with its distribution at every position; they lie in OUT/texts and are used again. Then a
student learns them: a new one, or a draft or EAGLE-3 head that learns on. Both parts continue where they were stopped.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from specdec.distill.eagle import EagleLearner, feature_layers, head_sizes, new_head
from specdec.distill.learners import DraftLearner, HeadsLearner
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
from specdec.distill.written import WrittenTexts, make_folder, recorded_features, temperatures_of, written_texts
from specdec.engine.eagle.folder import load_eagle, save_eagle, target_facts
from specdec.engine.eagle.network import EagleHead
from specdec.engine.heads import save_heads
from specdec.engine.loading.devices import find_device, prepare_libraries
from specdec.engine.loading.model_folder import ModelFolder, open_model_folder
from specdec.engine.transformers_model import read_weights
from specdec.engine.vocabulary_map import VocabularyMap
from specdec.errors import ConfigError
from specdec.folders import expanded
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
CHECKPOINT_FILE = "training.checkpoint"  # in safetensors; engines load every file of that suffix beside a model


def layers_of(text: str, flag: str = "--target-layers") -> tuple[int, ...]:
    """Returns the layers of a list with commas. Raises ConfigError."""
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdigit() for part in parts):
        raise ConfigError(f"{flag} is {text!r}; it must be numbers with commas between them, such as 0,29")
    return tuple(map(int, parts))


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
    start = open_start(settings.start, folder) if settings.start and not settings.eagle else None
    head = load_eagle(expanded(settings.start), target_facts(folder)) if settings.start and settings.eagle else None
    check_checkpoint(settings.out / CHECKPOINT_FILE, kept_settings(settings))
    layers = head.config.aux_layer_ids if head else ()
    if settings.eagle and not head:
        layers = feature_layers(folder, layers_of(settings.eagle_layers, "--eagle-layers"))
    written = written_texts(settings, folder, start, device, console)
    texts, heldout = written.learned.texts, written.heldout.texts
    make_folder(settings.out, "--out")
    plan = plan_of(settings, device, digest_of(start or head, texts, heldout))
    if settings.eagle:
        learn_eagle(settings, folder, head, plan, written, layers, clock, console)
    elif settings.heads:
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


def learn_eagle(
    settings: DistillSettings,
    folder: ModelFolder,
    head: EagleHead | None,
    plan: Plan,
    written: WrittenTexts,
    layers: tuple[int, ...],
    clock: Callable[[], float],
    console: Console,
) -> None:
    """Trains an EAGLE-3 head on the target, a new one without `head`, and saves it. Raises SpecdecError."""
    texts, heldout = written.learned, written.heldout
    target = read_weights(settings.target, folder, folder.digest, torch.float32).eval().requires_grad_(False)
    features, tested_features = (
        recorded_features(target, layers, own, plan.device, console) for own in (texts, heldout)
    )
    feature_size = None
    if head is None:
        sizes = features.sizes(len(layers))
        feature_size = sizes[-1]
        size, count = settings.draft_vocabulary, folder.token_string_count
        token_ids = most_used(texts.texts, size, folder.end_token_ids) if size else torch.arange(count)
        config = head_sizes(target.config, target_facts(folder), layers, len(token_ids))
        head = new_head(target, config, token_ids, sizes, plan.seed)
    table = target.get_input_embeddings() if head.embed_tokens is None else head.embed_tokens
    steps = settings.eagle_steps
    learner = EagleLearner(head.train().requires_grad_(), table.weight.detach(), steps, plan, feature_size)
    del target  # but for its embeddings: the features are read
    learned = Data(texts.texts, texts.texts.learned_from, None, features=features)
    tested = Data(heldout.texts, heldout.texts.answered_from, None, features=tested_features)
    trainer = Trainer(learner, plan, learned, tested, settings.out / CHECKPOINT_FILE, clock)
    train(trainer, "the head learns", console)
    save_eagle(head, settings.out)
    facts = facts_of(settings, trainer)
    write_facts(settings.out, facts | {"share": share_of(head.target_ids, heldout.texts), "layers": layers})
    served = f"specdec target --model {settings.target} --heads {settings.out}"
    console.print(f"{settings.out} holds the head; serve it: {served}", soft_wrap=True)


def facts_of(settings: DistillSettings, trainer: Trainer) -> dict[str, Any]:
    """Returns the facts of a finished run: its settings, its evaluations, and the size of what it trained."""
    facts: dict[str, Any] = {"settings": settings.model_dump(mode="json"), "history": trainer.progress.history}
    facts["parameters"] = sum(weight.numel() for weight in trainer.student.parameters())
    return facts


def digest_of(start: Start | EagleHead | None, *parts: LabelledTexts) -> str:
    """Returns a digest of the draft or head that learns on, if one does, and of texts: their tokens, which decide a new
    student's vocabulary, and everything after them."""
    whole = hashlib.sha256(start.folder.digest().encode() if isinstance(start, Start) else b"")
    if isinstance(start, EagleHead):
        for tensor in start.state_dict().values():
            whole.update(tensor.numpy().tobytes())
    for part in parts:
        for tensor in (part.token_ids, part.likeliest_ids, part.log_probs, part.input_ids):
            whole.update(tensor.numpy().tobytes())
    return whole.hexdigest()


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
