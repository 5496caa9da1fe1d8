"""``Client`` and ``AsyncClient``: answers of a server, retries, and errors by their kind."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import pytest

from octavo import (
    AsyncClient,
    AuthenticationError,
    Client,
    Completion,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidParameter,
    ModelNotFound,
    Piece,
    QueueFull,
    RequestError,
    RequestFailed,
    Unavailable,
)
from octavo.client import protocol
from tests.cli.fake_server import DONE, FakeServer, event, running
from tests.server.conftest import Served
from tests.server.in_process import ANSWER, InProcessEngine, byte_tokenizer

HI = [{"role": "user", "content": "Hi"}]


class Caller(Protocol):
    """Calls a method of a client that is made for the call; streams come as lists."""

    def __call__(
        self, url: str, method: str, *args: Any, options: dict[str, Any] | None = None, **fields: Any
    ) -> Any: ...


def blocking(url: str, method: str, *args: Any, options: dict[str, Any] | None = None, **fields: Any) -> Any:
    with Client(url, **options or {}) as client:
        result = getattr(client, method)(*args, **fields)
        return list(result) if method.startswith("stream") else result


def asynchronous(url: str, method: str, *args: Any, options: dict[str, Any] | None = None, **fields: Any) -> Any:
    async def run() -> Any:
        async with AsyncClient(url, **options or {}) as client:
            result = getattr(client, method)(*args, **fields)
            return [piece async for piece in result] if method.startswith("stream") else await result

    return asyncio.run(run())


@pytest.fixture(params=[blocking, asynchronous])
def call(request: pytest.FixtureRequest) -> Caller:
    caller: Caller = request.param
    return caller


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    served = Served(InProcessEngine(), byte_tokenizer(), {})
    yield served
    served.stop()


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with running() as server:
        yield server


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that a client would make."""
    made: list[float] = []

    async def pause(seconds: float) -> None:
        made.append(seconds)

    monkeypatch.setattr(time, "sleep", made.append)
    monkeypatch.setattr("octavo.client.async_client.asyncio.sleep", pause)
    return made


def complete(text: str) -> tuple[int, bytes]:
    return 200, json.dumps({"choices": [{"index": 0, "message": {"content": text}}]}).encode()


def refused(status: int, code: str | None = None, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    error = {"message": "no", "type": "x", "param": "n", "code": code}
    return (
        status,
        json.dumps({"error": error}).encode(),
        {name.replace("_", "-"): text for name, text in headers.items()},
    )


def test_it_speaks_with_octavo(call: Caller, served: Served) -> None:
    assert call(served.url, "health") is True
    assert call(served.url + "/v1/", "models") == ["test"]
    completion: Completion = call(served.url, "generate", "Hi", max_tokens=6, n=2)
    assert [choice.text for choice in completion.choices] == [ANSWER[:6]] * 2
    assert (completion.text, completion.choices[1].finish_reason) == (ANSWER[:6], "length")
    assert (completion.num_prompt_tokens, completion.num_output_tokens) == (2, 12)
    assert call(served.url, "generate", [72, 105], max_tokens=3).text == ANSWER[:3]
    assert call(served.url, "chat", HI, max_tokens=5).text == ANSWER[:5]


@pytest.mark.parametrize(("method", "prompt"), [("stream", "Hi"), ("stream_chat", HI)])
def test_pieces_of_a_stream_concatenate(call: Caller, served: Served, method: str, prompt: Any) -> None:
    pieces: list[Piece] = call(served.url, method, prompt, max_tokens=7, n=2)
    for index in range(2):
        own = [piece for piece in pieces if piece.index == index]
        assert "".join(piece.text for piece in own) == ANSWER[:7]
        assert [piece.finish_reason for piece in own if piece.finish_reason] == ["length"]
    assert len(pieces) > 4


def test_leaving_a_stream_aborts_the_request() -> None:
    engine = InProcessEngine(runs=False)
    served = Served(engine, byte_tokenizer(), {})
    with Client(served.url) as client, ThreadPoolExecutor(1) as pool:
        stream = client.stream("Hi", max_tokens=400)
        first = pool.submit(next, stream)
        wait_for(lambda: engine.requests)
        served.call(engine.step)
        assert first.result(30).text == ANSWER[0]
        stream.close()
        wait_for(lambda: engine.aborted)
    served.stop()


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_octavos_refusals_have_their_kind(call: Caller, served: Served) -> None:
    with pytest.raises(InvalidParameter, match="temperature") as found:
        call(served.url, "generate", "Hi", temperature=-1)
    assert (found.value.param, found.value.status) == ("temperature", 400)
    with pytest.raises(ModelNotFound):
        call(served.url, "generate", "Hi", options={"model": "other"})
    with pytest.raises(ContextLengthExceeded):
        call(served.url, "stream", "Hi", max_tokens=10_000)


def test_a_refused_request_is_sent_again(call: Caller, fake: FakeServer, pauses: list[float]) -> None:
    fake.answers = [refused(503), refused(429, Retry_After="7"), refused(503, Retry_After="soon"), complete("yes")]
    assert call(fake.url, "chat", HI, options={"model": "m"}, max_tokens=3).text == "yes"
    assert pauses == [0.5, 7, 2]
    assert fake.bodies == [{"model": "m", "messages": HI, "max_tokens": 3}] * 4
    fake.answers = [refused(503), [event(content="a"), event(content="b"), DONE]]
    assert [piece.text for piece in call(fake.url, "stream_chat", HI)] == ["a", "b"]


def test_after_the_last_attempt_the_refusal_is_raised(call: Caller, fake: FakeServer, pauses: list[float]) -> None:
    fake.answers = [refused(429, Retry_After="2")] * 3
    with pytest.raises(QueueFull, match="the server answered 429: no") as found:
        call(fake.url, "chat", HI, options={"max_retries": 2})
    assert (found.value.retry_after, pauses, fake.answers) == (2, [2, 2], [])
    with pytest.raises(Unavailable, match=r"No server can be reached at http://127\.0\.0\.1:1: [CA]"):
        call("http://127.0.0.1:1", "chat", HI, options={"max_retries": 1})
    assert pauses == [2, 2, 0.5]
    assert call("http://127.0.0.1:1", "health") is False


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (refused(400), RequestError),
        (refused(400, "context_length_exceeded"), ContextLengthExceeded),
        (refused(401), AuthenticationError),
        (refused(500), RequestFailed),
        (refused(504), DeadlineExceeded),
        (refused(503, x_should_retry="false"), Unavailable),
        ((502, b"<html>bad gateway"), RequestError),
        ((200, b"[1]"), RequestFailed),
        ((200, b"not JSON"), Unavailable),
        ([event(content="a")], RequestFailed),
        ([b'data: {"error": {"message": "broken"}}\n\n', DONE], RequestFailed),
        ([b"data: {broken\n\n", DONE], RequestFailed),
    ],
)
def test_what_is_not_refused_for_now_is_not_sent_again(call: Caller, fake: FakeServer, answer: Any, kind: Any) -> None:
    fake.answers = [answer]
    with pytest.raises(kind) as found:
        call(fake.url, "stream_chat" if isinstance(answer, list) else "chat", HI)
    assert type(found.value) is kind
    assert len(fake.bodies) == 1


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ((307, b"", {"Location": "http://127.0.0.1:1/"}), RequestError),
        ((200, b"[" * 200_000), Unavailable),
        ((200, b'{"choices": ["' + b"x" * 300_000 + b'"]}'), RequestFailed),
        ((400, b"[" * 200_000), RequestError),
        ((400, b'{"error": {"code": [], "param": {}, "message": ["x"]}}'), RequestError),
        ((400, b'{"error": {"message": "' + b"x" * 60_000 + b'"}}'), RequestError),
        ((429, b"", {"Retry-After": "9" * 5000}), QueueFull),
        ((429, b"", {"Retry-After": "100000"}), QueueFull),
        ((200, b'{"choices": [{"index": "0", "text": "a"}]}'), RequestFailed),
        ((200, b'{"choices": [{"index": 0, "text": {"a": 1}}]}'), RequestFailed),
        ((200, b'{"usage": "x", "choices": []}'), RequestFailed),
        ([b'data: {"choices": 5}\n\n', DONE], RequestFailed),
        ([b'data: {"choices": [1]}\n\n', DONE], RequestFailed),
        ([b'data: {"choices": [{"text": 1}]}\n\n', DONE], RequestFailed),
        ([b"data: " + b"[" * 100_000 + b"\n\n", DONE], RequestFailed),
        ([b"data: " + b"x" * 300_000], RequestFailed),
        ([b"data: ", *[b"x" * 60_000] * 10], RequestFailed),
    ],
)
def test_a_strange_answer_is_an_error(
    call: Caller, fake: FakeServer, pauses: list[float], monkeypatch: pytest.MonkeyPatch, answer: Any, kind: Any
) -> None:
    """Never another exception, and never one of the size that the server chooses."""
    monkeypatch.setattr(protocol, "MAX_BODY_BYTES", 250_000)
    monkeypatch.setattr(protocol, "MAX_EVENT_BYTES", 250_000)
    fake.answers = [answer] * 4
    with pytest.raises(kind) as found:
        call(fake.url, "stream_chat" if isinstance(answer, list) else "chat", HI)
    assert type(found.value) is kind
    assert len(str(found.value)) < 3000
    assert sum(pauses) < 10


def test_what_usage_claims_is_a_number_of_tokens(call: Caller, fake: FakeServer) -> None:
    usage = {"prompt_tokens": -5, "completion_tokens": "many"}
    fake.answers = [(200, json.dumps({"choices": [], "usage": usage}).encode())]
    answer = call(fake.url, "chat", HI)
    assert (answer.num_prompt_tokens, answer.num_output_tokens) == (0, 0)


def test_answers_are_asked_for_uncompressed(call: Caller, fake: FakeServer) -> None:
    """One that is compressed all the same is not unpacked: it may unpack to any size."""
    packed = gzip.compress(json.dumps({"choices": []}).encode())
    fake.answers = [(200, packed, {"Content-Encoding": "gzip"})]
    with pytest.raises(Unavailable, match="not JSON"):
        call(fake.url, "chat", HI)
    assert fake.headers[-1]["Accept-Encoding"] == "identity"


def test_pauses_double_up_to_a_bound() -> None:
    given = [protocol.pause_before_retry(attempt, None, {}) for attempt in range(9)]
    assert given == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_a_key_is_sent(call: Caller, fake: FakeServer) -> None:
    call(fake.url, "models", options={"api_key": "secret"})
    assert fake.headers[-1]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("max_retries", value) for value in (-1, 1.5, None, True)),
        *(("timeout", value) for value in (-1, 0, float("nan"), float("inf"), "9")),
        *(("api_key", value) for value in ("schlüssel", "a\nb", b"key")),
        *(
            ("base_url", value)
            for value in (None, "", "127.0.0.1:8000", "ftp://host", "http://", "http://a:port", b"http://a")
        ),
    ],
)
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_an_option_that_cannot_work_is_refused_by_name(kind: Any, option: str, value: Any) -> None:
    with pytest.raises(InvalidParameter, match=f"'{option}' must be") as found:
        kind(**{option: value})
    assert found.value.param == option


@pytest.mark.parametrize("method", ["generate", "stream"])
@pytest.mark.parametrize("value", [float("nan"), object(), b"a", "\ud800", ["\ud800"]])
def test_a_field_that_is_no_json_is_refused_by_name(call: Caller, fake: FakeServer, method: str, value: Any) -> None:
    for prompt, fields, named in (("Hi", {"field": value}, "field"), (value, {}, "prompt")):
        with pytest.raises(InvalidParameter, match=f"'{named}' cannot be sent as JSON: ") as found:
            call(fake.url, method, prompt, **fields)
        assert found.value.param == named
    assert not fake.bodies


@pytest.mark.parametrize(("method", "value"), [("generate", True), ("chat", True), ("stream", False)])
def test_whether_to_stream_is_the_methods_choice(call: Caller, fake: FakeServer, method: str, value: bool) -> None:
    with pytest.raises(InvalidParameter, match="stream and stream_chat do"):
        call(fake.url, method, HI, stream=value)
    assert not fake.bodies


def test_a_closed_client_says_so() -> None:
    client = Client()
    client.close()
    calls: list[Callable[[], Any]] = [
        lambda: client.generate("Hi"),
        lambda: next(client.stream("Hi")),
        client.models,
        client.health,
    ]
    for ask in calls:
        with pytest.raises(Unavailable, match="This client is closed"):
            ask()


def test_a_closed_asynchronous_client_says_so() -> None:
    async def run() -> None:
        client = AsyncClient()
        await client.close()
        for ask in (client.generate("Hi"), anext(client.stream("Hi")), client.models(), client.health()):
            with pytest.raises(Unavailable, match="This client is closed"):
                await ask

    asyncio.run(run())


def test_without_a_timeout_it_waits(call: Caller, fake: FakeServer) -> None:
    fake.answers = [complete("späte Antwort")]
    assert call(fake.url, "chat", HI, options={"timeout": None}).text == "späte Antwort"
