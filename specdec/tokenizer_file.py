"""A tokenizer.json as a tokenizer of whole texts."""

from __future__ import annotations

from pathlib import Path

import tokenizers

from specdec.errors import ModelRefused


def whole_tokenizer(file: Path) -> tokenizers.Tokenizer:
    """Returns a tokenizer that cuts and pads no text. Raises ModelRefused for a file that is none."""
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for a file it cannot read
        raise ModelRefused(f"{file} is not a tokenizer file: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
