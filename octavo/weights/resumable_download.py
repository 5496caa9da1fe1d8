"""Resumable HTTP download of one large file: after an interruption, the next attempt continues from there."""

from __future__ import annotations

import os
import re
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import certifi
import httpx

from octavo.errors import ConfigError

Progress = Callable[[int, int | None], None]
"""Called with the bytes downloaded so far, and the total if known."""

MAX_ATTEMPTS = 5
"""Consecutive attempts without a new byte before giving up."""
TIMEOUT_SECONDS = 30.0


class _NoProgress(Exception):
    """The connection was refused or broken, or the server was busy: a retry may succeed."""


def download(url: str, target: Path, progress: Progress, max_bytes: int, pause: float = 1.0) -> None:
    """Fetch ``url`` into ``target``, appending to the partial file of an earlier attempt.

    The caller must verify the content. Broken connections are retried after ``pause`` seconds times the number of
    consecutive failures. Raises ``ConfigError`` if the server refuses, cannot be reached, or sends more than
    ``max_bytes``.
    """
    failures = 0
    with httpx.Client(follow_redirects=True, timeout=TIMEOUT_SECONDS, verify=_trusted_certificates()) as client:
        while True:
            before = _size(target)
            try:
                return _fetch_rest(client, url, target, progress, max_bytes)
            except (_NoProgress, httpx.TransportError) as error:
                failures = 1 if _size(target) > before else failures + 1
                if failures >= MAX_ATTEMPTS:
                    raise ConfigError(f"{url}: {str(error) or type(error).__name__}") from error
                time.sleep(pause * failures)


def _fetch_rest(client: httpx.Client, url: str, target: Path, progress: Progress, max_bytes: int) -> None:
    have = _size(target)
    # A compressed response could not be resumed in the middle.
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with client.stream("GET", url, headers=headers) as response:
        if response.status_code == 416 and have:
            return  # Range not satisfiable after the last byte: the file is complete.
        if response.status_code in (408, 429) or response.status_code >= 500:
            raise _NoProgress(f"the server answers {response.status_code}")
        if response.status_code not in (200, 206):
            raise ConfigError(f"{url}: the server answers {response.status_code}")
        if _range_start(response) != have:
            have = 0
        total = have + int(response.headers["Content-Length"]) if "Content-Length" in response.headers else None
        with target.open("ab") as file:
            file.truncate(have)
            progress(have, total)
            for chunk in response.iter_raw():
                have += len(chunk)
                if have > max_bytes:
                    raise ConfigError(f"{url}: the server sends more than {max_bytes:,} bytes")
                file.write(chunk)
                progress(have, total)


def _range_start(response: httpx.Response) -> int:
    """The file offset at which the body of a response starts."""
    found = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return int(found[1]) if response.status_code == 206 and found else 0


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _trusted_certificates() -> ssl.SSLContext:
    """The default certificate authorities, the system's, and those configured for pip, as behind a company's proxy."""
    context = ssl.create_default_context(cafile=certifi.where())
    context.load_default_certs()
    if own := os.environ.get("PIP_CERT"):
        context.load_verify_locations(own)
    return context
