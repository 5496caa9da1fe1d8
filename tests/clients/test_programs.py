"""Each library of ``programs/`` with a program as its users write it, which fails by itself."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable

import pytest

from tests.clients.conftest import FOLDER, HERE, MODEL
from tests.conftest import Server

PROGRAMS = HERE / "programs"
ENVIRONMENTS = {
    "agents_tools": ["main", "openai3"],
    "crewai_crew": ["crewai"],
    "openai_chat": ["main", "openai3"],
    "pydantic_ai_agents": ["main", "openai3"],
}
"""Where a program runs, if not in ``main`` only."""
CASES = [
    (name, environment)
    for name in sorted(path.stem for path in PROGRAMS.glob("*.py"))
    for environment in ENVIRONMENTS.get(name, ["main"])
]


@pytest.mark.parametrize(("name", "environment"), CASES)
def test_python(name: str, environment: str, server: Server, run: Callable[..., str]) -> None:
    package = name.rpartition("_")[0]
    if not list(FOLDER.glob(f"{environment}/lib/python*/site-packages/{package}")):
        pytest.skip(f"{package} is not installed in {FOLDER / environment}")
    run("python", PROGRAMS / f"{name}.py", server.url, MODEL, environment=environment)


@pytest.mark.parametrize("name", sorted(path.stem for path in PROGRAMS.glob("*.mjs")))
def test_node(name: str, server: Server, run_node: Callable[..., None]) -> None:
    run_node(PROGRAMS / f"{name}.mjs", server.url, MODEL)


def test_java(server: Server) -> None:
    """Java 11 and later run a file of source text, where its compiler is installed."""
    if shutil.which("javac") is None:
        pytest.skip("there is no JDK")
    command = ["java", str(PROGRAMS / "HttpClientChat.java"), server.url, MODEL]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
