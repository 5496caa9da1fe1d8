"""One tiny model for all tests of the offline API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo import LLM
from tests.llm.tiny import SETTINGS, write_checkpoint


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def shared_llm(tiny_checkpoint: Path) -> Iterator[LLM]:
    with LLM(tiny_checkpoint, **SETTINGS) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """The shared model; a test that leaves work or blocks behind fails."""
    yield shared_llm
    engine = shared_llm.engine
    while engine.has_work:
        assert not engine.step()
    engine.check()
    assert engine.stats().num_used_blocks == 0
