"""A model folder beside a GGUF file: what every other part of the project reads, made once from the file's metadata.

It has config.json, generation_config.json, the tokenizer's files and a link to the file itself, whose weights stay
there. `python -m specdec.engine.loading.gguf_folder SOURCE FOLDER` makes one, for a process without the libraries.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from specdec.engine.loading.folder_files import GENERATION_FILE, GGUF_FILE
from specdec.engine.loading.gguf import GgufFile, read_gguf
from specdec.engine.loading.gguf_model import config_of, end_ids_of
from specdec.errors import ModelRefused, SpecdecError, one_line, refusing
from specdec.folders import CHAT_PACKAGE, chat_file, refuse

CHAT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TOKENIZER = "tokenizer.ggml."
TOKENIZER_MODEL = "gpt2"  # byte-level BPE
SPLITS_OF_GPT2 = ("gpt-2", "gpt2", "smollm")  # the last one after each digit
CONTROL, USER_DEFINED = 3, 4  # types of tokens that are found whole in a text
TOKEN_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def describe_gguf(source: Path, folder: Path) -> None:
    """Makes the folder of a file in a new folder of its own, whole or not at all. Raises ModelRefused, also if the chat
    model's file is not the published one."""
    if source == chat_file():
        check_digest(source, CHAT_SHA256)
    gguf = read_gguf(source)
    config = config_of(gguf)
    place = folder.parent
    place.parent.mkdir(parents=True, exist_ok=True)
    whole = Path(tempfile.mkdtemp(dir=place.parent, prefix=".gguf-"))
    made = whole / folder.name
    made.mkdir()
    try:
        (made / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        generation = json.dumps({"eos_token_id": end_ids_of(gguf)}, indent=1) + "\n"
        (made / GENERATION_FILE).write_text(generation, encoding="utf-8")
        with refusing(str(source)):
            save_tokenizer(gguf, made)
        (made / GGUF_FILE).symlink_to(source.resolve())
        whole.chmod(0o755)
        try:
            os.rename(whole, place)
        except OSError:
            if not folder.is_dir():  # another process was faster: its folder is the same
                raise
    finally:
        shutil.rmtree(whole, ignore_errors=True)


def check_digest(source: Path, expected: str) -> None:
    """Raises ModelRefused unless a file has this SHA-256."""
    with source.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise ModelRefused(f"{source} is not the file of {CHAT_PACKAGE}: install it again")


def save_tokenizer(gguf: GgufFile, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and the chat template. Raises ModelRefused."""
    kind = gguf.metadata.get(TOKENIZER + "model")
    if kind != TOKENIZER_MODEL:
        raise refuse(gguf.path, TOKENIZER + "model", kind, f"{TOKENIZER_MODEL}, of byte-level BPE")
    tokens, merges = _strings(gguf, "tokens"), _strings(gguf, "merges")
    types = gguf.metadata.get(TOKENIZER + "token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        raise refuse(gguf.path, TOKENIZER + "token_type", types, f"a list of {len(tokens)}, one for each token")
    if len(set(tokens)) != len(tokens):
        raise refuse(gguf.path, TOKENIZER + "tokens", len(tokens), "different strings")
    wrong = next((merge for merge in merges if merge.count(" ") != 1), None)
    if wrong is not None:
        raise refuse(gguf.path, TOKENIZER + "merges", wrong, "two parts with a space between them")
    from transformers import PreTrainedTokenizerFast

    backend = _byte_level_bpe(gguf, tokens, [tuple(merge.split(" ")) for merge in merges], types)
    entries = {name: _special(gguf, key, tokens) for name, key in TOKEN_NAMES.items()}
    usual = {"bos": is_of_llama3(gguf), "eos": False}  # where a file does not say it, as llama.cpp has it
    adds = {f"add_{each}_token": gguf.metadata.get(f"{TOKENIZER}add_{each}_token", usual[each]) for each in usual}
    wrong = next((each for each in adds if not isinstance(adds[each], bool)), None)
    if wrong is not None:
        raise refuse(gguf.path, TOKENIZER + wrong, adds[wrong], "true or false")
    template = gguf.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise refuse(gguf.path, "tokenizer.chat_template", template, "a string")
    named = {name: entry for name, entry in entries.items() if entry is not None}
    PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **named, **adds).save_pretrained(folder)


def _byte_level_bpe(gguf: GgufFile, tokens: list[str], merges: list[Any], types: list[Any]) -> Tokenizer:
    """Returns the tokenizer of a vocabulary, which splits texts as the file names it."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    name = gguf.metadata.get(TOKENIZER + "pre")
    regex: str | None = GGUF_PRE_TOKENIZER_SPLITS.get(str(name))
    if regex is None and name not in SPLITS_OF_GPT2:
        known = ", ".join(sorted({*GGUF_PRE_TOKENIZER_SPLITS, *SPLITS_OF_GPT2}))
        raise refuse(gguf.path, TOKENIZER + "pre", name, f"one of {known}")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=is_of_llama3(gguf)))
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex is None)
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if name == "smollm" else []
    steps += [pre_tokenizers.Split(Regex(regex), behavior="isolated")] if regex else []
    made.pre_tokenizer = pre_tokenizers.Sequence([*steps, bytes_only]) if steps else bytes_only
    made.decoder = decoders.ByteLevel()
    if name == "qwen2":
        made.normalizer = normalizers.NFC()
    for kind, add in ((CONTROL, made.add_special_tokens), (USER_DEFINED, made.add_tokens)):
        chosen = [token for token, own in zip(tokens, types) if own == kind and token]
        add([AddedToken(token, normalized=False, special=kind == CONTROL) for token in chosen])
    return made


def is_of_llama3(gguf: GgufFile) -> bool:
    """Whether texts are split as Llama 3 does it: a piece that is a token is not cut, and a text has a first token."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    own: str | None = GGUF_PRE_TOKENIZER_SPLITS.get(str(gguf.metadata.get(TOKENIZER + "pre")))
    return own == GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"]


def _strings(gguf: GgufFile, name: str) -> list[str]:
    found = gguf.metadata.get(TOKENIZER + name)
    if not isinstance(found, list) or not found or not isinstance(found[0], str):
        raise refuse(gguf.path, TOKENIZER + name, found, "a list of strings")
    return [str(each) for each in found]


def _special(gguf: GgufFile, name: str, tokens: list[str]) -> str | None:
    """Returns the string of a special token, if the file has it."""
    key = f"{TOKENIZER}{name}_token_id"
    found = gguf.metadata.get(key)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < len(tokens):
        raise refuse(gguf.path, key, found, f"a token id below {len(tokens)}")
    return tokens[found]


if __name__ == "__main__":
    try:
        describe_gguf(*map(Path, sys.argv[1:]))
    except (SpecdecError, OSError) as error:
        sys.exit(one_line(error))
