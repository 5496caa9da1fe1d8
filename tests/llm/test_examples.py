"""Every example of docs/python.md runs as it is written, with a tiny model in place of the one that it names."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import octavo
from tests.llm.tiny import SETTINGS
from tests.server.conftest import Served
from tests.server.in_process import ANSWER, InProcessEngine, byte_tokenizer

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served(InProcessEngine(), byte_tokenizer(), {})
    yield served
    served.stop()


def test_the_examples_run(
    tiny_checkpoint: Path, served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Tiny(octavo.LLM):
        def __init__(self, model: str, max_model_len: int | None = None) -> None:
            super().__init__(tiny_checkpoint, **SETTINGS)

    monkeypatch.setattr(octavo, "LLM", Tiny, raising=False)
    names: dict[str, Any] = {}
    for number, block in enumerate(BLOCKS):
        code = block.replace("http://127.0.0.1:8000", served.url)
        run = compile(code, f"example {number} of docs/python.md", "exec")
        exec(run, names)
    printed = capsys.readouterr().out
    assert "first token after" in printed
    assert ANSWER[:8] in printed
    assert asyncio.run(names["answer"]("Hi")) == ANSWER[:8]
