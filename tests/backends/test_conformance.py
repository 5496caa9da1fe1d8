"""What every backend must do, over HTTP and with a process of its own: one suite for all."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from octavo import BeamSearchParams
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from tests.backends.checkpoints import save_checkpoint
from tests.backends.onnx_export import export
from tests.backends.workers import WorkerProcess
from tests.conftest import Server, start_server
from tests.llm.test_beam_search import plain_search
from tests.tiers import nightly

BACKENDS = ["octavo", "transformers", nightly("transformers-own-cache"), "grpc", "toy", "instant", "openai"]
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def instant() -> Iterator[Server]:
    server = start_server("--backend", "instant", "--served-model-name", "tiny")
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module", params=BACKENDS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    backend = request.param.removesuffix("-own-cache")
    worker: WorkerProcess | None = None
    model: Any = None
    if backend == "instant":
        server = request.getfixturevalue("instant")
    elif backend == "openai":
        upstream = request.getfixturevalue("instant").url
        server = start_server("--backend", "openai", "--upstream", upstream, "--log-level", "warning")
    elif backend == "toy":
        server = start_server("--backend", "toy", "--served-model-name", "tiny")
    elif backend == "grpc":
        folder = tmp_path_factory.mktemp("checkpoint")
        model = save_checkpoint("llama", folder)
        worker = WorkerProcess(export(folder))
        server = start_server(str(folder), *worker.settings, "--served-model-name", "tiny")
    else:
        family = {"octavo": "llama", "transformers": "cohere", "transformers-own-cache": "mamba"}[request.param]
        folder = tmp_path_factory.mktemp("checkpoint")
        model = save_checkpoint(family, folder)
        sizes = ("--num-kv-blocks", "64", "--max-model-len", "256")
        named = ("--device", "cpu", "--served-model-name", "tiny")
        server = start_server(str(folder), "--backend", backend, *named, *sizes)
    server.backend, server.model = backend, model
    yield server
    if backend != "instant":
        assert server.stop() == 0
    if worker is not None:
        worker.end(signal.SIGTERM)


def body(prompt: Any = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, **fields}


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert response.json()["usage"]["completion_tokens"] == MAX_TOKENS
    return str(choice["text"])


def test_what_it_is(server: Server) -> None:
    assert server.get("/version").json()["backend"] == server.backend  # type: ignore[attr-defined]
    assert [model["id"] for model in server.get("/v1/models").json()["data"]] == ["tiny"]
    assert server.get("/health").status_code == server.get("/ready").status_code == 200


def test_the_same_prompt_gives_the_same_text(server: Server) -> None:
    first = text_of(server.post("/v1/completions", body()))
    assert first
    assert text_of(server.post("/v1/completions", body())) == first
    assert text_of(server.post("/v1/completions", body("other words"))) != first


def test_a_stream_adds_up_to_the_whole(server: Server) -> None:
    whole = text_of(server.post("/v1/completions", body()))
    response = server.post("/v1/completions", body(stream=True))
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    choices = [json.loads(event)["choices"][0] for event in events]
    assert done == "[DONE]"
    assert "".join(choice["text"] for choice in choices) == whole
    assert choices[-1]["finish_reason"] == "length"


def test_batched_equals_alone(server: Server) -> None:
    prompts = [f"{number} " * (1 + 5 * number) for number in range(6)]
    alone = [text_of(server.post("/v1/completions", body(prompt))) for prompt in prompts]

    async def together() -> list[str]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            posts = [client.post("/v1/completions", json=body(prompt)) for prompt in prompts]
            return [text_of(response) for response in await asyncio.gather(*posts)]

    assert asyncio.run(together()) == alone


def test_choices_stops_and_chat(server: Server) -> None:
    choices = server.post("/v1/completions", body(n=2)).json()["choices"]
    assert choices[0]["text"] == choices[1]["text"]
    text = choices[0]["text"]
    stop = text[len(text) // 2 :][:2]
    stopped = server.post("/v1/completions", body(stop=stop)).json()["choices"][0]
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == text[: text.index(stop)]
    messages = [{"role": "user", "content": "Hi"}]
    chat = server.post("/v1/chat/completions", {"model": "tiny", "messages": messages, "max_tokens": 3})
    assert chat.status_code == 200
    assert chat.json()["usage"]["completion_tokens"] <= 3


def test_beam_search(server: Server) -> None:
    model = server.model  # type: ignore[attr-defined]
    prompts = [[104, 101, 108, 108, 111], [7]]
    asked = {"prompt": prompts, "n": 3, "use_beam_search": True, "length_penalty": 0.5, "return_token_ids": True}
    if server.backend not in ("octavo", "grpc"):  # type: ignore[attr-defined]
        return
    response = server.post("/v1/completions", body(**asked))
    choices = response.json()["choices"]
    params = BeamSearchParams(3, MAX_TOKENS, ignore_eos=True, length_penalty=0.5)
    right = [tokens[len(prompt) :] for prompt in prompts for tokens, _ in plain_search(model, prompt, params, -1)]
    assert [choice["token_ids"] for choice in choices] == right
    assert [choice["index"] for choice in choices] == [*range(6)]
    assert {choice["finish_reason"] for choice in choices} == {"length"}
    assert response.json()["usage"] == {"prompt_tokens": 6, "completion_tokens": 72, "total_tokens": 78}
    greedy = server.post("/v1/completions", body(use_beam_search=True)).json()["choices"]
    assert [choice["text"] for choice in greedy] == [text_of(server.post("/v1/completions", body()))]
    refused = {"stop": ["a"], "stream": True, "logprobs": 1, "n": 11, "max_tokens": 0, "length_penalty": 11.0}
    for name, value in refused.items():
        error = server.post("/v1/completions", body(**{"use_beam_search": True, name: value}))
        assert (error.status_code, error.json()["error"]["param"]) == (400, name)
    passed_over = server.post("/v1/completions", body(length_penalty=2.0))
    assert passed_over.json()["choices"][0]["text"] == greedy[0]["text"]
    assert "length_penalty" in passed_over.headers["x-octavo-unknown-fields"]


def test_log_probabilities(server: Server) -> None:
    response = server.post("/v1/completions", body(logprobs=2))
    found = response.json()["choices"][0]["logprobs"]
    assert len(found["token_logprobs"]) == MAX_TOKENS
    assert all(value <= 0 for value in found["token_logprobs"])
    assert all(2 <= len(top) <= 3 for top in found["top_logprobs"])


@pytest.mark.parametrize(
    ("change", "status"), [({"temperature": -1}, 400), ({"model": "unknown"}, 404), ({"prompt": ""}, 400)]
)
def test_what_is_refused(server: Server, change: dict[str, Any], status: int) -> None:
    response = server.post("/v1/completions", body(**change))
    if server.backend == "toy" and "model" in change:  # type: ignore[attr-defined]
        assert response.json()["model"] == change["model"], "toy has no model whose name could matter"
        return
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_client_that_leaves_is_forgotten(server: Server) -> None:
    with httpx.stream("POST", server.url + "/v1/completions", json=body(max_tokens=200, stream=True)) as response:
        next(response.iter_raw())
    for _ in range(200):
        if not server.get("/load").json()["server_load"]:
            break
    assert server.get("/load").json()["server_load"] == 0
    assert "vllm:generation_tokens_total" in server.get("/metrics").text


def test_a_setting_without_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match="dtype: has no effect with backend toy"):
        EngineConfig.from_flat({"backend": "toy", "dtype": "float16"})
