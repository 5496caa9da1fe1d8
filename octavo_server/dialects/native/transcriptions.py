"""POST /v1/audio/transcriptions and /v1/audio/translations: the words of a sound file.

https://platform.openai.com/docs/api-reference/audio; further fields are vLLM's. The form becomes a conversation of one
message with the audio, which the model answers with the text.
"""

from __future__ import annotations

import dataclasses
import io
import math
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from octavo.errors import InvalidParameter
from octavo.images.audio import RATE
from octavo.images.transcription import Transcription, TranscriptReader, language_name
from octavo.text.conversation import Conversation
from octavo.text.message_parser import Text
from octavo_server.dialects.chat_reply import ChatReply, FieldNames, submission
from octavo_server.dialects.openai.chat_body import ChatBody
from octavo_server.dialects.openai.common_fields import ACCEPTED, IGNORED, REFUSED, SAMPLING
from octavo_server.generation import GeneratedChoice
from octavo_server.http.error_responses import MissingParameter, UnsupportedParameter
from octavo_server.http.multipart_form import MEDIA_TYPE, MultipartForm
from octavo_server.http.request_body import BodyDecoder
from octavo_server.http.response import EventStream, encode, encode_line, json_response
from octavo_server.pipeline import Answer, Dialect, Submission
from octavo_server.services import ModelServices, server_of

FILE = "file"
"""The part of a form with the sound, and the id by which a conversation names it."""
FORMATS = ("json", "text", "verbose_json")
REFUSED_IN_FORMS: dict[str, tuple[Any, ...]] = {
    **REFUSED,
    **dict.fromkeys(("include", "known_speaker_names", "known_speaker_references", "timestamp_granularities"), ()),
    "n": (1,),
}
ACCEPTED_IN_FORMS = ACCEPTED | {"stream_include_usage"}
"""Streams always end with it."""


class TranscriptionBody(msgspec.Struct, kw_only=True):
    """A form with a sound file."""

    file: Annotated[bytes, msgspec.Meta(extra_json_schema={"contentEncoding": "binary"})]
    model: str = ""
    language: str = ""
    to_language: str = ""
    prompt: str = ""
    response_format: str = "json"
    stream: bool = False
    max_completion_tokens: int | None = None
    sampling: dict[str, Any] = {}


decoder = BodyDecoder(
    TranscriptionBody, REFUSED_IN_FORMS, ACCEPTED_IN_FORMS, {**IGNORED, "chunking_strategy": ()}, SAMPLING
)


class FormDialect(Dialect[TranscriptionBody]):
    """Bodies that are forms."""

    MEDIA_TYPE = MEDIA_TYPE

    async def serve(self, request: Request) -> Response:
        request.state.decoded = await _decoded(request)
        return await super().serve(request)


async def _decoded(request: Request) -> tuple[ModelServices, TranscriptionBody, list[str]]:
    """See ``ServerServices.decoded``. Raises ``RequestError``."""
    server, content = server_of(request), io.BytesIO()
    server.check_room(request)
    form = MultipartForm(request, content)

    def decode(data: bytes) -> tuple[TranscriptionBody, list[str]]:
        form.take(data)
        form.finish()
        if form.file_name is None:
            raise MissingParameter(FILE)
        body, ignored_fields = decoder.read(_as_json(form.fields))
        body.file = content.getvalue()
        return body, ignored_fields

    body, ignored_fields = await server.body_receiver.read(request, decode)
    return server.of_model(body.model), body, ignored_fields


def _as_json(fields: Mapping[str, bytes | bytearray]) -> bytes:
    """The fields of a form as a JSON body, with no bytes in the file, and without those that are empty. Lists have
    ``[]`` behind their names."""
    texts = {name.removesuffix("[]"): value.decode("utf-8", "replace") for name, value in fields.items() if value}
    of_texts = {field.name for field in msgspec.structs.fields(TranscriptionBody) if field.type is str}
    values = {name: text if name in of_texts else _scalar(text) for name, text in texts.items()}
    return encode({**values, FILE: ""})


def _scalar(text: str) -> int | float | bool | str:
    """A number, true or false, also as Python writes them, or the text."""
    try:
        return msgspec.json.decode(text.lower(), type=int | float | bool)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return text


def _asked(body: TranscriptionBody, services: ModelServices, is_translation: bool) -> Transcription:
    """What the form asks of the model, if that can do it. Raises ``RequestError``."""
    services.check_model(body.model)
    if body.response_format not in FORMATS:
        message = f"'response_format' must be one of {', '.join(FORMATS)}: the models write no times, as for srt."
        raise InvalidParameter("response_format", message)
    names = {}
    for field, given in (("language", body.language), ("to_language", body.to_language)):
        names[field] = language_name(given)
        if given and not names[field]:
            raise InvalidParameter(field, f"'{field}' must be the code of a language, such as 'en'.")
    if body.to_language and not is_translation:
        raise UnsupportedParameter("to_language", "'to_language' is for /v1/audio/translations.")
    preparer = services.admission.images.preparer
    form = None if preparer is None else preparer.processor.audio
    if form is None:
        raise UnsupportedParameter("model", "This model reads no audio.")
    if form.language_end and is_translation:
        raise UnsupportedParameter("model", "This model transcribes audio, and does not translate it.")
    into = names["to_language"] or "English" if is_translation else ""
    return Transcription(form=form, spoken=names["language"], into=into, context=body.prompt)


async def _translate(
    is_translation: bool, body: TranscriptionBody, services: ModelServices, request: Request
) -> Submission:
    asked = _asked(body, services, is_translation)
    chat = ChatBody(
        model=body.model,
        messages=asked.messages({"type": "input_audio", "file_id": FILE}),
        stream=body.stream,
        max_completion_tokens=body.max_completion_tokens,
        sampling={"temperature": 0.0, **body.sampling},
    )
    places = ["prompt"] * (len(chat.messages) - 1) + [FILE]
    names = FieldNames({"messages": FILE}, {"messages": places}, {".content[0]": ""})

    async def read_file(name: str) -> bytes:
        sound, body.file = body.file, b""  # which is held no longer than until it is decoded
        return sound

    made = submission(services, chat, request, lambda reply: Transcript(reply, asked, body), EventStream, names)
    prompts = [each.begun(asked.answer_start) for each in made.request.prompts if isinstance(each, Conversation)]
    wanted = dataclasses.replace(made.request, prompts=prompts, read_file=read_file)
    return dataclasses.replace(made, request=wanted, respond=_respond)


def _respond(answer: object, headers: Mapping[str, str]) -> Response:
    return PlainTextResponse(answer, headers=headers) if isinstance(answer, str) else json_response(answer, headers)


class Transcript(Answer):
    """Renders the transcript of a sound."""

    def __init__(self, reply: ChatReply, asked: Transcription, body: TranscriptionBody) -> None:
        self._reply, self._format = reply, body.response_format
        self._task, self._reader = "translate" if asked.into else "transcribe", TranscriptReader(asked)
        self._text = ""
        self.id = f"transcript-{uuid.uuid4().hex}"

    def unstreamed(self, choices: list[GeneratedChoice]) -> object:
        (choice,) = choices
        text = self._new_text(choice)
        if self._format == "text":
            return text
        if self._format == "json":
            return {"text": text, "usage": _usage(choice)}
        seconds = sum(image.shape[2] for image in choice.prompt.images) / RATE
        return {
            "task": self._task,
            "language": self._reader.language.lower(),
            "duration": seconds,
            "text": text,
            "usage": {"type": "duration", "seconds": math.ceil(seconds)},
        }

    def frames(self, choice: GeneratedChoice) -> bytes:
        events: list[dict[str, Any]] = []
        if text := self._new_text(choice):
            events.append({"type": "transcript.text.delta", "delta": text})
            self._text += text
        if choice.finish_reason is not None:
            events.append({"type": "transcript.text.done", "text": self._text, "usage": _usage(choice)})
        return b"".join(b"data: " + encode_line(event) + b"\n\n" for event in events)

    def _new_text(self, choice: GeneratedChoice) -> str:
        pieces = [piece.text for piece in self._reply.pieces() if isinstance(piece, Text) and piece.kind == "content"]
        return self._reader.push("".join(pieces), choice.finish_reason is not None)


def _usage(choice: GeneratedChoice) -> dict[str, Any]:
    count, of_audio = len(choice.prompt.tokens), sum(image.num_tokens for image in choice.prompt.images)
    return {
        "type": "tokens",
        "input_tokens": count,
        "input_token_details": {"audio_tokens": of_audio, "text_tokens": count - of_audio},
        "output_tokens": choice.num_tokens,
        "total_tokens": count + choice.num_tokens,
    }


TRANSCRIPTION = FormDialect(decoder, partial(_translate, False))
TRANSLATION = FormDialect(decoder, partial(_translate, True))
ENDPOINTS = [
    TRANSCRIPTION.endpoint("/v1/audio/transcriptions", "The words of a sound file", "create_transcription"),
    TRANSLATION.endpoint("/v1/audio/translations", "The words of a sound file in English", "create_translation"),
]
