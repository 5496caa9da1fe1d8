"""What SageMaker sends: probes at /ping, and at /invocations bodies of three endpoints."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import Served
from tests.server.in_process import InProcessEngine

MESSAGES = [{"role": "user", "content": "Hi"}]
OF_ONE = ("id", "created")
"""Members that differ from answer to answer."""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, "unheard": 1}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": -5}),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 4, "n": 2}),
        ("/v1/completions", {"prompt": "Hi", "model": "other"}),
        ("/v1/embeddings", {"input": "Hi"}),
    ],
)
def test_an_invocation_is_answered_as_its_endpoint_does(served: Served, path: str, body: dict[str, Any]) -> None:
    answers = [served.client.post(each, json=body) for each in ("/invocations", path)]
    one, other = [{k: v for k, v in answer.json().items() if k not in OF_ONE} for answer in answers]
    assert one == other
    assert answers[0].status_code == answers[1].status_code
    names = [answer.headers.get("x-octavo-unknown-fields") for answer in answers]
    assert names[0] == names[1] == ("unheard" if "unheard" in body else None)


def test_an_invocation_streams(served: Served) -> None:
    answer = served.client.post("/invocations", json={"messages": MESSAGES, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")


def test_invocations_of_no_kind_are_refused(served: Served) -> None:
    error = served.client.post("/invocations", json={"inputs": "Hi"}).json()["error"]
    assert error["message"] == "The body must have 'messages', 'prompt' or 'input'."
    assert served.client.post("/invocations", content=b"{", headers={"content-type": "application/json"}).is_error


def test_the_probe_needs_no_key_and_an_invocation_does(serve_app: Any) -> None:
    engine = InProcessEngine()
    served = serve_app(engine, api_key="secret")
    for method in ("GET", "POST"):
        assert served.client.request(method, "/ping").status_code == 200
    assert served.client.post("/invocations", json={"messages": MESSAGES}).status_code == 401
    assert not engine.requests
    engine.failure = "The engine cannot be restarted"
    assert served.client.get("/ping").status_code == 503
