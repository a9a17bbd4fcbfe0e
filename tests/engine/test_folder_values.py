"""Every value and file of a model folder is checked when it is opened: each fault is one line with file, field, value.

Faults are planted one at a time in a complete folder that is served without them; most are refused before any library
for models is asked.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.coordinator.tokenizer import Tokenizer
from specdec.engine.loading.config_check import CONFIG_FIELDS, END_TOKENS_MAX
from specdec.engine.loading.model import load_model
from specdec.engine.loading.model_folder import open_model_folder
from specdec.engine.parallel.share import check_split
from specdec.errors import ModelRefused
from tests.engine.test_model_folder import edit_json
from tests.support.engine_models import make_tiny_model

CONFIG, GENERATION, TOKENIZER, WEIGHTS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "model.safetensors",
)
INDEX = "model.safetensors.index.json"
WEIGHT = "model.layers.0.mlp.up_proj.weight"
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 5\n"
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder without a fault."""
    return make_tiny_model(tmp_path_factory.mktemp("whole") / "model", "llama", num_hidden_layers=1)


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to plant a fault in."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def refusal(open_it: Callable[[], object]) -> str:
    with pytest.raises(ModelRefused) as caught:
        open_it()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def opened(folder: Path) -> Callable[[], object]:
    return lambda: open_model_folder(str(folder))


CONFIG_FAULTS: list[tuple[str, Any]] = [
    ("dtype", "bf16"),
    ("torch_dtype", "int8"),
    ("dtype", 16),
    ("rms_norm_eps", "1e-6"),
    ("rms_norm_eps", float("nan")),
    ("rms_norm_eps", -1e-6),
    ("max_position_embeddings", None),
    ("max_position_embeddings", 10**18),
    ("max_position_embeddings", 10**400),
    ("max_position_embeddings", 1.5),
    ("max_position_embeddings", True),
    ("num_hidden_layers", 10**9),
    ("num_hidden_layers", 0),
    ("hidden_size", -64),
    ("vocab_size", 10**12),
    ("num_attention_heads", 0),
    ("num_key_value_heads", 0),
    ("num_key_value_heads", 3),
    ("head_dim", 0),
    ("sliding_window", 0),
    ("sliding_window", -1),
    ("sliding_window", "4096"),
    ("layer_types", ["full_attention"] * 3),
    ("layer_types", "full_attention"),
    ("tie_word_embeddings", "true"),
    ("model_type", ["llama"]),
    ("pad_token_id", 301),
    ("eos_token_id", "0"),
    ("rope_theta", 0),
    ("rope_theta", float("inf")),
    ("rope_scaling", "linear"),
    ("rope_parameters", [1]),
    ("rope_parameters.rope_theta", float("nan")),
    ("rope_parameters.rope_theta", "10000"),
    ("rope_parameters.factor", 0),
    ("rope_parameters.rope_type", ["yarn"]),
    ("rope_parameters.full_attention", 3),
    ("rope_parameters.original_max_position_embeddings", "128"),
    ("final_logit_softcapping", 0),
    ("logits_scaling", 0),
]


@pytest.mark.parametrize(("field", "value"), CONFIG_FAULTS, ids=lambda part: str(part)[:40])
def test_a_wrong_value_is_refused_by_file_field_and_value(field: str, value: Any, folder: Path) -> None:
    """Claim: a value of a wrong type or outside its limits is refused as `config.json: FIELD is VALUE; it must be ...`.

    Source: `config_check`. Conclusive: the folder opens without the planted value; a billion layers, which would be
    made one by one, and sizes that fill all memory are among them.
    """
    outer, _, inner = field.partition(".")
    open_model_folder(str(folder))
    edit_json(folder / CONFIG, **{outer: YARN | {inner: value} if inner else value})
    said = refusal(opened(folder))
    shown = json.dumps(value)
    assert f"{folder / CONFIG}: {field} is {shown if len(shown) <= 80 else shown[:77]}" in said
    assert "; it must be " in said


def test_every_bound_of_the_table_is_one(folder: Path) -> None:
    """Claim: each entry of the table is refused one below and one above its limits, as a string, and as a list.

    Conclusive: the table itself is walked, so that a new line is tried too.
    """
    original = (folder / CONFIG).read_text(encoding="utf-8")
    for name, field in CONFIG_FIELDS.items():
        for value in (field.low - 1, field.high * 2, str(field.high), [field.low], True):
            edit_json(folder / CONFIG, **{name: value})
            assert f"{folder / CONFIG}: {name} is {json.dumps(value)}; it must be " in refusal(opened(folder))
            (folder / CONFIG).write_text(original, encoding="utf-8")


def test_spellings_with_one_meaning_are_accepted(folder: Path) -> None:
    """Claim: "torch.bfloat16" is bfloat16, 256.0 positions are 256, and an end token 0.0 is 0.

    Source: values that people and older programs write; `transformers` itself raises for them. Conclusive: the loaded
    model's description has each meaning.
    """
    edit_json(folder / CONFIG, torch_dtype="torch.bfloat16", dtype=None, max_position_embeddings=256.0)
    edit_json(folder / GENERATION, eos_token_id=[0.0, 3])
    described = load_model(str(folder)).description
    assert (described.dtype, described.positions_max, described.end_token_ids) == ("bfloat16", 256, (0, 3))


def test_what_only_the_library_checks_is_one_line_too(folder: Path) -> None:
    """Claim: entries that the table does not name are refused by the library's own checks, in one line with the file.

    Conclusive: each of these raises an error of another class in `transformers`, of several lines or none of its own.
    """
    for field, value in (("attention_bias", "x"), ("id2label", "x"), ("use_cache", "x"), ("head_dim", 15)):
        original = (folder / CONFIG).read_text(encoding="utf-8")
        edit_json(folder / CONFIG, **{field: value})
        assert refusal(lambda: load_model(str(folder))).startswith(f"{folder / CONFIG}: ")
        (folder / CONFIG).write_text(original, encoding="utf-8")
    edit_json(folder / CONFIG, rope_parameters=YARN | {"rope_theta": 1e-300})
    assert "give angles that are no numbers" in refusal(lambda: load_model(str(folder)))


@pytest.mark.parametrize("value", [-1, "0", 0.5, True, [[0]], {"a": 1}, [0, -1], 10**30, list(range(200))], ids=str)
def test_an_end_token_that_is_no_id_is_refused(value: Any, folder: Path) -> None:
    """Claim: end tokens that are no ids, or more than requests leave space for, are refused with file, field, value.

    Source: `-1` never ends a text, and 200 ids make the service refuse every request for a field no client sent.
    Conclusive: as many as are allowed pass.
    """
    edit_json(folder / GENERATION, eos_token_id=list(range(END_TOKENS_MAX)))
    assert len(open_model_folder(str(folder)).end_token_ids) == END_TOKENS_MAX
    edit_json(folder / GENERATION, eos_token_id=value)
    said = refusal(opened(folder))
    assert said.startswith(f"{folder / GENERATION}: eos_token_id is {json.dumps(value)[:40]}")


def test_an_end_token_beyond_the_vocabulary_is_left_out_with_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Claim: ids that the tokenizer does not have are left out, and named in a warning; if generation_config.json has
    no other, config.json's end a text; a folder without any is served too.

    Source: folders that share a generation_config.json with a larger vocabulary. Conclusive: the ids of the description
    are what services use.
    """
    logging.getLogger("specdec").handlers.clear()  # of services that ran in this process
    for named, ends in (([0, 99999], (0,)), (99999, (0,)), ([287, 288], (287,))):
        edit_json(folder / GENERATION, eos_token_id=named)
        caplog.clear()
        assert load_model(str(folder)).description.end_token_ids == ends
        assert "eos_token_id has [99999]" in caplog.text or "eos_token_id has [288]" in caplog.text
    edit_json(folder / CONFIG, eos_token_id=4711)
    edit_json(folder / GENERATION, eos_token_id=99999)
    assert load_model(str(folder)).description.end_token_ids == ()
    assert "eos_token_id has [99999, 4711]" in caplog.text and "texts end only at their max_tokens" in caplog.text


def replaced_by(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def replace(file: Path) -> None:
        file.unlink(missing_ok=True)
        make(file)

    return replace


FILE_FAULTS: list[tuple[str, Callable[[Path], object], str]] = [
    ("pointer", lambda file: file.write_bytes(LFS_POINTER), "is a pointer of Git LFS"),
    ("empty", lambda file: file.write_bytes(b""), "is empty"),
    ("directory", replaced_by(Path.mkdir), "is a directory"),
    ("broken link", replaced_by(lambda file: file.symlink_to("nowhere")), "is a link to nothing"),
    ("loop", replaced_by(lambda file: file.symlink_to(file.name)), "is a link to nothing"),
    ("pipe", replaced_by(os.mkfifo), "is a pipe"),
    # Reading it fails, for root too.
    ("unreadable", replaced_by(lambda file: file.symlink_to("/proc/self/mem")), "cannot be read: Input/output error"),
]
JSON_FAULTS: list[tuple[str, Callable[[Path], object], str]] = [
    ("byte order mark", lambda file: file.write_bytes(b"\xef\xbb\xbf{}"), "begins with a byte order mark"),
    ("utf-16", lambda file: file.write_bytes("{}".encode("utf-16")), "begins with a byte order mark"),
    ("latin-1", lambda file: file.write_bytes(b'{"a": "\xe9"}'), "is not UTF-8"),
    ("nested", lambda file: file.write_text('{"a":' * 100_000), "is not valid JSON: maximum recursion depth"),
    ("list", lambda file: file.write_text("[1]"), "holds [1]; it must hold a JSON object"),
    ("null", lambda file: file.write_text("null"), "holds null"),
    ("cut", lambda file: file.write_text('{"a": '), "is not valid JSON"),
    ("half a number", lambda file: file.write_text('{"a": ' + "9" * 5000 + "}"), "is not valid JSON"),
]


@pytest.mark.parametrize(
    ("fault", "plant", "cause"), FILE_FAULTS + JSON_FAULTS, ids=[own[0] for own in FILE_FAULTS + JSON_FAULTS]
)
def test_a_file_that_is_not_what_it_is_named_is_refused_by_its_cause(
    fault: str, plant: Callable[[Path], object], cause: str, folder: Path
) -> None:
    """Claim: a file that is a pointer to another one, empty, a pipe, a broken link, unreadable or in another encoding
    is refused by its name and this cause, whichever file of the folder it is, the coordinator's too; none hangs.

    Source: folders that were fetched or copied in part. Conclusive: one file at a time, restored afterwards.
    """
    edit_json(folder / GENERATION, eos_token_id=0)
    names = [CONFIG, GENERATION, TOKENIZER]
    if (fault, plant, cause) in FILE_FAULTS:
        names += [WEIGHTS]
    for name in names:
        kept = (folder / name).rename(folder / "kept")
        shutil.copy(kept, folder / name)
        plant(folder / name)
        assert refusal(opened(folder)).startswith(f"{folder / name} {cause}")
        if name == TOKENIZER:
            assert refusal(lambda: Tokenizer(str(folder))).startswith(f"{folder / name} {cause}")
        if (folder / name).is_dir():
            (folder / name).rmdir()
        kept.replace(folder / name)
    open_model_folder(str(folder))


TOKEN_FAULTS: list[tuple[Callable[[dict], object], str]] = [
    (lambda content: content.pop("model"), "model is None"),
    (lambda content: content.update(model=[1]), "model is [1]"),
    (lambda content: content["model"].update(vocab=[1, 2]), "model.vocab must be an object of ids, or a list"),
    (lambda content: content["model"]["vocab"].update(z="1"), "model.vocab has the id '1' of 'z'"),
    (lambda content: content["model"]["vocab"].update(z=-1), "model.vocab has the id -1 of 'z'"),
    (lambda content: content["model"]["vocab"].update(z=10**12), "model.vocab has the id 1000000000000 of 'z'"),
    (lambda content: content["added_tokens"].append({"content": "z"}), "added_tokens has {'content': 'z'}"),
    (lambda content: content.update(added_tokens=None), "added_tokens is None; it must be a list"),
    (lambda content: (content["model"].update(vocab={}), content.update(added_tokens=[])), "fewer than two tokens"),
    (lambda content: content["model"]["vocab"].update({"\ud800": 5}), "surrogates not allowed"),
]


@pytest.mark.parametrize(("edit", "cause"), TOKEN_FAULTS, ids=[own[1][:40] for own in TOKEN_FAULTS])
def test_tokens_without_ids_are_refused(edit: Callable[[dict], object], cause: str, folder: Path) -> None:
    """Claim: a tokenizer.json whose tokens are no strings with ids is refused by the entry, on all services.

    Conclusive: the same file passes before the entry is changed; every other entry stays.
    """
    content = json.loads((folder / TOKENIZER).read_text(encoding="utf-8"))
    edit(content)
    (folder / TOKENIZER).write_text(json.dumps(content), encoding="utf-8")
    for said in (refusal(opened(folder)), refusal(lambda: Tokenizer(str(folder)))):
        assert str(folder / TOKENIZER) in said and cause in said


def test_a_targets_tokenizer_is_checked_for_its_draft(folder: Path, tmp_path: Path) -> None:
    """Claim: a draft is refused if the tokenizer of its target is missing or wrong, by that file.

    Source: `--target-tokenizer` names a folder of which the draft reads the tokenizer alone. Conclusive: the draft's
    own folder has no fault.
    """
    target = tmp_path / "target"
    target.mkdir()
    for content, cause in ((None, "is missing"), ("{}", "model is None"), (LFS_POINTER.decode(), "is a pointer")):
        if content is not None:
            (target / TOKENIZER).write_text(content, encoding="utf-8")
        said = refusal(lambda: load_model(str(folder), has_stable_rows=False, target_tokenizer=str(target)))
        assert said.startswith(str(target / TOKENIZER)) and cause in said


def renamed(prefix: str, suffix: str = "") -> Callable[[dict], dict]:
    return lambda weights: {f"{prefix}{name}{suffix}": weight for name, weight in weights.items()}


WEIGHT_FAULTS: list[tuple[Callable[[dict], dict], str]] = [
    (renamed("_orig_mod."), "lack model.embed_tokens.weight; they have _orig_mod.lm_head.weight"),
    (renamed("module."), "lack model.embed_tokens.weight; they have module.lm_head.weight"),
    (renamed("base_model.model.", ".lora_A"), "they have base_model.model.lm_head.weight.lora_A"),
    (lambda weights: {}, "the weights lack model.embed_tokens.weight"),
    (lambda weights: weights | {WEIGHT: weights[WEIGHT].to(torch.int8)}, f"{WEIGHT} has type I8; it must be one of"),
    (lambda weights: weights | {WEIGHT: weights[WEIGHT].to(torch.float8_e4m3fn)}, f"{WEIGHT} has type F8_E4M3"),
    (lambda weights: weights | {WEIGHT: weights[WEIGHT][:5].clone()}, f"{WEIGHT} has shape [5, 64]; by config.json"),
]


@pytest.mark.parametrize(("edit", "cause"), WEIGHT_FAULTS, ids=[own[1][:40] for own in WEIGHT_FAULTS])
def test_weights_of_another_model_are_refused_by_the_tensor(
    edit: Callable[[dict], dict], cause: str, folder: Path
) -> None:
    """Claim: a tensor that is missing, under another name, or of another shape or type is named, alone and by ranks.

    Source: weights of compiled, wrapped, adapted and quantized models. Conclusive: of each fault the message must name
    the tensor that the model wants, and what is there instead; float64, which is only wider, is served.
    """
    weights = load_file(folder / WEIGHTS)
    save_file(weights | {WEIGHT: weights[WEIGHT].double()}, folder / WEIGHTS, metadata={"format": "pt"})
    load_model(str(folder))
    save_file(edit(weights), folder / WEIGHTS, metadata={"format": "pt"})
    assert cause in refusal(lambda: load_model(str(folder)))
    assert cause in refusal(lambda: check_split(str(folder), open_model_folder(str(folder)), 2))


INDEX_FAULTS: list[tuple[Any, str]] = [
    ([], "weight_map is []; it must be an object of file names"),
    ({"a": 1}, 'weight_map is {"a": 1}; it must be'),
    (None, "weight_map is null; it must be"),
    ({"a": "../../etc/passwd"}, "weight_map names '../../etc/passwd', which is not a file of the folder"),
    ({"a": "/etc/passwd"}, "weight_map names '/etc/passwd', which is not a file of the folder"),
    ({"a": "lost.safetensors"}, "weight_map names 'lost.safetensors', which is not a file of the folder"),
    ({"a": "x\0y"}, "which is not a file of the folder"),
]


@pytest.mark.parametrize(("places", "cause"), INDEX_FAULTS, ids=[own[1][:40] for own in INDEX_FAULTS])
def test_an_index_that_names_no_files_of_the_folder_is_refused(places: Any, cause: str, folder: Path) -> None:
    """Claim: an index of weights that is a list, has numbers, or names files elsewhere or missing is refused by it.

    Conclusive: with the right names the same folder loads.
    """
    names = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).rename(folder / "part.safetensors")
    right = dict.fromkeys(names, "part.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": right}))
    load_model(str(folder))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert refusal(opened(folder)).startswith(f"{folder / INDEX}: {cause}" if places != {"a": "x\0y"} else str(folder))


def test_a_damaged_file_of_weights_is_refused_by_its_header(folder: Path) -> None:
    """Claim: a cut file, a header of 2^60 bytes and one that is no JSON are refused when the folder is opened.

    Conclusive: the message names the file and the cause; no other file is changed.
    """
    content = (folder / WEIGHTS).read_bytes()
    for damaged, cause in (
        (content[:-100], "incomplete metadata"),
        (content[:7], "header too small"),
        (struct.pack("<Q", 1 << 60) + b"{}", "header too large"),
        (struct.pack("<Q", 8) + b"no json!", "invalid JSON"),
    ):
        (folder / WEIGHTS).write_bytes(damaged)
        said = refusal(opened(folder))
        assert said.startswith(f"{folder / WEIGHTS} is not a whole safetensors file") and cause in said


def test_an_adapter_is_refused_by_its_file(folder: Path) -> None:
    """Claim: a folder with an adapter is refused, not served without it.

    Source: with one more package `transformers` would load another model in its place. Conclusive: the one file.
    """
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "another"}', encoding="utf-8")
    assert "adapter_config.json" in refusal(opened(folder))
