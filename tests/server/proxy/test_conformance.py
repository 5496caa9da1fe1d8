"""The tests of the OpenAI API, through a proxy in front of the server that they are written for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from octavo.text.tokenizer import Tokenizer
from tests.server import test_sse
from tests.server.conftest import Served
from tests.server.in_process import InProcessEngine, byte_tokenizer
from tests.server.openai import (
    test_best_of,
    test_chat,
    test_completions,
    test_every_field,
    test_models_and_tokenize,
    test_passed_over,
    test_restrictions,
    test_sampling_defaults,
    test_structured,
    test_tools,
    test_vectors,
)
from tests.server.proxy.proxied import ProxiedServed

for module in (
    test_best_of,
    test_chat,
    test_completions,
    test_every_field,
    test_models_and_tokenize,
    test_passed_over,
    test_restrictions,
    test_sampling_defaults,
    test_structured,
    test_tools,
    test_vectors,
    test_sse,
):
    for name, value in vars(module).items():
        if name.startswith("test_") and callable(value):
            globals()[f"{name}_{module.__name__.rpartition('.')[2]}"] = value
        elif type(value).__name__ == "FixtureFunctionDefinition" and name not in ("served", "serve_app"):
            globals()[name] = value


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
