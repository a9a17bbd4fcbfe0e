"""Collects the corpus: Python files that pass the filters, split into files to train on and files held out.

A file is held out by a hash of its name, so the split is the same on every machine and in every run. A file that
holds the text of a held-out prompt, or most of its lines (another version of the file), is used for nothing. Writes
`train.jsonl`, `heldout.jsonl`, prompts from both, `train_prompts.jsonl` and `heldout_prompts.jsonl`, and
`manifest.json`.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import random
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from models.console import progress_over, run_command
from models.sizes import SIZES, Size
from models.sources import SOURCES, Source, source_files, source_folders
from specdec.errors import ConfigError
from specdec.folders import EMBEDDED_MODELS

PROMPTS_FILE = EMBEDDED_MODELS / "heldout_prompts.jsonl"
CHARACTERS_MIN, CHARACTERS_MAX = 200, 200_000  # below there is nothing to learn, above are tables
LINE_MAX = 400  # longer lines are data
TELLING_LINE_MIN = 20  # shorter lines ("return False") stand in many files and tell nothing
TELLING_LINES_MIN = 2  # fewer matching lines may be chance
PROMPT_COUNT = 200
TRAIN_PROMPT_COUNT = 2000  # for texts that the target writes and others learn from
PROMPT_LINES = 8


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of the corpus. `name` is the source's name and the path below it."""

    name: str
    text: str


class PromptFilter:
    """Detects a held-out prompt in a text: whole, or more than half of its telling lines."""

    def __init__(self, prompts: Sequence[str]) -> None:
        self.prompts = tuple(prompt for prompt in prompts if prompt.strip())
        self._prompts_with_line: dict[str, set[int]] = defaultdict(set)
        self._line_counts = [0] * len(self.prompts)
        for index, prompt in enumerate(self.prompts):
            lines = telling_lines(prompt)
            self._line_counts[index] = len(lines)
            for line in lines:
                self._prompts_with_line[line].add(index)

    def matches(self, text: str) -> bool:
        """True when the text must not be used."""
        if any(prompt in text for prompt in self.prompts):
            return True
        shared = Counter(index for line in telling_lines(text) for index in self._prompts_with_line.get(line, ()))
        return any(
            count >= TELLING_LINES_MIN and 2 * count > self._line_counts[index] for index, count in shared.items()
        )


def telling_lines(text: str) -> set[str]:
    """The lines long enough to tell one file from others, without indentation."""
    return {line for line in map(str.strip, text.splitlines()) if len(line) >= TELLING_LINE_MIN}


def read_prompts(path: Path) -> list[str]:
    """The prompts of a held-out file: one JSON object with `id` and `prompt` a line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read held-out prompts {path}: {error.strerror}; give --prompts FILE") from None
    return [json.loads(line)["prompt"] for line in lines if line.strip()]


def read_source(path: Path) -> str | None:
    """The file's text with line ends as \\n; None when it fails a filter or cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    if not CHARACTERS_MIN <= len(text) <= CHARACTERS_MAX or max(map(len, text.splitlines())) > LINE_MAX:
        return None
    return text if parses(text) else None


def parses(text: str) -> bool:
    """Whether the text is Python of the running interpreter's version."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def name_hash(name: str) -> int:
    """64 bits that depend on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def is_heldout(name: str, one_in: int) -> bool:
    """Whether the file of this name is held out; the same in every run and on every machine."""
    return name_hash(name) % one_in == 0


def collect(candidates: Iterable[tuple[str, Path]], prompt_filter: PromptFilter, size: Size) -> list[SourceFile]:
    """The files that pass, in an order that depends on names alone; stops at the size's number of characters."""
    files: list[SourceFile] = []
    digests: set[bytes] = set()
    characters = 0
    for name, path in candidates:
        text = read_source(path)
        if text is None or prompt_filter.matches(text):
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if digest in digests:
            continue
        digests.add(digest)
        files.append(SourceFile(name, text))
        characters += len(text)
        if size.characters_max is not None and characters >= size.characters_max:
            break
    return files


def sample_prompts(files: Sequence[SourceFile], seed: int, count: int = PROMPT_COUNT) -> list[str]:
    """Runs of lines from files, at most `count`, none twice."""
    source = random.Random(seed)
    prompts: dict[str, None] = {}
    for _ in range(count * 4):
        lines = source.choice(files).text.splitlines(keepends=True)
        start = source.randrange(len(lines))
        prompt = "".join(lines[start : start + PROMPT_LINES])
        if len(telling_lines(prompt)) >= TELLING_LINES_MIN:
            prompts[prompt] = None
        if len(prompts) == count:
            break
    return list(prompts)


def write_corpus(
    out: Path,
    files: Sequence[SourceFile],
    sources: Sequence[Source],
    size: Size,
    seed: int,
    prompt_count: int = PROMPT_COUNT,
) -> dict[str, Any]:
    """Writes the split, the prompts and the manifest below `out`; returns the manifest."""
    heldout = [file for file in files if is_heldout(file.name, size.heldout_one_in)]
    train = [file for file in files if not is_heldout(file.name, size.heldout_one_in)]
    if not heldout or not train:
        raise ConfigError(f"{len(files)} files passed the filters, too few to hold some out; install more packages")
    out.mkdir(parents=True, exist_ok=True)
    write_lines(out / "train.jsonl", [asdict(file) for file in train])
    write_lines(out / "heldout.jsonl", [asdict(file) for file in heldout])
    for name, own, count in (("heldout", heldout, prompt_count), ("train", train, TRAIN_PROMPT_COUNT)):
        prompts = [{"id": i, "prompt": prompt} for i, prompt in enumerate(sample_prompts(own, seed, count))]
        write_lines(out / f"{name}_prompts.jsonl", prompts)
    manifest = {
        "size": size.name,
        "train": {"files": len(train), "characters": sum(len(file.text) for file in train)},
        "heldout": {"files": len(heldout), "characters": sum(len(file.text) for file in heldout)},
        "sources": {source.name: source.licence for source in sources if source_folders(source)},
        "files": {file.name: hashlib.sha256(file.text.encode()).hexdigest() for file in files},
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


def write_lines(path: Path, values: Iterable[object]) -> None:
    """One JSON value a line."""
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")


def read_corpus(path: Path) -> list[SourceFile]:
    """Files written by `write_corpus`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; run python -m models.data first") from None
    return [SourceFile(**json.loads(line)) for line in lines]


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(prog="python -m models.data", description=__doc__)
    options.add_argument("--out", type=Path, required=True, help="folder the corpus is written to")
    options.add_argument("--size", choices=SIZES, default="full", help="amount of data (default: %(default)s)")
    options.add_argument("--prompts", type=Path, default=PROMPTS_FILE, help="held-out prompts, kept out")
    options.add_argument("--seed", type=int, default=0, help="of the prompts drawn from held-out files")
    options.add_argument(
        "--prompt-count", type=int, default=PROMPT_COUNT, help="of these prompts, at most (default: %(default)s)"
    )
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Collects and writes; shows how many files and characters there are."""
    options = parser().parse_args(arguments)
    size = SIZES[options.size]
    candidates = [file for source in SOURCES for file in source_files(source)]
    candidates.sort(key=lambda file: name_hash(file[0]))
    with progress_over(candidates, "reading files") as shown:
        files = collect(shown, PromptFilter(read_prompts(options.prompts)), size)
    manifest = write_corpus(options.out, files, SOURCES, size, options.seed, options.prompt_count)
    for split in ("train", "heldout"):
        counts = manifest[split]
        print(f"{split}: {counts['files']} files, {counts['characters']:,} characters")


if __name__ == "__main__":
    run_command(main)
