"""Clients that send a picture, each in its own words: the engine gets the same pixels from all of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.clients.conftest import FOLDER, HERE
from tests.server.conftest import Served
from tests.server.in_process import byte_tokenizer
from tests.server.test_images import CONFIG, RED, SPECIAL, TEMPLATE, SeeingEngine, check_seen

PROGRAMS = HERE / "programs" / "images"
NUM_REQUESTS = {"ai_sdk": 2, "anthropic": 2, "google": 2, "langchain": 3, "litellm": 3, "ollama": 2, "openai": 3}
"""Pictures that the program of a client sends."""


@pytest.fixture
def engine() -> SeeingEngine:
    return SeeingEngine()


@pytest.fixture
def served(engine: SeeingEngine, tmp_path: Path) -> Iterator[Served]:
    """A server of a model with a tower."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "red.png").write_bytes(RED)
    settings = {"model": str(tmp_path), "served_model_name": "m"}
    server = Served(engine, byte_tokenizer(TEMPLATE, SPECIAL), settings)
    yield server
    server.stop()


@pytest.mark.parametrize("client", NUM_REQUESTS)
def test_a_picture_arrives_as_it_was_sent(
    client: str,
    engine: SeeingEngine,
    served: Served,
    run: Callable[..., str],
    run_node: Callable[..., None],
    tmp_path: Path,
) -> None:
    (program,) = PROGRAMS.glob(f"{client}_images.*")
    arguments = served.url, "m", str(tmp_path / "red.png")
    if program.suffix == ".mjs":
        run_node(program, *arguments)
    elif not list(FOLDER.glob(f"main/lib/python*/site-packages/{client}")):
        pytest.skip(f"{client} is not installed in {FOLDER / 'main'}")
    else:
        run("python", program, *arguments)
    assert len(engine.seen) == NUM_REQUESTS[client]
    for request in engine.seen:
        check_seen(request)
        assert request.images[0].pixels[:3] == bytes((200, 10, 10))
        assert request.images[0].pixels == engine.seen[0].images[0].pixels
