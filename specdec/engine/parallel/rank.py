"""One rank from its place to its end: join, load, and lead or follow.

The two entry points for a launcher: a command, a pod or an actor calls one of them in each process. They depend on
the model, the place and the current thread count, not on services.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
import transformers

from specdec.engine.loading.config_check import TABLE_MODEL_TYPE
from specdec.engine.loading.model_folder import ModelFolder, Progress, open_model_folder
from specdec.engine.parallel.group import Bounds, Ending, RankGroup, join
from specdec.engine.parallel.rank_config import RankPlace
from specdec.engine.parallel.share import LeaderModel, check_split, follow, load_embedding, load_output, load_share
from specdec.engine.parallel.watch import Loss, last_words
from specdec.engine.transformers_model import numerics_of
from specdec.errors import RANK_LOST_EXIT_CODE, ModelRefused, SpecdecError
from specdec.process_watch import ProcessWatch

logger = logging.getLogger("specdec.engine")

SERVING = Bounds()


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The model to load: arguments of `load_model`, and whether its ranks add in symmetric memory."""

    path_or_hub_id: str
    dtype: str = "auto"
    device: str = "cpu"
    positions_max: int | None = None
    symmetric_memory: bool = False

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)


def load_leader(source: ModelSource, place: RankPlace, ending: Ending, progress: Progress) -> LeaderModel:
    """Returns rank 0's model, once all ranks have joined and loaded their shares. Raises SpecdecError."""
    folder = _checked_folder(source, place)
    group = join(place, _facts(source, folder), ending, source.torch_device, source.symmetric_memory)
    try:
        name, device = source.path_or_hub_id, source.torch_device
        share = load_share(name, folder, source.dtype, device, group, progress, source.positions_max)
        own = name, folder, source.dtype, share
        return LeaderModel(share, group, partial(load_output, *own), partial(load_embedding, *own))
    except BaseException as error:
        group.watch.fail(place.rank, error)
        raise


def run_follower(source: ModelSource, place: RankPlace, bounds: Bounds = SERVING) -> None:
    """Runs any other rank; returns when rank 0 has ended normally. A lost rank ends the process with
    RANK_LOST_EXIT_CODE.

    The first SIGTERM or SIGINT asks rank 0 to end normally, the second has its default effect. Main thread only.
    """
    folder = _checked_folder(source, place)
    ending = Ending(lambda loss: _end_frozen(loss, place.parent_pid), bounds)
    group = join(place, _facts(source, folder), ending, source.torch_device, source.symmetric_memory)
    _stop_on_signal(group)
    try:
        name, device = source.path_or_hub_id, source.torch_device
        share = load_share(name, folder, source.dtype, device, group, lambda what, share: None, source.positions_max)
        with ProcessWatch():
            follow(share, group)
    except BaseException as error:
        if not isinstance(error, (SpecdecError, OSError)):
            logger.exception("rank %d failed", place.rank)
        group.watch.fail(place.rank, error)
        threading.Event().wait()  # the watch tells the others, then ends this process


def _checked_folder(source: ModelSource, place: RankPlace) -> ModelFolder:
    """Returns the folder after checking that the model is supported and divisible, and that the ranks can exchange as
    they should. Reads no weights."""
    if source.symmetric_memory:
        from specdec.engine.parallel.symmetric import check_symmetric

        check_symmetric(source.torch_device)
    folder = open_model_folder(source.path_or_hub_id)
    if folder.config.get("model_type") == TABLE_MODEL_TYPE:
        raise ModelRefused(f"{source.path_or_hub_id} is a table model, which cannot be split over ranks")
    if source.torch_device.type == "cuda":
        torch.cuda.set_device(source.torch_device)  # the device for NCCL
    check_split(source.path_or_hub_id, folder, place.rank_count, source.positions_max)
    return folder


def _facts(source: ModelSource, folder: ModelFolder) -> Mapping[str, object]:
    """Returns the facts that all ranks must have in common."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "--dtype": source.dtype,
        "--max-model-len": source.positions_max,
        "kind of device": torch.device(source.device).type,
        "--symmetric-memory": source.symmetric_memory,
        "numerics": numerics_of(source.torch_device),
        "config.json (SHA-256)": hashlib.sha256((folder.path / "config.json").read_bytes()).hexdigest(),
    }


def _stop_on_signal(group: RankGroup) -> None:
    def ask(number: int, _frame: object) -> None:
        group.watch.request_stop()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask)


def _end_frozen(loss: Loss, parent_pid: int | None) -> None:
    """Kills a frozen rank 0, which would keep its port without serving: called by the ranks it started."""
    if loss.is_silent and loss.rank == 0 and parent_pid is not None and os.getppid() == parent_pid:
        try:
            last_words("rank 0 is frozen; it is ended with the others (code %d)", RANK_LOST_EXIT_CODE)
        finally:
            os.kill(parent_pid, signal.SIGKILL)  # and with it this process
