"""The page at /: its files, read once, and headers under which a browser loads nothing from elsewhere.

They are no secret and need no key, so that the page can ask for one.
"""

from __future__ import annotations

import mimetypes
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "static"
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


PAGE_PATHS = {"/" if file.name == "index.html" else f"/static/{file.name}": file for file in sorted(FOLDER.iterdir())}


def page_routes() -> list[Route]:
    """Returns the routes of the page."""
    return [_route(url_path, file) for url_path, file in PAGE_PATHS.items()]


def _route(url_path: str, file: Path) -> Route:
    content, media_type = file.read_bytes(), mimetypes.guess_type(file.name)[0]

    async def answer(_: Request) -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    return Route(url_path, answer, methods=["GET"])
