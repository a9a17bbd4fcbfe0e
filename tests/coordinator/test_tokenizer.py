"""The coordinator's tokenizer against `transformers`' own, loaded from the same folders.

The coordinator uses the `tokenizers` library alone, because `transformers` would bring torch with it. Equality over
texts that tempt special-token rules is the claim; decoding is compared with decoding everything at once.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models
from transformers import AutoTokenizer

from coordinator.tokenizer import TextStream, Tokenizer
from specdec.config import EMBEDDED_MODELS
from specdec.errors import InvalidRequest, ModelRefused
from tests.support.engine_models import make_tiny_model

TEXTS = ["def f(x):\n    return x\n", " leading", "<|end|>", "a<|end|>b", "日本語 🙂", "\t\n\n  ", "x" * 500, "é\u0301"]


@pytest.fixture(scope="module", params=["shipped", "llama", "qwen2", "gpt2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "shipped":
        return EMBEDDED_MODELS / "target"
    path = tmp_path_factory.mktemp("tokenizer") / request.param
    make_tiny_model(path, request.param, seed=0)
    return path


def test_prompts_become_the_token_ids_transformers_would_give(folder: Path):
    """Claim: special tokens are added, or not, and recognised in text, or not, exactly as by default elsewhere."""
    ours, theirs = Tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert list(ours.encode(text, 2048)) == theirs(text)["input_ids"], text


def test_streamed_text_is_the_text(folder: Path):
    """Claim: pieces concatenate to what decoding everything at once gives, special tokens left out."""
    ours, theirs = Tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        token_ids = ours.encode(text, 2048)
        stream = ours.stream()
        streamed = "".join(stream.step(token_id) for token_id in token_ids) + stream.rest()
        assert streamed == theirs.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False), text


def byte_fallback_tokenizer() -> tokenizers.Tokenizer:
    """In the manner of sentencepiece: words with a leading space mark, single bytes for what has no word."""
    words = {"<unk>": 0, "\u2581hello": 1, "\u2581world": 2, "b": 3}
    words |= {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    tokenizer = tokenizers.Tokenizer(models.BPE(words, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def test_byte_tokens_that_form_no_character_become_replacement_characters():
    """Claim: whatever tokens a model draws, decoding goes on; what was sent is not taken back."""
    for token_ids in ([4 + 0xC3, 4 + 0xA9, 4 + 0xFF, 3], [4 + 0xFF] * 3 + [1, 2], [1, 4 + 0xE6, 2, 4 + 0x97, 3]):
        stream = TextStream(byte_fallback_tokenizer(), (1,))
        text = "".join(stream.step(token_id) for token_id in token_ids) + stream.rest()
        assert "\ufffd" in text
        assert (" world" in text) == (2 in token_ids)


def test_the_space_before_the_first_word_is_part_of_the_text():
    """Claim: output text continues the prompt: prompt and output decoded together have the same space."""
    stream = TextStream(byte_fallback_tokenizer(), (1,))
    assert stream.step(2) == " world"


def test_a_prompt_of_too_many_bytes_is_refused():
    """Claim: the bound on bytes holds before the tokenizer is asked."""
    with pytest.raises(InvalidRequest, match="prompt.text"):
        Tokenizer(str(EMBEDDED_MODELS / "target")).encode("x" * 1000, 10)


def test_a_folder_without_tokenizer_is_refused_by_name(tmp_path: Path):
    """Claim: the message names the file that is missing."""
    with pytest.raises(ModelRefused, match="tokenizer.json"):
        Tokenizer(str(tmp_path))
