"""The names in docs/operations.md exist: overlays, files, sections, flags, and the sentences our services print."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from specdec.cli.main import KNOWN_FIELDS
from specdec.settings import flag_of
from tests.deploy.manifests import OVERLAYS
from tests.hygiene.sources import ROOT, product_modules

PAGE = ROOT / "docs" / "operations.md"
TEXT = PAGE.read_text(encoding="utf-8")
VALUES = re.compile(r"…|; |\S*\d\S*|'\w+'|\(…\)|SPECDEC_\w+\??|--port\b|model\.safetensors:")  # or chosen
WORD_COUNT_MIN = 3  # of a piece of a sentence, so that it is found for what it says
OTHERS_FLAGS = frozenset(  # of docker, kubectl and the rest; and ours that are no settings
    {
        "--build",
        "--call",
        "--config",
        "--from-file",
        "--from-literal",
        "--server-side",
        "--strict",
        "--target",
        "--wait",
    }
)


def test_every_overlay_is_explained() -> None:
    """Claim: every overlay the page names exists, and every one that exists is named."""
    assert set(re.findall(r"deploy/kubernetes/overlays/([\w-]+)", TEXT)) == set(OVERLAYS)


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)]+)\)", TEXT))))
def test_links_lead_somewhere(target: str) -> None:
    """Claim: every link to a file of this repository finds it, and every linked section exists."""
    path, _, section = target.partition("#")
    file = (PAGE.parent / path).resolve() if path else PAGE
    assert file.exists(), target
    if section:
        titles = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
        assert section in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}, target


def test_flags_and_variables_are_ours() -> None:
    """Claim: every flag and variable on the page belongs to a command of ours, or to another tool."""
    own = {flag_of(name) for field in KNOWN_FIELDS for name in (field, f"no_{field}")} | OTHERS_FLAGS
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", TEXT)) <= own
    variables = set(re.findall(r"SPECDEC_([A-Z_]+)", TEXT)) - {"URL"}
    assert {name.lower() for name in variables} <= KNOWN_FIELDS


@cache
def sentences() -> str:
    """All texts of the product's code, computed parts left out, one a line."""
    nodes = (node for module in product_modules() for node in ast.walk(module.tree))
    return "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def quoted() -> list[str]:
    """The sentences in the first column of the page's last table."""
    rows = [line for line in TEXT.partition("## When something is wrong")[2].splitlines() if line.startswith("| `")]
    cells = [row.split(" | ")[0] for row in rows]
    return [text for cell in cells for text in re.findall(r"`([^`]+)`", cell) if len(text.split()) > WORD_COUNT_MIN]


@pytest.mark.parametrize("sentence", quoted())
def test_errors_are_those_that_are_printed(sentence: str) -> None:
    """Claim: errors quoted on the page are those of the code: a piece of each quoted sentence, between the values that
    differ from case to case, is in the code word for word."""
    pieces = [piece.strip() for piece in VALUES.split(sentence)]
    long_ones = [piece for piece in pieces if len(piece.split()) >= WORD_COUNT_MIN]
    assert any(piece in sentences() for piece in long_ones), (sentence, long_ones)


def test_there_are_sentences_to_look_for() -> None:
    """Claim: the check above has sentences to check, and can fail."""
    assert len(quoted()) >= 10
    assert "reaches beyond this very machine" not in sentences()
