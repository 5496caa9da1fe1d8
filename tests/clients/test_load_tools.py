"""Programs that measure servers, in short runs: every request is answered with the tokens that were asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.conftest import MODEL
from tests.conftest import Server

NUM_REQUESTS = 6
NUM_TOKENS = 12


def test_guidellm(server: Server, tokenizer_folder: Path, run: Callable[..., str], tmp_path: Path) -> None:
    run(
        *("guidellm", "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={server.url},model={MODEL}"),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={NUM_TOKENS}"),
        *("--tokenizer", f"kind=hf_auto,model={tokenizer_folder}"),
        *("--output", f"kind=json,path={tmp_path / 'out.json'}"),
        HF_HUB_OFFLINE="1",
    )
    (benchmark,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert not requests["errored"]
    assert len(requests["successful"]) == NUM_REQUESTS
    assert {request["output_tokens"] for request in requests["successful"]} == {NUM_TOKENS}


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_aiperf(server: Server, tokenizer_folder: Path, run: Callable[..., str], tmp_path: Path, endpoint: str) -> None:
    run(
        *("aiperf", "profile", "--ui", "none", "--model", MODEL, "--url", server.url),
        *("--endpoint-type", endpoint, "--streaming", "--concurrency", 2, "--request-count", NUM_REQUESTS),
        *("--tokenizer", tokenizer_folder, "--use-server-token-count", "--extra-inputs", "ignore_eos:true"),
        *("--synthetic-input-tokens-mean", 32, "--output-tokens-mean", NUM_TOKENS),
        *("--output-artifact-dir", tmp_path / "out"),
    )
    report = json.loads((tmp_path / "out/profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == NUM_REQUESTS
    assert not report["error_summary"]
    assert report["output_sequence_length"]["min"] == report["output_sequence_length"]["max"] == NUM_TOKENS
    # It reads /metrics as well.
    assert "vllm:num_requests_running" in (tmp_path / "out/server_metrics_export.json").read_text()
