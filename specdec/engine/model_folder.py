"""A model folder before anything is loaded from it: where it is, whether it may be used, what it says of itself.

Everything that can be refused is refused here, by name and in one line, from the JSON files alone. Nothing in a model
folder is ever run: no remote code, no pickle.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.errors import ModelRefused
from specdec.protocol.fingerprint import vocabulary_size

Progress = Callable[[str, float], None]  # (what is being done, share done 0 to 1)

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
HUB_FILES = [
    "config.json",
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
JSON_BYTES_MAX = 256 << 20  # tokenizers of large vocabularies take tens of megabytes; more is no configuration
READ_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder that holds config.json, tokenizer.json and safetensors weights."""

    path: Path
    config: dict[str, Any]
    weight_files: tuple[Path, ...]

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """End ids from generation_config.json, one or a list; else those of config.json; else none."""
        generation = self.path / "generation_config.json"
        value = read_json(generation).get("eos_token_id") if generation.is_file() else None
        if value is None:
            value = self.config.get("eos_token_id")
        if value is None:
            return ()
        return tuple(value) if isinstance(value, list) else (value,)

    @property
    def token_string_count(self) -> int:
        """Ids up to the last one that has a string in tokenizer.json; output layers are often wider."""
        return vocabulary_size(read_json(self.path / "tokenizer.json"))

    def digest(self, progress: Progress | None = None) -> str:
        """SHA-256 over config.json and the weights, names and lengths included: two models agree or they do not.

        Raises ModelRefused for a file that differs from the folder's SHA256SUMS, where there is one.
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
                own.update(chunk)
                read += len(chunk)
                if progress:
                    progress("checking weights", read / byte_count)
            if stated.get(file.name, own.hexdigest()) != own.hexdigest():
                raise ModelRefused(f"{file} is not the file {MANIFEST_FILE} describes: fetch it again")
        return total.hexdigest()

    def _stated_digests(self) -> dict[str, str]:
        """File name -> SHA-256 of the folder's SHA256SUMS, as sha256sum writes it; empty without one."""
        manifest = self.path / MANIFEST_FILE
        if not manifest.is_file():
            return {}
        lines = [line.split(maxsplit=1) for line in manifest.read_text(encoding="utf-8").splitlines() if line.strip()]
        if any(len(line) != 2 for line in lines):
            raise ModelRefused(f"{manifest} is not what sha256sum writes")
        return {name.lstrip("*"): digest for digest, name in lines}


def open_model_folder(path_or_hub_id: str) -> ModelFolder:
    """The folder named, or a hub repository's snapshot. Raises ModelRefused in one line."""
    path = Path(path_or_hub_id).expanduser()
    if not path.is_dir():
        path = _download(path_or_hub_id)
    if not (path / "config.json").is_file():
        raise ModelRefused(f"{path_or_hub_id} has no config.json: it is no model folder")
    if not (path / "tokenizer.json").is_file():
        raise ModelRefused(f"{path_or_hub_id} has no tokenizer.json: save its tokenizer as a fast tokenizer first")
    return ModelFolder(path, read_json(path / "config.json"), _weight_files(path, path_or_hub_id))


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelRefused for anything else."""
    if file.stat().st_size > JSON_BYTES_MAX:
        raise ModelRefused(f"{file} has {file.stat().st_size} bytes; at most {JSON_BYTES_MAX} are read")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelRefused(f"{file} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelRefused(f"{file} does not hold a JSON object")
    return value


def _weight_files(path: Path, name: str) -> tuple[Path, ...]:
    """The safetensors files to load, sorted by name. Raises ModelRefused where there are none or one is missing."""
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
    """A hub repository's files, from the local hub cache where they are there. Raises ModelRefused."""
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
