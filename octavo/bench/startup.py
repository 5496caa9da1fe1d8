"""How long a user waits: from `octavo serve` to ready, and to the first token."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import httpx

from octavo.errors import ConfigError

TIMEOUT = 300.0


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_once(arguments: Sequence[str]) -> dict[str, float]:
    """Start a server, wait until it is ready, ask for one token, stop it. All in seconds from the start."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "octavo", "serve", "--port", str(port), *arguments]
    start = time.perf_counter()
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while not is_ready(url):
            if server.poll() is not None or time.perf_counter() - start > TIMEOUT:
                raise ConfigError("the server did not become ready")
            time.sleep(0.01)
        ready = time.perf_counter() - start
        body = {"prompt": [1, 2, 3], "max_tokens": 1}
        httpx.post(url + "/v1/completions", json=body, timeout=TIMEOUT).raise_for_status()
        return {"ready_s": ready, "first_answer_s": time.perf_counter() - start}
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)


def is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url + "/ready", timeout=5).status_code == 200
    return False
