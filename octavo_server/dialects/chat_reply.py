"""A chat reply for APIs other than chat completions (Anthropic messages, OpenAI responses, Ollama, Gemini).

They convert their body to a chat completion's, so that each field is validated in one place, and render the parsed
pieces of the reply in their own format.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from pydantic_core import from_json
from starlette.requests import Request

from octavo.errors import RequestError
from octavo.grammar.forms import is_deep
from octavo.text.message_parser import Call, Piece, Text
from octavo.types import TokenLogprobs
from octavo_server.admission import ClientRequest
from octavo_server.dialects.batches.files import file_reader
from octavo_server.dialects.openai.chat import chat_message
from octavo_server.dialects.openai.chat_body import ChatBody, client_request, prompt_of, tools_of
from octavo_server.generation import GeneratedChoice, Generation
from octavo_server.http.response import EventStream
from octavo_server.pipeline import Answer, Submission
from octavo_server.services import ModelServices
from octavo_server.tenants.api_keys import caller_of

_PATH = re.compile(r"([a-z_]++)(\[(\d{1,9})\])?+([^' ]*+)")
_QUOTED = re.compile(f"'({_PATH.pattern})'")


@dataclass(frozen=True)
class FieldNames:
    """What the fields of a chat completion are called in the body that it was made of."""

    names: Mapping[str, str]
    """Names of fields that are called otherwise."""
    places: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Of fields that are lists, the place from which each element comes, such as "input[3]"."""
    members: Mapping[str, str] = field(default_factory=dict)
    """Parts of the path behind the place of an element, such as ".function.name", and what they are called."""

    @contextlib.contextmanager
    def in_errors(self) -> Iterator[None]:
        """Let errors name the fields that the client sent."""
        try:
            yield
        except RequestError as error:
            error.message = _QUOTED.sub(lambda quoted: f"'{self.of(quoted[1])}'", error.message)
            error.param = self.names.get(error.param or "", error.param)
            raise

    def of(self, path: str) -> str:
        """What the client calls a part of the chat completion, such as "tools[0].function.name"."""
        found = _PATH.fullmatch(path)
        if found is None:
            return path
        name, index, place, rest = found.groups()
        places = self.places.get(name)
        if place is None or places is None or int(place) >= len(places):
            return f"{self.names.get(name, name)}{index or ''}{rest}"
        # Parts of a message that was made of other parts are named by the place of those.
        if rest.startswith(".tool_calls"):
            return places[int(place)]
        known = max((path for path in self.members if f"{rest}.".startswith(f"{path}.")), key=len, default="")
        return places[int(place)] + self.members.get(known, "") + rest.removeprefix(known)


NO_NAMES = FieldNames({})


class Translated(NamedTuple):
    """A body of another API as a chat completion."""

    chat: ChatBody
    names: FieldNames
    left_out: list[str]
    """Names of what the model does not get as it was sent."""


class ChatReply:
    """A choice of a generation, parsed into pieces: content, reasoning and tool calls."""

    def __init__(self, services: ModelServices, body: ChatBody, generation: Generation, index: int = 0) -> None:
        self.generation = generation
        self.choice: GeneratedChoice = generation.choices[index]
        self.logprobs: list[TokenLogprobs] = []
        """Of the tokens that pieces were made of, if they were asked for, until whoever shows them takes them out."""
        self.places: list[tuple[int, int]] = []
        """Where the texts of the last pieces begin and end in the complete text."""
        if body.return_token_ids:
            self.choice.output_tokens = []
        tools = tools_of(body, services)
        prompt = self.choice.prompt.text or ""
        is_begun = body.continue_final_message
        self._tokenizer = services.tokenizer
        self._message = chat_message(services.message_format, tools, prompt, is_begun, body.stream)

    def pieces(self) -> list[Piece]:
        """The pieces that became unambiguous since the last call."""
        text, _, logprobs = self.choice.take()
        self.logprobs += logprobs
        if self._message is not None:
            pieces = self._message.pieces(text, self.choice.finish_reason)
            self.places = self._message.places
            if self.choice.finish_reason is not None:
                self._message.count_reasoning(self.choice, self._tokenizer)
            return pieces
        start = self.places[0][1] if self.places else 0
        self.places = [(start, start + len(text))]
        return [Text("content", text)] if text else []


def members_of(call: Call) -> dict[str, Any]:
    """The arguments of a call as an object; if they are cut or no JSON, the members that are complete before that.

    Arguments deeper than clients can send back are none.
    """
    try:
        value = _value_of(call.arguments)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(value, dict) or is_deep(value):
        return {}
    # Half a character, which JSON can name, is no text, and a number too large for floats is not written as one.
    written = json.dumps(value, ensure_ascii=False).encode(errors="replace")
    members: dict[str, Any] = json.loads(written, parse_constant=str)
    return members


def _value_of(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        return from_json(text[: error.pos] or "{}", allow_partial=True)


def chat_request(services: ModelServices, chat: ChatBody, request: Request, names: FieldNames) -> ClientRequest:
    """The request for admission. Raises ``RequestError``, in the words of ``names``.

    A token limit beyond the context is lowered to what fits.
    """
    with names.in_errors():
        tools = tools_of(chat, services)
        if tools is not None:
            services.report(request, [names.of(place) for place in tools.unbound])
        submitted = _with_limit_that_fits(client_request(chat, services, request, tools))
    return dataclasses.replace(
        submitted,
        prompt_field=names.of("messages"),
        report=lambda paths: services.report(request, [names.of(path) for path in paths]),
    )


def submission(
    services: ModelServices,
    chat: ChatBody,
    request: Request,
    answer: Callable[[ChatReply], Answer],
    stream: Callable[[Generation, Any, Mapping[str, str]], EventStream],
    names: FieldNames = NO_NAMES,
    keep: Callable[[], Awaitable[None]] | None = None,
) -> Submission:
    """A conversation, answered in the form of another API. Raises ``RequestError``, in the words of ``names``."""
    return Submission(
        request=chat_request(services, chat, request, names),
        answer=lambda generation: answer(ChatReply(services, chat, generation)),
        is_streamed=chat.stream,
        stream=stream,
        is_large=chat.logprobs,
        in_words=names.in_errors,
        keep=keep,
    )


async def num_prompt_tokens(services: ModelServices, chat: ChatBody, request: Request, names: FieldNames) -> int:
    """Tokens of the prompt of a conversation. Raises ``RequestError``, in the words of ``names``."""
    with names.in_errors():
        source, caller = prompt_of(chat, services, tools_of(chat, services)), caller_of(request)
        read_file = file_reader(services.server.store, caller.name)
        prompt = await services.admission.encode(source, "messages", chat.add_special_tokens, caller, read_file)
    return len(prompt.tokens)


def _with_limit_that_fits(submitted: ClientRequest) -> ClientRequest:
    """The request with its token limit as a default, which the context bounds."""
    params = submitted.params
    if params.max_tokens is None:
        return submitted
    without = msgspec.structs.replace(params, max_tokens=None)
    return dataclasses.replace(submitted, params=without, default_max_tokens=params.max_tokens)
