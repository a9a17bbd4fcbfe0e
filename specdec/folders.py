"""Folders of models and caches. Imports nothing outside the standard library, so a GPU script needs no settings."""

from __future__ import annotations

import os
from pathlib import Path

from specdec.errors import ModelRefused

EMBEDDED_MODELS = Path(__file__).resolve().parent / "models"
CHAT_MODEL = "smollm2-135m-instruct"  # of the extra `chat`; converted into the cache folder at its first use
CHAT_DRAFT = EMBEDDED_MODELS / "smollm2-draft"


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
    """Returns the folder of a path, or of the name CHAT_MODEL; it may not exist. Raises ModelRefused without a home
    folder to look in."""
    path = expanded(path_or_name)
    if path_or_name != CHAT_MODEL or path.is_dir():
        return path
    try:
        return cache_folder() / CHAT_MODEL
    except FileNotFoundError as error:
        raise ModelRefused(f"{path_or_name}: {error}") from None


def tokenizer_file(path_or_hub_id: str) -> Path:
    """Returns the path of the tokenizer.json of a folder or hub repository. Raises ModelRefused."""
    folder = local_folder(path_or_hub_id)
    if folder.is_dir():
        return folder / "tokenizer.json"
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(hf_hub_download(path_or_hub_id, "tokenizer.json"))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelRefused(f"{path_or_hub_id}: no such folder, and the model hub did not give it ({reason})") from None
