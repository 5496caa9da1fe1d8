"""Real servers have all cores, as users run them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tests.environment
from tests.conftest import Server, start_server


@pytest.fixture(autouse=True, scope="package")
def as_by_default() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(tests.environment.THREADS, raising=False)
        yield


@pytest.fixture(scope="package")
def server(as_by_default: None) -> Iterator[Server]:
    """One of the default model without any flag, for tests that leave it idle."""
    server = start_server()
    yield server
    assert server.stop() == 0
