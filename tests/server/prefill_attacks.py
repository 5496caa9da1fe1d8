"""A prefill and a decode server whose engine processes are killed under streams: no token changes.

Run as ``python -m tests.server.prefill_attacks FOLDER``. All processes are forked from this one, as in
``rank_attacks``; the proxy is a thread of it, which starts when all of them are there.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import httpx
import psutil

from octavo.config import ServeConfig
from octavo_bench.chaos.tiny_model import write_tiny_model
from octavo_bench.serving.server_process import free_port
from octavo_server.front import serving
from tests.server.forked_engine import ForkedProcess, forked
from tests.server.proxy.proxied import Proxy
from tests.server.rank_attacks import warm_up
from tests.server.test_prefill_servers import SECONDS, answers

SIZES: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "max_model_len": 2048, "num_kv_blocks": 2000}
KEY: dict[str, Any] = {"kv_transfer_key": "a key"}
NUM_STREAMS = 4


class ForkedServer:
    """A server of the model with further settings."""

    def __init__(self, model: Path, **settings: Any) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        config = ServeConfig.from_flat({**SIZES, "model": str(model), "port": port, **settings})

        def main() -> NoReturn:
            sys.exit(serving.run(config, forked("rank_attacks")))

        self.process = ForkedProcess(main, [], [])

    def wait_ready(self) -> None:
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                if httpx.get(self.url + "/ready", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            assert time.monotonic() < deadline, f"{self.url} is not ready"
            time.sleep(0.05)

    def kill_engine(self) -> None:
        """It leads a process group of its own."""
        [engine] = [
            child for child in psutil.Process(self.process.pid).children() if os.getpgid(child.pid) == child.pid
        ]
        engine.send_signal(signal.SIGKILL)

    def received(self) -> float:
        lines = httpx.get(self.url + "/metrics", timeout=10).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("octavo_kv_transfer_received_blocks"))


def attack(prefill: ForkedServer, decode: ForkedServer, one: ForkedServer) -> None:
    for server in (prefill, decode, one):
        server.wait_ready()
    proxy = Proxy(decode.url, {"prefill_upstream": prefill.url})
    try:
        for turn, attacked in enumerate((prefill, decode)):
            numbers = range(turn * NUM_STREAMS, (turn + 1) * NUM_STREAMS)
            expected = asyncio.run(answers(one.url, numbers))
            assert asyncio.run(answers(proxy.url, numbers, attacked.kill_engine)) == expected
            attacked.wait_ready()
        assert decode.received() > 0, "no prompt was computed apart"
    finally:
        proxy.stop()


def main() -> None:
    model = write_tiny_model(Path(sys.argv[1]))
    warm_up(ServeConfig.from_flat({**SIZES, "model": str(model)}))
    sides = ({"role": "prefill", **KEY}, {"role": "decode", "kv_transfer_timeout": 1.0, **KEY})
    servers = [ForkedServer(model, **settings) for settings in (*sides, {})]
    try:
        attack(*servers)
    finally:
        for server in servers:
            server.process.send_signal(signal.SIGTERM)
        for server in servers:
            server.process.wait(20)


if __name__ == "__main__":
    main()
