"""Whether two tokenizers have the same token ids.

Draft and target may differ in everything else: a draft token id must mean the same string to both.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any


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
