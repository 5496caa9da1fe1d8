"""GGUF files of the Hugging Face Hub, from a hub on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import huggingface_hub.constants
import pytest

from octavo.cli import main
from octavo.errors import ConfigError
from octavo.weights.gguf.hub_gguf import HubGGUF, choose_file, parse_hub_gguf, quantisation_of

REPO = "acme/tiny-GGUF"
COMMIT = "1" * 40
CHUNK = 10 << 20
"""The hub's library writes, and resumes, such pieces."""
CONTENT = b"GGUF" + bytes(range(256)) * 48_000
PARTS = {f"tiny-F16-0000{number}-of-00002.gguf": b"GGUF" + bytes([number] * 20_000) for number in (1, 2)}
FILES = {"tiny-Q4_K_M.gguf": CONTENT, "tiny-Q8_0.gguf": b"GGUF", "README.md": b"# tiny", **PARTS}


class Hub(ThreadingHTTPServer):
    """A hub with one repository; ``cut_after`` bytes of the first download it breaks the connection."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.cut_after: int | None = None
        self.downloads: list[tuple[str, str]] = []
        """File and range of each download."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(False)

    def do_GET(self) -> None:
        self._answer(True)

    def _answer(self, has_body: bool) -> None:
        path = urlsplit(self.path).path
        if path.startswith(f"/api/models/{REPO}"):
            siblings = [{"rfilename": name} for name in FILES]
            info = {"id": REPO, "sha": COMMIT, "siblings": siblings}
            self._send(200, json.dumps(info).encode(), {"content-type": "application/json"}, has_body)
        elif (name := path.rpartition("/")[2]) in FILES and path.startswith(f"/{REPO}/resolve/"):
            self._send_file(name, has_body)
        else:
            self._send(404, b"", {"x-error-code": "RepoNotFound"}, has_body)

    def _send_file(self, name: str, has_body: bool) -> None:
        data, wanted = FILES[name], self.headers.get("range", "")
        headers = {"etag": f'"{hashlib.sha256(data).hexdigest()}"', "x-repo-commit": COMMIT}
        start = 0
        if wanted and has_body:
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
            headers["content-range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if has_body:
            self.server.downloads.append((name, wanted))
        self._send(206 if start else 200, data[start:], headers, has_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], has_body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if not has_body:
            return
        if self.server.cut_after is not None and len(body) > self.server.cut_after:
            body, self.server.cut_after = body[: self.server.cut_after], None
            self.close_connection = True
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    threading.Thread(target=hub.serve_forever, args=(0.02,), daemon=True).start()
    yield hub
    hub.shutdown()
    hub.server_close()


def test_it_is_pulled_resumed_listed_and_removed(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.cut_after = CHUNK + 1000
    monkeypatch.setenv("OCTAVO_DOWNLOAD_DIR", str(tmp_path))
    # The hub's library reads its variables when it is imported.
    variables = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "octavo", "pull", f"hf.co/{REPO}:q4_k_m"]
    pulled = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=60)
    assert pulled.returncode == 0, pulled.stderr
    path = Path(pulled.stdout.strip())
    assert (path.name, path.read_bytes() == CONTENT) == ("tiny-Q4_K_M.gguf", True)
    assert hub.downloads == [("tiny-Q4_K_M.gguf", ""), ("tiny-Q4_K_M.gguf", f"bytes={CHUNK}-")]
    assert main(["pull", f"{REPO}:Q4_K_M", "--offline"]) == 0
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert capsys.readouterr().out == pulled.stdout
    assert main(["pull", f"{REPO}:Q8_0"]) == 2
    assert "has no quantisation 'Q8_0'; it has Q4_K_M" in capsys.readouterr().err
    assert main(["pull", "acme/other:Q8_0"]) == 2
    assert "'acme/other:Q8_0' does not exist here" in capsys.readouterr().err
    assert main(["list"]) == 0
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert line.split()[0] == f"{REPO}:Q4_K_M"
    assert line.endswith(f" {path}")
    assert main(["rm", f"{REPO}:Q4_K_M", "--yes"]) == 0
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) < 10_000


def test_all_parts_are_pulled_listed_and_removed(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OCTAVO_DOWNLOAD_DIR", str(tmp_path))
    variables = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "octavo", "pull", f"{REPO}:F16"]
    pulled = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=60)
    assert pulled.returncode == 0, pulled.stderr
    first = Path(pulled.stdout.strip())
    assert {path.name: path.read_bytes() for path in first.parent.iterdir()} == PARTS
    assert main(["list"]) == 0
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert line.split()[:3] == [f"{REPO}:F16", "39.1", "KiB"]
    assert line.split()[-1] == str(first)
    assert main(["rm", f"{REPO}:F16", "--yes"]) == 0
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) < 10_000


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("owner/name:Q4_K_M", HubGGUF("owner/name", "Q4_K_M")),
        ("hf.co/owner/na.me-GGUF:UD-Q4_K_XL", HubGGUF("owner/na.me-GGUF", "UD-Q4_K_XL")),
        ("hf:owner/name:f16", HubGGUF("owner/name", "f16")),
        ("owner/name", None),
        ("owner/../name:Q8_0", None),
        ("name:latest", None),
        ("/owner/name:Q8_0", None),
    ],
)
def test_names(name: str, parts: HubGGUF | None) -> None:
    assert parse_hub_gguf(name) == parts


@pytest.mark.parametrize(
    ("file", "quantisation"),
    [
        ("Qwen3-8B-Q4_K_M.gguf", "Q4_K_M"),
        ("tinyllama.q8_0.gguf", "Q8_0"),
        ("BF16/m-BF16.gguf", "BF16"),
        ("m-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("m-IQ2_XXS.gguf", "IQ2_XXS"),
        ("m-MXFP4.gguf", "MXFP4"),
        ("big-Q8_0-00001-of-00002.gguf", "Q8_0"),
        ("mmproj-F16.gguf", None),
        ("Qwen3.gguf", None),
        ("m-Q8_0.safetensors", None),
    ],
)
def test_quantisations(file: str, quantisation: str | None) -> None:
    assert quantisation_of(file) == quantisation


def test_a_file_is_chosen_or_refused() -> None:
    files = ["b-Q4_K_M.gguf", "b-Q4_K_S.gguf", "b-UD-Q4_K_M.gguf", "old/b-Q4_K_M.gguf", "c-Q8_0-00001-of-00002.gguf"]
    assert choose_file(files, HubGGUF("a/b", "q4_k_m")) == "b-Q4_K_M.gguf"
    with pytest.raises(ConfigError, match=r"a/b has no quantisation 'Q4'; it has Q4_K_M, Q4_K_S, Q8_0, UD-Q4_K_M"):
        choose_file(files, HubGGUF("a/b", "Q4"))
    assert choose_file(files[::-1], HubGGUF("a/b", "Q8_0")) == "c-Q8_0-00001-of-00002.gguf"
