"""What ``vllm bench serve`` sends and reads, with ``--backend openai`` and ``--backend openai-chat``.

The client itself is too large to be installed for a test. It finds the model in ``/v1/models``, takes the time of the
first token from the first chunk that has choices, and the number of tokens from the chunk that has none; it reads
``/metrics`` before and after for what was guessed. vLLM, ``vllm/benchmarks/``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.server.conftest import Served
from tests.server.in_process import IM_END, InProcessEngine

TEXT = "Yes, but no. "
PROMPT = "How do you do?"
BACKENDS: dict[str, tuple[str, dict[str, Any]]] = {
    "openai": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 20, "repetition_penalty": 1.0, "logprobs": None}),
    "openai, token ids": (
        "/v1/completions",
        {"prompt": list(PROMPT.encode()), "max_tokens": 20, "repetition_penalty": 1.0, "logprobs": None},
    ),
    "openai-chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}], "max_completion_tokens": 20},
    ),
}


@dataclass
class Measured:
    """What the client knows of one answer."""

    text: str = ""
    num_chunks: int = 0
    usages: list[dict[str, int]] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)


def measure(served: Served, backend: str, **options: Any) -> Measured:
    path, body = BACKENDS[backend]
    model = served.client.get("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **body, **options}
    measured = Measured()
    with served.client.stream("POST", path, json=body, headers={"x-request-id": "bench-0"}) as response:
        assert (response.status_code, response.headers["x-request-id"]) == (200, "bench-0")
        assert "x-octavo-unknown-fields" not in response.headers
        frames = "".join(response.iter_text()).split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    for frame in frames[:-2]:
        if not frame.startswith(":"):
            take(measured, json.loads(frame.removeprefix("data: ")))
    return measured


def take(measured: Measured, chunk: dict[str, Any]) -> None:
    """A chunk with choices is text, and one without is the end."""
    if chunk["choices"]:
        assert not measured.usages
        (choice,) = chunk["choices"]
        measured.text += (choice["text"] if "text" in choice else choice["delta"].get("content")) or ""
        measured.num_chunks += 1
        measured.finish_reasons += filter(None, [choice["finish_reason"]])
    else:
        measured.usages.append(chunk["usage"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_request_runs_to_its_full_length(serve_app: Any, backend: str) -> None:
    served = serve_app(InProcessEngine(answer=lambda request: [*TEXT.encode(), IM_END]))
    measured = measure(served, backend, ignore_eos=True, temperature=0)
    (request,) = served.engine.requests
    assert request.params.temperature == 0
    assert request.params.repetition_penalty == 1
    assert request.params.logprobs is None
    assert request.eos_token_ids == ()
    assert measured.text == (TEXT * 2)[:19], "a special token is a token without a text"
    assert 1 <= measured.num_chunks <= 21
    assert measured.finish_reasons == ["length"]
    (usage,) = measured.usages
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(request.prompt_tokens), 20)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_ignore_eos_the_usage_has_the_length(serve_app: Any, backend: str) -> None:
    served = serve_app(InProcessEngine(answer=lambda request: [*TEXT.encode(), IM_END]))
    measured = measure(served, backend)
    assert (measured.text, measured.finish_reasons) == (TEXT, ["stop"])
    assert [usage["completion_tokens"] for usage in measured.usages] == [len(TEXT) + 1]


def test_the_model_is_found_by_its_name_and_its_tokenizer_by_its_root(serve_app: Any) -> None:
    found = serve_app(model="owner/name", served_model_name="mine").client.get("/v1/models").json()["data"][0]
    assert (found["id"], found["root"]) == ("mine", "owner/name")


def test_draft_counts_can_be_read_from_the_metrics(served: Served) -> None:
    lines = [line for line in served.client.get("/metrics").text.splitlines() if line.startswith("vllm:spec_decode")]
    assert any("num_draft_tokens" in line for line in lines)
    assert any("num_accepted_tokens" in line for line in lines)
    assert all(float(line.split()[-1]) == 0 for line in lines)
