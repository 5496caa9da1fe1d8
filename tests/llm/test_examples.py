"""Every example of docs/python.md runs as it is written, with a tiny model in place of the one that it names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import octavo
from tests.llm.tiny import SETTINGS

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_examples_run(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Tiny(octavo.LLM):
        def __init__(self, model: str, max_model_len: int | None = None) -> None:
            super().__init__(tiny_checkpoint, **SETTINGS)

    monkeypatch.setattr(octavo, "LLM", Tiny, raising=False)
    names: dict[str, Any] = {}
    for number, block in enumerate(BLOCKS):
        run = compile(block, f"example {number} of docs/python.md", "exec")
        exec(run, names)
    assert "first token after" in capsys.readouterr().out
