"""The coordinator's tokenizer against `transformers`' own, loaded from the same folders.

The coordinator uses the `tokenizers` library alone, because `transformers` would bring torch with it. Equality over
texts that tempt special-token rules is the claim; decoding is compared with decoding everything at once, and in full in
`test_text_stream.py`.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import tokenizers
from transformers import AutoTokenizer

from specdec.coordinator.tokenizer import Tokenizer
from specdec.errors import InvalidRequest, ModelRefused
from specdec.folders import EMBEDDED_MODELS
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


def test_a_prompt_is_neither_cut_nor_padded(folder: Path, tmp_path: Path):
    """Claim: `truncation` and `padding` that a tokenizer file was saved with change no prompt, as with `transformers`.
    Conclusive: the same texts, by a file that cuts them to two tokens and pads them to nine."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours, plain = Tokenizer(str(tmp_path)), Tokenizer(str(folder))
    assert [ours.encode(text, 2048) for text in TEXTS] == [plain.encode(text, 2048) for text in TEXTS]


def test_streamed_text_is_the_text(folder: Path):
    """Claim: pieces concatenate to the text of one decoding of all tokens, special tokens left out."""
    ours, theirs = Tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        token_ids = ours.encode(text, 2048)
        stream = ours.stream()
        streamed = "".join(stream.step(token_id) for token_id in token_ids) + stream.rest()
        assert streamed == theirs.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False), text


def test_tokenising_lets_other_threads_run():
    """Claim: while a prompt of 220,000 characters is tokenised in a thread, the event loop's thread goes on (a
    finding by attack: 1 MiB held the interpreter's lock for 0.9 s).

    Conclusive: counted in turns of this thread, each of which needs the lock; held until the end, it leaves it hardly
    one between the two marks.
    """
    ours, text = Tokenizer(str(EMBEDDED_MODELS / "target")), "def f(x):\n    return x\n" * 10_000
    begun, done, marks = threading.Event(), threading.Event(), []

    def encode() -> None:
        begun.set()
        marks.append(len(ours.encode(text, len(text))))
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    begun.wait()
    turns = 0
    while not done.wait(0.001):
        turns += 1
    thread.join()
    assert marks == [len(ours._tokenizer.encode(text).ids)]
    assert turns >= 5


def test_a_prompt_of_too_many_bytes_is_refused():
    """Claim: the bound on bytes is checked before the tokenizer runs."""
    with pytest.raises(InvalidRequest, match="prompt.text"):
        Tokenizer(str(EMBEDDED_MODELS / "target")).encode("x" * 1000, 10)


def test_a_folder_without_tokenizer_is_refused_by_name(tmp_path: Path):
    """Claim: the message names the file that is missing."""
    with pytest.raises(ModelRefused, match="tokenizer.json"):
        Tokenizer(str(tmp_path))
