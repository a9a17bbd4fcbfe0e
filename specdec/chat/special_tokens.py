"""The special tokens that a template may name, as the tokenizer of `transformers` has them: by the files of a folder,
and by the class of its tokenizer where they name none. Reads no tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.folders import has_file, read_json

NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
EXTRA = "extra_special_tokens"  # those with names of their own, in a folder's files
END_OF_TEXT = "<|endoftext|>"
CLASS_TOKENS = {  # of tokenizer classes that have tokens of their own, where a folder's files have no entry for them
    "CohereTokenizer": {
        "bos_token": "<BOS_TOKEN>",
        "eos_token": "<|END_OF_TURN_TOKEN|>",
        "unk_token": "<UNK>",
        "sep_token": "<SEP>",
        "pad_token": "<PAD>",
        "cls_token": "<CLS>",
        "mask_token": "<MASK_TOKEN>",
    },
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT),
    "GPTNeoXTokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    | {"pad_token": "<|padding|>"},
    "GemmaTokenizer": {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "unk", "pad", "mask")},
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "unk_token", "pad_token"), END_OF_TEXT),
}
MODEL_CLASSES = {  # the class of a model's tokenizer, where tokenizer_config.json names none
    "cohere": "CohereTokenizer",
    "gemma": "GemmaTokenizer",
    "gemma2": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
    "gpt2": "GPT2Tokenizer",
    "gpt_neox": "GPTNeoXTokenizer",
    "phi": "GPT2Tokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "starcoder2": "GPT2Tokenizer",
}
GENERIC_MODELS = ("granite", "mistral", "olmo2", "phi3")  # whatever class tokenizer_config.json names


def special_tokens_of(folder: Path) -> dict[str, str]:
    """Returns the texts of a folder's special tokens by name, without those it does not have. Raises ModelRefused."""
    config = read_present(folder / "tokenizer_config.json")
    declared = CLASS_TOKENS.get(tokenizer_class(folder, config), {}) | config
    if "added_tokens_decoder" not in config:  # a folder of the older form
        declared |= read_present(folder / "special_tokens_map.json")
    own = {name: value for name, value in declared.items() if name in NAMES or name.endswith("_token")}
    if isinstance(declared.get(EXTRA), Mapping):
        own |= declared[EXTRA]
    texts = {name: token_text(value) for name, value in own.items()}
    return {name: text for name, text in texts.items() if text is not None}


def tokenizer_class(folder: Path, config: Mapping[str, Any]) -> str:
    """Returns the name of a folder's tokenizer class, as far as CLASS_TOKENS needs it; empty if no file says it."""
    model = read_present(folder / "config.json")
    model_type, named = str(model.get("model_type")), config.get("tokenizer_class") or model.get("tokenizer_class")
    if model_type in GENERIC_MODELS:
        return ""
    if not named or model_type == "qwen2":  # many folders of which name a wrong class
        return MODEL_CLASSES.get(model_type, "")
    return str(named).removesuffix("Fast")


def token_text(token: Any) -> str | None:
    """The text of a special token, given as such or with its properties; None if it is neither."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def read_present(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; {} without the file. Raises ModelRefused for any other content."""
    return read_json(file) if has_file(file) else {}
