"""Each library of ``programs/`` with a program as its users write it, which fails by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.clients.conftest import FOLDER, HERE, MODEL
from tests.conftest import Server

PROGRAMS = HERE / "programs"


@pytest.mark.parametrize("name", sorted(path.stem for path in PROGRAMS.glob("*.py")))
def test_python(name: str, server: Server, run: Callable[..., str]) -> None:
    package = name.rpartition("_")[0]
    if not list(FOLDER.glob(f"lib/python*/site-packages/{package}")):
        pytest.skip(f"{package} is not installed in {FOLDER}")
    run("python", PROGRAMS / f"{name}.py", server.url, MODEL)


@pytest.mark.parametrize("name", sorted(path.stem for path in PROGRAMS.glob("*.mjs")))
def test_node(name: str, server: Server, run_node: Callable[..., None]) -> None:
    run_node(PROGRAMS / f"{name}.mjs", server.url, MODEL)
