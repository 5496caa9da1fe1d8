"""Another package adds to the server: an API of its own, out of this tree."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import msgspec
import pytest
from starlette.requests import Request

from octavo.errors import RequestError
from octavo_server import app
from octavo_server.dialects.openai.completions import CompletionBody, client_request
from octavo_server.generation import GeneratedChoice, Generation
from octavo_server.http.error_responses import ErrorForm
from octavo_server.http.request_body import BodyDecoder
from octavo_server.http.response import EventStream
from octavo_server.pipeline import Answer, Dialect, Submission
from octavo_server.services import ModelServices


class ParrotBody(msgspec.Struct, kw_only=True):
    """The body of a request to go on with what was said."""

    said: str
    words: int = 4
    stream: bool = False


class ParrotAnswer(Answer):
    """Says the text alone."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def unstreamed(self, choices: list[GeneratedChoice]) -> object:
        return {"says": choices[0].take().text}

    def frames(self, choice: GeneratedChoice) -> bytes:
        return choice.take_text().encode()


class ParrotStream(EventStream):
    """Plain text."""

    CONTENT_HEADERS = {"Content-Type": "text/plain"}
    KEEP_ALIVE = END = b""

    def error_frames(self, error: RequestError) -> bytes:
        return f"\n[{error.message}]".encode()


async def translate(body: ParrotBody, services: ModelServices, request: Request) -> Submission:
    completion = CompletionBody(prompt=body.said, max_tokens=body.words, sampling={"temperature": 0})
    return Submission(
        request=client_request(completion, services, request),
        answer=ParrotAnswer,
        is_streamed=body.stream,
        stream=ParrotStream,
    )


PARROT = Dialect(BodyDecoder(ParrotBody), translate)
ERRORS = ErrorForm("ParrotError", {"type": "object"}, lambda error: {"squawk": error.message}, ("/parrot",))
ENDPOINTS = [
    PARROT.endpoint("/parrot/talk", "Go on talking", "talk", ERRORS),
]


@pytest.fixture
def parrot(serve_app: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    point = EntryPoint("parrot", f"{__name__}:ENDPOINTS", app.GROUP)
    monkeypatch.setattr(app, "entry_points", lambda group: [point] if group == app.GROUP else [])
    return serve_app(api_key="secret")


def post(parrot: Any, headers: dict[str, str] | None = None, path: str = "/parrot/talk", **body: Any) -> Any:
    return parrot.client.post(path, json=body, headers=headers or {"authorization": "Bearer secret"})


def test_another_package_brings_an_api(parrot: Any) -> None:
    plain = {"prompt": "Hello", "max_tokens": 4, "temperature": 0}
    expected = post(parrot, path="/v1/completions", **plain).json()["choices"][0]["text"]
    assert post(parrot, said="Hello").json() == {"says": expected}
    streamed = post(parrot, said="Hello", stream=True)
    assert (streamed.text, streamed.headers["content-type"]) == (expected, "text/plain")
    assert "x-octavo-unknown-fields" in post(parrot, said="Hello", loud=True).headers


def test_it_has_the_keys_and_limits_of_the_server_and_errors_of_its_own(parrot: Any) -> None:
    refused = post(parrot, said=7)
    assert (refused.status_code, refused.json().keys()) == (400, {"squawk"})
    assert "said" in refused.json()["squawk"]
    assert post(parrot, {"authorization": "Bearer wrong"}, said="Hello").json().keys() == {"squawk"}
    assert post(parrot, path="/parrot/sing").json().keys() == {"squawk"}
    assert post(parrot, path="/parrots").json().keys() == {"error"}
    document = parrot.client.get("/openapi.json", headers={"authorization": "Bearer secret"}).json()
    assert document["paths"]["/parrot/talk"]["post"]["operationId"] == "talk"
    assert {"ParrotBody", "ParrotError"} <= document["components"]["schemas"].keys()
