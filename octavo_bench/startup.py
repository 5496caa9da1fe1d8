"""How long a user waits: from `octavo serve` to ready, and to the first token."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import httpx

from octavo_bench.server_process import ServerProcess, free_port

TIMEOUT = 300.0


def start_once(arguments: Sequence[str]) -> dict[str, float]:
    """Start a server, wait until it is ready, ask for one token, stop it. All in seconds from the start."""
    port = free_port()
    command = [sys.executable, "-m", "octavo", "serve", "--port", str(port), *arguments]
    start = time.perf_counter()
    with ServerProcess(command, f"http://127.0.0.1:{port}") as server:
        ready = server.wait_ready(TIMEOUT)
        body = {"prompt": [1, 2, 3], "max_tokens": 1}
        httpx.post(server.url + "/v1/completions", json=body, timeout=TIMEOUT).raise_for_status()
        return {"ready_s": ready, "first_answer_s": time.perf_counter() - start}
