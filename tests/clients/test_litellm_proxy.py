"""LiteLLM's own server in front of Octavo, asked with the openai package."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.clients.conftest import MODEL, OFFLINE, program_of
from tests.conftest import Server

KEY = "sk-of-a-test"  # it starts with one only
PROVIDERS = ("openai", "hosted_vllm")
QUESTION: Any = [{"role": "user", "content": "What is 2+2?"}]
ASKED: dict[str, Any] = {"messages": QUESTION, "temperature": 0, "max_tokens": 60}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]


def free_port() -> int:
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def proxy(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a proxy that has a model of each provider for the same server."""
    folder: Path = tmp_path_factory.mktemp("litellm")
    common = {"api_base": server.url + "/v1", "api_key": "none"}
    models = [{"model_name": name, "litellm_params": {"model": f"{name}/{MODEL}", **common}} for name in PROVIDERS]
    (folder / "config.yaml").write_text(json.dumps({"model_list": models, "router_settings": {"num_retries": 0}}))
    port = free_port()
    command = [str(program_of("litellm_proxy", "litellm")), "--config", str(folder / "config.yaml")]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            cwd=folder,
            env={**os.environ, **OFFLINE, "LITELLM_MASTER_KEY": KEY},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(url, process, folder / "log")
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(url + "/health/liveliness", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    pytest.fail("the proxy did not start:\n" + log.read_text()[-4000:])


@pytest.mark.parametrize("model", PROVIDERS)
def test_litellm_as_a_proxy(proxy: str, model: str) -> None:
    client = openai.OpenAI(base_url=proxy + "/v1", api_key=KEY, max_retries=0)
    whole = client.chat.completions.create(model=model, **ASKED)
    assert whole.choices[0].message.content
    assert whole.usage is not None
    chunks = list(
        client.chat.completions.create(model=model, stream=True, stream_options={"include_usage": True}, **ASKED)
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    (usage,) = [chunk.usage for chunk in chunks if chunk.usage]
    assert usage.completion_tokens == whole.usage.completion_tokens
    called = client.chat.completions.create(model=model, tools=TOOLS, tool_choice="required", **ASKED)
    (call,) = called.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    assert len(client.embeddings.create(model=model, input=["Hi", "Ho"], encoding_format="float").data) == 2
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(**{**ASKED, "model": model, "temperature": -5})


def test_messages_and_responses_by_a_proxy(proxy: str) -> None:
    body = {"model": "openai", "max_tokens": 20, "messages": QUESTION}
    message = httpx.post(proxy + "/v1/messages", json=body, headers={"x-api-key": KEY}, timeout=60).json()
    assert message["content"][0]["text"]
    client = openai.OpenAI(base_url=proxy + "/v1", api_key=KEY, max_retries=0)
    assert client.responses.create(model="openai", input="What is 2+2?", max_output_tokens=20).output_text
