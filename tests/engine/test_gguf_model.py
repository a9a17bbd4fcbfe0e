"""Models served from GGUF files: their weights, texts and tokenizers are those of `transformers` on the same file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from specdec.engine.cpu.kernels import kernels
from specdec.engine.loading.model import load_model
from specdec.engine.loading.model_folder import open_model_folder
from specdec.errors import ModelRefused
from specdec.folders import gguf_source, local_folder
from tests.support.engine_models import Driver, random_tokens
from tests.support.gguf_files import plain_stored, write_gguf
from tests.support.gguf_models import make_tiny_gguf

KINDS = ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def needs_package(kind: str) -> None:
    if kind.startswith("Q") and not kind.endswith("K"):
        pytest.importorskip("gguf", reason="the package gguf writes this format for the test")


@pytest.mark.parametrize(
    ("architecture", "kind"), [*(("llama", kind) for kind in KINDS), ("qwen2", "Q8_0"), ("qwen3", "Q4_1")]
)
def test_logits_and_texts_are_those_of_transformers(architecture: str, kind: str, tmp_path: Path) -> None:
    """Claim: a model in each format has the logits and the greedy text that `transformers` has of the same file.

    Source: `transformers` reads the file with its own reader. Conclusive: weights of queries and keys lie permuted in
    a llama's file, so that a wrong order gives other logits by far more than the bound, which is float32's error.
    """
    needs_package(kind)
    pytest.importorskip("gguf", reason="transformers reads GGUF files with the package gguf")
    sizes = {"head_dim": 128} if architecture == "qwen3" else {}  # the only one that `transformers` reads for it
    file = make_tiny_gguf(tmp_path, architecture, kind, **sizes)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    driver = Driver.load(file, "float32")
    tokens = random_tokens(60, 1)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0, :, :288]
    found = driver.feed(driver.open(80), tokens)
    assert expected.std() > 0.05
    dense_bytes = 4 * sum(
        module.weight.numel() for module in reference.modules() if isinstance(module, torch.nn.Linear)
    )
    is_packed = driver.model.product_bytes < dense_bytes / 2
    assert is_packed == (kernels() is not None and kind not in ("F16", "BF16"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    with torch.inference_mode():
        text = reference.generate(torch.tensor([tokens]), max_new_tokens=12, do_sample=False, eos_token_id=-1)
    assert greedy(driver, tokens, 12) == text[0, len(tokens) :].tolist()


def greedy(driver: Driver, tokens: list[int], count: int) -> list[int]:
    table = driver.open(len(tokens) + count)
    written = [int(driver.feed(table, tokens)[-1].argmax())]
    while len(written) < count:
        written.append(int(driver.feed(table, written[-1:])[-1].argmax()))
    return written


def test_the_folder_of_a_file_has_what_the_file_says(tmp_path: Path) -> None:
    """Claim: sizes, rope, end tokens, tokenizer, chat template and the name of the format come from the metadata; the
    folder is made once, and anew for a file with another content.

    Source: the metadata written here. Conclusive: each entry has another value than the class has by itself.
    """
    file = make_tiny_gguf(tmp_path, "llama", "F16")
    folder = open_model_folder(str(file))
    assert folder.config["rope_parameters"] == {"rope_type": "default", "rope_theta": 5000.0}
    assert (folder.config["head_dim"], folder.config["vocab_size"], folder.config["dtype"]) == (64, 301, "float16")
    assert folder.config["tie_word_embeddings"] is True and folder.end_token_ids == (0, 5)
    assert folder.token_string_count == 288 and folder.packed and folder.packed.format == "GGUF"
    assert "message.content" in (folder.path / "chat_template.jinja").read_text(encoding="utf-8")
    assert "weights GGUF" in load_model(str(file)).description.libraries
    own = Tokenizer.from_file(str(folder.path / "tokenizer.json"))
    given = Tokenizer.from_file(str(tmp_path / "source" / "tokenizer.json"))
    for text in ("def total(values):", "<|end|> sum é \n\n\t if", "<word3>none of 12345"):
        assert own.encode(text).ids == given.encode(text).ids
        assert own.decode(own.encode(text).ids) == given.decode(given.encode(text).ids)
    assert open_model_folder(str(file.parent)).path == folder.path == local_folder(str(file))
    assert gguf_source(str(file.parent)) == file
    digest = folder.digest()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(1, 1))
    assert open_model_folder(str(file)).digest() != digest


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("gpt-2", "a  12 don't", ["a", "Ġ", "Ġ12", "Ġdon", "'t"]),
        ("smollm", "a  12 don't", ["a", "ĠĠ", "1", "2", "Ġdon", "'t"]),
        ("llama-bpe", "a  1234 don't", ["a", "Ġ", "Ġ", "123", "4", "Ġdon", "'t"]),
        ("qwen2", "a  12 don't", ["a", "Ġ", "Ġ", "1", "2", "Ġdon", "'t"]),
    ],
)
def test_texts_are_split_as_the_file_names_it(name: str, text: str, pieces: list[str], tmp_path: Path) -> None:
    """Claim: each supported split has its own pieces of blanks and digits; Llama 3's texts have a first token, those of
    the others do not, and one that a file asks for is added.

    Source: llama.cpp's table of splits; SmolLM's own tokenizer.json, which parts digits first. Conclusive: the pieces
    differ among the four names.
    """
    fields = {"tokenizer.ggml.pre": name, "tokenizer.ggml.bos_token_id": 0}
    file = make_tiny_gguf(tmp_path / "usual", "llama", "F32", fields)
    tokenizer = Tokenizer.from_file(str(open_model_folder(str(file)).path / "tokenizer.json"))
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == pieces
    assert (tokenizer.encode("total").ids[0] == 0) == (name == "llama-bpe")
    file = make_tiny_gguf(tmp_path / "asked", "llama", "F32", fields | {"tokenizer.ggml.add_bos_token": True})
    tokenizer = Tokenizer.from_file(str(open_model_folder(str(file)).path / "tokenizer.json"))
    assert tokenizer.encode("total").ids[0] == 0


def test_an_untied_head_and_scaled_positions_are_read(tmp_path: Path) -> None:
    """Claim: a head of its own is read as one, and positions scaled by a factor, by yarn or as Llama 3 does are told.

    Source: llama.cpp's converter, which writes Llama 3's as a tensor of factors. Conclusive: the factors are those of
    `transformers`' own function; others are refused.
    """
    scaling = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    scaling |= {"llama.rope.scaling.original_context_length": 128}
    file = make_tiny_gguf(tmp_path / "yarn", "llama", "F32", scaling, tie_word_embeddings=False)
    config = open_model_folder(str(file)).config
    assert config["rope_parameters"]["rope_type"] == "yarn" and not config["tie_word_embeddings"]
    assert config["rope_parameters"]["original_max_position_embeddings"] == 128
    for name, change, is_read in (("llama3", 1.0, True), ("other", 1.1, False)):
        file = with_rope_factors(tmp_path / name, change)
        if is_read:
            rope = open_model_folder(str(file)).config["rope_parameters"]
            assert rope["rope_type"] == "llama3" and rope["factor"] == 8.0
        else:
            with pytest.raises(ModelRefused, match=r"rope_freqs\.weight are not the factors"):
                open_model_folder(str(file))


def with_rope_factors(folder: Path, change: float) -> Path:
    """A llama's file with the factors of Llama 3.1, one of them changed."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    base = {"rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = base | {"rope_type": "llama3", "original_max_position_embeddings": 8192}
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64}
    config = transformers.LlamaConfig(rope_parameters=rope, max_position_embeddings=131072, **sizes)
    scaled = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
    plain = 500000.0 ** -(torch.arange(0, 64, 2) / 64)
    factors = plain / scaled
    factors[20] *= change
    folder.mkdir()
    metadata = {
        "general.architecture": "llama",
        "llama.context_length": 131072,
        "llama.block_count": 1,
        "llama.embedding_length": 256,
        "llama.feed_forward_length": 32,
        "llama.attention.head_count": 4,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 500000.0,
    }
    tokens = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.token_type": [1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
    }
    tensors = {"token_embd.weight": torch.zeros(3, 256), "rope_freqs.weight": factors}
    stored = {name: ("F32", tuple(one.shape), plain_stored(one)) for name, one in tensors.items()}
    return write_gguf(folder / "model.gguf", metadata | tokens, stored)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"general.architecture": "mamba"}, 'general.architecture is "mamba"; it must be one of llama, qwen2, qwen3'),
        ({"llama.attention.sliding_window": 128}, "llama.attention.sliding_window is 128"),
        ({"llama.expert_count": 8}, "llama.expert_count is 8"),
        ({"llama.block_count": "3"}, "llama.block_count is"),
        ({"llama.attention.head_count_kv": [1, 2]}, "llama.attention.head_count_kv is [1, 2]"),
        ({"llama.rope.dimension_count": 32}, "llama.rope.dimension_count is 32; it must be 64"),
        ({"llama.rope.scaling.type": "longrope"}, 'llama.rope.scaling.type is "longrope"'),
        ({"llama.embedding_length": 512}, "has shape"),
        ({"llama.block_count": 3}, "lack model.layers.2."),
        ({"tokenizer.ggml.model": "llama"}, 'tokenizer.ggml.model is "llama"'),
        ({"tokenizer.ggml.pre": "unheard-of"}, 'tokenizer.ggml.pre is "unheard-of"'),
        ({"tokenizer.ggml.token_type": [1]}, "tokenizer.ggml.token_type is [1]"),
        ({"tokenizer.ggml.merges": ["a b c"]}, 'tokenizer.ggml.merges is "a b c"'),
        ({"tokenizer.ggml.add_bos_token": 1}, "tokenizer.ggml.add_bos_token is 1"),
        ({"tokenizer.ggml.bos_token_id": 4000}, "tokenizer.ggml.bos_token_id is 4000"),
        ({"tokenizer.chat_template": 5}, "tokenizer.chat_template is 5"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(fields: dict, named: str, tmp_path: Path) -> None:
    """Claim: an architecture, entry or tokenizer that is not understood is refused in one line, and no folder is left.

    Source: a model that answers differently is worse than one that does not run. Conclusive: each entry is planted
    alone into a file that is read without it (the tests above).
    """
    file = make_tiny_gguf(tmp_path, "llama", "F32", fields)
    with pytest.raises(ModelRefused) as caught:
        load_model(str(file))
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_of_several_files_is_refused_and_a_tensor_of_another_model(tmp_path: Path) -> None:
    """Claim: of several files none is chosen, and a tensor without a place in the model is named.

    Source: `gguf_source`, `parameter_name`. Conclusive: the folder is read with one file, and the file without it.
    """
    file = make_tiny_gguf(tmp_path, "llama", "F32")
    open_model_folder(str(file.parent))
    other = write_gguf(
        file.parent / "other.gguf",
        {"general.architecture": "llama"},
        {"blk.0.ssm_a.weight": ("F32", (2,), plain_stored(torch.zeros(2)))},
    )
    with pytest.raises(ModelRefused, match="has 2 GGUF files"):
        open_model_folder(str(file.parent))
    with pytest.raises(ModelRefused, match="has no tensor token_embd"):
        open_model_folder(str(other))
    assert json.loads((local_folder(str(file)) / "config.json").read_text(encoding="utf-8"))["model_type"] == "llama"
