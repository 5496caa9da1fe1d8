"""Tests of the OpenAI API, through a proxy in front of the server that they are written for.

The proxy passes on all endpoints alike: those that are not here are in ``test_conformance_nightly``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from octavo.text.tokenizer import Tokenizer
from tests.server import test_response
from tests.server.conftest import Served
from tests.server.in_process import InProcessEngine, byte_tokenizer
from tests.server.openai import test_chat, test_models_and_tokenize
from tests.server.proxy.proxied import ProxiedServed

pytestmark = pytest.mark.slow


def every_test(*modules: ModuleType) -> dict[str, Any]:
    """The tests of modules, each with a name of its own, and their fixtures other than servers."""
    found: dict[str, Any] = {}
    for module in modules:
        for name, value in vars(module).items():
            if name.startswith("test_") and callable(value):
                found[f"{name}_{module.__name__.rpartition('.')[2]}"] = value
            elif type(value).__name__ == "FixtureFunctionDefinition" and name not in ("served", "serve_app"):
                found[name] = value
    return found


globals().update(every_test(test_chat, test_models_and_tokenize, test_response))


@pytest.fixture
def serve_app(tokenizer: Tokenizer) -> Iterator[Callable[..., ProxiedServed]]:
    running: list[ProxiedServed] = []

    def start(
        engine: InProcessEngine | None = None, *, tokenizer: Tokenizer | None = tokenizer, **settings: Any
    ) -> ProxiedServed:
        running.append(ProxiedServed(Served(engine or InProcessEngine(), tokenizer, settings)))
        return running[-1]

    yield start
    for served in running:
        served.stop()


@pytest.fixture(scope="module")
def served() -> Iterator[ProxiedServed]:
    served = ProxiedServed(Served(InProcessEngine(), byte_tokenizer(), {}))
    yield served
    served.stop()
