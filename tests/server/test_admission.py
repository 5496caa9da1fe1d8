"""What is let in, what is refused, and what the engine is given."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from octavo.model_info import PoolingInfo
from octavo.sampling_params import choice_key
from octavo.types import EngineInfo
from octavo_server import admission
from tests.server.conftest import Served
from tests.server.in_process import EOS, IM_END, MAX_MODEL_LEN, InProcessEngine
from tests.server.raw import post


def test_the_engine_gets_resolved_requests(serve_app: Any) -> None:
    served = serve_app()
    served.complete(prompt=["Hi", "Ho"], n=2, seed=-1, temperature=0.5, top_p=0.9, top_k=-1, stop_token_ids=[7])
    requests = served.engine.requests
    assert [bytes(r.prompt_tokens) for r in requests] == [b"Hi", b"Hi", b"Ho", b"Ho"]
    assert [r.seed for r in requests] == [choice_key(-1, 0), choice_key(-1, 1)] * 2
    assert len({r.id for r in requests}) == 4
    assert all(r.max_tokens == 4 and r.eos_token_ids == (EOS, IM_END) for r in requests)
    assert requests[0].params.temperature == 0.5
    assert requests[0].params.top_k == 0
    assert requests[0].params.stop_token_ids == (7,)
    assert requests[0].arrival > 0


def test_without_a_seed_every_prompt_draws_its_own(serve_app: Any) -> None:
    served = serve_app()
    served.complete(prompt=["Hi", "Hi"])
    served.complete()
    assert len({r.seed for r in served.engine.requests}) == 3


def test_a_server_may_have_a_seed(serve_app: Any) -> None:
    served = serve_app(request_seed=7)
    served.complete()
    served.complete()
    served.complete(seed=7)
    served.complete(seed=8)
    first, *same, other = (request.seed for request in served.engine.requests)
    assert same == [first, first] != [other, other]


def test_a_server_may_bound_the_time_of_every_request(serve_app: Any) -> None:
    served = serve_app(InProcessEngine(runs=False), request_timeout=0.05)
    for body in ({}, {"timeout": 60}):
        answer = served.complete(**body)
        assert answer.status_code == 504
        assert "0.05" in answer.json()["error"]["message"]
    assert served.client.post("/generate", json={"prompt": "x", "max_tokens": 3}).status_code == 504


def test_any_model_may_be_accepted(serve_app: Any) -> None:
    served = serve_app(accept_any_model=True)
    for name in ("torch-toy-decoder/cpu", "test"):
        assert served.complete(model=name).json()["model"] == name
        assert served.chat(model=name).json()["model"] == name
    assert serve_app().complete(model="torch-toy-decoder/cpu").status_code == 404


def test_ignore_eos_leaves_no_ends(serve_app: Any) -> None:
    served = serve_app()
    served.complete(ignore_eos=True)
    assert served.engine.requests[0].eos_token_ids == ()


def test_defaults_of_max_tokens(serve_app: Any) -> None:
    served = serve_app()
    served.complete(max_tokens=None)
    served.chat(max_tokens=None)
    served.complete(max_tokens=None, prompt="x" * (MAX_MODEL_LEN - 5))
    served.chat(max_tokens=9, max_completion_tokens=7)
    short, rest, clamped, newer = served.engine.requests
    assert short.max_tokens == 16
    assert rest.max_tokens == MAX_MODEL_LEN - len(rest.prompt_tokens)
    assert clamped.max_tokens == 5
    assert newer.max_tokens == 7


def test_a_prompt_and_a_limit_that_do_not_fit_are_refused_not_clamped(served: Served) -> None:
    error = served.complete(prompt="x" * 500, max_tokens=100).json()["error"]
    assert error == {
        "message": "This model's maximum context length is 512 tokens. However, you requested 600 tokens "
        "(500 in the prompt, 100 in the completion). Please reduce the length of the prompt or completion.",
        "type": "invalid_request_error",
        "param": "prompt",
        "code": "context_length_exceeded",
    }
    error = served.chat(max_tokens=600).json()["error"]
    assert error["param"] == "messages"
    assert "in the messages, 600 in the completion). Please reduce the length of the messages or" in error["message"]
    long = [{"role": "user", "content": "x" * 600}]
    error = served.chat(messages=long, max_tokens=None).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert served.complete(prompt=[1] * 600).json()["error"]["code"] == "context_length_exceeded"
    assert served.complete(prompt=[1] * MAX_MODEL_LEN, max_tokens=0, echo=True, logprobs=1).status_code == 200


def test_text_beyond_all_measure_is_refused_without_tokenising(serve_app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve_app()
    admitting = served.app.state.services.first.admission
    longest = admitting.tokenizer.longest_token_bytes

    class NeverCalled:
        longest_token_bytes = longest

    monkeypatch.setattr(admitting, "tokenizer", NeverCalled())
    response = served.complete(prompt="é" * (MAX_MODEL_LEN * longest // 2 + 1))
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("kind", ["text", "conversation"])
def test_short_texts_do_not_wait_for_long_ones(serve_app: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    served = serve_app()
    admitting = served.app.state.services.first.admission
    began, may_end, encode = threading.Event(), threading.Event(), admitting.tokenizer.encode

    def slow(text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) > 200:
            began.set()
            assert may_end.wait(30)
        return encode(text, add_special_tokens)  # type: ignore[no-any-return]

    monkeypatch.setattr(admitting.tokenizer, "encode", slow)
    monkeypatch.setattr(admission, "THREAD_BYTES", 10)
    monkeypatch.setattr(admission, "LONG_BYTES", 200)
    long, messages = "x" * 300, [{"role": "user", "content": "x" * 300}]
    with ThreadPoolExecutor() as pool:
        ask = {"text": lambda: served.complete(prompt=long), "conversation": lambda: served.chat(messages=messages)}
        waiting = [pool.submit(ask[kind]) for _ in range(4)]
        try:
            assert began.wait(30)
            assert served.complete(prompt="x" * 100).status_code == 200
            assert served.chat().status_code == 200
            assert not any(done.done() for done in waiting)
        finally:
            may_end.set()
        assert [done.result().status_code for done in waiting] == [200] * 4


def test_long_texts_and_conversations_are_tokenised_in_a_thread(
    serve_app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve_app()
    admitting = served.app.state.services.first.admission
    seen: list[bool] = []
    encode = admitting.tokenizer.encode

    def watched(text: str, add_special_tokens: bool = True) -> list[int]:
        seen.append(threading.current_thread() is served._thread)
        return encode(text, add_special_tokens)  # type: ignore[no-any-return]

    monkeypatch.setattr(admitting.tokenizer, "encode", watched)
    monkeypatch.setattr(admission, "THREAD_BYTES", 100)
    served.complete(prompt="x" * 99)
    served.complete(prompt="x" * 101)
    served.complete(prompt=["x" * 60, "x" * 60])
    served.chat()
    assert seen == [True, False, False, False, False]


def test_long_texts_leave_cores_to_the_event_loop(serve_app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission.os, "cpu_count", lambda: 4)
    served = serve_app()
    admitting = served.app.state.services.first.admission
    encode, lock, together = admitting.tokenizer.encode, threading.Lock(), threading.Semaphore(2)
    seen = []

    def watched(text: str, add_special_tokens: bool = True) -> list[int]:
        free = together.acquire(blocking=False)
        with lock:
            seen.append(free)
        threading.Event().wait(0.02)
        if free:
            together.release()
        return encode(text, add_special_tokens)  # type: ignore[no-any-return]

    monkeypatch.setattr(admitting.tokenizer, "encode", watched)
    monkeypatch.setattr(admission, "THREAD_BYTES", 10)
    asking = [threading.Thread(target=served.complete, kwargs={"prompt": "x" * 50}) for _ in range(8)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert seen == [True] * 8


def test_more_than_there_can_ever_be_room_for_is_a_400(serve_app: Any) -> None:
    served = serve_app(InProcessEngine(max_num_seqs=2), max_num_queued_reqs=3)
    response = served.complete(prompt=["a"] * 6)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    assert served.complete(prompt=["a"] * 5).status_code == 200


def test_a_full_queue_is_a_429_and_a_place_that_frees_is_given_again(serve_app: Any) -> None:
    engine = InProcessEngine(max_num_seqs=1, runs=False)
    served = serve_app(engine, max_num_queued_reqs=1)
    waiting = [threading.Thread(target=served.complete) for _ in range(2)]
    for thread in waiting:
        thread.start()
    while engine.num_live < 2:
        threading.Event().wait(0.005)
    response = served.chat(stream=True)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["code"] == "rate_limit_exceeded"
    assert response.json()["error"]["type"] == "rate_limit_error"
    for _ in range(4):
        served.call(engine.step)
    for thread in waiting:
        thread.join(30)
    engine.runs = True
    assert served.complete().status_code == 200
    assert engine.metrics.rejected["queue_full"] == 1


@pytest.mark.slow
def test_five_hundred_at_once_never_overshoot(serve_app: Any) -> None:
    engine = InProcessEngine(max_num_seqs=16)
    served = serve_app(engine, max_num_queued_reqs=48)
    text = {"prompt": "x" * 10, "max_tokens": 100}
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100, "stream": True}
    bodies = [("/v1/chat/completions", chat) if i % 3 == 0 else ("/v1/completions", text) for i in range(500)]

    async def burst() -> list[tuple[int, dict[str, str], bytes]]:
        return await asyncio.gather(*(post(served.port, path, body) for path, body in bodies))

    answers = asyncio.run(burst())
    statuses = Counter(status for status, _, _ in answers)
    assert all(headers["retry-after"] == "1" for status, headers, _ in answers if status == 429)
    assert set(statuses) <= {200, 429}
    assert statuses[200] >= 64
    assert statuses[429] > 0
    assert engine.max_live <= 64
    assert engine.num_live == 0


def test_a_draining_engine_is_a_503(serve_app: Any) -> None:
    engine = InProcessEngine(is_draining=True, is_ready=False)
    served = serve_app(engine)
    for response in (served.complete(), served.chat(stream=True), served.client.get("/ready")):
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["type"] == "service_unavailable_error"
    assert served.client.get("/health").status_code == 200


def test_every_generating_route_goes_through_the_same_door(serve_app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve_app()
    calls: list[str] = []
    admit = admission.Admission.admit

    async def counted(self: admission.Admission, client_request: admission.ClientRequest) -> Any:
        calls.append(client_request.prompt_field)
        return await admit(self, client_request)

    monkeypatch.setattr(admission.Admission, "admit", counted)
    served.complete()
    served.chat(stream=True)
    others = {
        "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
        "/v1/responses": {"input": "Hi"},
        "/v1/generate": {"prompt": "Hi"},
        "/generate": {"prompt": "Hi", "max_tokens": 2},
        "/infer/v1/completions": {"model": "test", "prompt": "Hi"},
    }
    for path, body in others.items():
        assert served.client.post(path, json=body).status_code == 200
    assert calls == ["prompt", "messages", "messages", "input", "prompt", "prompt", "prompt"]
    assert len(served.engine.requests) == 7


def test_a_request_that_takes_longer_than_it_may_is_a_504(serve_app: Any) -> None:
    engine = InProcessEngine(runs=False)
    served = serve_app(engine)
    for answer in (served.complete(timeout=0.05), served.chat(timeout=0.05, stream=True)):
        assert answer.status_code == 504
        assert answer.headers["x-should-retry"] == "false"
        assert answer.json()["error"] == {
            "message": "The request was not finished within the timeout of 0.05 s.",
            "type": "timeout_error",
            "param": "timeout",
            "code": "deadline_exceeded",
        }
    assert engine.num_live == 0
    engine.runs = True
    assert served.complete(timeout=20).status_code == 200
    for bad in (0, -1, 1e-320, 86401):
        assert served.complete(timeout=bad).json()["error"]["param"] == "timeout"


def test_a_stream_that_takes_longer_than_it_may_ends_with_an_error(serve_app: Any) -> None:
    class OneStep(InProcessEngine):
        def step(self) -> None:
            super().step()
            self.runs = False

    engine = OneStep()
    served = serve_app(engine)
    answer = served.complete(timeout=0.3, stream=True)
    assert answer.status_code == 200
    *_, error, done = answer.text.strip().split("\n\n")
    assert '"code":"deadline_exceeded"' in error
    assert done == "data: [DONE]"
    assert engine.num_live == 0


class WideEngine(InProcessEngine):
    """Its tokens have vectors of a million numbers."""

    @property
    def info(self) -> EngineInfo:
        return msgspec.structs.replace(super().info, tasks=("token_embed",), pooling=PoolingInfo(token_size=1 << 20))


def test_vectors_of_all_tokens_of_several_texts_are_bounded(serve_app: Any) -> None:
    served = serve_app(WideEngine())
    answers = [served.client.post("/pooling", json={"input": texts}) for texts in ([[1] * 20, [2] * 20], [[1] * 40])]
    assert [answer.status_code for answer in answers] == [400, 200]
    assert answers[0].json()["error"]["param"] == "input"
    assert len(served.engine.requests) == 1, "one text may have its whole context"
