"""A server that ends texts that repeat themselves: what it counts, and what it tells of such a request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.config import ServeConfig
from tests.llm.tiny import SETTINGS, write_checkpoint
from tests.server.threaded_server import ThreadedServer

pytestmark = pytest.mark.slow  # a real engine


def test_repetitions_are_counted_and_told(tmp_path: Path) -> None:
    settings = {**SETTINGS, "device": "cpu", "repetition_detection": {"max_pattern_size": 2, "min_count": 5}}
    served = ThreadedServer(ServeConfig.from_flat({"model": str(write_checkpoint(tmp_path)), **settings}))
    try:
        asked: dict[str, Any] = {"prompt": "x", "max_tokens": 30, "temperature": 0, "logit_bias": {str(ord("a")): 100}}
        found = served.client.post("/v1/completions", json=asked).json()
        own = {"repetition_detection": {"max_pattern_size": 0}}
        whole = served.client.post("/v1/completions", json={**asked, **own}).json()
        told = served.client.get(f"/v1/requests/{found['id']}/timeline").text
        metrics = served.client.get("/metrics").text
    finally:
        served.stop()
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a" * 5, "stop", "repetition")
    assert whole["choices"][0]["finish_reason"] == "length"
    assert "repetition" in told
    ended = {
        line.partition('finished_reason="')[2].partition('"')[0]: line.rpartition(" ")[2]
        for line in metrics.splitlines()
        if line.startswith("vllm:request_success_total{")
    }
    assert ended == {"stop": "0.0", "length": "1.0", "abort": "0.0", "error": "0.0", "repetition": "1.0"}
    assert 'inferengine_requests_total{status="ok"} 2.0' in metrics
