"""A model folder before loading: its location, its checks, its configuration and digest.

A folder is refused here, by file, field and value in one line, from its file names, its JSON files and the headers of
its weights: no later place meets a value that was not checked. Nothing in a model folder is ever run: no remote code,
no pickle.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors import safe_open

from specdec.engine.loading.architectures import check_supported
from specdec.engine.loading.config_check import TABLE_MODEL_TYPE, checked_config, checked_table_config, end_ids
from specdec.engine.loading.encoder_decoder import beginning_tokens
from specdec.engine.loading.folder_files import (
    ADAPTER_FILE,
    GENERATION_FILE,
    GGUF_FILE,
    HUB_FILES,
    INDEX_FILE,
    MANIFEST_FILE,
    PICKLE_SUFFIXES,
    WEIGHTS_FILE,
)
from specdec.engine.loading.gguf_folder import describe_gguf
from specdec.engine.loading.gguf_model import GgufWeights
from specdec.engine.loading.schemes import read_scheme
from specdec.engine.loading.stored import ENTRY, PackedFolder, PackedScheme, StoredTensor
from specdec.errors import ModelRefused, one_line, refusing
from specdec.folders import (
    TOKENIZER_BYTES_MAX,
    expanded,
    gguf_source,
    has_file,
    local_folder,
    read_json,
    read_text,
    refuse,
)
from specdec.protocol.fingerprint import check_tokens, tokenizer_fingerprint, vocabulary_size

logger = logging.getLogger("specdec.engine")

Progress = Callable[[str, float], None]  # (activity, share done 0 to 1)


def no_progress(_activity: str, _share: float) -> None:
    """Shows nothing."""


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
READ_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """Of a tokenizer.json: see `tokenizer_fingerprint`; the number of ids up to the last one with a string."""

    fingerprint: str
    size: int


@dataclass(frozen=True, slots=True)
class EndTokens:
    """End token ids that the tokenizer has, and others that the folder names."""

    ids: tuple[int, ...]
    unknown: tuple[int, ...] = ()

    def below(self, size: int) -> EndTokens:
        """Returns those below a size of vocabulary; the others are unknown."""
        ids = tuple(one for one in self.ids if one < size)
        return EndTokens(ids, self.unknown + tuple(one for one in self.ids if one >= size))


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder that holds config.json, tokenizer.json and safetensors weights, all checked; `config`: as
    `checked_config` returns it. `tensors`: by the names in the files, or, if `packed`, of the parameters. `beginning`:
    see `beginning_tokens`."""

    path: Path
    config: dict[str, Any]
    weight_files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]
    tokenizer: TokenizerFacts
    ends: EndTokens
    beginning: tuple[int, ...] = ()
    packed: PackedFolder | None = None

    @property
    def has_encoder(self) -> bool:
        """Whether it is an encoder-decoder model: outputs of others have no `beginning`."""
        return bool(self.beginning)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """End token ids of generation_config.json, one or a list; else those of config.json; else none. Ids that the
        tokenizer does not have are left out."""
        return self.ends.ids

    @property
    def token_string_count(self) -> int:
        """Number of ids up to the last one with a string in tokenizer.json; output layers are often wider."""
        return self.tokenizer.size

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

    def check_manifest(self, digest: Callable[[], object]) -> None:
        """Calls a function that returns the digest, if the folder states its own: of what is wrong with a folder, a
        file that is not the published one is the better reason. Raises ModelRefused."""
        if has_file(self.path / MANIFEST_FILE):
            digest()

    def _stated_digests(self) -> dict[str, str]:
        """Returns file name -> SHA-256 from the folder's SHA256SUMS, in sha256sum's format; empty without one."""
        manifest = self.path / MANIFEST_FILE
        if not has_file(manifest):
            return {}
        lines = [line.split(maxsplit=1) for line in read_text(manifest).splitlines() if line.strip()]
        if any(len(line) != 2 for line in lines):
            raise ModelRefused(f"{manifest} is not in the format of sha256sum")
        return {name.lstrip("*"): digest for digest, name in lines}


def open_model_folder(path_or_hub_id: str) -> ModelFolder:
    """Returns the named folder, that of a GGUF file, made at its first use, or a hub repository's snapshot. Raises
    ModelRefused in one line."""
    with refusing(f"{path_or_hub_id:.200}"):
        path = local_folder(path_or_hub_id)
        source = None if path.is_dir() else gguf_source(path_or_hub_id)
        if source is not None:
            describe_gguf(source, path)
        elif not path.is_dir():
            path = _download(path_or_hub_id)
        if has_file(path / ADAPTER_FILE):
            raise ModelRefused(
                f"{path_or_hub_id} holds an adapter ({ADAPTER_FILE}): merge it into its base model first"
            )
        if not has_file(path / "config.json"):
            raise ModelRefused(f"{path_or_hub_id} has no config.json: it is no model folder")
        if not has_file(path / "tokenizer.json"):
            raise ModelRefused(f"{path_or_hub_id} has no tokenizer.json: save its tokenizer as a fast tokenizer first")
        file = path / "config.json"
        config, has_encoder, scheme = read_json(file), False, None
        if config.get("model_type") == TABLE_MODEL_TYPE:
            config = checked_table_config(file, config)
        else:
            scheme = read_scheme(file, config)
            config = checked_config(file, {name: value for name, value in config.items() if name != ENTRY})
            has_encoder = check_supported(path_or_hub_id, config).has_encoder
        tokenizer = tokenizer_facts(path / "tokenizer.json")
        weight_files = weight_files_of(path, path_or_hub_id)
        ends = end_tokens_of(path, config, tokenizer.size)
        ids_end = min(tokenizer.size, config.get("vocab_size", tokenizer.size))
        beginning = beginning_tokens(path, config, ids_end) if has_encoder else ()
        folder = ModelFolder(path, config, weight_files, {}, tokenizer, ends, beginning)
        try:
            return with_tensors(folder, scheme)
        except ModelRefused:
            folder.check_manifest(folder.digest)
            raise


def with_tensors(folder: ModelFolder, scheme: PackedScheme | None) -> ModelFolder:
    """Returns the folder with what its files of weights hold; `scheme`: of those that are packed. Raises
    ModelRefused."""
    packed: PackedFolder | None = None
    if folder.weight_files[0].name == GGUF_FILE:
        packed = GgufWeights(folder.weight_files[0], folder.config)
    else:
        stored = stored_tensors(folder.weight_files)
        if scheme is None:
            return replace(folder, tensors=stored)
        packed = scheme.weights(stored)
    return replace(folder, tensors=packed.tensors, packed=packed)


def shown_name(path_or_hub_id: str) -> str:
    """Returns what a model is called on the terminal: the last part of the path of a folder here; any other name, such
    as a hub id, as it is, since its folder has the name of a commit."""
    path = expanded(path_or_hub_id)
    return Path(os.path.abspath(path)).name if path.exists() else path_or_hub_id


def end_tokens_of(folder: Path, config: dict[str, Any], size: int) -> EndTokens:
    """Returns the end tokens of a folder's generation_config.json below `size`, the number of its tokenizer's ids; if
    that file names none, those of its checked configuration. Raises ModelRefused."""
    generation, found = folder / GENERATION_FILE, EndTokens(())
    values = [(generation, read_json(generation).get("eos_token_id"))] if has_file(generation) else []
    for file, value in [*values, (folder / "config.json", config.get("eos_token_id"))]:
        if value is not None:
            own = EndTokens(end_ids(file, value)).below(size)
            found = EndTokens(own.ids, found.unknown + own.unknown)
            if own.ids or not own.unknown:
                break
    return found


def warn_of_unknown_ends(folder: Path, ends: EndTokens, size: int) -> None:
    """Logs a warning if a folder names end tokens that its model, of `size` token ids, does not have."""
    if ends.unknown:
        rest = f"{list(ends.ids)} end a text" if ends.ids else "texts end only at their max_tokens"
        named = list(ends.unknown)
        logger.warning("%s: eos_token_id has %s; the model has ids below %d, so %s", folder, named, size, rest)


def tokenizer_facts(file: Path) -> TokenizerFacts:
    """Returns the facts of a tokenizer.json; those of one that is asked for again are remembered. Raises
    ModelRefused."""
    if not has_file(file):
        raise ModelRefused(f"{file} is missing")
    state = file.stat()
    return _tokenizer_facts(file, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=8)
def _tokenizer_facts(file: Path, _changed_ns: int, _size: int) -> TokenizerFacts:
    content = read_json(file, TOKENIZER_BYTES_MAX)
    check_tokens(str(file), content)
    with refusing(str(file)):
        return TokenizerFacts(tokenizer_fingerprint(content), vocabulary_size(content))


def stored_tensors(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """Returns what the headers of weight files say of their tensors, by name. Raises ModelRefused."""
    found = {}
    for file in files:
        try:
            with safe_open(file, "np") as stored:
                for name in stored.keys():
                    part = stored.get_slice(name)
                    found[name] = StoredTensor(file, part.get_dtype(), tuple(part.get_shape()))
        except Exception as error:  # the library has several kinds of errors
            raise ModelRefused(f"{file} is not a whole safetensors file: {one_line(error)}") from None
    return found


def weight_files_of(path: Path, name: str) -> tuple[Path, ...]:
    """Returns the safetensors files to load, sorted by name. Raises ModelRefused if one is missing or none exists."""
    for file in (path / WEIGHTS_FILE, path / GGUF_FILE):
        if has_file(file):
            return (file,)
    index = path / INDEX_FILE
    if has_file(index):
        content = read_json(index)
        places, metadata = content.get("weight_map"), content.get("metadata")
        if not isinstance(places, dict) or not all(isinstance(one, str) for one in places.values()):
            raise refuse(index, "weight_map", places, "an object of file names")
        names = sorted(set(places.values()))
        for file_name in names:
            if Path(file_name).name != file_name or not has_file(path / file_name):
                raise ModelRefused(f"{index}: weight_map names {file_name!r}, which is not a file of the folder")
        if not isinstance(metadata, dict):  # `transformers` wants it, whatever it holds
            raise refuse(index, "metadata", metadata, "an object")
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
