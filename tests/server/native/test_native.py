"""The plain dialects: what their clients send, and what they read."""

from __future__ import annotations

import json
import threading
import uuid
from typing import Any

import pytest

from octavo.errors import RequestFailed
from tests.server.conftest import Served
from tests.server.in_process import ANSWER, IM_END, InProcessEngine


def infer(served: Served, **body: Any) -> Any:
    body = {"model": "test", "prompt": "Hi", "max_tokens": 5, **body}
    return served.client.post("/infer/v1/completions", json=body)


def events(text: str) -> list[tuple[str, Any]]:
    frames = [frame.split("\n") for frame in text.split("\n\n") if frame]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in frames]


def test_v1_generate(serve_app: Any) -> None:
    served = serve_app(InProcessEngine(lambda request: [*b"Yes", IM_END]))
    answer = served.client.post("/v1/generate", json={"prompt": "Hi", "max_new_tokens": 9}).json()
    assert uuid.UUID(answer.pop("request_id"))
    assert answer.pop("latency_ms") > 0
    # Clients count on as many tokens as they asked for.
    assert answer == {"text": "YesYesY", "generated_tokens": 9, "finish_reason": "length", "model": "test"}
    assert served.client.post("/v1/generate", json={"prompt": "Hi"}).json()["generated_tokens"] == 64


@pytest.mark.parametrize(("path", "limit"), [("/v1/generate", "max_new_tokens"), ("/generate", "max_tokens")])
def test_the_plain_dialects_are_greedy_unless_asked(serve_app: Any, path: str, limit: str) -> None:
    served = serve_app()
    for body in ({}, {"temperature": 0.7}):
        assert served.client.post(path, json={"prompt": "Hi", limit: 2, **body}).status_code == 200
    assert [request.params.temperature for request in served.engine.requests] == [0.0, 0.7]
    assert served.client.post(path, json={"prompt": "Hi", limit: 2, "temperature": -1}).status_code == 422
    assert served.client.post(path, json={"prompt": "Hi", limit: 2, "timeout": 0}).status_code == 422


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/generate", {}, 422),
        ("/v1/generate", {"prompt": ""}, 422),
        ("/v1/generate", {"prompt": "x" * 8001}, 422),
        ("/v1/generate", {"prompt": 7}, 422),
        ("/v1/generate", {"prompt": "x", "max_new_tokens": 0}, 422),
        ("/v1/generate", {"prompt": "x", "max_new_tokens": 513}, 422),
        ("/v1/generate", {"prompt": "x" * 500}, 400),
        ("/generate", {"prompt": "x"}, 422),
        ("/generate", {"prompt": " ", "max_tokens": 1}, 400),
        ("/generate", {"prompt": "x", "max_tokens": 0}, 400),
        ("/generate", {"prompt": "x", "max_tokens": 600}, 400),
        ("/infer/v1/completions", {"prompt": "x"}, 422),
        ("/infer/v1/completions", {"model": "other", "prompt": "x"}, 422),
        ("/infer/v1/completions", {"model": "test", "prompt": ""}, 400),
        ("/infer/v1/completions", {"model": "test", "prompt": []}, 400),
        ("/infer/v1/completions", {"model": "test", "prompt": "x", "max_tokens": 0}, 422),
        ("/infer/v1/completions", {"model": "test", "prompt": "x", "top_k": 0}, 422),
        ("/infer/v1/completions", {"model": "test", "prompt": "x", "temperature": -1}, 422),
        ("/infer/v1/completions", {"model": "test", "prompt": "x", "max_tokens": 600}, 422),
        ("/infer/v1/completions", {"model": "test", "prompt": "x", "n": 2}, 422),
        ("/infer/v1/completions", {"model": "test", "prompt": "x", "response_format": {"type": "xml"}}, 422),
    ],
)
def test_statuses(served: Served, path: str, body: dict[str, Any], status: int) -> None:
    answer = served.client.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


def test_generate(serve_app: Any) -> None:
    served = serve_app(InProcessEngine(lambda request: [*b"Yes", IM_END]))
    answer = served.client.post("/generate", json={"prompt": "Hi ", "max_tokens": 9}).json()
    assert uuid.UUID(answer.pop("request_id"))
    ended = {
        "prompt": "Hi ",
        "generated_text": "Hi Yes",
        "token_count": 4,
        "stop_reason": "Sequences generated EOS token.",
    }
    assert answer == ended
    cut = served.client.post("/generate", json={"prompt": "Hi ", "max_tokens": 2}).json()
    assert (cut["generated_text"], cut["stop_reason"]) == ("Hi Ye", "Reached max_tokens limit of 2.")


def test_the_stream_of_infer(served: Served) -> None:
    answer = infer(served, stream=False)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *tokens, (name, done) = events(answer.text)
    assert [kind for kind, _ in tokens] == ["token"] * 5
    assert "".join(data["token"] for _, data in tokens) == ANSWER[:5]
    assert bytes(data["token_id"] for _, data in tokens) == ANSWER[:5].encode()
    counts = {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7}
    assert (name, done) == ("done", {"finish_reason": "length", "usage": counts})
    assert infer(served, prompt=[1, 2, 3], max_tokens=1).status_code == 200
    assert events(infer(served, stop="a", max_tokens=50).text)[-1][1]["finish_reason"] == "stop"


def test_the_ends_of_infer(serve_app: Any) -> None:
    served = serve_app(InProcessEngine(lambda request: [*b"Yes", IM_END]))
    assert events(infer(served).text)[-1][1]["finish_reason"] == "eos"
    failing = serve_app(InProcessEngine(errors={2: RequestFailed("The engine fails on this.")}))
    assert [name for name, _ in events(infer(failing).text)] == ["token", "token", "error"]


def test_a_full_server(serve_app: Any) -> None:
    engine = InProcessEngine(max_num_seqs=1, runs=False)
    served = serve_app(engine, max_num_queued_reqs=1)
    waiting = [threading.Thread(target=served.complete) for _ in range(2)]
    for thread in waiting:
        thread.start()
    while engine.num_live < 2:
        threading.Event().wait(0.005)
    assert served.client.post("/v1/generate", json={"prompt": "x"}).status_code == 429
    assert served.client.post("/generate", json={"prompt": "x", "max_tokens": 1}).status_code == 503
    assert infer(served).status_code == 503
    engine.runs = True
    served.call(engine._schedule)
    for thread in waiting:
        thread.join()


def test_stats_have_what_small_clients_print(serve_app: Any) -> None:
    engine = InProcessEngine(counters={"num_evictions": 7, "num_preemptions": 3})
    stats = serve_app(engine, api_key=None, admin_key="s3cret").client.get("/stats")
    assert "s3cret" not in stats.text
    found = stats.json()
    names = {"average_batch_size", "max_batch_observed", "completed_requests", "decode_steps", "last_error", "running"}
    assert names <= set(found)
    cache = {"page_size", "max_pages", "used_pages", "free_pages", "pressure_events", "utilization"}
    assert cache <= set(found["cache"])
    assert (found["cache"]["evictions"], found["cache"]["preemptions"]) == (7, 3)
    assert found["config"]["eviction_policy"] == "lru"
    assert found["config"]["max_num_seqs"] == engine.info.max_num_seqs, "what the engine chose, not null"


def test_the_dialect_of_completions_is_chosen_by_flag_or_header(serve_app: Any) -> None:
    body = {"model": "test", "prompt": "Hi", "max_tokens": 2}
    for settings, header, is_infer in (
        ({}, None, False),
        ({}, "infer", True),
        ({"completions_dialect": "infer"}, None, True),
        ({"completions_dialect": "infer"}, "openai", False),
    ):
        client = serve_app(**settings).client
        headers = {} if header is None else {"x-octavo-dialect": header}
        answer = client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        if is_infer:
            assert [name for name, _ in events(answer.text)] == ["token", "token", "done"]
            assert client.post("/v1/completions", json={"prompt": "x"}, headers=headers).status_code == 422
        else:
            assert answer.json()["object"] == "text_completion"
    wrong = client.post("/v1/completions", json=body, headers={"x-octavo-dialect": "xml"})
    assert wrong.status_code == 400
    assert "openai, infer" in wrong.json()["error"]["message"]
