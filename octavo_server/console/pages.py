"""GET /, /docs and /console/...: pages that chat with the model, show the engine, and list the endpoints."""

from __future__ import annotations

import functools
import gzip
import hashlib
from importlib import resources
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from octavo_server.http.endpoint import Endpoint
from octavo_server.http.error_responses import HTTPRefusal, printable

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
POLICY = (
    "default-src 'self'",
    "img-src 'self' data:",  # the images of a chat, which are in its messages
    "frame-ancestors 'none'",
    "base-uri 'none'",
    "form-action 'self'",
)
HEADERS = {
    "Content-Security-Policy": "; ".join(POLICY),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
PATHS = frozenset({"/", "/docs"})
FOLDER = "/console/"
"""What a page without a key must be able to load; it holds nothing of this server."""


def is_open(path: str) -> bool:
    """Whether this is a file of the page, which needs no API key."""
    return path in PATHS or path.startswith(FOLDER)


class File(NamedTuple):
    """A file of the page, as it is and compressed, and the tag of its content."""

    plain: bytes
    compressed: bytes
    tag: str


@functools.cache
def _files() -> dict[str, File]:
    """The files by their path below the page's folder, read when one is first asked for."""
    page = resources.files(__package__) / "page"
    found, folders = dict[str, File](), [("", page)]
    while folders:
        path, folder = folders.pop()
        for entry in folder.iterdir():
            if entry.is_dir():
                folders.append((f"{path}{entry.name}/", entry))
            elif any(entry.name.endswith(suffix) for suffix in TYPES):
                content = entry.read_bytes()
                tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
                found[path + entry.name] = File(content, gzip.compress(content, mtime=0), tag)
    return found


async def index(request: Request) -> Response:
    return _response(request, "index.html")


async def api(request: Request) -> Response:
    return _response(request, "api.html")


async def file(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in _files():
        raise HTTPRefusal(404, f"The console has no file '{printable(name)}'.", "not_found")
    return _response(request, name)


def _response(request: Request, name: str) -> Response:
    """The file ``name``: compressed if the client takes that, and without its content if the client has it."""
    found = _files()[name]
    headers = {
        **HEADERS,
        "Content-Type": TYPES["." + name.rpartition(".")[2]],
        "ETag": found.tag,
        "Vary": "Accept-Encoding",
    }
    if found.tag in request.headers.get("If-None-Match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("Accept-Encoding", ""):
        return Response(found.compressed, headers={**headers, "Content-Encoding": "gzip"})
    return Response(found.plain, headers=headers)


ENDPOINTS = [
    Endpoint("GET", "/", index, "The console: a page that chats and shows the engine"),
    Endpoint("GET", "/docs", api, "The endpoints and their fields, as a page"),
    Endpoint("GET", "/console/{name:path}", file, "A file of the console"),
]
