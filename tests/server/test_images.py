"""Images in requests of every dialect, down to the engine's request; what is fetched, and what never is."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import random
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from PIL import Image

from octavo.config import ModelSettings
from octavo.errors import InvalidParameter
from octavo.images.media_sources import Source, is_public, source_of
from octavo.images.processors import PreparedImage
from octavo.sampling_params import SamplingParams
from octavo.server_settings import ServerSettings
from octavo.types import EngineInfo, ImageInput, Request
from octavo_server.engines.sent_pixels import KeptPixels
from octavo_server.image_files import ImageFiles, KeptImages
from tests.server.conftest import Served
from tests.server.in_process import InProcessEngine, byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif p.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
START, PAD, END, VIDEO_PAD = range(259, 263)
CONFIG = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "vision_config": {"patch_size": 14, "spatial_merge_size": 2},
    "image_token_id": PAD,
}


class SeeingEngine(InProcessEngine):
    """Keeps the requests that it gets."""

    def __init__(self) -> None:
        self._by_id: dict[int, Request] = {}

        def answer(request: Request) -> list[int]:
            self._by_id[request.id] = request
            return list(b"A picture.")

        super().__init__(answer)

    @property
    def seen(self) -> list[Request]:
        return list(self._by_id.values())

    @property
    def info(self) -> EngineInfo:
        return msgspec.structs.replace(super().info, num_image_slots=400)


def png(width: int = 56, height: int = 84, colour: tuple[int, int, int] = (200, 10, 10)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(buffer, "PNG")
    return buffer.getvalue()


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


RED, GREEN = png(), png(28, 56, (0, 255, 0))
Seeing = Callable[..., tuple[Served, SeeingEngine]]


@pytest.fixture
def seeing(serve_app: Callable[..., Served], tmp_path: Path) -> Seeing:
    """A server of a model with a tower."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def start(videos: dict[str, Any] | None = None, **settings: Any) -> tuple[Served, SeeingEngine]:
        if videos is not None:
            (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(videos))
        engine = SeeingEngine()
        tokenizer = byte_tokenizer(TEMPLATE, SPECIAL)
        return serve_app(engine, tokenizer=tokenizer, model=str(tmp_path), served_model_name="m", **settings), engine

    return start


def test_the_list_of_models_says_which_take_images(seeing: Seeing) -> None:
    served, _ = seeing()
    assert served.client.get("/v1/models/m").json()["input_modalities"] == ["text", "image", "video"]


def image_part(data: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(data), **more}}


def chat(served: Served, content: Any, **fields: Any) -> httpx.Response:
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}
    return served.client.post("/v1/chat/completions", json=body)


def check_seen(request: Request, *, num_images: int = 1) -> None:
    """Each placeholder is as many tokens as its image has, at the place where the engine is told."""
    assert len(request.images) == num_images
    assert request.prompt_tokens.count(PAD) == sum(image.num_tokens for image in request.images)
    for image in request.images:
        assert request.prompt_tokens[image.start - 1] == START
        assert request.prompt_tokens[image.start + image.num_tokens] == END
        assert image.grid is not None
        assert image.num_tokens == image.grid[0] * image.grid[1]
        assert len(image.pixels) == image.shape[1] * image.shape[2] * 3


def test_chat_completions(seeing: Seeing) -> None:
    served, engine = seeing()
    parts = [{"type": "text", "text": "What is "}, image_part(RED), {"type": "text", "text": "and"}, image_part(GREEN)]
    response = chat(served, parts)
    assert response.status_code == 200
    (request,) = engine.seen
    check_seen(request, num_images=2)
    assert request.images[0].grid == (3, 2)
    assert request.images[0].pixels[:3] == bytes((200, 10, 10))
    assert request.images[1].pixels[:3] == bytes((0, 255, 0))
    assert response.json()["usage"]["prompt_tokens"] == len(request.prompt_tokens)
    streamed = chat(served, parts, stream=True)
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert engine.seen[1].images == request.images


def test_an_image_is_prepared_once_for_each_who_sends_it() -> None:
    """Told by the text of a data: URL, which is decoded once as well, and of others by the file."""
    made, read_from = list[str](), list[str]()

    def prepare(data: bytes, where: str) -> PreparedImage:
        made.append(where)
        return PreparedImage((1, 2, 2), (), data * 3)

    async def asked() -> None:
        kept = KeptImages(most_bytes=80)
        for owner, data, detail, where in [
            ("a", b"wxyz", "auto", "first"),
            ("a", b"wxyz", "auto", "again"),
            ("b", b"wxyz", "auto", "of another"),
            ("a", b"wxyz", "low", "small"),
            ("a", b"wxyz", "auto", "again"),
            ("a", b"vwxy", "auto", "too much"),
            ("a", b"wxyz", "auto", "still there"),
            ("b", b"wxyz", "auto", "gone"),
        ]:
            for kind in ("data", "file"):

                async def read(data: bytes = data, what: str = f"{kind} {where}") -> bytes:
                    read_from.append(what)
                    return data

                source = Source(kind, f"data:,{data.decode()}", detail, f"{kind} {where}")
                image = await kept.prepared(owner, source, read, partial(prepare, where=source.where))
                assert isinstance(image, PreparedImage)
                assert image.pixels == data * 3

    asyncio.run(asked())
    times = ("first", "of another", "small", "too much", "gone")
    assert made == [f"{kind} {time}" for time in times for kind in ("data", "file")]
    assert [what for what in read_from if what.startswith("data")] == [f"data {time}" for time in times]


def test_placeholders_that_a_client_spells_stay_text(seeing: Seeing) -> None:
    served, engine = seeing()
    assert chat(served, [{"type": "text", "text": "Is <|image_pad|> a token?"}, image_part(RED)]).status_code == 200
    check_seen(engine.seen[0])
    assert chat(served, "Is <|image_pad|> a token?").status_code == 200
    assert PAD not in engine.seen[1].prompt_tokens
    token_ids = served.client.post("/v1/completions", json={"model": "m", "prompt": [PAD, PAD, 65], "max_tokens": 1})
    assert token_ids.status_code == 200
    assert engine.seen[2].prompt_tokens == [PAD, PAD, 65]  # never expanded again


def test_detail_and_counts(seeing: Seeing) -> None:
    served, engine = seeing()
    large = png(1200, 1200)
    sizes = []
    for detail in ("low", "high"):
        assert chat(served, [image_part(large, detail=detail)]).status_code == 200
        sizes.append(engine.seen[-1].images[0].num_tokens)
    assert sizes[0] < sizes[1] <= 400  # the engine has 400 slots
    assert "'detail'" in chat(served, [image_part(RED, detail="huge")]).json()["error"]["message"]
    messages = [{"role": "user", "content": [image_part(RED)]}]
    tokenized = served.client.post("/tokenize", json={"model": "m", "messages": messages}).json()
    assert tokenized["tokens"].count(PAD) == 6
    blocks = [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": url(RED)[22:]}}]
    counted = served.client.post(
        "/v1/messages/count_tokens", json={"model": "m", "messages": [{"role": "user", "content": blocks}]}
    )
    assert counted.json()["input_tokens"] == tokenized["count"]


def test_anthropic_messages_and_images_of_tools(seeing: Seeing) -> None:
    served, engine = seeing()
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(RED).decode()}
    messages = [
        {"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "Look."}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "shot", "input": {}}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "image", "source": source}]},
                {"type": "text", "text": "And this?"},
            ],
        },
    ]
    body = {"model": "m", "max_tokens": 4, "messages": messages}
    response = served.client.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    check_seen(engine.seen[0], num_images=2)


def test_gemini_contents_and_images_of_functions(seeing: Seeing) -> None:
    """Google's Python client writes base64 in the alphabet for URLs."""
    served, engine = seeing()
    data = base64.urlsafe_b64encode(RED).decode()
    assert {"-", "_"} & {*data}, "the image shall have a letter that the alphabets do not share"
    image = {"inline_data": {"mime_type": "image/png", "data": data}}
    result = {"name": "shot", "response": {"output": "Here."}, "parts": [image]}
    contents = [
        {"role": "user", "parts": [image, {"text": "Look."}]},
        {"role": "model", "parts": [{"functionCall": {"name": "shot", "args": {}}}]},
        {"role": "user", "parts": [{"functionResponse": result}, {"text": "And this?"}]},
    ]
    body = {"contents": contents, "generationConfig": {"maxOutputTokens": 4}}
    response = served.client.post("/v1beta/models/m:generateContent", json=body)
    assert response.status_code == 200, response.text
    check_seen(engine.seen[0], num_images=2)


def test_responses_with_uploaded_files(seeing: Seeing) -> None:
    served, engine = seeing()
    uploaded = served.client.post("/v1/files", files={"file": ("a.png", RED)}, data={"purpose": "vision"})
    file_id = uploaded.json()["id"]
    content = [
        {"type": "input_text", "text": "Compare."},
        {"type": "input_image", "image_url": url(GREEN), "detail": "low"},
        {"type": "input_image", "file_id": file_id},
    ]
    body = {"model": "m", "input": [{"role": "user", "content": content}], "max_output_tokens": 4}
    response = served.client.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    check_seen(engine.seen[0], num_images=2)
    assert engine.seen[0].images[1].pixels[:3] == bytes((200, 10, 10))
    content[2]["file_id"] = "file-of-nobody"
    assert "file_id" in served.client.post("/v1/responses", json=body).json()["error"]["message"]


def test_ollama_and_text_generation_inference(seeing: Seeing) -> None:
    served, engine = seeing()
    encoded = base64.b64encode(RED).decode()
    message = {"role": "user", "content": "What is this?", "images": [encoded]}
    body = {"model": "m", "messages": [message], "stream": False, "options": {"num_predict": 3}}
    assert served.client.post("/api/chat", json=body).status_code == 200
    generated = {"model": "m", "prompt": "What?", "images": [encoded], "stream": False, "options": {"num_predict": 3}}
    assert served.client.post("/api/generate", json=generated).status_code == 200
    markdown = {"inputs": f"![]({url(RED)})What is this?", "parameters": {"max_new_tokens": 3}}
    assert served.client.post("/", json=markdown).status_code == 200
    for request in engine.seen:
        check_seen(request)
    assert len(engine.seen) == 3


def test_bad_images_are_refused_by_place(seeing: Seeing) -> None:
    served, _ = seeing(max_images=2, max_image_bytes=20_000)
    bomb = bytearray(png(8, 8))
    bomb[16:24] = (60_000).to_bytes(4) * 2  # width and height of the header
    bomb[29:33] = zlib.crc32(bomb[12:29]).to_bytes(4)
    for data, reason in (
        (b"not an image", "is not a PNG, JPEG, WebP, GIF or BMP image"),
        (bytes(bomb), "has 60000 x 60000 pixels"),
        (RED[:60], "is damaged"),
        (png(3000, 10), "is 3000 x 10 pixels"),
        (b"\0" * 20_001, "at most 20000 are allowed"),
    ):
        response = chat(served, [{"type": "text", "text": "a"}, image_part(data)])
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert reason in message
        assert "messages[0].content[1]" in message
        assert base64.b64encode(data).decode()[:40] not in message
    assert "may have 2 images" in chat(served, [image_part(RED)] * 3).json()["error"]["message"]
    assert (
        "base64"
        in chat(served, [{"type": "image_url", "image_url": {"url": "data:;base64,?"}}]).json()["error"]["message"]
    )
    assert chat(served, [image_part(RED)]).status_code == 200


def gif(count: int = 8) -> bytes:
    buffer = io.BytesIO()
    frames = [Image.new("RGB", (56, 56), (30 * number, 0, 0)) for number in range(count)]
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:], duration=500)
    return buffer.getvalue()


def video_part(data: bytes, **more: Any) -> dict[str, Any]:
    return {
        "type": "video_url",
        "video_url": {"url": "data:image/gif;base64," + base64.b64encode(data).decode()},
        **more,
    }


def test_videos(seeing: Seeing) -> None:
    """Eight frames in four seconds, two for each part of the video; frames as images; next to an image."""
    served, engine = seeing(videos={"size": {"shortest_edge": 784, "longest_edge": 7840}})
    frames = [url(png(56, 56, (0, number, 0))) for number in range(3)]
    parts = [
        {"type": "text", "text": "What is <|video_pad|>"},
        video_part(gif()),
        image_part(RED),
        {"type": "video", "video": frames, "fps": 1.0},
    ]
    response = chat(served, parts)
    assert response.status_code == 200, response.text
    (request,) = engine.seen
    assert [image.shape[0] for image in request.images] == [2, 2, 2, 2, 1, 2, 2]
    assert [image.elapsed for image in request.images] == [None, 4, 8, 12, None, None, 8]
    assert [image.num_tokens for image in request.images] == [4, 4, 4, 4, 6, 4, 4]
    assert request.prompt_tokens.count(START) == request.prompt_tokens.count(END) == 3
    assert request.prompt_tokens.count(VIDEO_PAD) == 0
    assert response.json()["usage"]["prompt_tokens"] == len(request.prompt_tokens)
    for image, after in zip(request.images[:3], request.images[1:4], strict=True):
        assert image.start + image.num_tokens == after.start
    listed = "data:video/jpeg;base64," + ",".join(frame.partition(",")[2] for frame in frames)
    assert chat(served, [{"type": "video_url", "video_url": {"url": listed, "fps": 1}}]).status_code == 200
    assert [image.digest for image in engine.seen[1].images] == [image.digest for image in request.images[-2:]]
    tokenized = served.client.post("/tokenize", json={"model": "m", "messages": [{"role": "user", "content": parts}]})
    assert tokenized.json()["count"] == len(request.prompt_tokens)


def test_bad_videos_are_refused_by_place(seeing: Seeing) -> None:
    served, _ = seeing(max_image_bytes=20_000)
    frames = [url(RED)]
    for part, reason in (
        (video_part(b"\0\0\0 ftypisom"), "the video"),
        (video_part(b"no video"), "is not an MP4, WebM, GIF, WebP or PNG"),
        (video_part(b"\0" * 20_001), "at most 20000 are allowed"),
        ({"type": "video", "video": frames, "fps": 0}, "'fps' must be"),
        ({"type": "video", "video": []}, "1 to 1000"),
        ({"type": "video", "video": ["https://good.example/a"]}, "frames must be data: URLs"),
        ({"type": "video"}, "must have a video"),
        ({"type": "video_url", "video_url": {"url": "https://good.example/a.mp4"}}, "this server fetches no files"),
    ):
        response = chat(served, [{"type": "text", "text": "a"}, part])
        assert response.status_code == 400
        assert reason in response.json()["error"]["message"]
        assert "messages[0].content[1]" in response.json()["error"]["message"]


def test_a_model_without_videos_says_so(seeing: Seeing) -> None:
    served, _ = seeing(videos={"image_mean": [0.1, 0.2, 0.3]})
    message = chat(served, [video_part(gif())]).json()["error"]["message"]
    assert "this model reads text and images only" in message
    assert chat(served, [image_part(RED)]).status_code == 200


def test_a_model_without_a_tower_says_so(serve_app: Callable[..., Served]) -> None:
    response = chat(serve_app(), [image_part(RED)])
    assert response.status_code == 400
    assert "this model reads text only" in response.json()["error"]["message"]


TRICKS = [
    *("http://127.0.0.1/a", "http://localhost/a", "https://[::1]/a", "http://0.0.0.0/a", "http://2130706433/a"),
    *("http://0x7f000001/a", "http://0177.0.0.1/a", "http://127.1/a", "http://169.254.169.254/latest/meta-data"),
    *("http://metadata.google.internal/", "http://10.0.0.1/", "http://192.168.0.1/", "http://172.16.0.1/"),
    *("http://good.example@127.0.0.1/", "http://127.0.0.1#@good.example/", "http://127.0.0.1?@good.example/"),
    *("http://good.example:80@127.0.0.1/", "http://good.example%00.evil.example/", "http://good.example.evil.example/"),
    *("http://evilgood.example/", "http://good.example\\@127.0.0.1/", "http://good.example\\.evil.example/"),
    *("http:\\\\good.example/", "http:/good.example/", "http:good.example/", "//good.example/a", "good.example/a"),
    *("ftp://good.example/a", "file:///etc/passwd", "gopher://good.example/", "jar:http://good.example/", "unix:/x"),
    *(
        "http://good.example:22/",
        "http://good.example:99999/",
        "http://good.example:/a\r\nHost: x",
        "http://good .example/",
    ),
    *("http://good.example\t/", "http://g\u00f6od.example/", "http://\uff27ood.example/", "http://good.example./a"),
    *("http://[::ffff:127.0.0.1]/", "http://user:pass@good.example/", "HTTP://GOOD.EXAMPLE:8080/a"),
]


@pytest.mark.parametrize("hosts", [None, "good.example, other.example:8443"])
def test_urls_that_lead_elsewhere_make_no_connection(hosts: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a name is resolved nor a connection made."""
    asked: list[str] = []

    async def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["8.8.8.8"]

    async def send(*args: Any, **kwargs: Any) -> httpx.Response:
        raise AssertionError("a connection was made")

    monkeypatch.setattr(httpx.AsyncClient, "send", send)
    files = ImageFiles(ModelSettings(), ServerSettings(allowed_media_domains=hosts), lambda: 0, resolve)
    assert len(TRICKS) >= 40
    for trick in TRICKS:
        with pytest.raises(InvalidParameter):
            asyncio.run(files._content(source_of(({"image_url": trick}, "here")), None))
    assert asked == []


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "169.254.169.254", "192.168.1.1", "0.0.0.0", "100.64.0.1", "224.0.0.1", "::1"),
        *("fe80::1", "fc00::1", "::ffff:10.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1", "::", "255.255.255.255"),
    ],
)
def test_names_of_private_addresses_are_not_fetched(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a name has a public address as well."""

    async def resolve(host: str, port: int) -> list[str]:
        return ["8.8.8.8", address]

    async def send(*args: Any, **kwargs: Any) -> httpx.Response:
        raise AssertionError("a connection was made")

    monkeypatch.setattr(httpx.AsyncClient, "send", send)
    assert not is_public(address)
    files = ImageFiles(ModelSettings(), ServerSettings(allowed_media_domains="good.example"), lambda: 0, resolve)
    with pytest.raises(InvalidParameter, match="no public address"):
        asyncio.run(files._content(source_of(({"image_url": "https://good.example/a"}, "here")), None))


class Stream(httpx.AsyncByteStream):
    def __init__(self, content: bytes) -> None:
        self._content = content

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self._content), 1000):
            yield self._content[start : start + 1000]


def test_allowed_hosts_are_asked_once_at_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved: list[str] = []
    sent: list[httpx.Request] = []

    async def resolve(host: str, port: int) -> list[str]:
        resolved.append(host)
        return ["8.8.8.8"]

    def handle(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        if request.url.path == "/moved":
            return httpx.Response(302, headers={"location": "http://127.0.0.1/"})
        return httpx.Response(200, stream=Stream(RED if request.url.path == "/a.png" else b"x" * 5000))

    plain = httpx.AsyncClient.__init__

    def init(self: httpx.AsyncClient, **kwargs: Any) -> None:
        plain(self, **kwargs, transport=httpx.MockTransport(handle))

    monkeypatch.setattr(httpx.AsyncClient, "__init__", init)
    settings = ServerSettings(allowed_media_domains="good.example", max_image_bytes=2000)
    files = ImageFiles(ModelSettings(), settings, lambda: 0, resolve)

    def fetch(path: str) -> bytes:
        return asyncio.run(files._content(source_of(({"image_url": f"https://good.example{path}"}, "here")), None))

    assert fetch("/a.png") == RED
    assert (sent[0].url.host, sent[0].headers["host"]) == ("8.8.8.8", "good.example")
    assert sent[0].extensions["sni_hostname"] == "good.example"
    with pytest.raises(InvalidParameter, match="answers 302"):
        fetch("/moved")
    with pytest.raises(InvalidParameter, match="more than 2000 bytes"):
        fetch("/large")
    assert resolved == ["good.example"] * 3
    assert len(sent) == 3


def test_a_journal_keeps_images(seeing: Seeing, tmp_path: Path) -> None:
    """Another server goes on with a request that was not finished, and gives what was to one that asks again."""
    journal, key = str(tmp_path / "journal"), {"Idempotency-Key": "a"}
    body = {"model": "m", "messages": [{"role": "user", "content": [image_part(RED)]}], "max_tokens": 4}

    def send(served: Served) -> httpx.Response:
        return served.client.post("/v1/chat/completions", json=body, headers=key)

    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    settings = {"model": str(tmp_path), "served_model_name": "m", "journal": journal}
    engine = SeeingEngine()
    engine.runs = False
    served = Served(engine, byte_tokenizer(TEMPLATE, SPECIAL), settings)

    def ask() -> None:
        with contextlib.suppress(httpx.HTTPError):  # the server ends
            send(served)

    threading.Thread(target=ask, daemon=True).start()
    deadline = time.monotonic() + 30
    while not engine.requests:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    served.call(engine.step)
    served.stop()
    other, after = seeing(journal=journal)
    answer = send(other)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"] == "A pi"
    (again,) = after.requests
    check_seen(again)
    assert again.images == engine.requests[0].images
    assert again.output_tokens == list(b"A")
    assert send(other).json() == answer.json()
    assert after.requests == [again]


def test_both_ends_of_the_socket_keep_the_same_pixels() -> None:
    """Whatever comes, in requests of several images: sizes are such that three or four are kept."""
    rng = random.Random(5)
    front, engine = KeptPixels(has_pixels=False, most_bytes=100), KeptPixels(has_pixels=True, most_bytes=100)
    num_sent = num_images = 0
    for number in range(300):
        names = [rng.randrange(8) for _ in range(rng.randrange(5))]
        images = [ImageInput(0, 1, 7, bytes([name]) * 32, (1, 1, 1), bytes([name + 1]) * (20 + name)) for name in names]
        if rng.random() < 0.05:
            images.append(ImageInput(0, 1, 7, b"large", (1, 1, 1), bytes(200)))
        request = Request(number, [1], SamplingParams(), max_tokens=1, images=images)
        sent = front.without_known(request)
        front.note(request.images)
        got = engine.with_known(sent)
        engine.note(got.images)
        assert got.images == images
        num_sent += sum(bool(image.pixels) for image in sent.images)
        num_images += len(images)
    assert 0.3 * num_images < num_sent < 0.8 * num_images
