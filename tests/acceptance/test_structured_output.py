"""Structured output of the default model, over a real server: bound, beside free requests, and after a crash."""

from __future__ import annotations

import json
import os
import signal
import threading
from typing import Any

import jsonschema
import pytest

from tests.conftest import Server

pytestmark = [pytest.mark.model, pytest.mark.slow]

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
MESSAGES = [{"role": "user", "content": "Describe a person as JSON."}]
TOOL = {"type": "function", "function": {"name": "add_person", "parameters": SCHEMA}}


def ask(server: Server, **body: Any) -> dict[str, Any]:
    response = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 200, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_the_default_model_keeps_to_what_it_is_asked_for(server: Server) -> None:
    free = ask(server, temperature=0, max_tokens=40)
    for choice in ask(server, response_format=FORMAT, n=4, seed=1)["choices"]:
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    (choice,) = ask(server, tools=[TOOL], tool_choice="required", seed=2, max_tokens=400)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    for call in choice["message"]["tool_calls"]:
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
    (choice,) = ask(server, tools=[TOOL], seed=2, max_tokens=20)["choices"]
    assert choice["finish_reason"] in ("stop", "length", "tool_calls")
    words = server.post("/v1/completions", {"prompt": "The sky is", "guided_choice": ["blue", "green"]}).json()
    assert words["choices"][0]["text"] in ("blue", "green")
    refused = server.post("/v1/chat/completions", {"messages": MESSAGES, "guided_json": {"not": {}}})
    assert refused.status_code == 400
    assert ask(server, temperature=0, max_tokens=40)["choices"] == free["choices"], "a free request was touched"


@pytest.mark.nightly
def test_a_bound_answer_goes_on_after_a_crash_as_if_there_had_been_none(server: Server) -> None:
    num_restarts = server.get("/stats").json()["num_restarts"]
    body = {"response_format": FORMAT, "seed": 7, "temperature": 1.5, "n": 3}
    calm = ask(server, **body)["choices"]
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(ask(server, **body)))
    thread.start()
    while not server.get("/stats").json()["num_running"]:
        pass
    os.kill(server.engine_pid(), signal.SIGKILL)
    thread.join()
    assert server.get("/stats").json()["num_restarts"] == num_restarts + 1
    assert answers[0]["choices"] == calm
