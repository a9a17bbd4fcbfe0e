"""The files of the gateway's page, without a browser."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from starlette.applications import Starlette
from starlette.routing import Route

from specdec.gateway.page import FOLDER, PAGE_PATHS, page_routes
from tests.hygiene.sources import project_files

BYTES_MAX = 60_000
# Ways in which text becomes markup or program.
UNSAFE = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(|setHTML|srcdoc|\bon\w+\s*=\s*['\"]"
)


class Tags(HTMLParser):
    """The tags of a file with their attributes, and the text inside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1][0] in ("script", "style"):
            self.inside += data.strip()


def test_the_page_is_small_and_whole() -> None:
    """Claim: the page is below 60 kB, and is made of its own files alone: every address in it is one of them, nothing
    is inline, and no text becomes markup. Conclusive: each attribute that names an address is looked up among the
    served paths, imports of scripts too; the planted lines show that the search finds what it must."""
    contents = {url_path: file.read_text(encoding="utf-8") for url_path, file in PAGE_PATHS.items()}
    assert sum(len(content.encode()) for content in contents.values()) < BYTES_MAX
    tags = Tags(contents["/"])
    named = [value for _, attrs in tags.found for name, value in attrs.items() if name in ("src", "href", "action")]
    assert len(named) >= 3 and {f"/{name}" for name in named} <= PAGE_PATHS.keys()
    assert not tags.inside and not [attrs for _, attrs in tags.found if "style" in attrs]
    for url_path, content in contents.items():
        assert not UNSAFE.search(content), url_path
        assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", content), url_path
        for imported in re.findall(r'from "\./(.+?)"', content):
            assert f"/static/{imported}" in PAGE_PATHS
    assert all(UNSAFE.search(line) for line in ("x.innerHTML = y", '<p onclick="z()">', "eval(x)"))


def test_every_file_is_served() -> None:
    """Claim: what the folder holds is what is served, and git has it. Conclusive: sets are equal."""
    files = {f"gateway/static/{path.name}" for path in FOLDER.iterdir()}
    assert files == {path for path in project_files() if path.startswith("gateway/static/")}
    app = Starlette(routes=page_routes())
    served = {route.path for route in app.routes if isinstance(route, Route)}
    assert served == set(PAGE_PATHS) and len(PAGE_PATHS) == len(files)
