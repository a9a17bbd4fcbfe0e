"""Links between the pages: files and headings that they name are there."""

from __future__ import annotations

import re
from pathlib import Path

from tests.hygiene.sources import ROOT, project_files, report

FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: str) -> set[str]:
    """The names that a forge gives to a page's headings."""
    heads = re.findall(r"^#+ (.*)", FENCED.sub("", page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.strip().lower()).replace(" ", "-") for head in heads}


def broken(page: Path) -> list[str]:
    """The links of a page, to files of the project, that lead nowhere."""
    found = []
    for link in LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
        name, _, anchor = link.partition("#")
        to = page.parent / name if name else page
        if ":" not in name and not (to.exists() and (not anchor or anchor in anchors(to.read_text(encoding="utf-8")))):
            found.append(link)
    return found


def test_every_link_of_a_page_leads_somewhere(tmp_path: Path) -> None:
    """Claim: a reader who follows a link of a page finds the file, and the heading. Conclusive: every link of every
    page is followed; of planted ones those without file or heading are found, and no other."""
    planted = tmp_path / "page.md"
    planted.write_text(
        "# A `b`, c\n[x](#a-b-c) [x](page.md) [x](#d) [x](none.md) [x](a:b)\n```\n[x](y)\n```\n", "utf-8"
    )
    assert broken(planted) == ["#d", "none.md"]
    pages = [path for path in project_files() if path.endswith(".md")]
    problems = [f"{path}: {link}" for path in pages for link in broken(ROOT / path)]
    assert len(pages) > 15 and not problems, report(problems, "Name a file, and a heading of it:")
