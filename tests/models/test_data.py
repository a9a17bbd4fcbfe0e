"""The corpus: which files are taken, which are held out, and that no held-out prompt is ever trained on."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from models.chat_questions import questions
from models.data import (
    PROMPTS_FILE,
    PromptFilter,
    SourceFile,
    collect,
    is_heldout,
    read_prompts,
    read_source,
    sample_prompts,
    telling_lines,
    write_corpus,
)
from models.sizes import SMALL
from models.sources import SOURCES, STANDARD_LIBRARY, Source, is_taken, source_files
from specdec.errors import ConfigError
from specdec.folders import EMBEDDED_MODELS

NO_PROMPTS = PromptFilter([])


def python_text(name: str, line_count: int = 20) -> str:
    """A file that passes all filters."""
    return "".join(f"{name}_{i} = {i}  # a line of some length\n" for i in range(line_count))


def write(folder: Path, name: str, content: str | bytes) -> tuple[str, Path]:
    """A candidate of the given content."""
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return f"source/{name}", path


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("a = 1\n", "shorter than 200 characters"),
        ("a = 1\n" * 40_000, "longer than 200,000 characters"),
        (python_text("a") + "b = '" + "x" * 400 + "'\n", "a line over 400 characters"),
        (python_text("a") + "def (:\n", "does not parse"),
        (python_text("a").encode() + b"# \xff\n", "not UTF-8"),
        (python_text("a") + "\0", "a zero byte"),
    ],
)
def test_filters_drop_what_is_not_source_to_learn_from(tmp_path: Path, content: str | bytes, why: str) -> None:
    """Claim: each filter of models/README.md drops its file.

    Conclusive: the same file without the flaw passes.
    """
    assert read_source(write(tmp_path, "bad.py", content)[1]) is None, why
    assert read_source(write(tmp_path, "good.py", python_text("a"))[1]) == python_text("a")


def test_duplicates_are_taken_once_whatever_their_names(tmp_path: Path) -> None:
    """Claim: equal texts count once (by hash); line ends do not make them differ."""
    text = python_text("a")
    candidates = [write(tmp_path, "a.py", text), write(tmp_path, "b.py", text.replace("\n", "\r\n"))]
    assert [file.name for file in collect(candidates, NO_PROMPTS, SMALL)] == ["source/a.py"]


def test_a_file_with_a_heldout_prompt_is_used_for_nothing(tmp_path: Path) -> None:
    """Claim: a file that holds a prompt, whole or as another version of its lines, is in neither split.

    Conclusive: every prompt that ships is tried within a file that passes without it.
    """
    prompts = read_prompts(PROMPTS_FILE)
    prompt_filter = PromptFilter(prompts)
    assert len(prompts) == 200
    assert not prompt_filter.matches(python_text("a"))
    for prompt in prompts:
        assert prompt_filter.matches(python_text("a") + prompt + python_text("b")), prompt
    changed = "def f():\n    first_telling_line = compute(1)\n    second_telling_line = compute(2)\n    short = 1\n"
    only = PromptFilter([changed])
    candidates = [
        write(tmp_path, "whole.py", python_text("a") + changed),
        write(tmp_path, "version.py", python_text("b") + changed.replace("short", "other").replace("def f", "def g")),
        write(tmp_path, "clean.py", python_text("c")),
    ]
    assert [file.name for file in collect(candidates, only, SMALL)] == ["source/clean.py"]


def test_no_collected_file_holds_a_shipped_prompt() -> None:
    """Claim: on this machine's own standard library the collector keeps every shipped prompt out.

    Conclusive: prompts come from `encodings` among others, so some of its files must be dropped; and a file that was
    collected is dropped as soon as a prompt is cut from it.
    """
    prompts = read_prompts(PROMPTS_FILE)
    folders = {"encodings", "json", "email"}
    files = [file for file in source_files(STANDARD_LIBRARY) if folders & set(file[0].split("/"))]
    unlimited = replace(SMALL, characters_max=None)
    everything = collect(files, NO_PROMPTS, unlimited)
    kept = collect(files, PromptFilter(prompts), unlimited)
    assert 20 < len(kept) < len(everything)
    assert not [(prompt, file.name) for prompt in prompts for file in kept if prompt in file.text]
    planted = PromptFilter([kept[0].text[:400]])
    assert kept[0].name not in {file.name for file in collect(files, planted, unlimited)}


def test_the_split_depends_on_the_name_alone() -> None:
    """Claim: one file in fifty is held out, the same ones everywhere: the names are pinned."""
    names = [f"python/module_{i}.py" for i in range(20_000)]
    heldout = [name for name in names if is_heldout(name, 50)]
    assert 320 < len(heldout) < 480  # mean 400, four standard deviations of 20
    assert heldout[:3] == ["python/module_92.py", "python/module_256.py", "python/module_296.py"]


def test_prompts_come_from_files_held_out_and_the_manifest_names_every_file(tmp_path: Path) -> None:
    """Claim: a corpus's own prompts are in held-out files only, and its record names the files used."""
    files = [SourceFile(f"python/module_{i}.py", python_text(f"module_{i}")) for i in range(100)]
    manifest = write_corpus(tmp_path, files, SOURCES, SMALL, seed=1)
    train = [json.loads(line)["text"] for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    prompts = read_prompts(tmp_path / "heldout_prompts.jsonl")
    assert prompts and not [prompt for prompt in prompts for text in train if prompt in text]
    assert set(manifest["files"]) == {file.name for file in files}
    assert manifest["train"]["files"] + manifest["heldout"]["files"] == 100
    assert manifest["sources"]["python"] == "PSF-2.0"
    assert sample_prompts(files, seed=1) == sample_prompts(files, seed=1)


def test_too_few_files_are_refused_with_what_to_do(tmp_path: Path) -> None:
    """Claim: a corpus without held-out files is an error of one line, and nothing is written."""
    with pytest.raises(ConfigError, match="too few"):
        write_corpus(tmp_path / "out", [], SOURCES, SMALL, seed=1)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="--prompts"):
        read_prompts(tmp_path / "missing.jsonl")


def test_sources_name_a_licence_and_leave_foreign_code_out() -> None:
    """Claim: each source is of a permissive licence; folders named in the recipe are left out."""
    assert {source.licence for source in SOURCES} <= {"PSF-2.0", "MIT", "BSD-3-Clause", "BSD-2-Clause", "Apache-2.0"}
    assert not is_taken(STANDARD_LIBRARY, Path("idlelib/run.py"))
    assert not is_taken(STANDARD_LIBRARY, Path("site-packages/some/code.py"))
    assert is_taken(STANDARD_LIBRARY, Path("json/decoder.py"))
    part = Source("torch", "BSD-3-Clause", only=("nn",))
    assert is_taken(part, Path("nn/modules/linear.py")) and not is_taken(part, Path("jit/api.py"))
    assert not list(source_files(Source("no_package_of_this_name", "MIT")))


def test_telling_lines_forget_indentation_and_short_lines() -> None:
    """Claim: only lines of 20 characters and more tell one file from another."""
    text = "    return False\n        a_line_of_some = length_and_more\n"
    assert telling_lines(text) == {"a_line_of_some = length_and_more"}


def test_no_question_to_train_on_is_one_that_measures() -> None:
    """Claim: the questions of the chat draft's recipe differ from those of `chat_prompts.jsonl` in more than a word.

    Conclusive: the nearest pair has the same form and another subject: 0.6 of the longer words of both are common. A
    held-out question that a class had would have 1.
    """

    def words(text: str) -> set[str]:
        return set(re.findall("[a-z]{4,}", text.lower()))

    lines = (EMBEDDED_MODELS / "chat_prompts.jsonl").read_text().splitlines()
    heldout = [words(json.loads(line)["prompt"]) for line in lines]
    own = [words(question) for _, question in questions(1)]
    assert len(own) > 2000
    assert {name for name, _ in questions(1)} == {json.loads(line)["class"] for line in lines}
    assert questions(1) == questions(1) != questions(2)
    nearest = max(len(one & other) / len(one | other) for one in own if one for other in heldout)
    assert 0.4 < nearest <= 0.6
