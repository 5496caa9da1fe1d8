"""GET /, /docs and /console/...: pages that chat with the model, show the engine, and list the endpoints."""

from __future__ import annotations

from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

from octavo_server.http.endpoint import Endpoint
from octavo_server.http.errors import HTTPRefusal, printable

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
PATHS = frozenset({"/", "/docs"})
FOLDER = "/console/"
"""What a page without a key must be able to load; it holds nothing of this server."""


def is_open(method: str, path: str) -> bool:
    """Whether this is a file of the page, which needs no API key."""
    return method in ("GET", "HEAD") and (path in PATHS or path.startswith(FOLDER))


def _read() -> dict[str, bytes]:
    page = resources.files(__package__) / "page"
    return {file.name: file.read_bytes() for file in page.iterdir() if file.is_file()}


_FILES = _read()


async def index(request: Request) -> Response:
    return _response("index.html")


async def api(request: Request) -> Response:
    return _response("api.html")


async def file(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in _FILES:
        raise HTTPRefusal(404, f"The console has no file '{printable(name)}'.", "not_found")
    return _response(name)


def _response(name: str) -> Response:
    kind = TYPES["." + name.rpartition(".")[2]]
    return Response(_FILES[name], headers={**HEADERS, "Content-Type": kind})


ENDPOINTS = [
    Endpoint("GET", "/", index, "The console: a page that chats and shows the engine"),
    Endpoint("GET", "/docs", api, "The endpoints and their fields, as a page"),
    Endpoint("GET", "/console/{name}", file, "A file of the console"),
]
