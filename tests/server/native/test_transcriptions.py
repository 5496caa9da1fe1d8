"""Sound files in forms: what the engine is asked, and how its answers are told."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo.config import ServeConfig
from octavo.llm.image_inputs import audio_file_of
from octavo.text.tokenizers.token_bytes import byte_level_alphabet
from octavo.types import EngineInfo
from tests.server.conftest import AppServer, Served
from tests.server.in_process import IM_END, InProcessEngine, byte_tokenizer
from tests.server.threaded_server import ThreadedServer

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
MARKS = {
    "Qwen2AudioForConditionalGeneration": ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),
    "Qwen3ASRForConditionalGeneration": ("<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"),
    "VoxtralForConditionalGeneration": ("[BEGIN_AUDIO]", "[AUDIO]"),
}
QWEN2, ASR, VOXTRAL = MARKS
PAD = 260
"""Id of the placeholder of ``byte_tokenizer``."""
OF_ASR = (
    "{% for m in messages if m.role == 'system' %}<|im_start|>system\n"
    "{{ m.content if m.content is string else m.content[0].text }}<|im_end|>\n{% endfor %}"
    "{% for m in messages if m.role == 'user' %}<|im_start|>user\n{% for p in m.content if p.type == 'audio' %}AUDIO"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""It has no place for words of the user, nor for those of an earlier answer."""
OF_QWEN2 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'audio' %}Audio: AUDIO\n{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEARD = "A bird sings. "


def template_of(architecture: str) -> str:
    source = OF_ASR if architecture == ASR else OF_QWEN2
    return source.replace("AUDIO", "".join(MARKS[architecture]))


def wav(seconds: float) -> bytes:
    samples = np.sin(np.arange(int(seconds * 16_000)) / 20) * 0.3
    return audio_file_of((samples.astype(np.float32), 16_000), "it")


SOUND = wav(0.75)


class HearingEngine(InProcessEngine):
    """Answers with ``said``."""

    def __init__(self, said: str = HEARD) -> None:
        super().__init__(lambda request: list(said.encode()))

    @property
    def info(self) -> EngineInfo:
        return msgspec.structs.replace(super().info, num_image_slots=400)

    def prompt(self) -> str:
        """The text of the last request, with one character for all that is no byte."""
        return "".join(chr(token) if token < 256 else "_" for token in self.requests[-1].prompt_tokens)


Hearing = Callable[..., tuple[Served, HearingEngine]]


@pytest.fixture
def hearing(serve_app: Callable[..., Served], tmp_path: Path) -> Hearing:
    """A server of a model that reads audio."""

    def start(architecture: str = QWEN2, said: str = HEARD, **settings: Any) -> tuple[Served, HearingEngine]:
        config = {"architectures": [architecture], "audio_config": {"n_window": 50}, "audio_token_id": PAD}
        (tmp_path / "config.json").write_text(json.dumps(config))
        engine, tokenizer = HearingEngine(said), byte_tokenizer(template_of(architecture), MARKS[architecture])
        return serve_app(engine, tokenizer=tokenizer, model=str(tmp_path), served_model_name="m", **settings), engine

    return start


def send(served: AppServer, path: str = TRANSCRIPTIONS, sound: bytes = SOUND, **fields: Any) -> httpx.Response:
    data = {"model": "m", "max_completion_tokens": str(len(HEARD)), **fields}
    return served.client.post(path, data=data, files={"file": ("a.wav", sound)})


def refusal(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["param"]


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, end = response.text.removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_json(hearing: Hearing) -> None:
    served, engine = hearing()
    answer = send(served)
    assert answer.status_code == 200, answer.text
    (request,) = engine.requests
    (audio,) = request.images
    num_prompt = len(request.prompt_tokens)
    assert request.prompt_tokens.count(PAD) == audio.num_tokens == 19
    assert audio.shape == (1, 1, 12_000)
    assert request.params.temperature == 0
    assert answer.json() == {
        "text": HEARD,
        "usage": {
            "type": "tokens",
            "input_tokens": num_prompt,
            "input_token_details": {"audio_tokens": 19, "text_tokens": num_prompt - 19},
            "output_tokens": len(HEARD),
            "total_tokens": num_prompt + len(HEARD),
        },
    }
    assert engine.prompt().endswith("_\nTranscribe the audio._\n_assistant\n")


def test_text_and_verbose_json(hearing: Hearing) -> None:
    served, _ = hearing()
    text = send(served, response_format="text")
    assert text.headers["content-type"].startswith("text/plain")
    assert text.text == HEARD
    verbose = {"task": "transcribe", "duration": 0.75, "text": HEARD, "usage": {"type": "duration", "seconds": 1}}
    found = send(served, response_format="verbose_json").json()
    assert found == {**verbose, "language": ""}
    assert send(served, response_format="verbose_json", language="de-CH").json()["language"] == "german"
    translated = send(served, TRANSLATIONS, response_format="verbose_json", language="de").json()
    assert translated == {**verbose, "task": "translate", "language": "english"}


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (TRANSCRIPTIONS, {"language": "de"}, "Transcribe the German audio."),
        (TRANSCRIPTIONS, {"language": "english"}, "Transcribe the English audio."),
        (TRANSCRIPTIONS, {"prompt": "Names: Ada."}, "Transcribe the audio.\nContext: Names: Ada."),
        (TRANSLATIONS, {}, "Translate the audio into English."),
        (TRANSLATIONS, {"language": "fr", "to_language": "it"}, "Translate the French audio into Italian."),
    ],
)
def test_what_a_model_is_asked_in_words(hearing: Hearing, path: str, fields: Any, words: str) -> None:
    served, engine = hearing()
    assert send(served, path, **fields).status_code == 200
    assert engine.prompt().endswith(f"_\n{words}_\n_assistant\n")


def test_fields_of_forms_are_those_of_chat(hearing: Hearing) -> None:
    """Numbers, and truth as Python writes it; what is empty is not there, and what is unknown is told."""
    served, engine = hearing()
    fields = {"temperature": "0.5", "top_k": "7", "top_p": "0.9", "seed": "3", "stream": "False", "language": ""}
    neutral = {"n": "1", "length_penalty": "1.0", "stream_include_usage": "true", "timestamp_granularities[]": ""}
    answer = send(served, **fields, **neutral, hotwords="Ada")
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-octavo-unknown-fields"] == "hotwords"
    params = engine.requests[0].params
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.5, 7, 0.9, None)
    assert engine.requests[0].max_tokens == len(HEARD)


def test_streams(hearing: Hearing) -> None:
    served, engine = hearing()
    *deltas, done = events_of(send(served, stream="true"))
    assert len(deltas) > 1
    assert {event["type"] for event in deltas} == {"transcript.text.delta"}
    assert "".join(event["delta"] for event in deltas) == HEARD
    assert (done["type"], done["text"]) == ("transcript.text.done", HEARD)
    assert done["usage"]["total_tokens"] == len(engine.requests[0].prompt_tokens) + len(HEARD)


@pytest.mark.parametrize(
    ("said", "text", "language"),
    [
        (f"language English<asr_text>{HEARD}", HEARD, "english"),
        ("language None<asr_text>", "", ""),
        (HEARD, HEARD, ""),
        (HEARD * 8, HEARD * 8, ""),
    ],
)
def test_the_language_that_a_model_hears(hearing: Hearing, said: str, text: str, language: str) -> None:
    served, engine = hearing(ASR, said)
    fields = {"max_completion_tokens": str(len(said)), "prompt": "Names: Ada."}
    found = send(served, response_format="verbose_json", **fields).json()
    assert (found["text"], found["language"]) == (text, language)
    assert engine.prompt().startswith("_system\nNames: Ada._\n_user\n_")
    assert engine.prompt().endswith("_\n_assistant\n")
    *deltas, done = events_of(send(served, stream="true", **fields))
    assert done["text"] == "".join(event["delta"] for event in deltas) == text


def test_a_language_is_the_beginning_of_the_answer(hearing: Hearing) -> None:
    """Also behind a context that spells what ends a turn, which stays text."""
    served, engine = hearing(ASR)
    found = send(served, response_format="verbose_json", language="fr", prompt="a<|im_end|>b").json()
    assert (found["text"], found["language"]) == (HEARD, "french")
    assert engine.prompt().startswith("_system\na<|im_end|>b_\n_user\n_")
    assert engine.prompt().endswith("_\n_assistant\nlanguage French<asr_text>")
    assert engine.requests[0].prompt_tokens.count(IM_END) == 2


@pytest.mark.parametrize(
    ("path", "fields", "end"),
    [
        (TRANSCRIPTIONS, {}, "_\n_\n_assistant\n[TRANSCRIBE]"),
        (TRANSCRIPTIONS, {"language": "French"}, "_\n_\n_assistant\nlang:fr[TRANSCRIBE]"),
        (TRANSCRIPTIONS, {"prompt": "Ada"}, "_\nTranscribe the audio.\nContext: Ada_\n_assistant\n"),
        (TRANSLATIONS, {}, "_\nTranslate the audio into English._\n_assistant\n"),
    ],
)
def test_a_token_that_asks_for_a_transcript(hearing: Hearing, path: str, fields: Any, end: str) -> None:
    """Where there are no words that it would leave out."""
    served, engine = hearing(VOXTRAL)
    assert send(served, path, **fields).json()["text"] == HEARD
    assert engine.prompt().endswith(end)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (TRANSCRIPTIONS, {"response_format": "srt"}, "response_format"),
        (TRANSCRIPTIONS, {"response_format": "vtt"}, "response_format"),
        (TRANSCRIPTIONS, {"timestamp_granularities[]": "word"}, "timestamp_granularities"),
        (TRANSCRIPTIONS, {"include[]": "logprobs"}, "include"),
        (TRANSCRIPTIONS, {"language": "xx"}, "language"),
        (TRANSCRIPTIONS, {"to_language": "de"}, "to_language"),
        (TRANSLATIONS, {"to_language": "<|im_end|>"}, "to_language"),
        (TRANSCRIPTIONS, {"temperature": "nan"}, "temperature"),
        (TRANSCRIPTIONS, {"temperature": "-1"}, "temperature"),
        (TRANSCRIPTIONS, {"stream": "perhaps"}, "stream"),
        (TRANSCRIPTIONS, {"max_completion_tokens": "0"}, "max_completion_tokens"),
        (TRANSCRIPTIONS, {"n": "2"}, "n"),
        (TRANSCRIPTIONS, {"sound": b"no sound"}, "file"),
        (TRANSCRIPTIONS, {"sound": b""}, "file"),
        (TRANSCRIPTIONS, {"prompt": "x" * 600}, "file"),
    ],
)
def test_refusals_name_the_field(hearing: Hearing, path: str, fields: Any, param: str) -> None:
    served, engine = hearing()
    response = send(served, path, **fields)
    assert refusal(response) == (400, param)
    assert param in response.json()["error"]["message"]
    assert "messages" not in response.text
    assert not engine.requests


def test_sound_that_is_too_long(hearing: Hearing) -> None:
    served, _ = hearing()
    response = send(served, sound=wav(16.5))
    assert refusal(response) == (400, "file")
    assert response.json()["error"]["message"].startswith("'file': the audio has 16.5 s; at most ")


def test_as_long_a_sound_is_taken_as_there_are_slots_for(hearing: Hearing) -> None:
    """All of Voxtral's windows of half a minute have as many tokens: the 400 slots have room for one."""
    served, engine = hearing(VOXTRAL)
    assert send(served, sound=wav(29.9)).status_code == 200
    assert engine.requests[0].images[0].num_tokens == 375
    assert send(served, sound=wav(30.5)).json()["error"]["message"].endswith("at most 30 s are allowed.")


def test_bodies_that_are_no_such_form(hearing: Hearing) -> None:
    served, _ = hearing()
    assert refusal(served.client.post(TRANSCRIPTIONS, data={"file": "x"}, files={"a": b"x"})) == (400, "file")
    response = served.client.post(TRANSCRIPTIONS, json={"model": "m", "file": "aaaa"})
    assert response.json()["error"]["code"] == "unsupported_media_type"


def test_models_that_cannot(hearing: Hearing, serve_app: Callable[..., Served]) -> None:
    assert refusal(send(serve_app(), model="test")) == (400, "model")
    served, _ = hearing(ASR)
    assert refusal(send(served, TRANSLATIONS)) == (400, "model")
    assert refusal(send(served, model="another")) == (404, "model")


def test_a_picture_in_a_text_of_tgi_is_text(hearing: Hearing) -> None:
    """As for a model that reads text only."""
    served, engine = hearing()
    body = {"inputs": "![](https://a.example/a.png) What?", "parameters": {"max_new_tokens": 3}}
    answer = served.client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    assert engine.prompt().endswith("![](https://a.example/a.png) What?")


def test_keys_and_sizes(hearing: Hearing) -> None:
    served, engine = hearing(api_key="k", max_request_bytes=100_000)
    assert send(served).status_code == 401
    served.client.headers["authorization"] = "Bearer k"
    assert send(served).status_code == 200
    assert send(served, sound=wav(2)).status_code == 413
    assert len(engine.requests) == 1


def test_the_openapi_document_has_the_form(hearing: Hearing) -> None:
    served, _ = hearing()
    document = served.client.get("/openapi.json").json()
    for path in (TRANSCRIPTIONS, TRANSLATIONS):
        (media_type,) = document["paths"][path]["post"]["requestBody"]["content"]
        assert media_type == "multipart/form-data"
    properties = document["components"]["schemas"]["TranscriptionBody"]["properties"]
    assert {"file", "language", "temperature", "response_format"} <= properties.keys()


def test_the_openai_client(hearing: Hearing) -> None:
    served, _ = hearing()
    strict: dict[str, Any] = {"api_key": "none", "max_retries": 0, "_strict_response_validation": True}
    with openai.OpenAI(base_url=f"{served.url}/v1", **strict) as client:
        more: Any = {"model": "m", "file": ("a.wav", SOUND), "extra_body": {"max_completion_tokens": len(HEARD)}}
        transcriptions = client.audio.transcriptions
        plain = transcriptions.create(**more, language="en", prompt="Ada", temperature=0.2)
        assert plain.text == HEARD
        assert plain.usage is not None
        assert plain.usage.type == "tokens"
        assert transcriptions.create(**more, response_format="text") == HEARD
        assert transcriptions.create(**more, response_format="verbose_json").duration == 0.75
        events = list(transcriptions.create(**more, stream=True))
        assert "".join(event.delta for event in events if event.type == "transcript.text.delta") == HEARD
        assert events[-1].type == "transcript.text.done"
        assert client.audio.translations.create(**more).text == HEARD


# --- real engines ---


@pytest.fixture(scope="module", params=["qwen2_audio", "qwen3_asr"])
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadedServer]:
    """A server of a tiny model, whose tokens are bytes."""
    from tests.models.audio_families import AUDIO, AUDIO_FAMILIES, make_audio  # only here: it needs torch

    folder = tmp_path_factory.mktemp(request.param)
    make_audio(folder, request.param)
    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    before, pad, after = MARKS[architecture]
    assert pad == AUDIO_FAMILIES[request.param].text
    special = {"<|im_start|>": 245, "<|im_end|>": 246, before: 247, after: 248, pad: AUDIO}
    alphabet = {char: byte for char, byte in byte_level_alphabet().items() if byte not in special.values()}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet | special, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*special])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template_of(architecture))
    settings = {"model": str(folder), "served_model_name": "m", "device": "cpu", "dtype": "float32"}
    served = ThreadedServer(ServeConfig.from_flat({**settings, "num_kv_blocks": 64, "max_num_seqs": 2}))
    yield served
    served.stop()


@pytest.mark.slow
def test_a_model_hears_what_it_hears_in_a_chat(real: ThreadedServer) -> None:
    """As a model of random weights says no language, what it says is its transcript."""
    content: list[dict[str, Any]] = [
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(SOUND).decode(), "format": "wav"}},
        {"type": "text", "text": "Transcribe the audio."},
    ]
    asked = {"messages": [{"role": "user", "content": content}], "max_tokens": len(HEARD), "temperature": 0}
    chat = real.client.post("/v1/chat/completions", json=asked).json()
    expected = chat["choices"][0]["message"]["content"]
    assert expected
    found = send(real).json()
    assert found["text"] == expected
    assert found["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert events_of(send(real, stream="true"))[-1]["text"] == expected
    assert send(real, sound=wav(2)).json()["usage"]["input_tokens"] > found["usage"]["input_tokens"]
    assert refusal(send(real, sound=b"nothing")) == (400, "file")
