"""What the scripts and README samples of four projects send to a server, and what they read from its answers.

The scripts themselves are in those projects (docs/clients.md); the requests here have the same paths, fields and
concurrency.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.in_process import ANSWER


def test_the_bench_and_demo_of_inferengine(serve_app: Any) -> None:
    """github.com/souvikDevloper/InferEngine: 64 requests, 16 at once, then a summary from /stats."""
    client = serve_app().client

    def generate(number: int) -> dict[str, Any]:
        answer = client.post("/v1/generate", json={"prompt": f"prompt {number}", "max_new_tokens": 20})
        assert answer.status_code == 200
        result: dict[str, Any] = answer.json()
        return result

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(generate, range(64)))
    assert sum(answer["generated_tokens"] for answer in answers) == 64 * 20
    assert all(answer["latency_ms"] > 0 for answer in answers)
    stats = client.get("/stats").json()
    assert (stats["waiting_requests"], stats["active_requests"], stats["cache"]["used_pages"]) == (0, 0, 0)
    assert {"average_batch_size", "max_batch_observed", "completed_requests"} <= set(stats)
    assert {"pressure_events", "evictions", "policy"} <= set(stats["cache"])


def test_the_stream_of_inferengine_for_any_model(serve_app: Any) -> None:
    """Its README's curl names a toy model; a chunk comes for each token, then the usage and the end."""
    body = {
        "model": "torch-toy-decoder/cpu",
        "prompt": "Explain continuous batching",
        "max_tokens": 8,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = serve_app(accept_any_model=True).client.post("/v1/completions", json=body)
    *chunks, end = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert end == "[DONE]"
    read = [json.loads(chunk) for chunk in chunks]
    assert {chunk["model"] for chunk in read} == {"torch-toy-decoder/cpu"}
    assert "".join(chunk["choices"][0]["text"] for chunk in read[:-1]) == ANSWER[:8]
    assert read[-1]["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("concurrency", [1, 16])
def test_the_load_test_of_llm_inference_engine(serve_app: Any, concurrency: int) -> None:
    """github.com/achi9629/llm-inference-engine: short, middle and long prompts, some at once."""
    client = serve_app().client
    prompts = ["The meaning of life is", "In a distant future " * 5, "The history of computing " * 12]

    def send(number: int) -> dict[str, Any]:
        answer = client.post("/generate", json={"prompt": prompts[number % 3], "max_tokens": 50})
        assert answer.status_code == 200
        result: dict[str, Any] = answer.json()
        return result

    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(send, range(2 * concurrency)))
    for number, answer in enumerate(answers):
        assert answer["generated_text"].startswith(prompts[number % 3])
        assert (answer["token_count"], set(answer)) == (
            50,
            {"request_id", "prompt", "generated_text", "token_count", "stop_reason"},
        )


@pytest.mark.parametrize("is_flag", [False, True])
def test_the_bench_and_curl_of_infer(serve_app: Any, is_flag: bool) -> None:
    """github.com/paladin8/infer: events on /v1/completions, chosen by the flag or the header."""
    client = serve_app(**({"completions_dialect": "infer"} if is_flag else {})).client
    headers = {} if is_flag else {"x-octavo-dialect": "infer"}
    body = {"model": "test", "prompt": "Explain.", "max_tokens": 12, "temperature": 0.7, "stream": True, "seed": 42}
    kinds, done = [], {}
    with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        for line in answer.iter_lines():
            if line.startswith("event: "):
                kinds.append(line.removeprefix("event: "))
            elif line.startswith("data: "):
                done = json.loads(line.removeprefix("data: "))
    assert kinds == ["token"] * 12 + ["done"]
    assert done["usage"] == {"prompt_tokens": 8, "completion_tokens": 12, "total_tokens": 20}
    shaped = {**body, "response_format": {"type": "json_schema", "schema": {"type": "object"}}}
    assert client.post("/v1/completions", json=shaped, headers=headers).status_code == 200
