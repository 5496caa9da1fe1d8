"""The unmodified openai client, through a proxy: the tests of ``tests/server/openai/test_client.py``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.conftest import Served
from tests.server.in_process import InProcessEngine, byte_tokenizer
from tests.server.openai import test_client
from tests.server.openai.test_client import client  # noqa: F401 (a fixture)
from tests.server.proxy.proxied import ProxiedServed

for name, value in vars(test_client).items():
    if name.startswith("test_") and callable(value):
        globals()[name] = value


@pytest.fixture(scope="module")
def server() -> Iterator[ProxiedServed]:
    served = ProxiedServed(Served(InProcessEngine(), byte_tokenizer(), {}))
    yield served
    served.stop()
