"""`load_model`: from a folder or hub id to a model the engine can step.

A folder holds one of two kinds, a `transformers` causal language model or the table model of the protocol tests; both
have the same interface.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from specdec.engine.interface import CausalModel
from specdec.engine.loading.config_check import TABLE_MODEL_TYPE, served_positions
from specdec.engine.loading.devices import find_device
from specdec.engine.loading.model_folder import Progress, no_progress, open_model_folder
from specdec.engine.table_model import load_table_model
from specdec.errors import ConfigError, ModelRefused

DTYPES = ("auto", "float32", "bfloat16", "float16")


def load_model(
    path_or_hub_id: str,
    dtype: str = "auto",
    device: str = "cpu",
    progress: Progress | None = None,
    enforce_eager: bool = False,
    has_stable_rows: bool = True,
    target_tokenizer: str = "",
    positions_max: int | None = None,
    dependent_launch: bool = True,
) -> CausalModel:
    """Loads and describes a model; calls `progress(what, share)` meanwhile.

    Raises ModelRefused for an invalid folder and ConfigError for invalid settings, each in one line. "auto" keeps the
    weights' own type. `device`: see `find_device`; a table model always runs on a CPU. `enforce_eager`: no captured
    graphs on a GPU. `has_stable_rows`, required of a target: without it a model on a GPU takes chunks of trees
    (`TreeRows`); on a CPU every model takes them, and a row's bits never depend on its neighbours. `target_tokenizer`:
    folder or hub id of the target's, for a draft that may have another. `positions_max`: the most positions of a
    sequence, for which its tables are made; absent: all of the model's. `dependent_launch`: see `DeviceBackend`.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    place, folder = find_device(device), open_model_folder(path_or_hub_id)
    if folder.config.get("model_type") == TABLE_MODEL_TYPE:
        positions_max = served_positions(path_or_hub_id, folder.config["positions_max"], positions_max)
        return load_table_model(folder, folder.digest(progress), positions_max)
    if progress:
        progress("importing transformers", 0.0)
    is_imported, is_over = threading.Event(), threading.Event()

    def on_read(what: str, share: float) -> None:
        if is_over.is_set():  # refused for another reason: the rest is not read
            raise ModelRefused(f"{path_or_hub_id} is not loaded")
        if progress and is_imported.is_set():
            progress(what, share)

    with ThreadPoolExecutor(1, "digest") as digesting:  # beside the imports and the loading
        digest = digesting.submit(folder.digest, on_read)
        try:
            # Imported here so that protocol tests do not pay for loading transformers.
            from specdec.engine.transformers_model import load_transformers_model

            if progress:
                progress("loading weights", 0.0)
            is_imported.set()
            return load_transformers_model(
                path_or_hub_id,
                folder,
                digest.result,
                dtype,
                place,
                enforce_eager,
                has_stable_rows,
                target_tokenizer,
                positions_max,
                progress or no_progress,
                dependent_launch,
            )
        finally:
            is_over.set()


def load_offline_target(path_or_hub_id: str, device: str = "cpu") -> CausalModel:
    """Loads a target that writes and reads texts offline, as `load_model` does. On a GPU it takes chunks of trees."""
    return load_model(path_or_hub_id, device=device, has_stable_rows=False)
