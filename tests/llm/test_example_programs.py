"""The programs in examples/ run as they are written, with a tiny model in place of the one that they name."""

from __future__ import annotations

import importlib
import runpy
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import octavo
from octavo import cli, plugins
from tests.llm.tiny import SETTINGS
from tests.server.conftest import Served
from tests.server.in_process import ANSWER, InProcessEngine, byte_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = sorted(path.stem for path in EXAMPLES.glob("*.py"))


@pytest.fixture
def main(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path) -> Any:
    """The function ``main`` of the program that the test is about."""

    class Tiny(octavo.LLM):
        def __init__(self, model: str) -> None:
            super().__init__(tiny_checkpoint, **SETTINGS)

    monkeypatch.setattr(octavo, "LLM", Tiny, raising=False)
    return runpy.run_path(str(EXAMPLES / f"{request.param}.py"))["main"]


@pytest.mark.parametrize("main", ["offline"], indirect=True)
def test_each_prompt_gets_its_text(main: Any, capsys: pytest.CaptureFixture[str]) -> None:
    main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" ->")[0] for line in lines] == main.__globals__["PROMPTS"]


@pytest.mark.parametrize("main", ["json_output"], indirect=True)
def test_an_answer_keeps_to_the_schema(main: Any, capsys: pytest.CaptureFixture[str]) -> None:
    main()
    city, is_capital = capsys.readouterr().out.split()
    assert city in ("Paris", "Rome", "Oslo")
    assert is_capital in ("True", "False")


@pytest.mark.parametrize("main", ["search"], indirect=True)
def test_every_text_has_a_score(main: Any, capsys: pytest.CaptureFixture[str]) -> None:
    main()
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.split(" ", 1)[1] for line in lines) == sorted(main.__globals__["TEXTS"])


@pytest.mark.parametrize("main", ["steps"], indirect=True)
def test_steps_mix_prompts_and_outputs(main: Any, capsys: pytest.CaptureFixture[str]) -> None:
    main()
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("step") and line.count(":") == 2 for line in lines)
    assert [len(ids_of(line)) for line in lines[-2:]] == [3, 5]


def ids_of(line: str) -> list[int]:
    return [int(number) for number in line[line.index("[") + 1 : -1].split(",")]


@pytest.mark.parametrize("main", ["stream_chat"], indirect=True)
def test_a_chat_is_streamed(main: Any, capsys: pytest.CaptureFixture[str]) -> None:
    served = Served(InProcessEngine(), byte_tokenizer(), {})
    try:
        main(served.url)
    finally:
        served.stop()
    assert ANSWER[:20] in capsys.readouterr().out


def test_every_program_is_tested_and_listed() -> None:
    assert PROGRAMS == ["json_output", "offline", "search", "steps", "stream_chat"]
    page = (EXAMPLES / "README.md").read_text()
    assert all(f"({name}.py)" in page for name in PROGRAMS)


def test_the_package_adds_its_command(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its entry points are read from its own file, as an installation would write them."""
    named = tomllib.loads((EXAMPLES / "plugin" / "pyproject.toml").read_text())["project"]["entry-points"]
    entries = [EntryPoint(name, value, group) for group, parts in named.items() for name, value in parts.items()]
    monkeypatch.syspath_prepend(EXAMPLES / "plugin")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [each for each in entries if each.group == group])
    plugins.parts.cache_clear()
    try:
        assert cli.main(["count", str(tiny_checkpoint), "--text", "abc", "de"]) == 0
    finally:
        plugins.parts.cache_clear()
        sys.modules.pop("octavo_count", None)
        importlib.invalidate_caches()
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [["3", "abc"], ["2", "de"]]
