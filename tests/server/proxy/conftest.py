"""Proxies for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.proxy.proxied import Proxy


@pytest.fixture
def start() -> Iterator[Callable[..., Proxy]]:
    """Start proxies, to servers or URLs, that are stopped when the test ends; keyword arguments are settings."""
    running: list[Any] = []

    def start(upstream: Any, **settings: Any) -> Proxy:
        if not isinstance(upstream, str):
            running.insert(0, upstream)
        running.append(Proxy(upstream if isinstance(upstream, str) else upstream.url, settings))
        return running[-1]

    yield start
    for server in reversed(running):
        server.stop() if hasattr(server, "stop") else server.close()
