"""Every example of the README, run as it is written."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.cli import main
from tests.conftest import Server

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SERVED_AT = "http://127.0.0.1:8000"

pytestmark = [pytest.mark.model, pytest.mark.slow]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_curl_and_client(server: Server) -> None:
    curl = next(block for block in blocks("sh") if block.startswith("curl"))
    command = shlex.split(curl.replace("\\\n", " ").replace(SERVED_AT, server.url))
    answer = subprocess.run([*command, "--silent"], capture_output=True, text=True, timeout=120, check=True)
    real, shown = json.loads(answer.stdout), json.loads(blocks("json")[0])
    for reply in (real, shown):
        del reply["id"], reply["created"]
    assert real == shown
    client = next(block for block in blocks("python") if "import openai" in block)
    assert run_python(client.replace(SERVED_AT, server.url)).strip()


def test_offline_python() -> None:
    offline = next(block for block in blocks("python") if "from octavo import LLM" in block)
    assert run_python(offline).count("->") == 2


def test_command_lines_parse(capsys: pytest.CaptureFixture[str]) -> None:
    """Each command and flag that the README names is one that exists."""
    commands = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("octavo ")]
    assert len(commands) >= 5
    for line in commands:
        words = shlex.split(line, comments=True)[1:]
        text = _help_of([words[0], "--help"], capsys)
        if "--help [all]" in text:
            text = _help_of([words[0], "--help=all"], capsys)
        assert all(word in text for word in words[1:] if word.startswith("--")), line


def _help_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(argv)
    return capsys.readouterr().out


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks" / "notes").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert link.startswith(("http", "data:")) or (page.parent / link).exists(), f"{page.name}: {link}"
