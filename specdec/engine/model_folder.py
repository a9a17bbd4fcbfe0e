"""A model folder before loading: its location, its checks, its configuration and digest.

A folder is refused here, by name and in one line, from its file names and JSON files alone. Nothing in a model folder
is ever run: no remote code, no pickle.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.engine.chat_model import chat_model
from specdec.errors import ModelRefused
from specdec.folders import CHAT_MODEL, expanded, local_folder
from specdec.protocol.fingerprint import vocabulary_size

Progress = Callable[[str, float], None]  # (activity, share done 0 to 1)

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
HUB_FILES = [
    "config.json",
    "chat_template.jinja",
    "draft_vocabulary.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
]
INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"
MANIFEST_FILE = "SHA256SUMS"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
JSON_BYTES_MAX = 256 << 20  # tokenizers of large vocabularies take tens of megabytes
READ_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder that holds config.json, tokenizer.json and safetensors weights."""

    path: Path
    config: dict[str, Any]
    weight_files: tuple[Path, ...]

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """End token ids of generation_config.json, one or a list; else those of config.json; else none."""
        return end_token_ids_of(self.path, self.config)

    @property
    def token_string_count(self) -> int:
        """Number of ids up to the last one with a string in tokenizer.json; output layers are often wider."""
        return vocabulary_size(read_json(self.path / "tokenizer.json"))

    def digest(self, progress: Progress | None = None) -> str:
        """Returns the SHA-256 over config.json and the weights, names and lengths included.

        Raises ModelRefused for a file that differs from the folder's SHA256SUMS, if there is one.
        """
        files = (self.path / "config.json", *self.weight_files)
        byte_count = sum(file.stat().st_size for file in files)
        stated = self._stated_digests()
        total = hashlib.sha256()
        read = 0
        for file in files:
            own = hashlib.sha256()
            total.update(f"{file.name} {file.stat().st_size}\n".encode())
            for chunk in _chunks(file):
                total.update(chunk)
                if file.name in stated:
                    own.update(chunk)
                read += len(chunk)
                if progress:
                    progress("loading weights", read / byte_count)
            if file.name in stated and stated[file.name] != own.hexdigest():
                raise ModelRefused(f"{file} is not the file {MANIFEST_FILE} describes: fetch it again")
        return total.hexdigest()

    def _stated_digests(self) -> dict[str, str]:
        """Returns file name -> SHA-256 from the folder's SHA256SUMS, in sha256sum's format; empty without one."""
        manifest = self.path / MANIFEST_FILE
        if not manifest.is_file():
            return {}
        lines = [line.split(maxsplit=1) for line in manifest.read_text(encoding="utf-8").splitlines() if line.strip()]
        if any(len(line) != 2 for line in lines):
            raise ModelRefused(f"{manifest} is not in the format of sha256sum")
        return {name.lstrip("*"): digest for digest, name in lines}


def open_model_folder(path_or_hub_id: str) -> ModelFolder:
    """Returns the named folder, a hub repository's snapshot, or CHAT_MODEL, converted at its first use. Raises
    ModelRefused or ConfigError in one line."""
    path = local_folder(path_or_hub_id)
    if not path.is_dir():
        path = chat_model() if path_or_hub_id == CHAT_MODEL else _download(path_or_hub_id)
    if not (path / "config.json").is_file():
        raise ModelRefused(f"{path_or_hub_id} has no config.json: it is no model folder")
    if not (path / "tokenizer.json").is_file():
        raise ModelRefused(f"{path_or_hub_id} has no tokenizer.json: save its tokenizer as a fast tokenizer first")
    return ModelFolder(path, read_json(path / "config.json"), _weight_files(path, path_or_hub_id))


def open_with_bar(path_or_hub_id: str) -> ModelFolder:
    """As `open_model_folder`, for a command: while CHAT_MODEL is converted, a bar on standard error, if it is a
    terminal."""
    from rich import progress
    from rich.console import Console

    if path_or_hub_id == CHAT_MODEL:
        console = Console(stderr=True)
        with progress.Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("", total=1.0, visible=False)
            chat_model(lambda what, share: bar.update(task, description=what, completed=share, visible=True))
    return open_model_folder(path_or_hub_id)


def shown_name(path_or_hub_id: str) -> str:
    """Returns what a model is called on the terminal: the last part of the path of a folder here; any other name, such
    as a hub id, as it is, since its folder has the name of a commit."""
    path = expanded(path_or_hub_id)
    return Path(os.path.abspath(path)).name if path.is_dir() else path_or_hub_id


def end_token_ids_of(folder: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Returns the end token ids of a folder's generation_config.json, one or a list; else those of a configuration."""
    generation = folder / "generation_config.json"
    value = read_json(generation).get("eos_token_id") if generation.is_file() else None
    if value is None:
        value = config.get("eos_token_id")
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def read_json(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises ModelRefused for any other content."""
    if file.stat().st_size > JSON_BYTES_MAX:
        raise ModelRefused(f"{file} has {file.stat().st_size} bytes; at most {JSON_BYTES_MAX} are read")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelRefused(f"{file} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelRefused(f"{file} does not hold a JSON object")
    return value


def write_manifest(folder: Path) -> None:
    """Writes the SHA256SUMS of a folder's model files."""
    files = [file for pattern in HUB_FILES for file in folder.glob(pattern)]
    names = sorted({file.name for file in files if file.suffix != ".safetensors" or file.name.startswith("model")})
    lines = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (folder / MANIFEST_FILE).write_text("".join(lines), encoding="utf-8")


def _weight_files(path: Path, name: str) -> tuple[Path, ...]:
    """Returns the safetensors files to load, sorted by name. Raises ModelRefused if one is missing or none exists."""
    if (path / WEIGHTS_FILE).is_file():
        return (path / WEIGHTS_FILE,)
    if (path / INDEX_FILE).is_file():
        names = sorted(set(read_json(path / INDEX_FILE).get("weight_map", {}).values()))
        for file_name in names:
            if Path(file_name).name != file_name or not (path / file_name).is_file():
                raise ModelRefused(f"{name}: {INDEX_FILE} names {file_name!r}, which is not a file of the folder")
        if names:
            return tuple(path / file_name for file_name in names)
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise ModelRefused(f"{name} has {pickles[0]} but no {WEIGHTS_FILE}: only safetensors weights are loaded")
    raise ModelRefused(f"{name} has no {WEIGHTS_FILE}")


def _download(name: str) -> Path:
    """Returns the folder of a hub repository's files, from the local hub cache if present. Raises ModelRefused."""
    if not HUB_ID.fullmatch(name):
        raise ModelRefused(f"{name}: no such folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelRefused(f"{name}: no such folder here, and the model hub did not give it ({reason[0]})") from None


def _chunks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while chunk := stream.read(READ_BYTES):
            yield chunk
