"""`octavo generate`: the continuation alone on standard output."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.cli import main
from tests.llm.tiny import SETTINGS, write_checkpoint

FLAGS = [part for name, value in SETTINGS.items() for part in ("--" + name.replace("_", "-"), str(value))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("generate"))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> str:
    with LLM(checkpoint, **SETTINGS) as llm:
        return llm.generate("Hello", SamplingParams(temperature=0, max_tokens=12))[0].outputs[0].text


def test_it_prints_what_the_model_says(checkpoint: Path, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [str(checkpoint), "--prompt", "Hello", "--temperature", "0", "--max-tokens", "12", *FLAGS]
    assert main(["generate", *argv]) == 0
    shown = capsys.readouterr()
    assert shown.out == expected + "\n"
    assert "octavo: 12 tokens in" in shown.err
    assert "finish_reason length" in shown.err


@pytest.mark.parametrize("prompt", [[], ["--prompt", "-"]])
def test_the_prompt_may_come_from_standard_input(
    checkpoint: Path,
    expected: str,
    prompt: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))
    assert main(["generate", str(checkpoint), *prompt, "--temperature", "0", "--max-tokens", "12", *FLAGS]) == 0
    assert capsys.readouterr().out == expected + "\n"


def test_without_a_prompt_on_a_terminal_it_asks_for_one(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert main(["generate", str(checkpoint), *FLAGS]) == 2
    assert "--prompt TEXT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--temperature", "-1"], "'temperature' must be from 0 to 100, not -1.0."),
        (["--max-tokens", "1000"], "maximum context length is 256 tokens"),
        (["--load-format", "gguf"], "is of load format safetensors, but gguf was asked for"),
    ],
)
def test_mistakes_are_one_line(
    checkpoint: Path, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(checkpoint), "--prompt", "Hello", *FLAGS, *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("octavo: error: ")
    assert message in error
    assert error.count("\n") == 1
