"""Whether two tokenizers have the same token ids.

Draft and target may differ in everything else: a draft token id must mean the same string to both. Of a tokenizer.json
it knows the tokens only; `tokenizers` reads the rest.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from specdec.errors import ModelRefused
from specdec.protocol.limits import TOKENS_MAX

ID_LIMIT = f"an id must be an integer from 0 to {TOKENS_MAX - 1}"


def check_tokens(name: str, tokenizer: dict[str, Any]) -> None:
    """Raises ModelRefused unless a tokenizer.json, called `name`, has tokens, and these are strings with ids. The other
    functions take checked ones."""
    model = tokenizer.get("model")
    if not isinstance(model, dict):
        raise ModelRefused(f"{name}: model is {model!r:.80}; it must be an object with the vocabulary")
    vocabulary = model.get("vocab", {})
    if isinstance(vocabulary, dict):
        for token, token_id in vocabulary.items():
            if not _is_id(token_id):
                raise ModelRefused(f"{name}: model.vocab has the id {token_id!r:.80} of {token!r:.80}; {ID_LIMIT}")
    elif not isinstance(vocabulary, list) or not all(_is_piece(entry) for entry in vocabulary):
        raise ModelRefused(f"{name}: model.vocab must be an object of ids, or a list of strings with their scores")
    added = tokenizer.get("added_tokens", [])
    if not isinstance(added, list):
        raise ModelRefused(f"{name}: added_tokens is {added!r:.80}; it must be a list")
    for entry in added:
        if not isinstance(entry, dict) or not _is_id(entry.get("id")) or not isinstance(entry.get("content"), str):
            raise ModelRefused(f"{name}: added_tokens has {entry!r:.80}; it must have a content, and {ID_LIMIT}")
    if vocabulary_size(tokenizer) < 2:
        raise ModelRefused(f"{name}: model.vocab and added_tokens have fewer than two tokens")


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value < TOKENS_MAX


def _is_piece(entry: object) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)


def tokenizer_fingerprint(tokenizer: dict[str, Any]) -> str:
    """Returns the hexadecimal SHA-256 of token strings, their ids, and added and special tokens of a tokenizer.json.

    The width of the output layer is not part of it: models pad it differently.
    """
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, dict):
        pairs = sorted((token_id, token) for token, token_id in vocabulary.items())
    else:
        pairs = [(token_id, entry[0]) for token_id, entry in enumerate(vocabulary)]
    entries = tokenizer.get("added_tokens", ())
    added = sorted((entry["id"], entry["content"], bool(entry.get("special"))) for entry in entries)
    digest = hashlib.sha256(json.dumps([pairs, added], ensure_ascii=False).encode())
    return digest.hexdigest()


def vocabulary_size(tokenizer: dict[str, Any]) -> int:
    """One more than the highest token id that has a string."""
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    ids = set(vocabulary.values()) if isinstance(vocabulary, dict) else set(range(len(vocabulary)))
    return 1 + max(ids | {entry["id"] for entry in tokenizer.get("added_tokens", ())}, default=-1)
