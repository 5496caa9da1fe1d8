"""Client packages in places of their own, unmodified, and the servers that they talk to.

`make test-clients` installs the packages and names their folder in ``OCTAVO_CLIENTS``; without it every test here is
skipped. A client runs in a process of its own, so none of its dependencies meets those of the server.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from octavo.text.tokenizer import load_tokenizer
from tests.conftest import Server, start_server

HERE = Path(__file__).parent
FOLDER = Path(os.environ.get("OCTAVO_CLIENTS", "/nonexistent"))
"""An environment of Python for each file of ``requirements/``, and ``node_modules``."""
MODEL = "smollm2-135m"
OFFLINE = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "OTEL_SDK_DISABLED": "true",
    "NO_COLOR": "1",
}
"""No client may look for models, prices or news anywhere, or tell of its use."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(900))
            if "OCTAVO_CLIENTS" not in os.environ:
                item.add_marker(pytest.mark.skip(reason="clients: run by `make test-clients`"))


def program_of(environment: str, name: str) -> Path:
    """A program of an environment; skips the test when it is not installed."""
    program = FOLDER / environment / "bin" / name
    if not program.exists():
        pytest.skip(f"{name} is not installed in {program.parent}")
    return program


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The server of `make serve`, without a setting: clients must work with what a user meets first."""
    server = start_server(MODEL)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def tokenizer_folder(server: Server, default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's tokenizer as clients load one that count tokens themselves."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = load_tokenizer(default_model_path)
    assert tokenizer is not None
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(server.get("/tokenizer_info").text)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    """Run a program of an environment to its end; return what it printed. Skips when it is not installed."""

    def run(
        name: str,
        *arguments: object,
        environment: str = "main",
        fails: bool = False,
        timeout: float = 800,
        **env: str,
    ) -> str:
        program = program_of(environment, name)
        ended = subprocess.run(
            [str(program), *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, **OFFLINE, "HF_HOME": str(tmp_path / "hub"), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        assert fails or ended.returncode == 0, ended.stdout[-8000:]
        return ended.stdout

    return run


@pytest.fixture
def run_node() -> Callable[..., None]:
    """Run a program of Node's with the packages in the clients' folder."""

    def run(path: Path, *arguments: str) -> None:
        node = shutil.which("node")
        if node is None or not (FOLDER / "node_modules").exists():
            pytest.skip(f"there is no node, or no node_modules in {FOLDER}")
        # Given as text, it finds packages where it runs, not where its file is.
        command = [node, "--input-type=module", "-", *arguments]
        ended = subprocess.run(command, cwd=FOLDER, input=path.read_text(), capture_output=True, text=True, timeout=800)
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]

    return run
